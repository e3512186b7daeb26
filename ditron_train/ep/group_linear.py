"""The linear layers of a rank's experts with their gradients, by the grouped GEMMs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_train.ep.group_gemm import group_gemm, group_wgrad
from ditron_train.ep.row_tiles import RowTiles
from ditron_train.runtime.derivatives import refuse_second_derivatives, rows_to_save
from ditron_train.runtime.outside_compile import outside_compile

#: Where the gradients of weights go: (grad of the output rows, input rows, their tiles) -> gradient of each weight, or
#: None where it has gone elsewhere.
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
    """Differentiable ``group_gemm`` forward: x [num_rows, K] times each expert's [N, K] transposed; ``wgrad`` takes
    the place of ``group_wgrad``."""
    return _GroupLinear.apply(x, tiles, wgrad, *weights)
