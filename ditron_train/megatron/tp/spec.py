"""The linear layers of tensor parallelism, declared for the policy.

Whether a call is covered depends on what all ranks of the group see alike (shapes, types, options). What they cannot
know beforehand is tried once per shape, all ranks together (`ditron_train.policy`): whether the symmetric memory can
be had, whether all results have the bits of stock Megatron, and whether they come sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import (
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from ditron_train.megatron.compat.batch_invariant import is_batch_invariant_mode_enabled
from ditron_train.megatron.shared.devices import unsupported_reason_on_device
from ditron_train.megatron.shared.product_proof import ProductProof
from ditron_train.megatron.shared.te_products import (
    bias_like,
    product_pairs,
    product_with_bias,
    unsupported_reason_bias,
)
from ditron_train.megatron.shared.values import order_probe_like, unsupported_reason_hidden
from ditron_train.megatron.tp.linear_call import LinearCall, decide_over_nodes, decide_with_library, words_over_nodes
from ditron_train.policy import Decision, Function, Op, Run, Trial
from ditron_train.policy.decide import is_untimed
from ditron_train.policy.op import ProofPart, dtype_name, make_trial
from ditron_train.runtime.errors import ArenaError, NotSupportedError
from ditron_train.runtime.settings import get_settings
from ditron_train.symm.nodes import spans_nodes
from ditron_train.tp.choices import prefers_native
from ditron_train.tp.context import TPContext, get_tp_context
from ditron_train.tp.linear import column_linear, row_linear, row_linear_ar
from ditron_train.tp.nodes import NodesTPContext, get_nodes_tp_context

Kind = Literal["column", "row"]


_GPU_DTYPES = (torch.bfloat16, torch.float16)
_CPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


#: How often a comparison holds what all ranks' rows are of the input, the weight, and all rows of the product: as
#: counted (``tests/policy/bodies_held.py``), and the order-probe inputs.
_HELD: dict[Kind, tuple[int, int, int]] = {"column": (8, 4, 5), "row": (5, 8, 6)}
_BYTES_OF_ORDERS = 10  # of an element: values, what was read, two comparisons


class _LinearLengths(Op[LinearCall, Any]):
    """What `LinearOp` says of calls whose number of tokens varies."""

    kind: Kind
    is_reduced: bool

    def family(self, call: LinearCall) -> tuple[tuple[Hashable, ...], int] | None:
        """The order of an all-reduce depends on the number of elements, so a layer with one has no family; neither
        has one over nodes."""
        if self.is_reduced or call.group is None or dist.get_world_size(call.group) == 1 or spans_nodes(call.group):
            return None
        world_size = dist.get_world_size(call.group)
        rows = call.x.shape[:-1].numel() * (world_size if self.kind == "column" else 1)
        return ((*_kind_of(self, call), call.by_te), rows) if rows else None

    def bits_proof(self, call: LinearCall, context: TPContext) -> Sequence[ProofPart]:
        """By products of one rank that show the order of their sums. A column layer's dgrad is the library's own if
        the weight gets a gradient: only Transformer Engine's has to agree with torch's then."""
        proof = ProductProof(tuple(call.weight.shape), call.x.dtype, call.x.device, by_te=call.by_te)
        if not call.weight.is_contiguous() or call.bias is not None:
            return super().bits_proof(call, context)
        takes_library_dgrad = self.kind == "column" and self.needs_grad(call)[1]
        return proof.parts(takes_library_dgrad=takes_library_dgrad)

    def with_values(self, call: LinearCall, x: torch.Tensor, grad: torch.Tensor | None) -> LinearCall:
        return call._replace(x=x, weight=call.weight.detach(), grad_y=grad, is_forward=grad is None)

    def at_rows(self, call: LinearCall, rows: int) -> LinearCall:
        local = rows // dist.get_world_size(call.group) if self.kind == "column" else rows
        x = call.x.new_empty(local, call.x.shape[-1])
        weight = torch.empty_strided(call.weight.shape, call.weight.stride(), dtype=x.dtype, device=x.device)
        bias = None if call.bias is None else torch.empty_like(call.bias)
        return call._replace(x=x, weight=weight, bias=bias, grad_y=None)


class LinearOp(_LinearLengths):
    """Gather, GEMM and their backward (``column``), or GEMM, reduce-scatter and theirs (``row``).

    Args:
        kind: Which layer.
        is_reduced: Without sequence parallelism: the row layer's forward is a GEMM and an all-reduce, and tokens are
            whole everywhere: ``x [s, b, K]`` of every call holds all of them.
    """

    decides_forward = True
    is_observed = True

    def __init__(self, kind: Kind, *, is_reduced: bool = False) -> None:
        self.kind, self.is_reduced = kind, is_reduced
        self.name = f"tp {kind}" + (" ar" if is_reduced else "")

    def key(self, call: LinearCall) -> tuple[Hashable, ...]:
        return (tuple(call.x.shape), *_kind_of(self, call))

    def unsupported_reason(self, call: LinearCall) -> str | None:
        x, weight = call.x, call.weight
        world_size = dist.get_world_size(call.group)
        if world_size == 1:
            return "the tensor parallel group has one rank"
        if torch.is_autocast_enabled(x.device.type):
            return "autocast is on"
        if x.dtype != weight.dtype:
            return f"the input is {x.dtype} and the weight {weight.dtype}"
        reason = _unsupported_device(x)
        if reason is not None:
            return reason
        if x.dim() < 2 or 0 in x.shape or 0 in weight.shape or x.shape[-1] != weight.shape[1]:
            return f"shapes {tuple(x.shape)} and {tuple(weight.shape)} are not covered"
        if call.bias is not None and spans_nodes(call.group):
            return "the bias is added inside the GEMM, in a group over nodes"
        return unsupported_reason_bias(call.bias, x) or _unsupported_rows(self, call, world_size)

    def make_context(self, call: LinearCall) -> TPContext | NodesTPContext:
        """By peer memory if that reaches all ranks, else with rails between nodes (``symm.nodes``)."""
        try:
            return get_tp_context(call.group, call.x.device)
        except (ArenaError, NotSupportedError):
            if self.is_reduced or not spans_nodes(call.group):
                raise
            return get_nodes_tp_context(call.group, call.x.device).for_answer()

    def decide(self, call: LinearCall, context: TPContext) -> Decision:
        """Memory is had and kernels are compiled by it, so nothing of that fails between a forward and
        its backward."""
        by_table = isinstance(context, TPContext) and get_settings().policy == "strict"
        by_table = by_table and not is_untimed()  # of one number of rows
        if by_table and _table_prefers_native(self, call, context):
            return Decision(False, "by the tuning table: nothing that was tried is faster", None, None, None)
        ask = super().decide
        if isinstance(context, NodesTPContext):
            decision = decide_over_nodes(lambda one: ask(one, context), call, context, is_column=self.kind == "column")
        elif self.is_reduced:
            decision = ask(call, context)
        else:
            decision = decide_with_library(lambda: ask(call, context), context)
        context.synchronize()
        return decision

    def describe(self, call: LinearCall, context: TPContext) -> str:
        rows = call.x.shape[:-1].numel()  # however they are split into sequences: verify's plan holds for a job
        sizes = f"{rows}x{call.x.shape[-1]} {'x'.join(map(str, call.weight.shape))}"
        frozen = "" if self.needs_grad(call)[1] else ", frozen"
        frozen += "" if call.bias is None else ", bias inside"
        if not call.weight.is_contiguous():
            frozen += f", weight of strides {'x'.join(map(str, call.weight.stride()))}"
        if isinstance(context, NodesTPContext):
            way = words_over_nodes(call, context, is_column=self.kind == "column")
        else:
            way = context.way
        return f"{self.name} {sizes} {dtype_name(call.x.dtype)}{frozen}{way}"

    def describe_shape(self, call: LinearCall) -> str:
        return f"at {tuple(call.x.shape)} x {tuple(call.weight.shape)} "

    def inputs(self, call: LinearCall) -> tuple[torch.Tensor, torch.Tensor]:
        return call.x.contiguous(), call.weight  # Megatron's layer refuses strides, Transformer Engine's copies them

    def peak_bytes(self, call: LinearCall) -> int:
        """Rows of all ranks are gathered, multiplied and go back; without sequence parallelism, what shows in which
        order NCCL adds each element of the sum (``policy.all_reduce_order``), too."""
        x, (n, k), world_size = call.x, call.weight.shape, dist.get_world_size(call.group)
        most_rows = max(x.shape[0], self.output_rows(x.shape[0], world_size))
        rows, held = most_rows * x.shape[1:-1].numel(), _HELD[self.kind]
        num_bytes = (held[0] * rows * k + held[1] * n * k + held[2] * rows * n) * x.element_size()
        return num_bytes + (rows * n * (world_size + _BYTES_OF_ORDERS) if self.is_reduced else 0)

    def needs_grad(self, call: LinearCall) -> tuple[bool, bool]:
        """Without the weight's gradient if the native path leaves it out: that of frozen column layers."""
        return True, not (call.is_frozen and self.kind == "column")

    def grads(self, call: LinearCall) -> Sequence[torch.Tensor]:
        if call.is_forward:
            return ()
        assert call.grad_y is not None
        return (call.grad_y,)

    def native(self, call: LinearCall) -> Function:
        if call.instead_of is not None:
            return self.fused(call, call.instead_of)
        if self.kind == "column":
            return lambda x, weight: (native_column(x, weight, group=call.group, is_frozen=call.is_frozen),)
        native = native_reduced_row if self.is_reduced else native_row
        return lambda x, weight: (native(x, weight, group=call.group),)

    def fused(self, call: LinearCall, context: Any) -> Function:
        linear = linear_of(self)
        return lambda x, weight: (linear(x, weight, context=context),)

    def output_rows(self, rows: int, world_size: int) -> int:
        """Of the result of ``rows`` of the input."""
        if self.is_reduced:
            return rows
        return rows * world_size if self.kind == "column" else rows // world_size

    def trial(self, call: LinearCall, context: Any) -> Trial:
        """Values of the output's gradient show the order of sums, those of the others in a case of their own."""
        with torch.inference_mode(False):
            x, weight = (tensor.clone() if tensor.is_inference() else tensor for tensor in (call.x, call.weight))
            timed = call._replace(x=x, weight=weight, grad_y=_order_probe_grad(self, call, context))
        # NCCL's all-reduce has orders of its own, which the op looks at (`all_reduce_order`); over nodes the fused
        # path follows the order that the process group has, or leaves sums to it.
        # Forward alone, a column layer adds nothing up.
        is_summed = not self.is_reduced and not (self.kind == "column" and not torch.is_grad_enabled())
        follows_ring = is_summed and not isinstance(context, NodesTPContext)
        return make_trial(
            self,
            timed,
            context,
            order_probe=lambda: [_order_probe(self, call, context)],
            extra_cases=_extra_cases(self, call, context),
            summed_dtype=call.x.dtype if follows_ring else None,
            log_decision=not call.is_forward and call.instead_of is None,  # else it is a part of what will run
        )


