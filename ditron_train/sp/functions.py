"""Autograd of Ulysses sequence parallelism.

With P the exchange before attention (local rows, all heads -> all rows, own heads: a permutation over the group), so that
P^T is the exchange after it:

=====================  ==========================  =================================  ====================
..                     forward                     dgrad                              wgrad
=====================  ==========================  =================================  ====================
``qkv_projection``     (q, k, v) = P(x W^T + c)    dx = P^T(dq, dk, dv) W             dW = P^T(..)^T x
``output_projection``  y = P^T(o) W^T              do = P(dy W)                       dW = dy^T P^T(o)
``heads_exchange``     P(q, k, v)                  P^T(dq, dk, dv)
``sequence_exchange``  P^T(o)                      P(do)
=====================  ==========================  =================================  ====================

wgrad is one GEMM over all local rows in order, as native computes it; the bias c is added after the product was rounded,
and its gradient is P^T(..) summed over the local rows, both as Megatron's own linear layer does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ditron_train.runtime.errors import NotSupportedError
from ditron_train.sp.context import SPContext
from ditron_train.sp.layouts import HeadsLayout
from ditron_train.sp.ops import a2a_gemm, gemm_a2a, to_heads, to_sequence

__all__ = ["InputShards", "Wgrad", "heads_exchange", "output_projection", "qkv_projection", "sequence_exchange"]

class InputShards(Protocol):
    """How a tensor parallel rank holds the input of its QKV projection: what stands between ``x`` and the GEMM."""

    def start_gather(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Starts to make the whole input of this rank's part of the sequence from ``x``; the result waits for it."""

    def start_reduce(self, grad: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Starts to make ``x``'s gradient from that of the whole input; the result waits for it."""


#: Takes grad_output [rows, N] and input [rows, K]; returns the weight's gradient [N, K] (None where it kept it itself).
Wgrad = Callable[[torch.Tensor, torch.Tensor], "torch.Tensor | None"]


def _plain_wgrad(grad_output: torch.Tensor, total_input: torch.Tensor) -> torch.Tensor:
    return grad_output.t().matmul(total_input)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


class _QkvProjection(torch.autograd.Function):
    """(q, k, v) = P(x W^T + c); see the module's table."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        context: SPContext,
        layout: HeadsLayout,
        row_table: torch.Tensor | None,
        wgrad: Wgrad,
        shards: InputShards | None,
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(x, weight)
        ctx.options, ctx.wgrad = dict(context=context, layout=layout, row_table=row_table), wgrad
        ctx.shards = shards
        parts = gemm_a2a(x if shards is None else shards.start_gather(x)(), weight, **ctx.options)
        if bias is not None:
            own = bias.view(context.world_size, layout.num_groups, -1)[context.rank]
            for part, width, part_bias in zip(parts, layout.widths, own.split(list(layout.widths), dim=1)):
                part.view(*part.shape[:-2], layout.num_groups, width).add_(part_bias)
        return parts

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = grad_rows = None
        total_x = ctx.shards.start_gather(x) if needs_weight and ctx.shards is not None else lambda: x
        if needs_x:
            keep = "borrow" if needs_weight or needs_bias else "no"  # used up before the next op
            result = a2a_gemm(grads, weight, weight_layout="nn", return_gathered=keep, **ctx.options)
            grad_x, grad_rows = (result, None) if keep == "no" else result
            if ctx.shards is not None:
                grad_x = ctx.shards.start_reduce(grad_x)
        elif needs_weight or needs_bias:
            grad_rows = _mixed(to_sequence(grads, **ctx.options), ctx.options["layout"], ctx.options["context"].world_size)
        if needs_weight:
            grad_weight = ctx.wgrad(grad_rows, _rows(total_x()))
        if needs_bias:
            grad_bias = grad_rows.sum(dim=0)
        if needs_x and ctx.shards is not None:
            grad_x = grad_x()
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


def _mixed(parts: Sequence[torch.Tensor], layout: HeadsLayout, world_size: int) -> torch.Tensor:
    """Parts of all heads side by side, group by group: [rows, world_size * layout.num_columns]."""
    groups = world_size * layout.num_groups
    slices = [part.reshape(-1, groups, width) for part, width in zip(parts, layout.widths)]
    return torch.cat(slices, dim=-1).flatten(1)


class _OutputProjection(torch.autograd.Function):
    """y = P^T(o) W^T; see the module's table."""

    @staticmethod
    def forward(
        ctx: Any,
        attended: torch.Tensor,
        weight: torch.Tensor,
        context: SPContext,
        layout: HeadsLayout,
        row_table: torch.Tensor | None,
        wgrad: Wgrad,
    ) -> torch.Tensor:
        keep = ctx.needs_input_grad[1]
        ctx.options, ctx.wgrad = dict(context=context, layout=layout, row_table=row_table), wgrad
        result = a2a_gemm((attended,), weight, return_gathered="copy" if keep else "no", **ctx.options)
        out, gathered = result if keep else (result, None)
        ctx.save_for_backward(weight, gathered)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, gathered = ctx.saved_tensors
        needs_attended, needs_weight = ctx.needs_input_grad[:2]
        grad_attended = grad_weight = None

        def compute_wgrad() -> None:
            nonlocal grad_weight
            grad_weight = ctx.wgrad(_rows(grad_out), gathered) if needs_weight else None

        if needs_attended:
            (grad_attended,) = gemm_a2a(grad_out, weight, weight_layout="nn", meanwhile=compute_wgrad, **ctx.options)
        else:
            compute_wgrad()
        return grad_attended, grad_weight, None, None, None, None


class _Exchange(torch.autograd.Function):
    """P or its inverse, which is each other's backward."""

    @staticmethod
    def forward(
        ctx: Any,
        towards_heads: bool,
        context: SPContext,
        layout: HeadsLayout,
        row_table: torch.Tensor | None,
        *parts: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.towards_heads, ctx.options = towards_heads, dict(context=context, layout=layout, row_table=row_table)
        return (to_heads if towards_heads else to_sequence)(parts, **ctx.options)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inverse = to_sequence if ctx.towards_heads else to_heads
        return (None, None, None, None, *inverse(grads, **ctx.options))


def qkv_projection(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    context: SPContext,
    layout: HeadsLayout,
    bias: torch.Tensor | None = None,
    row_table: torch.Tensor | None = None,
    wgrad: Wgrad | None = None,
    shards: InputShards | None = None,
) -> tuple[torch.Tensor, ...]:
    """q, k and v of this rank's heads for the whole sequence; differentiable.

    Args:
        x: [s / world, b, hidden], this rank's two chunks (with ``shards`` what that makes them from).
        weight: [world * layout.num_columns, hidden], rows group by group.
        context: The group's context.
        layout: Columns of one rank (``qkv_layout``).
        bias: [world * layout.num_columns], or None.
        row_table: As ``gemm_a2a``.
        wgrad: Computes the weight's gradient; ``grad.T @ x`` where None.
        shards: How x is held by the ranks of a tensor parallel group; None where this rank has all of it and no other needs its
            gradient.

    Returns:
        One tensor a part, [s, b, heads of this rank, head size].

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``gemm_a2a``.
    """
    if bias is not None and bias.shape != (context.world_size * layout.num_columns,):
        raise NotSupportedError(f"qkv_projection: bias {tuple(bias.shape)} for {context.world_size * layout.num_columns} columns")
    return _QkvProjection.apply(x, weight, bias, context, layout, row_table, wgrad or _plain_wgrad, shards)


def output_projection(
    attended: torch.Tensor,
    weight: torch.Tensor,
    *,
    context: SPContext,
    layout: HeadsLayout,
    row_table: torch.Tensor | None = None,
    wgrad: Wgrad | None = None,
) -> torch.Tensor:
    """The attention's output of all heads, for this rank's two chunks, projected; differentiable.

    Args:
        attended: [s, b, heads of this rank, head size].
        weight: [hidden, world * layout.num_columns].
        context: The group's context.
        layout: Columns of one rank, one part.
        row_table: As ``gemm_a2a``.
        wgrad: As ``qkv_projection``.

    Returns:
        [s / world, b, hidden].

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``a2a_gemm``.
    """
    return _OutputProjection.apply(attended, weight, context, layout, row_table, wgrad or _plain_wgrad)


def heads_exchange(
    parts: Sequence[torch.Tensor], *, context: SPContext, layout: HeadsLayout, row_table: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """``ops.to_heads``, differentiable: for what stands between the projection and the exchange (q and k norms)."""
    return _Exchange.apply(True, context, layout, row_table, *parts)


def sequence_exchange(
    parts: Sequence[torch.Tensor], *, context: SPContext, layout: HeadsLayout, row_table: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """``ops.to_sequence``, differentiable."""
    return _Exchange.apply(False, context, layout, row_table, *parts)
