"""Linear layers of a tensor parallel group that spans nodes: rails between nodes beside what runs inside them.

A rank sends its rows along its rail, to the rank with its place in every other node, and meanwhile multiplies what its
own node gathers by peer memory; then what has come from the next node is gathered and multiplied likewise. Rows cross
the border once, and only the first border is not under a GEMM. Sums over ranks go from node to node in the order of
the process group's own reduce-scatter (``nodes_gemm_rs``); where ours cannot follow it, or the policy found it to be
slower, they are that reduce-scatter. Where the policy found it to be slower, the gather is the process group's, too.

    column: Y = AG(X) @ Wt^T by rails;  dX = RS(dY @ Wt) by rails, dWt = dY^T @ AG(X) as natively
    row:    Y = RS(X @ Wt^T) by rails;  dX = AG(dY) @ Wt by rails, which leaves AG(dY) for dWt
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.runtime.derivatives import refuse_second_derivatives, save_operands, saved_operands
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.symm.nodes import NodeGroups
from ditron_train.tp.nodes_context import NodesTPContext
from ditron_train.tp.nodes_gemm_rs import gemm_rs_over_nodes
from ditron_train.tp.ops import Layout, ag_gemm
from ditron_train.tp.prepared import AgGemmCall
from ditron_train.tp.strides import as_rows, is_whole, product_and_reduce_scatter

__all__ = ["ColumnOverNodes", "RowOverNodes", "ag_gemm_over_nodes"]


def _parts(rows: torch.Tensor, nodes: NodeGroups) -> Iterator[tuple[int, torch.Tensor]]:
    """This rank's rows, then those of its rail's other ranks as they come, with their nodes."""
    count, arrivals = nodes.num_nodes, []
    for step in range(1, count):  # one message each way at a time: the next node's rows are there first
        target, source = (nodes.node + step) % count, (nodes.node - step) % count
        splits = [[len(rows) * (node == one) for node in range(count)] for one in (source, target)]
        arrivals.append((source, *nodes.start_along_rail(rows, *splits)))
    yield nodes.node, rows
    for source, part, work in arrivals:
        nodes.wait(work)
        yield source, part


@outside_compile
def ag_gemm_over_nodes(
    x: torch.Tensor, weight: torch.Tensor, *, context: NodesTPContext, layout: Layout = "nt", keeps: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """All-gather of ``x`` [rows, K] of all ranks, times ``weight``: as ``ag_gemm``.

    Args:
        x: This rank's rows, as many on every rank.
        weight: [N, K] (``nt``) or [K, N] (``nn``).
        context: Of the group.
        layout: How ``weight`` lies.
        keeps: Whether the gathered rows are wanted.

    Returns:
        [rows of all ranks, N], and [rows of all ranks, K] or None.

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``ag_gemm``; the last names a rank of the whole group.
        ArenaError: A node has no room for it; on every rank alike.
    """
    x = x.contiguous()
    products: list[Any] = [None] * context.nodes.num_nodes
    gathered: list[Any] = [None] * context.nodes.num_nodes
    with context.nodes.naming("ag_gemm over nodes"):
        if context.inner is not None:  # before rows leave, for which a node that cannot gather them would not wait
            operands = (x.shape, weight.shape, x.dtype, weight.dtype, x.device, weight.device)
            context.prepare(AgGemmCall, *operands, layout, None, None, True, None)
        for node, part in _parts(x, context.nodes):
            if context.inner is None:
                products[node], gathered[node] = part.matmul(weight.t() if layout == "nt" else weight), part
                continue
            products[node], rows = ag_gemm(part, weight, context=context.inner, layout=layout, return_gathered=True)
            if keeps:  # the next node's rows will lie where these lie
                gathered[node] = rows[:, : x.shape[1]].clone()
    return torch.cat(products), torch.cat(gathered) if keeps else None


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
        # What a Function returns must not be a view: Megatron's cross entropy edits the logits in place.
        shape = [x.shape[0] * context.world_size, *x.shape[1:-1], y.shape[-1]]
        return y if x.dim() == 2 else torch.ops.aten._unsafe_view(y, shape)

    @staticmethod
    def backward(ctx, grad_output):
        refuse_second_derivatives("column_linear")
        x, weight = saved_operands(ctx)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        group, rows = ctx.context.group, as_rows(x).contiguous()  # on ``meta`` where the weight is frozen
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
        # Rows with strides are multiplied whole, as natively: cuBLAS chooses its kernel by how they lie.
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