def _kind_of(op: Op[LinearCall, Any], call: LinearCall) -> tuple[Hashable, ...]:
    x, weight = call.x, call.weight
    return (
        weight.shape,
        weight.stride(),
        x.dtype,
        weight.dtype,
        x.device,
        torch.is_autocast_enabled(x.device.type),
        is_batch_invariant_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        not op.needs_grad(call)[1],
        None if call.bias is None else call.bias.dtype,
    )


def linear_of(op: LinearOp) -> Callable[..., torch.Tensor]:
    """The fused layer's function."""
    if op.kind == "column":
        return column_linear
    return row_linear_ar if op.is_reduced else row_linear


def _unsupported_rows(op: LinearOp, call: LinearCall, world_size: int) -> str | None:
    x, rows = call.x, call.x.shape[:-1].numel()
    if op.kind == "row" and not op.is_reduced:
        if x.shape[0] % world_size:
            return f"the sequence of {x.shape[0]} does not divide by {world_size}"
        rows //= world_size
    return unsupported_reason_hidden(x.device, rows, *call.weight.shape)


def _extra_cases(op: LinearOp, call: LinearCall, context: Any) -> Sequence[tuple[Run, Run]]:
    """Both libraries' products, and with a bias inside the product that of the op."""
    x = call.x
    rows = max(x.shape[0], op.output_rows(x.shape[0], context.world_size)) * x.shape[1:-1].numel()
    pairs = product_pairs(rows, call.weight)
    if call.bias is None:
        return pairs
    bias = bias_like(call.bias, 504 + context.rank)

    def data() -> tuple[torch.Tensor, torch.Tensor]:
        return order_probe_like(x, 304 + context.rank, "rows"), order_probe_like(call.weight, 404, "columns")

    def by_library() -> list[torch.Tensor]:
        rows, weight = data()
        total = rows.new_empty(rows.shape[0] * dist.get_world_size(call.group), *rows.shape[1:])
        dist.all_gather_into_tensor(total, rows.contiguous(), group=call.group)
        return [product_with_bias(total.flatten(0, -2), weight, bias)]

    def by_op() -> list[torch.Tensor]:
        rows, weight = data()
        return [column_linear(rows, weight, context=context, bias=bias, rounds_once=True).flatten(0, -2)]

    return [*pairs, (by_library, by_op)]


