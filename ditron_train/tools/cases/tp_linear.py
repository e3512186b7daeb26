"""The linear layers of tensor parallelism as tools measure them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.megatron.tp.linear_call import LinearCall
from ditron_train.megatron.tp.spec import COLUMN, ROW, ROW_AR, LinearOp
from ditron_train.runtime.values import make_values
from ditron_train.tools.cases.case import BenchCase, Cost, Pass, RunEnvironment, Shape
from ditron_train.tools.cases.tp_gemm import AG_GEMM, GEMM_AR, GEMM_RS, GemmShapedCase, local_shapes
from ditron_train.tp.choices import Problem, choose, wire_bytes
from ditron_train.tp.context import TPContext


class LinearCase(GemmShapedCase[LinearCall]):
    """The backward of a layer with sequence parallelism; forward and backward of the row layer without."""

    op: LinearOp
    groups = "tensor"

    def __init__(self, op: LinearOp) -> None:
        gemm = GEMM_AR if op.is_reduced else AG_GEMM if op.kind == "column" else GEMM_RS
        super().__init__(op, f"{op.kind}_linear" + ("_ar" if op.is_reduced else ""), gemm)
        self.measured: Pass = "forward_backward" if op.is_reduced else "backward"

    def sample(self, shape: Shape, environment: RunEnvironment, seed: int) -> LinearCall:
        """Without sequence parallelism the gradient is the same on every rank."""
        x_shape, weight_shape = local_shapes(self.gemm.op.kind, shape, environment.world_size)
        y_shape = (self.op.output_rows(x_shape[0], environment.world_size), weight_shape[0])
        ranks = (environment.rank, environment.rank, 0 if self.op.is_reduced else environment.rank)
        x, weight, grad_y = (
            make_values(size, environment.dtype, environment.device, seed=3 * seed + index, rank=rank)
            for index, (size, rank) in enumerate(zip((x_shape, weight_shape, y_shape), ranks))
        )
        return LinearCall(x, weight, environment.group, grad_y=grad_y)

    def cost(self, call: LinearCall, context: TPContext) -> Cost:
        """Backward: column layers gather the input and scatter its gradient, row layers gather the output's gradient.
        Without sequence parallelism both passes count."""
        world_size, (n, k) = context.world_size, call.weight.shape
        rows = call.x.shape[:-1].numel() * (world_size if self.op.kind == "column" else 1)
        problem = Problem(self.gemm.op.kind, rows, n, k, "nt", call.x.dtype, world_size)
        factor = 2 if self.op.kind == "column" else 1
        return Cost(wire_bytes(problem) * factor, (6.0 if self.op.is_reduced else 4.0) * rows * n * k)

    def parts(self, call: LinearCall, context: TPContext) -> Mapping[str, Callable[[], object]]:
        """dgrad and wgrad alone, and all that is communicated; without sequence parallelism the GEMMs of both passes
        and the all-reduce."""
        if self.op.is_reduced:
            return _reduced_parts(call)
        total, total_grad = self._wholes(call)
        own = call.x.new_empty(total.shape[0] // context.world_size, call.x.shape[1])

        def gemm() -> list[torch.Tensor]:
            return [total_grad.matmul(call.weight), total_grad.t().matmul(total)]

        def comm() -> None:
            self._gather(call, total, total_grad)
            if self.op.kind == "column":
                dist.reduce_scatter_tensor(own, total, group=call.group)

        return {"gemm": gemm, "comm": comm}

    def peers(self, call: LinearCall, context: TPContext) -> Mapping[str, Callable[[], object]]:
        """Async-TP's products in place of those that communicate."""
        if self.op.is_reduced or context.target == "interpreter":
            return {}
        x, weight, grad, group_name = call.x, call.weight, call.grad_y, call.group.group_name
        total, total_grad = self._wholes(call)
        assert grad is not None

        def peer() -> list[torch.Tensor]:
            import torch.distributed._symmetric_memory  # noqa: F401  (registers the ops)

            if self.op.kind == "column":
                self._gather(call, total, total_grad)
                scatter = torch.ops.symm_mem.fused_matmul_reduce_scatter
                return [scatter(grad, weight, "sum", 0, group_name), grad.t().matmul(total)]
            gathered, (grad_x,) = torch.ops.symm_mem.fused_all_gather_matmul(grad, [weight], 0, group_name)
            return [grad_x, gathered.t().matmul(x)]

        return {"async-TP": peer}

    def comm_sms(self, call: LinearCall, context: TPContext) -> int:
        """Of the row layer's gather in backward; the tiles of the column layer's dgrad are sent by its
        GEMM."""
        if self.op.is_reduced or self.op.kind == "column" or context.target == "interpreter":
            return 0
        n, k = call.weight.shape
        problem = Problem("ag_gemm", call.x.shape[0], k, n, "nn", call.x.dtype, context.world_size)
        plan = choose(problem, context.machine).gather
        return plan.push_programs if plan.mode == "push" else 1

    def _wholes(self, call: LinearCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for the input and the gradient of the result of all ranks; what is not split is itself."""
        x, grad, world_size = call.x, call.grad_y, dist.get_world_size(call.group)
        assert grad is not None
        if self.op.kind == "row":
            return x, grad.new_zeros(x.shape[0], grad.shape[1])
        return x.new_zeros(x.shape[0] * world_size, x.shape[1]), grad

    def _gather(self, call: LinearCall, total: torch.Tensor, total_grad: torch.Tensor) -> None:
        of_all, of_one = (total, call.x) if self.op.kind == "column" else (total_grad, call.grad_y)
        dist.all_gather_into_tensor(of_all, of_one, group=call.group)


def _reduced_parts(call: LinearCall) -> dict[str, Callable[[], object]]:
    x, weight, grad, group = call.x, call.weight, call.grad_y, call.group
    assert grad is not None
    summed = torch.zeros_like(grad)

    def gemm() -> list[torch.Tensor]:
        return [x.matmul(weight.t()), grad.matmul(weight), grad.t().matmul(x)]

    return {"gemm": gemm, "comm": lambda: dist.all_reduce(summed, group=group)}


CASES: Sequence[BenchCase[Any, Any]] = (LinearCase(COLUMN), LinearCase(ROW), LinearCase(ROW_AR))
