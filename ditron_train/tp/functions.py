"""Column and row linear layers with sequence parallelism, as autograd functions.

Shapes: s tokens of the sequence (dimension 0 of activations), W ranks, K inputs and N outputs of the whole layer. With
``AG`` an all-gather over ranks along dimension 0, ``RS`` a reduce-scatter along it:

    column: Y [s, N/W] = AG(X [s/W, K]) @ Wt^T       Wt [N/W, K]
            dX = RS(dY @ Wt)                          dWt = dY^T @ AG(X)
    row:    Y [s/W, N] = RS(X [s, K/W] @ Wt^T)        Wt [N, K/W]
            dX = AG(dY) @ Wt                          dWt = AG(dY)^T @ X

Order of roundings as in Megatron's ``LinearWithGradAccumulationAndAsyncCommunication`` and ``RowParallelLinear``:
GEMMs round once to the activation dtype, partial sums are folded in ring order with a rounding at every hop, bias is a
separate addition, wgrad is one GEMM over all rows in canonical order.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ditron_train.runtime.derivatives import refuse_second_derivatives, save_operands, saved_operands
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.tp.context import TPContext
from ditron_train.tp.kept import KeptInput
from ditron_train.tp.movement import start_all_gather, start_reduce_scatter
from ditron_train.tp.nodes import ColumnOverNodes, RowOverNodes
from ditron_train.tp.nodes_context import NodesTPContext
from ditron_train.tp.ops import ag_gemm, gemm_rs
from ditron_train.tp.prepared import can_copy
from ditron_train.tp.strides import as_rows, is_whole, product_and_reduce_scatter


class Wgrad(Protocol):
    """Computes the weight gradient of one call of a layer, and says where it goes, and how its gradients lie."""

    def __call__(self, grad_output: torch.Tensor, total_input: torch.Tensor) -> torch.Tensor | None:
        """[rows, N] and [rows, K] to [N, K], or None where it went elsewhere (``main_grad``)."""

    def defer(self, grad_output: torch.Tensor) -> bool:
        """Whether it is left to later: then nothing is gathered, and ``result_without_gemm`` goes to autograd."""

    def operand(self, grad_output: torch.Tensor) -> torch.Tensor:
        """The gradient as the layer multiplies it by the weight: itself, its rows, or a whole copy."""

    def result_without_gemm(self, dtype: torch.dtype) -> torch.Tensor | None:
        """What autograd gets for a deferred gradient."""

    def bias_gradient(self, grad_output: torch.Tensor) -> torch.Tensor | None:
        """Of a bias that the layer adds, from ``grad_output`` [rows, N]; asked for behind the weight's."""


class PlainWgrad:
    """grad_output^T @ input, at once, as the native path without fused accumulation computes it."""

    def __call__(self, grad_output: torch.Tensor, total_input: torch.Tensor) -> torch.Tensor:
        """See ``Wgrad``."""
        return grad_output.contiguous().t().matmul(total_input.contiguous())

    def defer(self, grad_output: torch.Tensor) -> bool:
        """Never."""
        return False

    def operand(self, grad_output: torch.Tensor) -> torch.Tensor:
        """See ``Wgrad``: itself."""
        return grad_output

    def result_without_gemm(self, dtype: torch.dtype) -> None:
        """Nothing: it is never deferred."""
        return None

    def bias_gradient(self, grad_output: torch.Tensor) -> torch.Tensor:
        """See ``Wgrad``: a sum of its own."""
        return grad_output.contiguous().sum(dim=0)


def _shape_of_result(rows: torch.Tensor, x: torch.Tensor, context: TPContext | NodesTPContext) -> list[int]:
    """[s, ..., N] of [s * ..., N], with the middle dimensions of x, which is [s / W, ..., K]."""
    return [x.shape[0] * context.world_size, *x.shape[1:-1], rows.shape[-1]] if x.dim() > 2 else list(rows.shape)


def _like_input(rows: torch.Tensor, x: torch.Tensor, context: TPContext | NodesTPContext) -> torch.Tensor:
    return rows.view(_shape_of_result(rows, x, context)) if x.dim() > 2 else rows


@outside_compile
class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, context, wgrad, rounds_once, kept):
        save_operands(ctx, x, weight)
        ctx.has_bias = bias is not None
        ctx.context, ctx.wgrad, ctx.kept = context, wgrad, kept
        inside = bias if rounds_once else None
        y = ag_gemm(as_rows(x), weight, context=context, bias=inside, gathered_in=kept.buffer if kept else None)
        y = y if bias is None or rounds_once else y + bias
        # What a Function returns must not be a view: Megatron's cross entropy edits the logits in place.
        return torch.ops.aten._unsafe_view(y, _shape_of_result(y, x, context))

    @staticmethod
    def backward(ctx, grad_output):
        refuse_second_derivatives("column_linear")
        x, weight = saved_operands(ctx)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        is_frozen = needs_x and not needs_weight
        if not is_frozen:  # else how it lies counts: torch makes rows of others before it multiplies
            grad_output = as_rows(grad_output)
        deferred = needs_weight and ctx.wgrad.defer(_like_input(grad_output, x, ctx.context))
        grad_output = ctx.wgrad.operand(grad_output)
        kept: KeptInput | None = ctx.kept
        total_x = kept.rows() if kept is not None and not deferred else None
        grad_x = grad_weight = None
        if x.numel() == 0:  # on every rank: nothing to move
            grad_x = torch.empty_like(x, device=weight.device) if needs_x else None
            if needs_weight:
                grad_weight = (
                    ctx.wgrad.result_without_gemm(x.dtype) if deferred else ctx.wgrad(grad_output, as_rows(x))
                )
        elif needs_x and needs_weight and can_copy(ctx.context):
            grad_x, grad_weight = _column_gradients(ctx, x, weight, grad_output, deferred, total_x)
        else:
            if total_x is not None and not needs_x:
                ctx.context.resume(None)  # no op is called: who gets the place next, on another stream, is to wait
            is_gathered = needs_weight and not deferred and total_x is None
            gather = start_all_gather(x, context=ctx.context) if is_gathered else None
            try:
                if needs_x:
                    grad_x = _scattered_dgrad(grad_output, weight, ctx.context, is_frozen).view_as(x)
            finally:
                total_x = gather.wait() if gather is not None else total_x
            if total_x is not None:
                grad_weight = ctx.wgrad(grad_output, total_x)
            elif deferred:
                grad_weight = ctx.wgrad.result_without_gemm(x.dtype)
        grad_bias = ctx.wgrad.bias_gradient(as_rows(grad_output)) if ctx.has_bias and needs_bias else None
        if kept is not None:
            kept.release()
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _scattered_dgrad(
    grad_output: torch.Tensor, weight: torch.Tensor, context: TPContext, is_frozen: bool
) -> torch.Tensor:
    if is_whole(grad_output):
        return gemm_rs(as_rows(grad_output), weight, context=context, layout="nn")
    return product_and_reduce_scatter(grad_output, weight, context.group, is_frozen)


