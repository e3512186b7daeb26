"""Hooks on an attention's projections: where these are fused with their exchanges, what comes out of the one and into
the other is of all rows and this rank's heads, which is not what a hook sees natively (part of feature ``sp``)."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ditron_train.megatron.shared.module_hooks import has_hooks
from ditron_train.symm.exchange import exchange

_OF_QKV = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")  # that see q, k and v or their gradient
_OF_OUT = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks")  # that see the attended values or their gradient

#: Whether, when an attention was first called, such hooks were there on some ranks of its group and not on others.
_differ: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


def why_not_hooks_of_qkv(qkv: Any) -> str | None:
    """Why the QKV projection is not fused with its exchange for the sake of hooks on it, or None."""
    return "hooks on the QKV projection look at q, k and v" if has_hooks(qkv, _OF_QKV) else None


def why_not_hooks_of_out(out: Any) -> str | None:
    """Why the output projection is not fused with its exchange for the sake of hooks on it, or None."""
    return "hooks on the output projection look at its input" if has_hooks(out, _OF_OUT) else None


def why_not_hooks_of_ranks(attention: Any) -> str | None:
    """Why no projection of ``attention`` is fused for the sake of hooks that only some ranks have, as where the first
    alone logs, or None; collective at its first call."""
    differ = _differ.get(attention)
    if differ is None:
        mine = has_hooks(getattr(attention, "linear_qkv", None), _OF_QKV), has_hooks(attention.linear_proj, _OF_OUT)
        said = exchange(attention.core_attention.exchange_group, mine)
        differ = _differ[attention] = len(set(said)) > 1
    return "some ranks have hooks on the projections, others have none" if differ else None


def forget_hooks() -> None:
    """Ask all ranks again."""
    _differ.clear()
