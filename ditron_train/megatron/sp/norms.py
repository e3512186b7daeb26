"""Norms of q and k after a QKV projection that is fused with its exchange (part of feature ``sp``)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer.identity_op import IdentityOp

from ditron_train.sp.head_norms import Norms


def norms_of(attention: Any) -> Norms:
    """Those of q, k and v (which has none), as ``qkv_projection`` takes them; empty if there is none at all."""
    norms = [
        None if norm is None or isinstance(norm, IdentityOp) else norm
        for norm in (attention.q_layernorm, attention.k_layernorm)
    ]
    return (*norms, None) if any(norm is not None for norm in norms) else ()


def unsupported_reason_norms(norms: Norms) -> str | None:
    """Why these cannot follow the exchange, or None: the fused ones know torch's and Transformer Engine's, head by
    head."""
    for norm in norms:
        if norm is None:
            continue
        if type(norm) not in _kinds() or "forward" in vars(norm):
            return f"q and k are normalised before the exchange by {type(norm).__name__}"
        if any(parameter.dim() != 1 or hasattr(parameter, "__fsdp_param__") for parameter in norm.parameters()):
            return "q and k are normalised before the exchange, by weights that are sharded or of several heads"
    return None


def _kinds() -> tuple[type[torch.nn.Module], ...]:
    if not HAVE_TE:
        return torch.nn.LayerNorm, torch.nn.RMSNorm
    from transformer_engine.pytorch import LayerNorm, RMSNorm

    return torch.nn.LayerNorm, torch.nn.RMSNorm, LayerNorm, RMSNorm


def key_of(norms: Norms) -> tuple[Hashable, ...]:
    """What a decision about them depends on."""
    return tuple(
        None
        if norm is None
        else (type(norm), tuple([(parameter.dtype, parameter.requires_grad) for parameter in norm.parameters()]))
        for norm in norms
    )


def words_of(norms: Norms) -> str:
    """The same for a plan, whose reader may be another process."""
    words = []
    for norm in norms:
        parameters = [] if norm is None else list(norm.parameters())
        kind = "none" if norm is None else f"{type(norm).__module__.split('.')[0]}.{type(norm).__name__}"
        of_each = [f"{str(p.dtype).removeprefix('torch.')}{'' if p.requires_grad else ' frozen'}" for p in parameters]
        words.append(" ".join([kind, *of_each]))
    return "/".join(words)


def twins_of(norms: Norms) -> Norms:
    """Norms with the same values for a comparison: nobody's hooks run, no gradient comes to the layer's own."""
    return tuple([None if norm is None else _twin(norm) for norm in norms])


def _twin(norm: torch.nn.Module) -> torch.nn.Module:
    parameters = {
        name: None if one is None else torch.nn.Parameter(one.detach().clone(), one.requires_grad)
        for name, one in norm._parameters.items()
    }
    twin = type(norm).__new__(type(norm))
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    twin.__dict__.update(vars(norm), _parameters=parameters, **{name: OrderedDict() for name in hooks})
    return twin