def _column_gradients(
    ctx: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    grad_output: torch.Tensor,
    deferred: bool = False,
    total_x: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dX and dWt: the gather of X, where ``total_x`` was not kept, lies under the dgrad GEMM, the reduce-scatter of
    dX under the wgrad GEMM.

    Where dWt is ``deferred`` dX is the same product by the same kernels: what a policy has compared is what runs.

    What was started is waited for whatever is raised meanwhile: starts and waits are counted, and what the
    communication stream reads must not be freed under it."""
    gather = None if deferred or total_x is not None else start_all_gather(x, context=ctx.context)
    try:
        partial = grad_output.matmul(weight)
    finally:
        # before the scatter starts: it also orders this stream behind the communication stream
        total_x = total_x if gather is None else gather.wait()
    scatter = start_reduce_scatter(partial, context=ctx.context)
    try:
        grad_weight = ctx.wgrad.result_without_gemm(x.dtype) if total_x is None else ctx.wgrad(grad_output, total_x)
    finally:
        grad_x = scatter.wait()
    return grad_x.view_as(x), grad_weight


@outside_compile
class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, context, wgrad):
        save_operands(ctx, x, weight)
        ctx.context, ctx.wgrad = context, wgrad
        return gemm_rs(x, weight, context=context)

    @staticmethod
    def backward(ctx, grad_output):
        refuse_second_derivatives("row_linear")
        x, weight = saved_operands(ctx)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x = grad_weight = total_grad = None
        if needs_x:
            grad_x, total_grad = ag_gemm(grad_output, weight, context=ctx.context, layout="nn", return_gathered=True)
        elif needs_weight and grad_output.numel() == 0:
            total_grad = as_rows(grad_output)
        elif needs_weight:
            total_grad = start_all_gather(grad_output, context=ctx.context).wait()[:, : grad_output.shape[-1]]
        if needs_weight:
            grad_weight = ctx.wgrad(total_grad, as_rows(x))
        return grad_x, grad_weight, None, None


@outside_compile
def column_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    context: TPContext | NodesTPContext,
    bias: torch.Tensor | None = None,
    wgrad: Wgrad | None = None,
    rounds_once: bool = False,
) -> torch.Tensor:
    """AG(x) @ weight^T (+ bias): the column-parallel linear layer under sequence parallelism.

    Args:
        x: [s / W, ..., K], this rank's tokens.
        weight: [N / W, K], this rank's rows of the weight.
        context: The tensor-parallel group's context, also of a group that spans nodes (``tp.nodes``).
        bias: [N / W] or None; added after the GEMM's rounding.
        wgrad: Computes the weight gradient from the gathered input (None: ``PlainWgrad``).
        rounds_once: The bias is added inside the GEMM, in front of its rounding, as Transformer Engine does it.

    Returns:
        [s, ..., N / W].

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``ag_gemm`` and ``gemm_rs``, in backward too.
    """
    options = (x, weight, bias, context, wgrad or PlainWgrad())
    if not isinstance(context, NodesTPContext):
        kept = None if context.kept is None else context.kept.reserve(x, weight)
        return _ColumnLinear.apply(*options, rounds_once, kept)
    if rounds_once and bias is not None:
        raise NotSupportedError("column_linear: over nodes a bias is not added inside the GEMM")
    return ColumnOverNodes.apply(*options)


@outside_compile
def row_linear(
    x: torch.Tensor, weight: torch.Tensor, *, context: TPContext | NodesTPContext, wgrad: Wgrad | None = None
) -> torch.Tensor:
    """RS(x @ weight^T): the row-parallel linear layer under sequence parallelism (bias is added by the caller).

    Args:
        x: [s, ..., K / W], all tokens, this rank's share of the inputs.
        weight: [N, K / W].
        context: The tensor-parallel group's context.
        wgrad: Computes the weight gradient from the gathered output gradient (None: ``PlainWgrad``).

    Returns:
        [s / W, ..., N].

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``ag_gemm`` and ``gemm_rs``, in backward too.
    """
    if isinstance(context, NodesTPContext):
        y = RowOverNodes.apply(x, weight, context, wgrad or PlainWgrad())
        return y.view(x.shape[0] // context.world_size, *x.shape[1:-1], weight.shape[0])
    return _RowLinear.apply(x, weight, context, wgrad or PlainWgrad())
