"""Column and row linear layers without sequence parallelism, as autograd functions.

Every rank holds all s tokens; W ranks, K inputs and N outputs of the whole layer. With ``AR`` an all-reduce:

    column: Y [s, N/W] = X [s, K] @ Wt^T             Wt [N/W, K]
            dX = AR(dY @ Wt)                          dWt = dY^T @ X
    row:    Y [s, N] = AR(X [s, K/W] @ Wt^T)          Wt [N, K/W]
            dX = dY @ Wt                              dWt = dY^T @ X

Order of roundings as in Megatron's ``LinearWithGradAccumulationAndAsyncCommunication`` with ``allreduce_dgrad`` and
its ``RowParallelLinear``: GEMMs round once to the activation dtype, each element of an all-reduce is added in NCCL's
order with a rounding at every hop, bias is a separate addition.

cuBLAS chooses its kernel by how operands lie, so the plain products get a gradient as the native layer hands it over
(``Wgrad.operand``).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ditron_train.runtime.derivatives import refuse_second_derivatives, save_operands, saved_operands
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.tp.context import TPContext
from ditron_train.tp.functions import PlainWgrad, Wgrad
from ditron_train.tp.movement import start_all_reduce
from ditron_train.tp.ops import gemm_ar
from ditron_train.tp.prepared import can_copy
from ditron_train.tp.strides import as_rows, is_whole, log_strides


@outside_compile
class _ColumnLinearAr(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, context, wgrad, rounds_once):
        save_operands(ctx, x, weight)
        ctx.has_bias = bias is not None
        ctx.context, ctx.wgrad = context, wgrad
        if bias is not None and rounds_once:
            y = torch.addmm(bias, as_rows(x), weight.t())
            return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[-1]])
        y = torch.matmul(x, weight.t())
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, grad_output):
        refuse_second_derivatives("column_linear_ar")
        x, weight = saved_operands(ctx)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        deferred = needs_weight and ctx.wgrad.defer(grad_output)
        grad_output = ctx.wgrad.operand(grad_output)
        grad_x = grad_weight = started = None
        if needs_x and x.numel() == 0:
            grad_x = torch.empty_like(x, device=weight.device)
        elif needs_x and (not needs_weight or not can_copy(ctx.context)):
            if is_whole(grad_output):
                grad_x = gemm_ar(grad_output, weight, context=ctx.context, layout="nn")
            else:
                grad_x = _product_and_all_reduce(grad_output, weight, ctx.context, not needs_weight)
        elif needs_x:
            started = start_all_reduce(grad_output.matmul(weight), context=ctx.context)
        try:
            if deferred:
                grad_weight = ctx.wgrad.result_without_gemm(x.dtype)
            elif needs_weight:
                grad_weight = ctx.wgrad(as_rows(grad_output), as_rows(x))
        finally:  # starts and waits are counted, and what copy engines read must not be freed under them
            grad_x = started.wait() if started is not None else grad_x
        grad_x = None if grad_x is None else grad_x.view(x.shape)
        grad_bias = ctx.wgrad.bias_gradient(as_rows(grad_output)) if ctx.has_bias and needs_bias else None
        return grad_x, grad_weight, grad_bias, None, None, None


def _product_and_all_reduce(
    grad_output: torch.Tensor, weight: torch.Tensor, context: TPContext, is_frozen: bool
) -> torch.Tensor:
    log_strides(is_frozen)
    partial = grad_output.matmul(weight)
    dist.all_reduce(partial, group=context.group)
    return partial


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
def column_linear_ar(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    context: TPContext,
    bias: torch.Tensor | None = None,
    wgrad: Wgrad | None = None,
    rounds_once: bool = False,
) -> torch.Tensor:
    """x @ weight^T (+ bias), whose backward sums x's gradient over the ranks: the column-parallel linear layer without
    sequence parallelism. The sum travels by copy engines under the weight gradient's GEMM.

    Args:
        x: [s, ..., K], all tokens, the same on every rank.
        weight: [N / W, K], this rank's rows of the weight.
        context: The tensor-parallel group's context.
        bias: [N / W] or None; added after the GEMM's rounding.
        wgrad: Computes the weight gradient (None: ``PlainWgrad``).
        rounds_once: The bias is added inside the GEMM, in front of its rounding: ``torch.addmm``.

    Returns:
        [s, ..., N / W].

    Raises:
        NotSupportedError: Operands that do not multiply; else as ``gemm_ar``, in backward.
        MismatchError, PeerTimeoutError: As ``gemm_ar``, in backward.
    """
    if x.dim() < 2 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise NotSupportedError(f"column_linear_ar: {tuple(x.shape)} and weight {tuple(weight.shape)} do not multiply")
    return _ColumnLinearAr.apply(x, weight, bias, context, wgrad or PlainWgrad(), rounds_once)


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
