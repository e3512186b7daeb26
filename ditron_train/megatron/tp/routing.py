"""Which path a call of a linear layer takes, and by which function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.megatron.tp.linear_call import LinearCall
from ditron_train.megatron.tp.reduced_spec import COLUMN_AR, ROW_AR
from ditron_train.megatron.tp.spec import COLUMN, ROW, Kind, LinearSpec
from ditron_train.policy import OpSpec, gate
from ditron_train.tp.all_reduce_functions import column_linear_ar, row_linear_ar
from ditron_train.tp.context import TPContext
from ditron_train.tp.functions import column_linear, row_linear

SPECS: Sequence[OpSpec[Any, Any]] = (COLUMN, ROW, COLUMN_AR, ROW_AR)

_SPECS: dict[tuple[Kind, bool], LinearSpec] = {
    ("column", True): COLUMN,
    ("row", True): ROW,
    ("column", False): COLUMN_AR,
    ("row", False): ROW_AR,
}
_LINEARS: dict[tuple[Kind, bool], Callable[..., torch.Tensor]] = {
    ("column", True): column_linear,
    ("row", True): row_linear,
    ("column", False): column_linear_ar,
    ("row", False): row_linear_ar,
}


def route(
    kind: Kind,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    sequence_parallel: bool,
    is_frozen: bool = False,
    bias: torch.Tensor | None = None,
) -> TPContext | None:
    """The context to run this call with, or None for Megatron's path.

    Args:
        kind: Of the layer.
        x, weight, group, is_frozen, bias: As of `LinearCall`; without sequence parallelism ``x`` holds all tokens.
        sequence_parallel: Whether activations outside the layer are split along the sequence.
    """
    return gate.context_for(spec_of(kind, sequence_parallel), LinearCall(x, weight, group, is_frozen, bias=bias))


def spec_of(kind: Kind, sequence_parallel: bool) -> LinearSpec:
    """How such a layer is declared for the policy."""
    return _SPECS[kind, bool(sequence_parallel)]


def linear_of(kind: Kind, sequence_parallel: bool) -> Callable[..., torch.Tensor]:
    """The op of such a layer."""
    return _LINEARS[kind, bool(sequence_parallel)]
