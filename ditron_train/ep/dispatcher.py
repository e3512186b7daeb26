"""Autograd functions of dispatch and combine, each of which is the other's backward: alone, or with the experts' two
linear layers inside.

    rows[row(t, e)] = x[t]                      dx[t] = sum over e of drows[row(t, e)]
    row_probs[row(t, e)] = probs[t, e]          dprobs[t, e] = drow_probs[row(t, e)], 0 if not routed
    out[t] = sum over e of y[row(t, e)]         dy[row(t, e)] = dout[t]

    rows = dispatch(x)             dx  = combine(drows), drows = dy W1[e]
    y    = rows W1[e].T            dW1[e] = dy.T rows over the expert's rows
    z    = h W2[e].T               dh  = drows2 W2[e], drows2 = dispatch(dout)
    out  = combine(z)              dW2[e] = drows2.T h

In forward fc2's GEMM and the combine are one kernel (``gemm_combine``) or two, as ``ExpertCall.fused`` says; bits
are the same. Every product of a rank's experts is one kernel (``fc1_gemm`` and so on) or one for each expert. Weight
gradients are one GEMM over an expert's rows, whoever computes them. The last combine can send its
rows concurrently with dW1 on a stream of its own (``overlap_wgrad``), with few multiprocessors, and add them up after
it: it depends on the same dgrad, and nothing waits for dW1. Times: docs/measurements/ep.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

import torch

from ditron_train.ep import rails
from ditron_train.ep.combine import SumOrder, begin_combine, combine
from ditron_train.ep.context import EPContext
from ditron_train.ep.dispatch import dispatch
from ditron_train.ep.gemm_combine import FewProduct, gemm_combine, layout_tiles
from ditron_train.ep.grouped_gemm import RowTiles, group_gemm, group_wgrad
from ditron_train.ep.handle import EPHandle
from ditron_train.ep.plan import PAIRS, Pair
from ditron_train.ep.rails import RailContext, RailHandle
from ditron_train.runtime.derivatives import refuse_second_derivatives, rows_to_save
from ditron_train.runtime.outside_compile import outside_compile

AnyHandle = Union[EPHandle, RailHandle]
AnyContext = Union[EPContext, RailContext]


#: Rows, and one number for each of them or for each token and expert: probabilities or their gradients.
Moved = tuple[torch.Tensor, Union[torch.Tensor, None]]


def _dispatch(x: torch.Tensor, handle: Any, context: AnyContext, **options: Any) -> Moved:
    """Along rails between nodes, or by peer memory alone: see ``dispatch.dispatch``."""
    if isinstance(context, RailContext):
        return rails.dispatch(x, handle, context, **options)
    return dispatch(x, handle, context, **options)


def _combine(rows: torch.Tensor, handle: Any, context: AnyContext, **options: Any) -> Moved:
    """Along rails between nodes, or by peer memory alone: see ``combine.combine``."""
    if isinstance(context, RailContext):
        return rails.combine(rows, handle, context, **options)
    return combine(rows, handle, context, **options)


@outside_compile
class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, probs: torch.Tensor, handle: AnyHandle, context: AnyContext, order: SumOrder
    ):
        ctx.handle, ctx.context, ctx.order = handle, context, order
        ctx.probs_dtype = probs.dtype
        zero_probs = order.endswith("descending")
        return _dispatch(x, handle, context, probs_dtype=probs.dtype, zero_probs=zero_probs)

    @staticmethod
    def backward(ctx: Any, grad_rows: torch.Tensor, grad_row_probs: torch.Tensor):
        refuse_second_derivatives("dispatch")
        grad_x, grad_probs = _combine(
            grad_rows,
            ctx.handle,
            ctx.context,
            order=ctx.order,
            row_grads=grad_row_probs if ctx.needs_input_grad[1] else None,
            probs_dtype=ctx.probs_dtype,
        )
        return grad_x, grad_probs, None, None, None


@outside_compile
class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, handle: AnyHandle, context: AnyContext, order: SumOrder) -> torch.Tensor:
        ctx.handle, ctx.context = handle, context
        return _combine(y, handle, context, order=order)[0]

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor):
        refuse_second_derivatives("combine")
        return _dispatch(grad_out, ctx.handle, ctx.context)[0], None, None, None


@outside_compile
def dispatch_tokens(
    x: torch.Tensor, probs: torch.Tensor, handle: AnyHandle, context: AnyContext, order: SumOrder
) -> tuple[torch.Tensor, torch.Tensor]:
    """Differentiable ``dispatch`` of a new handle.

    Args:
        x: [num_tokens, hidden].
        probs: [num_tokens, num_experts], as given to ``begin_layout``.
        handle: Handle that was not dispatched yet.
        context: The group's context.
        order: Order in which the native permutation in use adds up the gradients of a token.

    Returns:
        rows [num_rows, hidden] and their probabilities [num_rows] (type of ``probs``).
    """
    return _Dispatch.apply(x, probs, handle, context, order)


@outside_compile
def combine_rows(y: torch.Tensor, handle: AnyHandle, context: AnyContext, order: SumOrder) -> torch.Tensor:
    """Differentiable ``combine``: y [num_rows, hidden] to [num_tokens, hidden]."""
    return _Combine.apply(y, handle, context, order)


#: (rows, weights, transpose) -> rows @ weights[e].T, or rows @ weights[e] if not ``transpose``.
Gemm = Callable[[torch.Tensor, Sequence[torch.Tensor], bool], torch.Tensor]
#: (grad of the output rows, input rows, weights) -> gradient of each weight, or None if it was written elsewhere.
Wgrad = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]], Sequence[torch.Tensor | None]]
#: (grad of the output rows, input rows, their tiles, multiprocessors to spare) -> the same.
IntoWgrad = Callable[[torch.Tensor, torch.Tensor, RowTiles, int], Sequence[torch.Tensor | None]]


@dataclass
class ExpertCall:
    """One pass of a layer's experts.

    Attributes:
        layout: Handle of the routing; named as the field of ``GatheredCall`` that holds its row layout.
        context: The group's context.
        order: Order of the sums of the native permutation in use.
        fused: Pairs that run as one kernel, or concurrently.
        gemm: The native grouped GEMM for all other products; None: ``group_gemm``.
        wgrad: The native GEMM of the weight gradients; None: ``group_wgrad``.
        into: Writes the weight gradients to ``main_grad``; None: ``group_wgrad`` into new tensors.
        min_rows: By the pairs of ``fused``: experts with fewer rows are multiplied by ``few``.
        few: The native product of those experts; None: the kernel multiplies them, too.
    """

    layout: EPHandle
    context: EPContext
    order: SumOrder
    fused: frozenset[Pair] = frozenset(PAIRS)
    gemm: Gemm | None = None
    wgrad: Wgrad | None = None
    into: IntoWgrad | None = None
    min_rows: Mapping[Pair, int] = field(default_factory=dict)
    few: FewProduct | None = None

    def product(
        self, rows: torch.Tensor, weights: Sequence[torch.Tensor], transpose: bool, name: Pair | None = None
    ) -> torch.Tensor:
        """The grouped GEMM alone; ``name``: by which ``fused`` knows it."""
        if self.gemm is not None and name not in self.fused:
            return self.gemm(rows, weights, transpose)
        out = group_gemm(rows, weights, layout_tiles(self.layout), transpose=transpose)
        if self.few is not None and name is not None and name in self.min_rows:
            self.few(rows, weights, transpose, out, self.layout.experts_below(self.min_rows[name]))
        return out

    def weight_grads(
        self, grad: torch.Tensor, rows: torch.Tensor, weights: Sequence[torch.Tensor], *, spare_sms: int = 0
    ) -> Sequence[torch.Tensor | None]:
        """The weight gradients; the fused path's GEMM leaves ``spare_sms`` multiprocessors to other kernels."""
        if self.wgrad is not None:
            return self.wgrad(grad, rows, weights)
        tiles = layout_tiles(self.layout)
        if self.into is not None:
            return self.into(grad, rows, tiles, spare_sms)
        return group_wgrad(grad, rows, tiles, spare_sms=spare_sms).unbind(0)


