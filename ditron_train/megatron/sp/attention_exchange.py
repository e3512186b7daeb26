"""The exchanges around an attention that gets the whole sequence with this rank's heads, and why an attention runs
natively, by its configuration alone (part of feature ``sp``)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.megatron.sp.exchange import AttentionShape, Exchange
from ditron_train.megatron.sp.spec import route_exchange
from ditron_train.runtime.errors import NotSupportedError


def config_of_one_rank(config: Any, world_size: int) -> Any:
    """A copy of ``config`` for the attention between the exchanges: whole sequence, own heads.

    Raises:
        NotSupportedError: Heads or query groups of one tensor parallel rank do not divide by the group.
    """
    ways = world_size * config.tensor_model_parallel_size
    if config.num_attention_heads % ways or config.num_query_groups % ways:
        raise NotSupportedError(
            f"The number of attention heads needs to be divisible by CP size! {config.num_attention_heads} heads and "
            f"{config.num_query_groups} query groups over {config.tensor_model_parallel_size} tensor parallel times "
            f"{world_size} context parallel ranks"
        )
    inner = copy.copy(config)
    inner.context_parallel_size = 1
    inner.num_attention_heads //= world_size
    inner.num_query_groups //= world_size
    return inner


def shape_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> AttentionShape:
    """Shape of an attention from its q, k and v [s, b, heads, d] (packed [t, heads, d])."""
    return AttentionShape(query.shape[-2], key.shape[-2], query.shape[-1], value.shape[-1])


def exchanged(
    group: dist.ProcessGroup,
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    left_in_heads: list[torch.Tensor | None] | None,
) -> torch.Tensor:
    """Exchange, ``attend(q, k, v)`` on the whole sequence with this rank's heads, exchange back: [s / W, b, heads *
    d].

    If ``left_in_heads`` is a list, the way back is left to the output projection and noted there: by the table of
    rows, which packed sequences alone have.
    """
    if query.shape[0] % 2:
        raise NotSupportedError(f"Sequence length per GPU needs to be divisible by 2! It is {query.shape[0]}")
    shape = shape_of(query, key, value)
    shape.qkv_layout(dist.get_world_size(group))
    exchange = Exchange(group, shape, route_exchange(group, shape, query))
    attended = attend(*exchange.to_heads(query, key, value))
    if left_in_heads is not None:
        left_in_heads.append(None)
        return attended
    return exchange.to_sequence(attended)


def unsupported_reason_comm_type(cp_comm_type: str | None) -> str | None:
    """Why context parallelism of this kind around Transformer Engine's attention runs natively, or None."""
    if cp_comm_type in ("a2a", "a2a+p2p"):
        return None
    return f"--cp-comm-type is {cp_comm_type or 'p2p'} (a2a, a2a+p2p and all_gather are covered)"


def unsupported_reason_levels(sizes: Sequence[int]) -> str | None:
    """Why ``a2a+p2p`` over groups of these sizes, of exchanges first, is Megatron's, or None."""
    if len(sizes) != 2:
        return f"a2a+p2p is over {len(sizes)} levels of groups, not 2"
    return "each exchange of a2a+p2p is of one rank" if sizes[0] == 1 else None


def unsupported_reason_te_attention(config: Any, is_training: bool) -> str | None:
    """Why Transformer Engine's attention makes its exchanges itself, or None."""
    if config.fp8 and (config.fp8_dot_product_attention or config.fp8_multi_head_attention):
        return "the attention itself computes in FP8"
    if getattr(config, "fp4", None) or config.softmax_type != "vanilla":
        return "FP4 or a softmax offset is on"
    if config.qk_clip or config.log_max_attention_logit:
        return "the largest attention logits are collected"
    if config.attention_dropout > 0 and is_training:
        return "attention dropout is on"
    return None
