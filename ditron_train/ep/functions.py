"""Autograd functions of dispatch and combine: each is the other's backward.

rows[row(t, e)] = x[t]                      dx[t] = sum over e of drows[row(t, e)]
row_probs[row(t, e)] = probs[t, e]          dprobs[t, e] = drow_probs[row(t, e)], 0 where not routed
out[t] = sum over e of y[row(t, e)]         dy[row(t, e)] = dout[t]
"""

from __future__ import annotations

from typing import Any, Union

import torch

from ditron_train.ep import ops, rails
from ditron_train.ep.context import EPContext
from ditron_train.ep.layout import Layout
from ditron_train.ep.orders import SumOrder
from ditron_train.ep.rail_context import RailContext
from ditron_train.ep.rail_layout import RailLayout
from ditron_train.runtime.derivatives import refuse_second_derivatives
from ditron_train.runtime.outside_compile import outside_compile

AnyLayout = Union[Layout, RailLayout]
AnyContext = Union[EPContext, RailContext]


def _mover(layout: AnyLayout) -> Any:
    """What moves the tokens of a layout: inside one node, or over several."""
    return rails if isinstance(layout, RailLayout) else ops


@outside_compile
class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, probs: torch.Tensor, layout: AnyLayout, context: AnyContext, order: SumOrder
    ):
        ctx.layout, ctx.context, ctx.order = layout, context, order
        ctx.probs_dtype = probs.dtype
        rows, row_probs = _mover(layout).dispatch(
            x, layout, context, probs_dtype=probs.dtype, zero_probs=order == "descending"
        )
        return rows, row_probs

    @staticmethod
    def backward(ctx: Any, grad_rows: torch.Tensor, grad_row_probs: torch.Tensor):
        refuse_second_derivatives("dispatch")
        grad_x, grad_probs = _mover(ctx.layout).combine(
            grad_rows,
            ctx.layout,
            ctx.context,
            order=ctx.order,
            row_grads=grad_row_probs if ctx.needs_input_grad[1] else None,
            probs_dtype=ctx.probs_dtype,
        )
        return grad_x, grad_probs, None, None, None


@outside_compile
class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, layout: AnyLayout, context: AnyContext, order: SumOrder) -> torch.Tensor:
        ctx.layout, ctx.context = layout, context
        return _mover(layout).combine(y, layout, context, order=order)[0]

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor):
        refuse_second_derivatives("combine")
        return _mover(ctx.layout).dispatch(grad_out, ctx.layout, ctx.context)[0], None, None, None


@outside_compile
def dispatch_tokens(
    x: torch.Tensor, probs: torch.Tensor, layout: AnyLayout, context: AnyContext, order: SumOrder
) -> tuple[torch.Tensor, torch.Tensor]:
    """Differentiable ``ops.dispatch`` of a fresh layout.

    Args:
        x: [num_tokens, hidden].
        probs: [num_tokens, num_experts], as given to ``begin_layout``.
        layout: Not dispatched yet.
        context: Of the group.
        order: Which native permutation is in force; decides how gradients of a token are added up.

    Returns:
        rows [num_rows, hidden] and their probabilities [num_rows] (type of ``probs``).
    """
    return _Dispatch.apply(x, probs, layout, context, order)


@outside_compile
def combine_rows(y: torch.Tensor, layout: AnyLayout, context: AnyContext, order: SumOrder) -> torch.Tensor:
    """Differentiable ``ops.combine``: y [num_rows, hidden] to [num_tokens, hidden]."""
    return _Combine.apply(y, layout, context, order)
