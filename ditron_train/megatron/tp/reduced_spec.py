"""The linear layers of tensor parallelism without sequence parallelism, declared for the policy and the tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

from ditron_train.megatron.shared.values import why_hidden
from ditron_train.megatron.tp.linear_call import LinearCall
from ditron_train.megatron.tp.spec import Kind, LinearSpec, native_linear
from ditron_train.policy import Cost, Function, ModelSizes, Place, Shape
from ditron_train.runtime.values import make_values
from ditron_train.tp.all_reduce_functions import column_linear_ar, row_linear_ar
from ditron_train.tp.choices import Layout, Op, Problem, prefers_native
from ditron_train.tp.context import TPContext
from ditron_train.tp.cost_model import wire_bytes
from ditron_train.tp.linear_costs import MOST_RANKS_IN_ONE_ROUND
from ditron_train.tp.spec import AG_GEMM, GEMM_AR, local_shapes, why_not_linear

_BYTES_OF_ORDERS = 10  # of an element: values, what was read, two comparisons


class ReducedLinearSpec(LinearSpec):
    """GEMM and all-reduce: in the backward of ``column``, beside the weight gradient, or the forward of ``row``.

    Tokens are whole everywhere: ``x [s, b, K]`` of every call holds all of them."""

    spans_nodes = False

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind)
        self.measured = "backward" if kind == "column" else "forward_backward"
        self.name = f"tp {kind} ar"
        self.row = f"{kind}_linear_ar"

    def _why_not_rows(self, call: LinearCall, world_size: int) -> str | None:
        if self.kind == "column" and world_size > MOST_RANKS_IN_ONE_ROUND:
            return f"in backward partial sums would go whole to {world_size - 1} peers: more than a GEMM hides"
        return why_hidden(call.x.device, call.x.shape[:-1].numel(), *call.weight.shape)

    def _output_rows(self, rows: int, world_size: int) -> int:
        return rows

    def held_bytes(self, call: LinearCall) -> int:
        """See `OpSpec`: with what asks in which order NCCL adds each element of the sum
        (``policy.all_reduce_order``)."""
        n, k = call.weight.shape
        num_elements = call.x.shape[:-1].numel() * (n if self.kind == "row" else k)
        return super().held_bytes(call) + num_elements * (dist.get_world_size(call.group) + _BYTES_OF_ORDERS)

    def summed_dtype(self, call: LinearCall) -> torch.dtype | None:
        """See `OpSpec`: NCCL's all-reduce has orders of its own, which the op looks at (`all_reduce_order`)."""
        return None

    def _whole_input(self, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return x

    def _product_with_bias(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, context: Any
    ) -> torch.Tensor:
        return column_linear_ar(x, weight, context=context, bias=bias, rounds_once=True)

    def megatron(self, call: LinearCall) -> Function:
        group = call.group
        if self.kind == "column":
            options = {"sequence_parallel": False, "is_frozen": call.is_frozen, "allreduce_dgrad": True}
            return lambda x, weight: (native_linear(x, weight, group, **options),)
        return lambda x, weight: (
            reduce_from_tensor_model_parallel_region(
                native_linear(x, weight, group, sequence_parallel=False), group=group
            ),
        )

    def fused(self, call: LinearCall, context: TPContext) -> Function:
        linear = column_linear_ar if self.kind == "column" else row_linear_ar
        return lambda x, weight: (linear(x, weight, context=context),)

    def shapes_of_model(self, model: ModelSizes, world_size: int) -> list[Shape]:
        return (AG_GEMM if self.kind == "column" else GEMM_AR).shapes_of_model(model, world_size)

    def why_not_shape(self, shape: Shape, world_size: int) -> str | None:
        return why_not_linear("ag_gemm" if self.kind == "column" else "gemm_ar", shape, world_size)

    def sample(self, shape: Shape, place: Place, seed: int) -> LinearCall:
        """See `OpSpec`; the input of ``column`` and the gradient of ``row`` are the same on every rank."""
        op: Op = "ag_gemm" if self.kind == "column" else "gemm_ar"
        (_, k), (n, _) = local_shapes(op, shape, place.world_size)
        m = shape.sizes["m"]
        shapes = ((m, k), (n, k), (m, n))
        ranks = (0, place.rank, place.rank) if self.kind == "column" else (place.rank, place.rank, 0)
        x, weight, grad_y = (
            make_values(one, place.dtype, place.device, seed=3 * seed + index, rank=rank)
            for index, (one, rank) in enumerate(zip(shapes, ranks))
        )
        return LinearCall(x, weight, place.group, grad_y=grad_y)

    def _problem(self, call: LinearCall) -> Problem:
        """Its GEMM-AR."""
        (n, k), rows = call.weight.shape, call.x.shape[:-1].numel()
        ours: tuple[int, int, Layout] = (k, n, "nn") if self.kind == "column" else (n, k, "nt")
        return Problem("gemm_ar", rows, *ours, call.x.dtype, dist.get_world_size(call.group))

    def cost(self, call: LinearCall, context: TPContext) -> Cost:
        """See `OpSpec`: of the backward of ``column``, of both passes of ``row``."""
        problem = self._problem(call)
        flops = 2.0 * problem.m * problem.n * problem.k
        return Cost(wire_bytes(problem), flops * (2 if self.kind == "column" else 3))

    def parts(self, call: LinearCall, context: TPContext) -> Mapping[str, Callable[[], object]]:
        """See `OpSpec`: the pass's GEMMs alone, and the all-reduce."""
        x, weight, grad, group = call.x, call.weight, call.grad_y, call.group
        assert grad is not None
        summed = torch.zeros_like(x if self.kind == "column" else grad)

        def gemm() -> list[torch.Tensor]:
            forward = [x.matmul(weight.t())] if self.kind == "row" else []
            return [*forward, grad.matmul(weight), grad.t().matmul(x)]

        return {"gemm": gemm, "comm": lambda: dist.all_reduce(summed, group=group)}

    def peers(self, call: LinearCall, context: TPContext) -> Mapping[str, Callable[[], object]]:
        """See `OpSpec`: none."""
        return {}

    def comm_sms(self, call: LinearCall, context: TPContext) -> int:
        """See `OpSpec`: copy engines send."""
        return 0

    def _table_prefers_native(self, call: LinearCall, context: TPContext) -> bool:
        """In backward the column layer overlaps more than its table says."""
        problem = self._problem(call)
        sizes = (problem.m, problem.n, problem.k, problem.layout, problem.dtype, problem.world_size)
        return self.kind == "row" and prefers_native("gemm_ar", *sizes, context.machine.device)


COLUMN_AR, ROW_AR = ReducedLinearSpec("column"), ReducedLinearSpec("row")
