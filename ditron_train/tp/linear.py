"""Column and row linear layers as autograd functions, with sequence parallelism and without, also of a group that
spans nodes.

Shapes: s tokens of the sequence (dimension 0 of activations), W ranks, K inputs and N outputs of the whole layer. With
``AG`` an all-gather over ranks along dimension 0, ``RS`` a reduce-scatter along it, ``AR`` an all-reduce:

    column: Y [s, N/W] = AG(X [s/W, K]) @ Wt^T       Wt [N/W, K]
            dX = RS(dY @ Wt)                          dWt = dY^T @ AG(X)
    row:    Y [s/W, N] = RS(X [s, K/W] @ Wt^T)        Wt [N, K/W]
            dX = AG(dY) @ Wt                          dWt = AG(dY)^T @ X

Timeline of ``column_linear`` in backward. Both paths overlap, but NCCL's kernels take multiprocessors from the GEMMs:

    native   compute   | dgrad: dY @ Wt                       | wgrad: dY^T @ X                       |
    native   NCCL      | all-gather of X           |          | reduce-scatter of dX      |
    fused    copies    | X to all             |      | partial sums of dX to all |
    fused    compute   | dgrad: dY @ Wt              | wgrad: dY^T @ X              | sum of dX |
    fused    waits     |                             | ^ all rows of X              | ^ all partial sums |

Timeline of ``row_linear`` in backward, on rank r of 4:

    native   NCCL      | all-gather of dY   |
    native   compute   |                    | dgrad: dY @ Wt                               | wgrad: dY^T @ X         |
    fused    copies    | to r-1 | to r-2 | to r-3 |
    fused    compute   | dgrad: local | of r+1     | of r+2     | of r+3     | wgrad: dY^T @ X         |
    fused    waits     |              | ^ its rows | ^ its rows | ^ its rows |

Without sequence parallelism every rank holds all s tokens:

    row:    Y [s, N] = AR(X [s, K/W] @ Wt^T)          Wt [N, K/W]
            dX = dY @ Wt                              dWt = dY^T @ X

The column layer is native then: Megatron overlaps the all-reduce of its backward with the weight gradient itself.

In a group that spans nodes, along rails (``tp.nodes``) unless the policy has found that to be slower:

    column: Y = AG(X) @ Wt^T by rails;  dX = RS(dY @ Wt) by rails, dWt = dY^T @ AG(X) as natively
    row:    Y = RS(X @ Wt^T) by rails;  dX = AG(dY) @ Wt by rails, which leaves AG(dY) for dWt

Order of roundings as in Megatron's ``LinearWithGradAccumulationAndAsyncCommunication`` and ``RowParallelLinear``:
GEMMs round once to the activation dtype, partial sums are added in NCCL's order with a rounding at every hop, bias is
a separate addition, wgrad is one GEMM over all rows in canonical order.

cuBLAS chooses its kernel, and so the bits, by the strides of its operands: the plain GEMMs get a gradient as the
native layer passes it (``Wgrad.operand``).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from ditron_train.policy import log_native
from ditron_train.runtime.derivatives import refuse_second_derivatives, save_operands, saved_operands
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.tp.ag_gemm import ag_gemm
from ditron_train.tp.context import TPContext, can_copy
from ditron_train.tp.gather import start_all_gather
from ditron_train.tp.gemm_ar import gemm_ar
from ditron_train.tp.gemm_rs import gemm_rs
from ditron_train.tp.nodes import NodesTPContext, ag_gemm_over_nodes, gemm_rs_over_nodes
from ditron_train.tp.reduce_scatter import start_reduce_scatter


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., K] as [rows, K]."""
    if x.dim() == 0:
        raise NotSupportedError("a linear layer: the input has no dimensions")
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def is_whole(x: torch.Tensor) -> bool:
    """Whether ``x`` has the strides of a new tensor, in dimensions of size 1, too. Others ``torch.matmul`` may
    multiply matrix by matrix, although torch calls them contiguous."""
    shape, strides = x.shape, x.stride()
    return x.is_contiguous() and all(strides[i] == strides[i + 1] * shape[i + 1] for i in range(x.dim() - 2))