def _order_probe(op: LinearOp, call: LinearCall, context: Any) -> LinearCall:
    x, weight = call.x, call.weight
    with torch.inference_mode(False):
        probe_x = order_probe_like(x, 1 + context.rank, "rows", _rows_of_a_rank(op, x, context))
        probe_weight = order_probe_like(weight, 101 + context.rank, "columns", weight.shape[0])
        grad_y = _order_probe_grad(op, call, context)
    return call._replace(x=probe_x, weight=probe_weight, grad_y=grad_y)


def _rows_of_a_rank(op: LinearOp, x: torch.Tensor, context: Any) -> int:
    return min(x.shape[0], op.output_rows(x.shape[0], context.world_size)) * x.shape[1:-1].numel()


def _order_probe_grad(op: LinearOp, call: LinearCall, context: Any) -> torch.Tensor:
    x = call.x
    y = x.new_empty(op.output_rows(x.shape[0], context.world_size), *x.shape[1:-1], call.weight.shape[0])
    return order_probe_like(y, 201 + context.rank, "columns", _rows_of_a_rank(op, x, context))


def _table_prefers_native(op: LinearOp, call: LinearCall, context: TPContext) -> bool:
    """Whether all GEMMs that the layer overlaps were faster natively: of row layers alone, since in backward the
    column layer overlaps more than its table says."""
    if op.kind == "column":
        return False
    rows, (n, k) = call.x.shape[:-1].numel(), call.weight.shape
    seen = (call.x.dtype, context.world_size, context.machine.device)
    if op.is_reduced:
        return prefers_native("gemm_ar", rows, n, k, "nt", *seen)
    if not prefers_native("gemm_rs", rows, n, k, "nt", *seen):
        return False
    return not torch.is_grad_enabled() or prefers_native("ag_gemm", rows, k, n, "nn", *seen)


def _unsupported_device(x: torch.Tensor) -> str | None:
    reason = unsupported_reason_on_device(x.device)
    covered = _CPU_DTYPES if x.device.type == "cpu" else _GPU_DTYPES
    return reason if reason is not None or x.dtype in covered else f"{x.dtype} is not covered"


COLUMN, ROW, ROW_AR = LinearOp("column"), LinearOp("row"), LinearOp("row", is_reduced=True)
OPS: Sequence[Op[Any, Any]] = (COLUMN, ROW, ROW_AR)


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


def native_reduced_row(x: torch.Tensor, weight: torch.Tensor, *, group: dist.ProcessGroup) -> torch.Tensor:
    """megatron-core's GEMM and all-reduce, and their backward."""
    partial = native_linear(x, weight, group, sequence_parallel=False)
    return reduce_from_tensor_model_parallel_region(partial, group=group)


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
