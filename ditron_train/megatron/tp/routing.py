"""Which path a call of a linear layer takes, and by which function."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ditron_train.megatron.tp.linear_call import LinearCall
from ditron_train.megatron.tp.spec import COLUMN, ROW, ROW_AR, Kind, LinearOp
from ditron_train.policy import Answer, gate, log_native

_OPS: dict[tuple[Kind, bool], LinearOp] = {("column", True): COLUMN, ("row", True): ROW, ("row", False): ROW_AR}


def unsupported_reason_kind(kind: Kind, sequence_parallel: bool) -> str | None:
    """Why such layers run natively, whatever their shapes, or None."""
    if kind == "column" and not sequence_parallel:
        return "without sequence parallelism Megatron itself overlaps the all-reduce with the weight gradient"
    return None


def route(
    kind: Kind,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    sequence_parallel: bool,
    is_frozen: bool = False,
    bias: torch.Tensor | None = None,
    by_te: bool = False,
) -> Answer | None:
    """What the gate says to this call, which has to be ``observed``; None for a kind of layer that is always native.

    Args:
        kind: Of the layer.
        x, weight, group, is_frozen, bias, by_te: As of `LinearCall`; without sequence parallelism ``x`` holds all
            tokens.
        sequence_parallel: Whether activations outside the layer are split along the sequence.
    """
    reason = unsupported_reason_kind(kind, sequence_parallel)
    if reason is not None:
        log_native(f"tp {kind}", reason)
        return None
    call = LinearCall(x, weight, group, is_frozen, bias=bias, by_te=by_te)
    return gate.answer_for(op_of(kind, sequence_parallel), call)


def op_of(kind: Kind, sequence_parallel: bool) -> LinearOp:
    """How such a layer, which ``unsupported_reason_kind`` has nothing against, is declared for the policy."""
    return _OPS[kind, bool(sequence_parallel)]
