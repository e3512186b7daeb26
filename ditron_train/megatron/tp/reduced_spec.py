"""The row layer of tensor parallelism without sequence parallelism, declared for the policy and the tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

from ditron_train.megatron.shared.values import why_hidden
from ditron_train.megatron.tp.linear_call import LinearCall
from ditron_train.megatron.tp.spec import LinearSpec, native_linear
from ditron_train.policy import Cost, Function, ModelSizes, Pass, Place, Shape
from ditron_train.runtime.values import make_values
from ditron_train.tp.choices import Problem, prefers_native, wire_bytes
from ditron_train.tp.context import TPContext
from ditron_train.tp.linear import row_linear_ar
from ditron_train.tp.spec import GEMM_AR, local_shapes, why_not_linear

_BYTES_OF_ORDERS = 10  # of an element: values, what was read, two comparisons


class ReducedLinearSpec(LinearSpec):
    """GEMM and all-reduce in the forward of the row layer.

    Tokens are whole everywhere: ``x [s, b, K]`` of every call holds all of them."""

    measured: Pass = "forward_backward"
    spans_nodes = False

    def __init__(self) -> None:
        super().__init__("row")
        self.name, self.row = "tp row ar", "row_linear_ar"

    def _why_not_rows(self, call: LinearCall, world_size: int) -> str | None:
        return why_hidden(call.x.device, call.x.shape[:-1].numel(), *call.weight.shape)

    def _output_rows(self, rows: int, world_size: int) -> int:
        return rows

    def held_bytes(self, call: LinearCall) -> int:
        """See `OpSpec`: with what asks in which order NCCL adds each element of the sum
        (``policy.all_reduce_order``)."""
        num_elements = call.x.shape[:-1].numel() * call.weight.shape[0]
        return super().held_bytes(call) + num_elements * (dist.get_world_size(call.group) + _BYTES_OF_ORDERS)

    def summed_dtype(self, call: LinearCall) -> torch.dtype | None:
        """See `OpSpec`: NCCL's all-reduce has orders of its own, which the op looks at (`all_reduce_order`)."""
        return None

    def megatron(self, call: LinearCall) -> Function:
        group = call.group
        return lambda x, weight: (
            reduce_from_tensor_model_parallel_region(
                native_linear(x, weight, group, sequence_parallel=False), group=group
            ),
        )

    def fused(self, call: LinearCall, context: TPContext) -> Function:
        return lambda x, weight: (row_linear_ar(x, weight, context=context),)

    def shapes_of_model(self, model: ModelSizes, world_size: int) -> list[Shape]:
        return GEMM_AR.shapes_of_model(model, world_size)

    def why_not_shape(self, shape: Shape, world_size: int) -> str | None:
        return why_not_linear("gemm_ar", shape, world_size)

    def sample(self, shape: Shape, place: Place, seed: int) -> LinearCall:
        """See `OpSpec`; the gradient is the same on every rank."""
        (_, k), (n, _) = local_shapes("gemm_ar", shape, place.world_size)
        m = shape.sizes["m"]
        shapes, ranks = ((m, k), (n, k), (m, n)), (place.rank, place.rank, 0)
        x, weight, grad_y = (
            make_values(one, place.dtype, place.device, seed=3 * seed + index, rank=rank)
            for index, (one, rank) in enumerate(zip(shapes, ranks))
        )
        return LinearCall(x, weight, place.group, grad_y=grad_y)

    def _problem(self, call: LinearCall) -> Problem:
        """Its GEMM-AR."""
        (n, k), rows = call.weight.shape, call.x.shape[:-1].numel()
        return Problem("gemm_ar", rows, n, k, "nt", call.x.dtype, dist.get_world_size(call.group))

    def cost(self, call: LinearCall, context: TPContext) -> Cost:
        """See `OpSpec`: of both passes."""
        problem = self._problem(call)
        return Cost(wire_bytes(problem), 6.0 * problem.m * problem.n * problem.k)

    def parts(self, call: LinearCall, context: TPContext) -> Mapping[str, Callable[[], object]]:
        """See `OpSpec`: the GEMMs alone, and the all-reduce."""
        x, weight, grad, group = call.x, call.weight, call.grad_y, call.group
        assert grad is not None
        summed = torch.zeros_like(grad)

        def gemm() -> list[torch.Tensor]:
            return [x.matmul(weight.t()), grad.matmul(weight), grad.t().matmul(x)]

        return {"gemm": gemm, "comm": lambda: dist.all_reduce(summed, group=group)}

    def peers(self, call: LinearCall, context: TPContext) -> Mapping[str, Callable[[], object]]:
        """See `OpSpec`: none."""
        return {}

    def comm_sms(self, call: LinearCall, context: TPContext) -> int:
        """See `OpSpec`: copy engines send."""
        return 0

    def _table_prefers_native(self, call: LinearCall, context: TPContext) -> bool:
        problem = self._problem(call)
        sizes = (problem.m, problem.n, problem.k, problem.layout, problem.dtype, problem.world_size)
        return prefers_native("gemm_ar", *sizes, context.machine.device)


ROW_AR = ReducedLinearSpec()
