"""The linear layers of tensor parallelism with sequence parallelism, declared for the policy and the tools.

Whether a call is covered depends on what all ranks of the group see alike (shapes, types, options). What they cannot
know beforehand is tried once per shape, all ranks together (`ditron_train.policy`): whether the symmetric memory can
be had, whether all results have the bits of Megatron's path, and whether they come sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import (
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron.core.tensor_parallel.mappings import reduce_scatter_to_sequence_parallel_region
from megatron.core.transformer.custom_layers.batch_invariant_kernels import is_batch_invariant_mode_enabled

from ditron_train.megatron.shared.devices import why_not_on_device
from ditron_train.megatron.shared.te_products import bias_like, product_pairs, product_with_bias, why_not_bias
from ditron_train.megatron.shared.values import revealing_like, why_hidden
from ditron_train.megatron.tp.linear_call import LinearCall, decide_over_nodes, words_over_nodes
from ditron_train.policy import Cost, Decision, Function, ModelSizes, OpSpec, Pass, Place, Run, Shape
from ditron_train.runtime.errors import ArenaError, NotSupportedError
from ditron_train.runtime.settings import get_settings
from ditron_train.runtime.values import make_values
from ditron_train.symm.nodes import spans_nodes
from ditron_train.tp.choices import Op, Problem, choose, prefers_native
from ditron_train.tp.context import TPContext, get_tp_context
from ditron_train.tp.cost_model import wire_bytes
from ditron_train.tp.functions import column_linear, row_linear
from ditron_train.tp.nodes_context import NodesTPContext, get_nodes_tp_context
from ditron_train.tp.spec import AG_GEMM, GEMM_RS, linear_shapes, local_shapes, traced_linear, why_not_linear

Kind = Literal["column", "row"]

_GPU_DTYPES = (torch.bfloat16, torch.float16)
_CPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


#: How often a comparison holds what all ranks' rows are of the input, the weight, and all rows of the product: as
#: counted (``tests/policy/bodies_held.py``), and the data that reveals.
_HELD: dict[Kind, tuple[int, int, int]] = {"column": (8, 4, 5), "row": (5, 8, 6)}


class LinearSpec(OpSpec[LinearCall, Any]):
    """Gather, GEMM and their backward (``column``), or GEMM, reduce-scatter and theirs (``row``)."""

    measured: Pass = "backward"
    groups = "tensor"
    spans_nodes = True  # also where the group's memory does not

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._op: Op = "ag_gemm" if kind == "column" else "gemm_rs"
        self.name = f"tp {kind}"
        self.row = f"{kind}_linear"

    def key(self, call: LinearCall) -> tuple[Hashable, ...]:
        x, weight = call.x, call.weight
        return (
            tuple(x.shape),
            weight.shape,
            weight.stride(),
            x.dtype,
            weight.dtype,
            x.device,
            torch.is_autocast_enabled(x.device.type),
            is_batch_invariant_mode_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            call.is_frozen and self.kind == "column",
            None if call.bias is None else call.bias.dtype,
        )

    def why_not(self, call: LinearCall) -> str | None:
        x, weight = call.x, call.weight
        world_size = dist.get_world_size(call.group)
        if world_size == 1:
            return "the tensor parallel group has one rank"
        if torch.is_autocast_enabled(x.device.type):
            return "autocast is on"
        if x.dtype != weight.dtype:
            return f"the input is {x.dtype} and the weight {weight.dtype}"
        reason = _why_not_device(x)
        if reason is not None:
            return reason
        if x.dim() < 2 or 0 in x.shape or 0 in weight.shape or x.shape[-1] != weight.shape[1]:
            return f"shapes {tuple(x.shape)} and {tuple(weight.shape)} are not covered"
        if call.bias is not None and spans_nodes(call.group):
            return "the bias is added inside the GEMM, in a group over nodes"
        return why_not_bias(call.bias, x) or self._why_not_rows(call, world_size)

    def _why_not_rows(self, call: LinearCall, world_size: int) -> str | None:
        x = call.x
        if self.kind == "row" and x.shape[0] % world_size:
            return f"the sequence of {x.shape[0]} does not divide by {world_size}"
        rows_of_a_rank = x.shape[:-1].numel() // (world_size if self.kind == "row" else 1)
        return why_hidden(x.device, rows_of_a_rank, *call.weight.shape)

    def context(self, call: LinearCall) -> TPContext | NodesTPContext:
        """See `OpSpec`: by peer memory where that reaches all ranks, else with rails between nodes."""
        try:
            return get_tp_context(call.group, call.x.device)
        except (ArenaError, NotSupportedError):
            if not self.spans_nodes or not spans_nodes(call.group):
                raise
            return get_nodes_tp_context(call.group, call.x.device).for_answer()

    def decide(self, call: LinearCall, context: TPContext) -> Decision:
        """See `OpSpec`. Memory is had and kernels are compiled by it, so nothing of that fails between a forward and
        its backward."""
        by_table = isinstance(context, TPContext) and get_settings().policy == "strict"
        if by_table and self._table_prefers_native(call, context):
            return Decision(False, "by the tuning table: nothing that was tried is faster", None, None, None)
        ask = super().decide
        if isinstance(context, NodesTPContext):
            decision = decide_over_nodes(lambda one: ask(one, context), call, context, is_column=self.kind == "column")
        else:
            decision = ask(call, context)
        context.synchronize()
        return decision

    def is_part(self, call: LinearCall) -> bool:
        """See `OpSpec`: a pass alone, or one way to run it beside another."""
        return call.is_forward or call.instead_of is not None

    def words(self, call: LinearCall, context: TPContext) -> str:
        rows = call.x.shape[:-1].numel()  # however they are split into sequences: verify's plan holds for a job
        sizes = f"{rows}x{call.x.shape[-1]} {'x'.join(map(str, call.weight.shape))}"
        frozen = ", frozen" if call.is_frozen and self.kind == "column" else ""
        frozen += "" if call.bias is None else ", bias inside"
        if not call.weight.is_contiguous():
            frozen += f", weight of strides {'x'.join(map(str, call.weight.stride()))}"
        nodes = ""
        if isinstance(context, NodesTPContext):
            nodes = words_over_nodes(call, context, is_column=self.kind == "column")
        return f"{self.name} {sizes} {str(call.x.dtype).removeprefix('torch.')}{frozen}{nodes}"

    def where(self, call: LinearCall) -> str:
        return f"at {tuple(call.x.shape)} x {tuple(call.weight.shape)} "

    def summed_dtype(self, call: LinearCall) -> torch.dtype | None:
        """See `OpSpec`; over nodes ours follows the order that the process group has, or leaves sums to it."""
        return None if isinstance(self.context(call), NodesTPContext) else call.x.dtype

    def more_pairs(self, call: LinearCall, context: TPContext) -> Sequence[tuple[Run, Run]]:
        """See `OpSpec`: both libraries' products, and with a bias inside the product that of the op."""
        x = call.x
        rows = max(x.shape[0], self._output_rows(x.shape[0], context.world_size)) * x.shape[1:-1].numel()
        pairs = product_pairs(rows, call.weight)
        if call.bias is None:
            return pairs
        bias = bias_like(call.bias, 504 + context.rank)

        def data() -> tuple[torch.Tensor, torch.Tensor]:
            return revealing_like(x, 304 + context.rank, "rows"), revealing_like(call.weight, 404, "columns")

        def by_library() -> list[torch.Tensor]:
            rows, weight = data()
            return [product_with_bias(self._whole_input(rows, call.group).flatten(0, -2), weight, bias)]

        def by_op() -> list[torch.Tensor]:
            rows, weight = data()
            return [self._product_with_bias(rows, weight, bias, context).flatten(0, -2)]

        return [*pairs, (by_library, by_op)]

    def _whole_input(self, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Rows of all ranks."""
        total = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
        dist.all_gather_into_tensor(total, x.contiguous(), group=group)
        return total

    def _product_with_bias(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, context: Any
    ) -> torch.Tensor:
        return column_linear(x, weight, context=context, bias=bias, rounds_once=True)

    def inputs(self, call: LinearCall) -> tuple[torch.Tensor, torch.Tensor]:
        return call.x.contiguous(), call.weight  # Megatron's layer refuses strides, Transformer Engine's copies them

    def held_bytes(self, call: LinearCall) -> int:
        """See `OpSpec`: rows of all ranks are gathered, multiplied and go back."""
        x, (n, k) = call.x, call.weight.shape
        most_rows = max(x.shape[0], self._output_rows(x.shape[0], dist.get_world_size(call.group)))
        rows, held = most_rows * x.shape[1:-1].numel(), _HELD[self.kind]
        return (held[0] * rows * k + held[1] * n * k + held[2] * rows * n) * x.element_size()

    def needs_grad(self, call: LinearCall) -> tuple[bool, bool]:
        return True, not (call.is_frozen and self.kind == "column")

    def grads(self, call: LinearCall) -> Sequence[torch.Tensor]:
        if call.is_forward:
            return ()
        assert call.grad_y is not None
        return (call.grad_y,)

    def megatron(self, call: LinearCall) -> Function:
        if call.instead_of is not None:
            return self.fused(call, call.instead_of)
        if self.kind == "column":
            return lambda x, weight: (native_column(x, weight, group=call.group, is_frozen=call.is_frozen),)
        return lambda x, weight: (native_row(x, weight, group=call.group),)

    def fused(self, call: LinearCall, context: Any) -> Function:
        if self.kind == "column":
            return lambda x, weight: (column_linear(x, weight, context=context),)
        return lambda x, weight: (row_linear(x, weight, context=context),)

    def shapes(self, world_size: int, on_gpu: bool) -> list[Shape]:
        """See `OpSpec`: those of the op that the layer's forward is."""
        return linear_shapes(self._op, world_size, on_gpu)

    def traced_shape(self, world_size: int, on_gpu: bool) -> Shape:
        return traced_linear(on_gpu)

    def shapes_of_model(self, model: ModelSizes, world_size: int) -> list[Shape]:
        return (AG_GEMM if self.kind == "column" else GEMM_RS).shapes_of_model(model, world_size)

    def why_not_shape(self, shape: Shape, world_size: int) -> str | None:
        return why_not_linear(self._op, shape, world_size)

    def sample(self, shape: Shape, place: Place, seed: int) -> LinearCall:
        x_shape, weight_shape = local_shapes(self._op, shape, place.world_size)
        y_shape = (self._output_rows(x_shape[0], place.world_size), weight_shape[0])
        x, weight, grad_y = (
            make_values(one, place.dtype, place.device, seed=3 * seed + index, rank=place.rank)
            for index, one in enumerate((x_shape, weight_shape, y_shape))
        )
        return LinearCall(x, weight, place.group, grad_y=grad_y)

    def cost(self, call: LinearCall, context: TPContext) -> Cost:
        """See `OpSpec`: of the backward pass. Column: the input is gathered and its gradient scattered; row: the
        output's gradient is gathered."""
        world_size, (n, k) = context.world_size, call.weight.shape
        rows = call.x.shape[0] * (world_size if self.kind == "column" else 1)
        problem = Problem(self._op, rows, n, k, "nt", call.x.dtype, world_size)
        return Cost(wire_bytes(problem) * (2 if self.kind == "column" else 1), 4.0 * rows * n * k)

    def _wholes(self, call: LinearCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for the input and the gradient of the result of all ranks; what is not split is itself."""
        x, grad, world_size = call.x, call.grad_y, dist.get_world_size(call.group)
        assert grad is not None
        if self.kind == "row":
            return x, grad.new_zeros(x.shape[0], grad.shape[1])
        return x.new_zeros(x.shape[0] * world_size, x.shape[1]), grad

    def _gather(self, call: LinearCall, total: torch.Tensor, total_grad: torch.Tensor) -> None:
        of_all, of_one = (total, call.x) if self.kind == "column" else (total_grad, call.grad_y)
        dist.all_gather_into_tensor(of_all, of_one, group=call.group)

    def parts(self, call: LinearCall, context: TPContext) -> Mapping[str, Callable[[], object]]:
        """See `OpSpec`: dgrad and wgrad alone, and all that is communicated."""
        total, total_grad = self._wholes(call)
        own = call.x.new_empty(total.shape[0] // context.world_size, call.x.shape[1])

        def gemm() -> list[torch.Tensor]:
            return [total_grad.matmul(call.weight), total_grad.t().matmul(total)]

        def comm() -> None:
            self._gather(call, total, total_grad)
            if self.kind == "column":
                dist.reduce_scatter_tensor(own, total, group=call.group)

        return {"gemm": gemm, "comm": comm}

    def peers(self, call: LinearCall, context: TPContext) -> Mapping[str, Callable[[], object]]:
        """See `OpSpec`: async-TP's products in place of those that communicate."""
        if context.target == "interpreter":
            return {}
        x, weight, grad, group_name = call.x, call.weight, call.grad_y, call.group.group_name
        total, total_grad = self._wholes(call)
        assert grad is not None

        def peer() -> list[torch.Tensor]:
            import torch.distributed._symmetric_memory  # noqa: F401  (registers the ops)

            if self.kind == "column":
                self._gather(call, total, total_grad)
                scatter = torch.ops.symm_mem.fused_matmul_reduce_scatter
                return [scatter(grad, weight, "sum", 0, group_name), grad.t().matmul(total)]
            gathered, (grad_x,) = torch.ops.symm_mem.fused_all_gather_matmul(grad, [weight], 0, group_name)
            return [grad_x, gathered.t().matmul(x)]

        return {"async-TP": peer}

    def comm_sms(self, call: LinearCall, context: TPContext) -> int:
        """See `OpSpec`: of the row layer's gather in backward; the tiles of the column layer's dgrad are sent by its
        GEMM."""
        if self.kind == "column" or context.target == "interpreter":
            return 0
        n, k = call.weight.shape
        problem = Problem("ag_gemm", call.x.shape[0], k, n, "nn", call.x.dtype, context.world_size)
        plan = choose(problem, context.machine).gather
        return plan.push_programs if plan.mode == "push" else 1

    def _output_rows(self, rows: int, world_size: int) -> int:
        return rows * world_size if self.kind == "column" else rows // world_size

    def given(self, call: LinearCall, context: TPContext) -> LinearCall:
        """See `OpSpec`; the gradient's values show the order of sums."""
        with torch.inference_mode(False):
            x, weight = (tensor.clone() if tensor.is_inference() else tensor for tensor in (call.x, call.weight))
            return call._replace(x=x, weight=weight, grad_y=self._revealing_grad(call, context))

    def revealing(self, call: LinearCall, context: TPContext) -> list[LinearCall]:
        x, weight = call.x, call.weight
        with torch.inference_mode(False):
            revealing_x = revealing_like(x, 1 + context.rank, "rows", self._rows_of_a_rank(x, context))
            revealing_weight = revealing_like(weight, 101 + context.rank, "columns", weight.shape[0])
            grad_y = self._revealing_grad(call, context)
        return [call._replace(x=revealing_x, weight=revealing_weight, grad_y=grad_y)]

    def _rows_of_a_rank(self, x: torch.Tensor, context: TPContext) -> int:
        return min(x.shape[0], self._output_rows(x.shape[0], context.world_size)) * x.shape[1:-1].numel()

    def _revealing_grad(self, call: LinearCall, context: TPContext) -> torch.Tensor:
        x = call.x
        y = x.new_empty(self._output_rows(x.shape[0], context.world_size), *x.shape[1:-1], call.weight.shape[0])
        return revealing_like(y, 201 + context.rank, "columns", self._rows_of_a_rank(x, context))

    def _table_prefers_native(self, call: LinearCall, context: TPContext) -> bool:
        """Whether all GEMMs that the layer overlaps were quicker natively: of row layers alone, since in backward the
        column layer overlaps more than its table says."""
        if self.kind == "column":
            return False
        rows, (n, k) = call.x.shape[:-1].numel(), call.weight.shape
        seen = (call.x.dtype, context.world_size, context.machine.device)
        return prefers_native("gemm_rs", rows, n, k, "nt", *seen) and prefers_native(
            "ag_gemm", rows, k, n, "nn", *seen
        )


def _why_not_device(x: torch.Tensor) -> str | None:
    reason = why_not_on_device(x.device)
    covered = _CPU_DTYPES if x.device.type == "cpu" else _GPU_DTYPES
    return reason if reason is not None or x.dtype in covered else f"{x.dtype} is not covered"


COLUMN, ROW = LinearSpec("column"), LinearSpec("row")


def native_column(
    x: torch.Tensor, weight: torch.Tensor, *, group: dist.ProcessGroup, is_frozen: bool = False
) -> torch.Tensor:
    """megatron-core's gather, GEMM, and their overlapped backward; of a weight that is frozen without any part of its
    gradient."""
    return native_linear(x, weight, group, sequence_parallel=True, is_frozen=is_frozen)


def native_row(x: torch.Tensor, weight: torch.Tensor, *, group: dist.ProcessGroup) -> torch.Tensor:
    """megatron-core's GEMM and reduce-scatter, and their backward."""
    partial = native_linear(x, weight, group, sequence_parallel=False)
    return reduce_scatter_to_sequence_parallel_region(partial, group=group)


def native_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    sequence_parallel: bool,
    is_frozen: bool = False,
) -> torch.Tensor:
    """megatron-core's linear function, with the communication that its flags ask for."""
    linear = linear_with_frozen_weight if is_frozen else linear_with_grad_accumulation_and_async_allreduce
    return linear(
        input=x,
        weight=weight,
        bias=None,
        gradient_accumulation_fusion=False,
        allreduce_dgrad=False,
        sequence_parallel=sequence_parallel,
        tp_group=group,
    )
