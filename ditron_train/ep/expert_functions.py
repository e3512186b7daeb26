"""Autograd functions of the experts' two linear layers with the movement at their outer side.

    rows = dispatch(x)             dx  = combine(drows), drows = dy W1[e]
    y    = rows W1[e].T            dW1[e] = dy.T rows over the expert's rows
    z    = h W2[e].T               dh  = drows2 W2[e], drows2 = dispatch(dout)
    out  = combine(z)              dW2[e] = drows2.T h

In forward fc2's GEMM and the combine are one kernel (``fused``) or two, as ``ExpertCall.fused`` says; bits are the
same. Weight gradients are one GEMM over an expert's rows, whoever computes them. The last combine can send its rows
beside dW1 on a stream of its own (``beside_wgrad``), with few multiprocessors, and add them up behind it: it
depends on the same dgrad, and nothing waits for dW1. Times: docs/measurements/ep.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from ditron_train.ep import fused, ops
from ditron_train.ep.context import EPContext
from ditron_train.ep.fused import FewProduct
from ditron_train.ep.group_gemm import group_gemm, group_wgrad
from ditron_train.ep.layout import Layout
from ditron_train.ep.orders import SumOrder
from ditron_train.ep.row_tiles import RowTiles
from ditron_train.runtime.derivatives import refuse_second_derivatives, rows_to_save
from ditron_train.runtime.outside_compile import outside_compile

#: What can overlap: fc2's GEMM with the combine after it, as one kernel; the last combine beside dW1.
Pair = Literal["gemm_combine", "beside_wgrad"]
PAIRS: tuple[Pair, ...] = ("gemm_combine", "beside_wgrad")

# Where cuBLAS has few tiles it may split K, and then sums in another order than our GEMMs: docs/measurements/ep.md.
_WAVE_TILES = 132
#: Part of all rows that may belong to such experts: their products stand in front of the kernel, where nothing is
#: returned yet.
MOST_FEW = 0.25


def pairs_of_step(pairs: frozenset[Pair], expert_rows: np.ndarray | None, fewest: int) -> tuple[frozenset[Pair], int]:
    """The pairs of a step, and below how many rows an expert is multiplied natively in ``gemm_combine`` (0: none is):
    at all ranks alike.

    Args:
        pairs: That were chosen for the layer.
        expert_rows: Of each expert of any rank; None where the host does not know (a fixed capacity): all pairs stay,
            and the user is warned afterwards.
        fewest: Rows that an expert must have for our GEMM to add up as native's does (``few_rows``).
    """
    if expert_rows is None or "gemm_combine" not in pairs:
        return pairs, 0
    few = expert_rows[expert_rows < fewest]
    if few.sum() > MOST_FEW * expert_rows.sum():
        return pairs - {"gemm_combine"}, 0
    return pairs, fewest if few.any() else 0


def own_wgrad_has_native_bits(rows: int, columns: int) -> bool:
    """Whether our gradient of a weight ``[rows, columns]`` adds up as native's does, whatever an expert's rows."""
    return -(-rows // 128) * -(-columns // 256) >= _WAVE_TILES


#: (rows, weights, transpose) -> rows @ weights[e].T, or rows @ weights[e] where not ``transpose``.
Gemm = Callable[[torch.Tensor, Sequence[torch.Tensor], bool], torch.Tensor]
#: (grad of the output rows, input rows, weights) -> gradient of each weight, or None where it has gone elsewhere.
Wgrad = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]], Sequence[torch.Tensor | None]]
#: (grad of the output rows, input rows, their tiles, multiprocessors to spare) -> the same.
IntoWgrad = Callable[[torch.Tensor, torch.Tensor, RowTiles, int], Sequence[torch.Tensor | None]]


@dataclass
class ExpertCall:
    """One pass of a layer's experts.

    Attributes:
        layout: Of the routing.
        context: Of the group.
        order: Which native permutation is in force.
        fused: Pairs that run as one kernel, or beside each other.
        gemm: Grouped GEMM of the others; None: ours.
        wgrad: Weight gradients; None: ours.
        into: Where ours go if not into tensors of their own: ``main_grad``.
        fewest_rows: If ``gemm_combine`` is one kernel, experts of fewer rows are multiplied by ``few``.
        few: Natively; None: ours does.
    """

    layout: Layout
    context: EPContext
    order: SumOrder
    fused: frozenset[Pair] = frozenset(PAIRS)
    gemm: Gemm | None = None
    wgrad: Wgrad | None = None
    into: IntoWgrad | None = None
    fewest_rows: int = 0
    few: FewProduct | None = None

    def product(self, rows: torch.Tensor, weights: Sequence[torch.Tensor], transpose: bool) -> torch.Tensor:
        """The grouped GEMM alone."""
        if self.gemm is not None:
            return self.gemm(rows, weights, transpose)
        return group_gemm(rows, weights, fused.layout_tiles(self.layout), transpose=transpose)

    def weight_grads(
        self, grad: torch.Tensor, rows: torch.Tensor, weights: Sequence[torch.Tensor], *, spare_sms: int = 0
    ) -> Sequence[torch.Tensor | None]:
        """The weight gradients; our GEMM leaves ``spare_sms`` to others."""
        if self.wgrad is not None:
            return self.wgrad(grad, rows, weights)
        tiles = fused.layout_tiles(self.layout)
        if self.into is not None:
            return self.into(grad, rows, tiles, spare_sms)
        return group_wgrad(grad, rows, tiles, spare_sms=spare_sms).unbind(0)


def forward_in(
    x: torch.Tensor, weights: Sequence[torch.Tensor], call: ExpertCall, probs_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """y, rows and row_probs of ``dispatch_linear``, without autograd."""
    zero_probs = call.order == "descending"
    rows, row_probs = ops.dispatch(x, call.layout, call.context, probs_dtype=probs_dtype, zero_probs=zero_probs)
    return call.product(rows, weights, True), rows, row_probs


def backward_in(
    grad_y: torch.Tensor,
    rows: torch.Tensor,
    weights: Sequence[torch.Tensor],
    call: ExpertCall,
    row_grads: torch.Tensor | None,
    probs_dtype: torch.dtype,
    with_wgrad: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None, Sequence[torch.Tensor | None]]:
    """dx, dprobs and the weights' gradients of ``dispatch_linear``."""
    options: dict[str, Any] = dict(order=call.order, row_grads=row_grads, probs_dtype=probs_dtype)
    if with_wgrad and "beside_wgrad" in call.fused:
        pending = ops.begin_combine(call.product(grad_y, weights, False), call.layout, call.context, **options)
        try:
            weight_grads = call.weight_grads(grad_y, rows, weights, spare_sms=call.context.senders_beside)
        finally:
            grads = pending.finish()  # in any case: the side stream must not outlive its tensors
        return (*grads, weight_grads)
    grads = ops.combine(call.product(grad_y, weights, False), call.layout, call.context, **options)
    return (*grads, call.weight_grads(grad_y, rows, weights) if with_wgrad else [None] * len(weights))


