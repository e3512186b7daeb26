"""The output projection fused with its exchange, in an attention whose QKV projection cannot be (part of feature
``sp``).

Multi-latent attention and norms that ``norms`` does not know come between the QKV projection and its exchange; nothing
comes after the attention. So the attention leaves its output where it is, all rows of this rank's heads, and the
output projection, called next, begins with the exchange.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ditron_train.megatron.shared.forward_override import calling, unsupported_reason_stand_in
from ditron_train.megatron.sp.exchange import AttentionShape
from ditron_train.megatron.sp.linears import linears_of
from ditron_train.megatron.sp.packed import unsupported_reason_packed
from ditron_train.megatron.sp.projections import unsupported_reason_hooks_of_ranks
from ditron_train.megatron.sp.spec import route_output
from ditron_train.policy import log_native
from ditron_train.sp import SPContext


@contextlib.contextmanager
def output_fused(attention: Any, shape: AttentionShape, hidden_states: torch.Tensor, packed: Any) -> Iterator[None]:
    """A forward of ``attention`` whose output projection is fused with its exchange, if policy, layers and batch allow
    it."""
    context = _route(attention, shape, hidden_states, packed)
    if context is None:
        yield
        return
    left: list[torch.Tensor | None] = []
    layer, inherited = attention.linear_proj, attention.linear_proj.forward

    def project(x: torch.Tensor) -> Any:
        if not left:  # the attention fell back to native, and so does its projection
            return inherited(x)
        # Not the attention's own head size: values that were padded for it have been cut since.
        heads = x.view(*x.shape[:-1], -1, shape.value_head_dim)
        return linears_of(layer).project_out(layer, heads, context, shape, left.pop())

    attention.core_attention.left_in_heads = left
    try:
        with calling(layer, project):
            yield
    finally:
        attention.core_attention.left_in_heads = None


def unsupported_reason_left(attention: Any) -> str | None:
    """Why an attention's output, by its options alone, is not left for the projection to exchange, or None."""
    if attention.checkpoint_core_attention:
        return "the attention is computed again in backward, apart from its projection"
    if getattr(attention.config, "attention_output_gate", False) or getattr(attention, "cache_mla_latents", False):
        return "an output gate stands between them, or latents are cached"
    if attention.offload_core_attention or attention.offload_attn_proj:
        return "activations are offloaded"
    return None


def _route(attention: Any, shape: AttentionShape, hidden_states: torch.Tensor, packed: Any) -> SPContext | None:
    core, config = attention.core_attention, attention.config
    if not getattr(core, "can_attend", False):
        return None
    group = core.exchange_group
    length = hidden_states.shape[0] * (attention.world_size if config.sequence_parallel else 1)
    if length % 2 or shape.num_heads % group.size() or shape.num_groups % group.size():
        return None  # the exchange says what is wrong
    reason = unsupported_reason_hooks_of_ranks(attention)  # first: what else is not covered may differ between ranks
    if packed is not None:
        reason = reason or unsupported_reason_packed(packed)
    reason = (
        reason
        or unsupported_reason_stand_in(core)
        or linears_of(attention.linear_proj).unsupported_reason_out(attention.linear_proj, hidden_states)
    )
    reason = unsupported_reason_left(attention) or reason
    if reason is not None:
        log_native("sp output projection", reason)
        return None
    return route_output(group, shape, (length, hidden_states.shape[1]), attention.linear_proj.weight, hidden_states)
