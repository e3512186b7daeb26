"""What autograd functions of this package share: what they keep for backward, and what that does not compute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ditron_train.runtime.errors import NotSupportedError


def refuse_second_derivatives(op: str) -> None:
    """The first line of every backward: it computes gradients that have none of their own, which a loss of gradients
    would silently leave out.

    Args:
        op: Whose backward, in words.

    Raises:
        NotSupportedError: The backward runs with ``create_graph=True``; on every rank alike, before it moves anything.
    """
    if torch.is_grad_enabled():
        raise NotSupportedError(
            f"{op}: second derivatives (create_graph=True) are not computed here; use Megatron's own layers for them"
        )


def save_operands(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Keeps a linear layer's input and weight for its backward; of the input its sizes alone if the weight (the
    function's second argument) is frozen, as Megatron's and Transformer Engine's layers do: the memory goes back, and
    whoever holds the input may write to it."""
    is_wanted = ctx.needs_input_grad[1]
    ctx.sizes_of_x = None if is_wanted else torch.empty_like(x, device="meta")
    ctx.save_for_backward(x if is_wanted else None, weight)


def saved_operands(ctx: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``save_operands`` has kept; the input on ``meta`` if the weight is frozen."""
    x, weight = ctx.saved_tensors
    return ctx.sizes_of_x if x is None else x, weight


def rows_to_save(rows: torch.Tensor, weights: Iterable[torch.Tensor]) -> torch.Tensor:
    """``rows`` for the gradients of ``weights``, or none of them, in memory of their own, if all are frozen."""
    return rows if any(weight.requires_grad for weight in weights) else rows.new_empty(0, *rows.shape[1:])