def forward_out(h: torch.Tensor, weights: Sequence[torch.Tensor], call: ExpertCall) -> torch.Tensor:
    """out of ``linear_combine``, without autograd."""
    if "gemm_combine" in call.fused:
        return fused.gemm_combine(
            h, call.layout, call.context, weights, order=call.order, fewest_rows=call.fewest_rows, few=call.few
        )
    return ops.combine(call.product(h, weights, True), call.layout, call.context, order=call.order)[0]


def backward_out(
    grad_out: torch.Tensor, weights: Sequence[torch.Tensor], call: ExpertCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """dh and the dispatched gradient rows of ``linear_combine``."""
    rows, _ = ops.dispatch(grad_out, call.layout, call.context)
    return call.product(rows, weights, False), rows


@outside_compile
class _DispatchLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, probs: torch.Tensor, call: ExpertCall, *weights: torch.Tensor):
        y, rows, row_probs = forward_in(x, weights, call, probs.dtype)
        ctx.call, ctx.probs_dtype = call, probs.dtype
        ctx.save_for_backward(rows_to_save(rows, weights), *weights)
        return y, row_probs

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor, grad_row_probs: torch.Tensor):
        refuse_second_derivatives("dispatch_linear")
        rows, *weights = ctx.saved_tensors
        grad_x, grad_probs, grads = backward_in(
            grad_y, rows, weights, ctx.call, grad_row_probs, ctx.probs_dtype, any(ctx.needs_input_grad[3:])
        )
        return (grad_x, grad_probs, None, *grads)


@outside_compile
class _LinearCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, call: ExpertCall, *weights: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        ctx.save_for_backward(rows_to_save(h, weights), *weights)
        return forward_out(h, weights, call)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor):
        refuse_second_derivatives("linear_combine")
        h, *weights = ctx.saved_tensors
        grad_h, grad_rows = backward_out(grad_out, weights, ctx.call)
        grads: Sequence[torch.Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[2:]):
            grads = ctx.call.weight_grads(grad_rows, h, weights)
        return (grad_h, None, *grads)


@outside_compile
def dispatch_linear(
    x: torch.Tensor, probs: torch.Tensor, weights: Sequence[torch.Tensor], call: ExpertCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens through the experts' first linear layer.

    Args:
        x: [num_tokens, hidden].
        probs: [num_tokens, num_experts], as given to ``begin_layout``.
        weights: [N, hidden] of each local expert.
        call: Of a layout that is not dispatched yet.

    Returns:
        y [num_rows, N] and the rows' probabilities [num_rows].
    """
    return _DispatchLinear.apply(x, probs, call, *weights)


@outside_compile
def linear_combine(h: torch.Tensor, weights: Sequence[torch.Tensor], call: ExpertCall) -> torch.Tensor:
    """h [num_rows, K] through the experts' second linear layer ([hidden, K] each) and back to tokens [num_tokens,
    hidden]."""
    return _LinearCombine.apply(h, call, *weights)