def product_and_reduce_scatter(
    grad_output: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, is_frozen: bool
) -> torch.Tensor:
    """dX of a gradient with strides, as stock Megatron computes it: a plain GEMM, then the process group's
    reduce-scatter.

    Like its callers in this file it falls back to the process group instead of raising ``NotSupportedError``. The
    strides of a gradient are known in backward only, when the forward has already run fused, and cuBLAS may choose
    another kernel for them than the one that was compared with the native product. It is needed if the weight is
    frozen, or if rows cannot be copied by copy engines: the normal backward (``_column_gradients``) multiplies the
    gradient by cuBLAS in any case.
    """
    if is_frozen:
        log_native("tp column", "a gradient with strides goes back through a frozen weight")
    else:
        log_native("tp column", "a gradient with strides goes back without copy engines, which need cuda-bindings")
    partial = grad_output.matmul(weight).contiguous()
    out = partial.new_empty(partial.shape[0] // dist.get_world_size(group), *partial.shape[1:])
    dist.reduce_scatter_tensor(out, partial, group=group)
    return out


class Wgrad(Protocol):
    """Computes the weight gradient of one call of a layer, decides where it is written, and prepares the output
    gradient for the layer's GEMMs."""

    def __call__(self, grad_output: torch.Tensor, total_input: torch.Tensor) -> torch.Tensor | None:
        """[rows, N] and [rows, K] to [N, K], or None if it was written elsewhere (``main_grad``)."""

    def defer(self, grad_output: torch.Tensor) -> bool:
        """Whether the weight gradient is computed later: then nothing is gathered, and autograd gets
        ``result_without_gemm``."""

    def operand(self, grad_output: torch.Tensor) -> torch.Tensor:
        """The gradient as the layer multiplies it by the weight: itself, its rows, or a contiguous copy."""

    def result_without_gemm(self, dtype: torch.dtype) -> torch.Tensor | None:
        """What autograd gets for a deferred weight gradient."""

    def bias_gradient(self, grad_output: torch.Tensor) -> torch.Tensor | None:
        """The gradient of a bias that the layer adds, from ``grad_output`` [rows, N]; called after the weight
        gradient."""


class PlainWgrad:
    """grad_output^T @ input, not deferred, as the native path without fused accumulation computes it."""

    def __call__(self, grad_output: torch.Tensor, total_input: torch.Tensor) -> torch.Tensor:
        return grad_output.contiguous().t().matmul(total_input.contiguous())

    def defer(self, grad_output: torch.Tensor) -> bool:
        """Never."""
        return False

    def operand(self, grad_output: torch.Tensor) -> torch.Tensor:
        """Itself."""
        return grad_output

    def result_without_gemm(self, dtype: torch.dtype) -> None:
        """Nothing: it is never deferred."""
        return None

    def bias_gradient(self, grad_output: torch.Tensor) -> torch.Tensor:
        """The sum over rows, by a kernel of its own."""
        return grad_output.contiguous().sum(dim=0)


def _shape_of_result(rows: torch.Tensor, x: torch.Tensor, context: TPContext | NodesTPContext) -> list[int]:
    """[s, ..., N] of [s * ..., N], with the middle dimensions of x, which is [s / W, ..., K]."""
    return [x.shape[0] * context.world_size, *x.shape[1:-1], rows.shape[-1]] if x.dim() > 2 else list(rows.shape)


def _like_input(rows: torch.Tensor, x: torch.Tensor, context: TPContext | NodesTPContext) -> torch.Tensor:
    return rows.view(_shape_of_result(rows, x, context)) if x.dim() > 2 else rows


@outside_compile
class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, context, wgrad, rounds_once):
        save_operands(ctx, x, weight)
        ctx.has_bias = bias is not None
        ctx.context, ctx.wgrad = context, wgrad
        y = ag_gemm(as_rows(x), weight, context=context, bias=bias if rounds_once else None)
        y = y if bias is None or rounds_once else y + bias
        # The result of a Function must not be a view: Megatron's cross entropy edits the logits in place.
        return torch.ops.aten._unsafe_view(y, _shape_of_result(y, x, context))

    @staticmethod
    def backward(ctx, grad_output):
        refuse_second_derivatives("column_linear")
        x, weight = saved_operands(ctx)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        is_frozen = needs_x and not needs_weight
        if not is_frozen:  # if it is, the product depends on the gradient's shape and strides
            grad_output = as_rows(grad_output)
        deferred = needs_weight and ctx.wgrad.defer(_like_input(grad_output, x, ctx.context))
        grad_output = ctx.wgrad.operand(grad_output)
        grad_x = grad_weight = None
        if x.numel() == 0:  # on every rank: nothing to move
            grad_x = torch.empty_like(x, device=weight.device) if needs_x else None
            if needs_weight:
                grad_weight = (
                    ctx.wgrad.result_without_gemm(x.dtype) if deferred else ctx.wgrad(grad_output, as_rows(x))
                )
        elif needs_x and needs_weight and can_copy(ctx.context):
            grad_x, grad_weight = _column_gradients(ctx, x, weight, grad_output, deferred)
        else:
            gather = start_all_gather(x, context=ctx.context) if needs_weight and not deferred else None
            try:
                if needs_x:
                    grad_x = _scattered_dgrad(grad_output, weight, ctx.context, is_frozen).view_as(x)
            finally:
                total_x = None if gather is None else gather.wait()
            if total_x is not None:
                grad_weight = ctx.wgrad(grad_output, total_x)
            elif deferred:
                grad_weight = ctx.wgrad.result_without_gemm(x.dtype)
        grad_bias = ctx.wgrad.bias_gradient(as_rows(grad_output)) if ctx.has_bias and needs_bias else None
        return grad_x, grad_weight, grad_bias, None, None, None


