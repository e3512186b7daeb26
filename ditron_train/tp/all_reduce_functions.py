"""The row linear layer without sequence parallelism, as an autograd function.

Every rank holds all s tokens; W ranks, K inputs and N outputs of the whole layer. With ``AR`` an all-reduce:

    Y [s, N] = AR(X [s, K/W] @ Wt^T)          Wt [N, K/W]
    dX = dY @ Wt                              dWt = dY^T @ X

Order of roundings as in Megatron's ``RowParallelLinear``: GEMMs round once to the activation dtype, each element of an
all-reduce is added in NCCL's order with a rounding at every hop.

cuBLAS chooses its kernel by how operands lie, so the plain products get a gradient as the native layer hands it over
(``Wgrad.operand``). The column layer is native without sequence parallelism: Megatron overlaps the all-reduce of its
backward with the weight gradient itself.
"""

from __future__ import annotations

import torch

from ditron_train.runtime.derivatives import refuse_second_derivatives, save_operands, saved_operands
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.tp.context import TPContext
from ditron_train.tp.functions import PlainWgrad, Wgrad
from ditron_train.tp.ops import gemm_ar
from ditron_train.tp.strides import as_rows


@outside_compile
class _RowLinearAr(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, context, wgrad):
        save_operands(ctx, x, weight)
        ctx.wgrad = wgrad
        return gemm_ar(x, weight, context=context)

    @staticmethod
    def backward(ctx, grad_output):
        refuse_second_derivatives("row_linear_ar")
        x, weight = saved_operands(ctx)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_output = ctx.wgrad.operand(grad_output)
        grad_x = grad_output.matmul(weight).view(x.shape) if needs_x else None
        grad_weight = ctx.wgrad(as_rows(grad_output), as_rows(x)) if needs_weight else None
        return grad_x, grad_weight, None, None


@outside_compile
def row_linear_ar(
    x: torch.Tensor, weight: torch.Tensor, *, context: TPContext, wgrad: Wgrad | None = None
) -> torch.Tensor:
    """AR(x @ weight^T): the row-parallel linear layer without sequence parallelism (bias is added by the caller).

    Args:
        x: [s, ..., K / W], all tokens, this rank's share of the inputs.
        weight: [N, K / W].
        context: The tensor-parallel group's context.
        wgrad: Computes the weight gradient (None: ``PlainWgrad``).

    Returns:
        [s, ..., N].

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``gemm_ar``.
    """
    return _RowLinearAr.apply(x, weight, context, wgrad or PlainWgrad())