def dispatch_linear_forward(
    x: torch.Tensor, weights: Sequence[torch.Tensor], call: ExpertCall, probs_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """y, rows and row_probs of ``dispatch_linear``, without autograd."""
    zero_probs = call.order == "descending"
    rows, row_probs = dispatch(x, call.layout, call.context, probs_dtype=probs_dtype, zero_probs=zero_probs)
    return call.product(rows, weights, True, "fc1_gemm"), rows, row_probs


def dispatch_linear_backward(
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
    if with_wgrad and "overlap_wgrad" in call.fused:
        pending = begin_combine(
            call.product(grad_y, weights, False, "fc1_dgrad"), call.layout, call.context, **options
        )
        try:
            weight_grads = call.weight_grads(grad_y, rows, weights, spare_sms=call.context.senders_beside)
        finally:
            grads = pending.finish()  # even after an error: the side stream must not outlive its tensors
        return (*grads, weight_grads)
    grads = combine(call.product(grad_y, weights, False, "fc1_dgrad"), call.layout, call.context, **options)
    return (*grads, call.weight_grads(grad_y, rows, weights) if with_wgrad else [None] * len(weights))


def linear_combine_forward(h: torch.Tensor, weights: Sequence[torch.Tensor], call: ExpertCall) -> torch.Tensor:
    """out of ``linear_combine``, without autograd."""
    if "gemm_combine" in call.fused:
        return gemm_combine(
            h,
            call.layout,
            call.context,
            weights,
            order=call.order,
            min_rows=call.min_rows.get("gemm_combine", 0),
            few=call.few if "gemm_combine" in call.min_rows else None,
        )
    return combine(call.product(h, weights, True, "fc2_gemm"), call.layout, call.context, order=call.order)[0]


def linear_combine_backward(
    grad_out: torch.Tensor, weights: Sequence[torch.Tensor], call: ExpertCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """dh and the dispatched gradient rows of ``linear_combine``."""
    rows, _ = dispatch(grad_out, call.layout, call.context)
    return call.product(rows, weights, False, "fc2_dgrad"), rows


@outside_compile
class _DispatchLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, probs: torch.Tensor, call: ExpertCall, *weights: torch.Tensor):
        y, rows, row_probs = dispatch_linear_forward(x, weights, call, probs.dtype)
        ctx.call, ctx.probs_dtype = call, probs.dtype
        ctx.save_for_backward(rows_to_save(rows, weights), *weights)
        return y, row_probs

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor, grad_row_probs: torch.Tensor):
        refuse_second_derivatives("dispatch_linear")
        rows, *weights = ctx.saved_tensors
        grad_x, grad_probs, grads = dispatch_linear_backward(
            grad_y, rows, weights, ctx.call, grad_row_probs, ctx.probs_dtype, any(ctx.needs_input_grad[3:])
        )
        return (grad_x, grad_probs, None, *grads)


@outside_compile
class _LinearCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, call: ExpertCall, *weights: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        ctx.save_for_backward(rows_to_save(h, weights), *weights)
        return linear_combine_forward(h, weights, call)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor):
        refuse_second_derivatives("linear_combine")
        h, *weights = ctx.saved_tensors
        grad_h, grad_rows = linear_combine_backward(grad_out, weights, ctx.call)
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
        call: With a handle that was not dispatched yet.

    Returns:
        y [num_rows, N] and the rows' probabilities [num_rows].
    """
    return _DispatchLinear.apply(x, probs, call, *weights)


@outside_compile
def linear_combine(h: torch.Tensor, weights: Sequence[torch.Tensor], call: ExpertCall) -> torch.Tensor:
    """h [num_rows, K] through the experts' second linear layer ([hidden, K] each) and back to tokens [num_tokens,
    hidden]."""
    return _LinearCombine.apply(h, call, *weights)


#: Computes the gradients of weights: (grad of the output rows, input rows, their tiles) -> gradient of each weight, or
#: None if it was written elsewhere.
GroupWgrad = Callable[[torch.Tensor, torch.Tensor, RowTiles], Sequence["torch.Tensor | None"]]


@outside_compile
class _GroupLinear(torch.autograd.Function):
    """y = x W[e].T; dx = dy W[e]; dW[e] = dy.T x over the expert's rows."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, tiles: RowTiles, wgrad: GroupWgrad | None, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows_to_save(x, weights), *weights)
        ctx.tiles, ctx.wgrad = tiles, wgrad
        return group_gemm(x, weights, tiles)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_derivatives("group_linear")
        x, *weights = ctx.saved_tensors
        dx = group_gemm(grad, weights, ctx.tiles, transpose=False) if ctx.needs_input_grad[0] else None
        dw: Sequence[torch.Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[3:]):
            own = ctx.wgrad is None
            dw = group_wgrad(grad, x, ctx.tiles).unbind(0) if own else ctx.wgrad(grad, x, ctx.tiles)
        return (dx, None, None, *dw)


@outside_compile
def group_linear(
    x: torch.Tensor, weights: Sequence[torch.Tensor], tiles: RowTiles, wgrad: GroupWgrad | None = None
) -> torch.Tensor:
    """Differentiable ``group_gemm``: x [num_rows, K] times each expert's [N, K] transposed; ``wgrad`` replaces
    ``group_wgrad``."""
    return _GroupLinear.apply(x, tiles, wgrad, *weights)