def _scattered_dgrad(
    grad_output: torch.Tensor, weight: torch.Tensor, context: TPContext, is_frozen: bool
) -> torch.Tensor:
    if is_whole(grad_output):
        return gemm_rs(as_rows(grad_output), weight, context=context, layout="nn")
    return product_and_reduce_scatter(grad_output, weight, context.group, is_frozen)


def _column_gradients(
    ctx: Any, x: torch.Tensor, weight: torch.Tensor, grad_output: torch.Tensor, deferred: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dX and dWt. The gather of X overlaps with the dgrad GEMM, and the reduce-scatter of dX with the wgrad GEMM.

    If dWt is ``deferred``, dX is computed by the same kernels, so what the policy has compared is what runs.

    Whatever is raised meanwhile, what was started is waited for: starts and waits are counted, and what the
    communication stream reads must not be freed before."""
    gather = None if deferred else start_all_gather(x, context=ctx.context)
    try:
        partial = grad_output.matmul(weight)
    finally:
        # before the scatter starts: the wait also makes this stream wait for the communication stream
        total_x = None if gather is None else gather.wait()
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
        rounds_once: Whether the bias is added inside the GEMM, before its rounding, as Transformer Engine does.

    Returns:
        [s, ..., N / W].

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``ag_gemm`` and ``gemm_rs``, in backward too.
    """
    options = (x, weight, bias, context, wgrad or PlainWgrad())
    if not isinstance(context, NodesTPContext):
        return _ColumnLinear.apply(*options, rounds_once)
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


def _all_gather(rows: torch.Tensor, context: NodesTPContext) -> torch.Tensor:
    total = rows.new_empty(len(rows) * context.world_size, rows.shape[1])
    dist.all_gather_into_tensor(total, rows.contiguous(), group=context.group)
    return total


@outside_compile
class ColumnOverNodes(torch.autograd.Function):
    """As ``column_linear``: x [s / W, ..., K] and weight [N / W, K] to [s, ..., N / W]."""

    @staticmethod
    def forward(ctx, x, weight, bias, context, wgrad):
        save_operands(ctx, x, weight)
        ctx.context, ctx.wgrad, ctx.has_bias = context, wgrad, bias is not None
        rows = as_rows(x)
        if not context.leaves_gather:
            y, _ = ag_gemm_over_nodes(rows, weight, context=context)
        else:
            y = _all_gather(rows, context).matmul(weight.t())
        y = y if bias is None else y + bias
        # The result of a Function must not be a view: Megatron's cross entropy edits the logits in place.
        shape = [x.shape[0] * context.world_size, *x.shape[1:-1], y.shape[-1]]
        return y if x.dim() == 2 else torch.ops.aten._unsafe_view(y, shape)

    @staticmethod
    def backward(ctx, grad_output):
        refuse_second_derivatives("column_linear")
        x, weight = saved_operands(ctx)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        group, rows = ctx.context.group, as_rows(x).contiguous()  # on ``meta`` if the weight is frozen
        if needs_x and not needs_weight and not is_whole(grad_output):
            grad_x = product_and_reduce_scatter(grad_output, weight, group, is_frozen=True).view_as(x)
            grad_bias = ctx.wgrad.bias_gradient(as_rows(grad_output)) if ctx.has_bias and needs_bias else None
            return grad_x, None, grad_bias, None, None
        whole, grad_output = grad_output.shape, as_rows(grad_output)
        deferred = needs_weight and ctx.wgrad.defer(grad_output.view(whole))
        grad_output = ctx.wgrad.operand(grad_output)
        total = gather = scatter = grad_x = grad_weight = None
        if needs_weight and not deferred:
            total = rows.new_empty(len(rows) * ctx.context.world_size, rows.shape[1])
            gather = dist.all_gather_into_tensor(total, rows, group=group, async_op=True)
        # Rows with strides are multiplied whole, as natively: cuBLAS chooses its kernel by how they are.
        by_rails = needs_x and is_whole(grad_output)
        by_rails = by_rails and ctx.context.sums_by_rails(len(grad_output), weight.shape[1], rows.dtype)
        partial = grad_output.matmul(weight) if needs_x and not by_rails else None
        if by_rails:
            grad_x = gemm_rs_over_nodes(grad_output, weight, context=ctx.context, layout="nn")
        if gather is not None:
            gather.wait()
        if partial is not None:
            grad_x = torch.empty_like(rows, device=weight.device)
            scatter = dist.reduce_scatter_tensor(grad_x, partial, group=group, async_op=True)
        if total is not None:
            grad_weight = ctx.wgrad(grad_output, total)
        elif deferred:
            grad_weight = ctx.wgrad.result_without_gemm(x.dtype)
        if scatter is not None:
            scatter.wait()
        grad_bias = ctx.wgrad.bias_gradient(grad_output) if ctx.has_bias and needs_bias else None
        return None if grad_x is None else grad_x.view_as(x), grad_weight, grad_bias, None, None


@outside_compile
class RowOverNodes(torch.autograd.Function):
    """As ``row_linear`` in rows: x [s, ..., K / W] and weight [N, K / W] to [s / W * ..., N]."""

    @staticmethod
    def forward(ctx, x, weight, context, wgrad):
        save_operands(ctx, x, weight)
        ctx.context, ctx.wgrad = context, wgrad
        rows = as_rows(x)
        if context.sums_by_rails(len(rows), weight.shape[0], x.dtype):
            return gemm_rs_over_nodes(rows, weight, context=context)
        partial = rows.matmul(weight.t())
        out = partial.new_empty(len(rows) // context.world_size, weight.shape[0])
        dist.reduce_scatter_tensor(out, partial, group=context.group)
        return out

    @staticmethod
    def backward(ctx, grad_output):
        refuse_second_derivatives("row_linear")
        x, weight = saved_operands(ctx)
        grad, grad_weight, needs_weight = as_rows(grad_output), None, ctx.needs_input_grad[1]
        if ctx.context.leaves_gather:
            total = _all_gather(grad, ctx.context)
            grad_x = total.matmul(weight)
        else:
            grad_x, total = ag_gemm_over_nodes(grad, weight, context=ctx.context, layout="nn", keeps=needs_weight)
        if needs_weight:
            grad_weight = ctx.wgrad(total, as_rows(x))
        return grad_x.view_as(x), grad_weight, None, None
