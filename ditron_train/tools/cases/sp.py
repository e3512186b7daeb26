"""The projections around an attention as tools measure them: GEMM-A2A and A2A-GEMM against cuBLAS and all-to-alls,
and the backward of both; and an attention that gathers keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ditron_train.data import load_workloads
from ditron_train.policy import Function, Op
from ditron_train.runtime.values import make_values
from ditron_train.schedule.keys import causal_ranges
from ditron_train.sp.a2a_gemm import a2a_gemm
from ditron_train.sp.all_gather_attention import (
    ALL_GATHER_ATTENTION,
    Attended,
    GatheredAttention,
    GatheredCall,
    NativeMoves,
    all_gather_attention,
)
from ditron_train.sp.choices import Product, ProjectionChoice, choose, exchange_programs
from ditron_train.sp.choices import ProjectionOp as ProductName
from ditron_train.sp.context import SPContext, get_sp_context
from ditron_train.sp.exchange import to_heads, to_sequence
from ditron_train.sp.functions import output_projection, qkv_projection
from ditron_train.sp.gemm_a2a import gemm_a2a
from ditron_train.sp.keys_values import FusedMoves
from ditron_train.sp.layouts import HeadsLayout, output_layout, qkv_layout
from ditron_train.sp.native import AllToAlls, exchange_natively
from ditron_train.sp.transfer import WeightLayout
from ditron_train.stream.op_context import OpContext
from ditron_train.tools.arguments import refuse
from ditron_train.tools.cases.case import BenchCase, Cost, ModelSizes, Pass, RunEnvironment, Shape

_LONG_FLOP = 8e12  # of one GEMM: some 10 ms, which vary less
_MOST_OF_LONG = 5


class ProjectionCall(NamedTuple):
    """Operands of this rank.

    Attributes:
        x: In front of the attention [s / W, b, hidden], behind it [s, b, heads / W, head size].
        weight: [columns of all heads, hidden], behind the attention [hidden, columns of all heads].
        layout: Columns of one rank.
        exchange: Of stock Megatron.
        group: Context parallel group.
        gradients: Of the results; empty if a row measures the forward pass.
        gathered: Behind the attention: what is multiplied, which a backward pass has kept.
    """

    x: torch.Tensor
    weight: torch.Tensor
    layout: HeadsLayout
    exchange: AllToAlls
    group: dist.ProcessGroup
    gradients: tuple[torch.Tensor, ...] = ()
    gathered: torch.Tensor | None = None


def _sizes(shape: Shape) -> tuple[int, int, int, int]:
    seqlen, heads, groups, head_size = (shape.sizes[name] for name in ("seqlen", "heads", "groups", "head_size"))
    return seqlen, heads, groups, head_size


def _shape(model: str, *sizes: int) -> Shape:
    return Shape(model, dict(zip(("seqlen", "heads", "groups", "head_size"), sizes, strict=True)))


def attention_shapes(world_size: int, on_gpu: bool) -> list[Shape]:
    """Global length, heads and groups of all ranks, and head size: a LLaMA-70B layer and what is published; the hidden
    size is heads times head size."""
    if not on_gpu:
        return [_shape("custom", 64, 16, 8, 8)]
    workload = load_workloads()["gemm_a2a"]
    lengths = workload["weak_scaling_seqlen_by_gpus"]
    return [
        _shape("attention layer", 32768, 64, 8, 128),  # the layer that the targets are stated for
        *(
            _shape("weak scaling", length, 64, 64, 128)
            for length in lengths.get(str(world_size)) or [one * world_size // 8 for one in lengths["8"]]
        ),
        *(
            _shape("strong scaling", one["seqlen"], one["heads"], one["heads"], one["head_size"])
            for one in workload["strong_scaling"]
        ),
    ]


@dataclass(frozen=True)
class Side:
    """In front of the attention or behind it: what the four ops differ in.

    Attributes:
        towards_heads: In front of it.
        first_seed: Of the forward pass's values; those of the backward pass are other ones.
    """

    towards_heads: bool
    first_seed: int
    first_backward_seed: int


FRONT, BEHIND = Side(True, 1, 5), Side(False, 3, 11)


class ProjectionOp(Op[ProjectionCall, SPContext]):
    """One projection and its exchange, forward or backward; with ``weight_layout`` ``nn`` the data gradient that the
    other projection's backward runs, which ``tune`` takes by itself."""

    def __init__(
        self, name: str, side: Side, *, is_backward: bool = False, weight_layout: WeightLayout = "nt"
    ) -> None:
        self.name = f"sp {name}" if weight_layout == "nt" else f"sp {name} {weight_layout}"
        self.side, self.is_backward, self.weight_layout = side, is_backward, weight_layout

    def make_context(self, call: ProjectionCall) -> SPContext:
        return get_sp_context(call.group, call.x.device)

    def inputs(self, call: ProjectionCall) -> tuple[torch.Tensor, torch.Tensor]:
        return call.x, call.weight

    def grads(self, call: ProjectionCall) -> Sequence[torch.Tensor]:
        return call.gradients

    def native(self, call: ProjectionCall) -> Function:
        exchange, layout, factor = call.exchange, call.layout, self.factor
        if self.side.towards_heads:
            return lambda x, weight: exchange_natively(
                exchange, True, *exchange.split(torch.matmul(x, factor(weight)), layout)
            )
        return lambda x, weight: [torch.matmul(exchange_natively(exchange, False, x)[0].flatten(2), factor(weight))]

    def factor(self, weight: torch.Tensor) -> torch.Tensor:
        """``weight`` as [K, N]."""
        return weight.t() if self.weight_layout == "nt" else weight

    def fused(self, call: ProjectionCall, context: SPContext) -> Function:
        options: dict[str, Any] = dict(context=context, layout=call.layout)
        if not self.is_backward:
            return self.run_as(call, context, None)
        if self.side.towards_heads:
            return lambda x, weight: list(qkv_projection(x, weight, **options))
        return lambda x, weight: [output_projection(x, weight, **options)]

    def run_as(self, call: ProjectionCall, context: SPContext, candidate: ProjectionChoice | None) -> Function:
        """The product as ``candidate`` says; None: what the op chooses itself."""
        options: dict[str, Any] = dict(
            context=context, layout=call.layout, choice=candidate, weight_layout=self.weight_layout
        )
        if self.side.towards_heads:
            return lambda x, weight: list(gemm_a2a(x, weight, **options))
        behind: Callable[..., Any] = a2a_gemm
        return lambda x, weight: [behind((x,), weight, **options)]

    def product(self, call: ProjectionCall) -> tuple[int, int, int]:
        """M, N and K of the forward pass on this rank."""
        rows = call.x.shape[:2].numel()
        k, n = self.factor(call.weight).shape
        return rows if self.side.towards_heads else rows // call.exchange.world_size, n, k

    def tuned(self, call: ProjectionCall) -> Product:
        """The product that is measured, as tuning tables take it: of a backward pass the data gradient's."""
        m, n, k = self.product(call)
        if self.is_backward:
            op: ProductName = "a2a_gemm" if self.side.towards_heads else "gemm_a2a"
            return Product(op, "nn", m, k, n, call.x.dtype)
        op = "gemm_a2a" if self.side.towards_heads else "a2a_gemm"
        return Product(op, self.weight_layout, m, n, k, call.x.dtype)


class ProjectionCase(BenchCase[ProjectionCall, SPContext]):
    """Against cuBLAS and all-to-alls."""

    op: ProjectionOp
    num_sets = 1  # one alone is larger than the L2 cache, and the longest fill the memory

    def __init__(self, row: str, side: Side, **options: Any) -> None:
        super().__init__(ProjectionOp(row, side, **options))
        self.row, self.has_rows = row, self.op.weight_layout == "nt"
        self.measured: Pass = "backward" if self.op.is_backward else "forward"

    def shapes(self, world_size: int, on_gpu: bool) -> list[Shape]:
        return attention_shapes(world_size, on_gpu)

    def shapes_of_model(self, model: ModelSizes, world_size: int) -> list[Shape]:
        return [_shape("custom", model.seq_length, model.heads, model.groups, model.channels)]

    def unsupported_shape(self, shape: Shape, world_size: int) -> str | None:
        """Ranks share out groups, and two chunks of the sequence each."""
        seqlen, heads, groups, _ = _sizes(shape)
        if seqlen % (2 * world_size) or groups % world_size or heads % groups:
            sizes = ", ".join(f"{name} {size}" for name, size in shape.sizes.items())
            return f"an attention of {sizes} does not divide over {world_size} ranks"
        return None

    def most_repetitions(self, shape: Shape, world_size: int) -> int | None:
        """The longest shapes would take minutes."""
        seqlen, heads, groups, head_size = _sizes(shape)
        flops = 2 * (seqlen // world_size) * heads * head_size * (heads + 2 * groups) * head_size
        return _MOST_OF_LONG if flops > _LONG_FLOP else None

    def sample(self, shape: Shape, environment: RunEnvironment, seed: int) -> ProjectionCall:
        refuse(self.unsupported_shape(shape, environment.world_size))
        world, (seqlen, heads, groups, head_size) = environment.world_size, _sizes(shape)
        hidden, side = heads * head_size, self.op.side
        first = 20 * seed + (side.first_backward_seed if self.op.is_backward else side.first_seed)

        def values(offset: int, *size: int) -> torch.Tensor:
            return make_values(size, environment.dtype, environment.device, seed=first + offset, rank=environment.rank)

        exchange = AllToAlls(environment.group, environment.device)
        if self.op.weight_layout == "nn":
            return self._data_gradient(shape, exchange, values)
        if side.towards_heads:
            layout = qkv_layout(heads, groups, head_size, world)
            x, weight = values(0, seqlen // world, 1, hidden), values(1, world * layout.num_columns, hidden)
            call = ProjectionCall(x, weight, layout, exchange, environment.group)
            lead = (seqlen, 1)
            results: list[tuple[int, ...]] = [(*lead, layout.num_heads(part), head_size) for part in range(3)]
        else:
            layout = output_layout(heads, head_size, world)
            x, weight = values(0, seqlen, 1, heads // world, head_size), values(1, hidden, hidden)
            gathered = exchange.to_sequence([x])[0].flatten(2)
            call = ProjectionCall(x, weight, layout, exchange, environment.group, gathered=gathered)
            results = [(seqlen // world, 1, hidden)]
        if not self.op.is_backward:
            return call
        return call._replace(gradients=tuple(values(2 + part, *size) for part, size in enumerate(results)))

    def _data_gradient(self, shape: Shape, exchange: AllToAlls, values: Callable[..., torch.Tensor]) -> ProjectionCall:
        """Of the output projection, whose result goes to heads, or of QKV's, whose gradient comes from them: in one
        part, which moves as many bytes."""
        world, (seqlen, heads, groups, head_size) = exchange.world_size, _sizes(shape)
        hidden, num_heads = heads * head_size, heads if self.op.side.towards_heads else heads + 2 * groups
        layout, columns = output_layout(num_heads, head_size, world), num_heads * head_size
        if self.op.side.towards_heads:
            x, weight, gathered = values(0, seqlen // world, 1, hidden), values(1, hidden, columns), None
        else:
            x, weight = values(0, seqlen, 1, num_heads // world, head_size), values(1, columns, hidden)
            gathered = exchange.to_sequence([x])[0].flatten(2)
        return ProjectionCall(x, weight, layout, exchange, exchange.group, gathered=gathered)

    def backward(self, call: ProjectionCall, context: SPContext, *, is_fused: bool) -> Function | None:
        """Natively dgrad with its exchange, and wgrad."""
        exchange, grads, gathered = call.exchange, call.gradients, call.gathered
        if is_fused or not self.op.is_backward:
            return None

        def of_front(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
            mixed = exchange.join(exchange.to_sequence(grads), call.layout)
            return [torch.matmul(mixed, weight), mixed.flatten(0, 1).t().matmul(x.flatten(0, 1))]

        def behind(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
            (grad,) = grads
            assert gathered is not None, "kept by the forward pass"
            grad_gathered = torch.matmul(grad, weight).view(*grad.shape[:2], -1, x.shape[-1])
            return [*exchange.to_heads([grad_gathered]), grad.flatten(0, 1).t().matmul(gathered.flatten(0, 1))]

        return of_front if self.op.side.towards_heads else behind

    def cost(self, call: ProjectionCall, context: SPContext) -> Cost | None:
        """What a rank sends to all is the product, or what is multiplied."""
        if self.op.is_backward:
            return None
        m, n, k = self.op.product(call)
        elements = m * (n if self.op.side.towards_heads else k)
        wire_bytes = elements * call.x.element_size() * (context.world_size - 1) / context.world_size
        return Cost(wire_bytes, 2.0 * m * n * k)

    def parts(self, call: ProjectionCall, context: SPContext) -> Mapping[str, Callable[[], object]]:
        if self.op.is_backward:
            return {}
        x, factor, exchange = call.x, self.op.factor(call.weight), call.exchange
        if self.op.side.towards_heads:
            parts = exchange.split(torch.matmul(x, factor), call.layout)
            return {"gemm": lambda: torch.matmul(x, factor), "comm": lambda: exchange.to_heads(parts)}
        gathered = call.gathered
        assert gathered is not None, "of every sample"
        return {"gemm": lambda: torch.matmul(gathered, factor), "comm": lambda: exchange.to_sequence([x])}

    def peers(self, call: ProjectionCall, context: SPContext) -> Mapping[str, Callable[[], object]]:
        if self.op.is_backward or not self.op.side.towards_heads or not self.has_rows:
            return {}
        x, weight, exchange = call.x, call.weight, call.exchange
        return {"one all-to-all": lambda: exchange.one_to_heads(torch.matmul(x, weight.t()), call.layout)}

    def comm_sms(self, call: ProjectionCall, context: SPContext) -> int:
        """What a product is pulled by, or pushes before it multiplies; the backward of one projection is
        the other's product."""
        if context.target == "interpreter":
            return 0
        return choose(self.op.tuned(call), context).programs


class ExchangeOp(ProjectionOp):
    """One exchange without a product."""

    def inputs(self, call: ProjectionCall) -> tuple[torch.Tensor]:  # type: ignore[override]
        """No weight."""
        return (call.x,)

    def native(self, call: ProjectionCall) -> Function:
        return lambda x: exchange_natively(call.exchange, self.side.towards_heads, x)

    def fused(self, call: ProjectionCall, context: SPContext) -> Function:
        return self.run_as(call, context, None)

    def run_as(self, call: ProjectionCall, context: SPContext, candidate: Any) -> Function:
        exchange = to_heads if self.side.towards_heads else to_sequence
        return lambda x: list(exchange((x,), context=context, layout=call.layout, programs=candidate))

    def sent(self, call: ProjectionCall) -> tuple[int, int]:
        """Rows of one rank, and columns of all heads."""
        world, rows = call.exchange.world_size, call.x.shape[0]
        return rows if self.side.towards_heads else rows // world, world * call.layout.num_columns


class ExchangeCase(ProjectionCase):
    """The exchanges around an attention without a projection: ``tune`` takes them alone."""

    op: ExchangeOp
    has_rows = False

    def __init__(self, row: str, side: Side) -> None:
        BenchCase.__init__(self, ExchangeOp(row, side))
        self.row = row

    def sample(self, shape: Shape, environment: RunEnvironment, seed: int) -> ProjectionCall:
        """Q, k and v as one part, or the attended values."""
        refuse(self.unsupported_shape(shape, environment.world_size))
        world, (seqlen, heads, groups, head_size) = environment.world_size, shape.sizes.values()
        rows, num_heads = (
            (seqlen // world, heads + 2 * groups) if self.op.side.towards_heads else (seqlen, heads // world)
        )
        (x,) = environment.values([(rows, 1, num_heads, head_size)], 20 * seed + self.op.side.first_seed)
        layout = output_layout(num_heads if self.op.side.towards_heads else heads, head_size, world)
        return ProjectionCall(x, x, layout, AllToAlls(environment.group, environment.device), environment.group)

    def cost(self, call: ProjectionCall, context: SPContext) -> Cost:
        return Cost(call.x.nbytes * (context.world_size - 1) / context.world_size, 0.0)

    def parts(self, call: ProjectionCall, context: SPContext) -> Mapping[str, Callable[[], object]]:
        """It has none."""
        return {}

    def comm_sms(self, call: ProjectionCall, context: SPContext) -> int:
        """As many as programs move data, as a tuning table says."""
        if context.target == "interpreter":
            return 0
        return exchange_programs(self.row, *self.op.sent(call), context)


class _StandIn:
    """Stands for an attention: little more than one pass over keys and values."""

    def forward(self, step: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """As ``StepKernels.forward``."""
        return q + k.sum((0, 2), keepdim=True) * v.sum((0, 2), keepdim=True), ()

    def backward(self, step: int, grad: torch.Tensor, attended: Attended) -> Sequence[torch.Tensor]:
        """As ``StepKernels.backward``."""
        factor = grad[:1, :, :1].clamp(-1, 1)
        return grad, attended.k * factor, attended.v * factor


class GatheredCase(BenchCase[GatheredCall, OpContext]):
    """The exchanges alone, around a stand-in for the attention, against all-gathers, reorders and reduce-scatters of
    the process group in Transformer Engine's order."""

    row = "all_gather_attention"
    measured: Pass = "forward_backward"
    num_sets = 1  # one alone is larger than the L2 cache

    def shapes(self, world_size: int, on_gpu: bool) -> list[Shape]:
        """LLaMA-8B's attention, and a window of 4096."""
        if not on_gpu:
            return [_shape("custom", 16 * world_size, 4, 2, 8)]
        windowed = Shape("LLaMA-8B, window 4096", _shape("", 65536, 32, 8, 128).sizes, {"window": 4096})
        return [_shape("LLaMA-8B", 32768, 32, 8, 128), windowed]

    def shapes_of_model(self, model: ModelSizes, world_size: int) -> list[Shape]:
        return [_shape("custom", model.seq_length, model.heads, model.groups, model.channels)]

    def unsupported_shape(self, shape: Shape, world_size: int) -> str | None:
        """Ranks share out two chunks of the sequence each."""
        seqlen, heads, groups, _ = _sizes(shape)
        if seqlen % (2 * world_size) or heads % groups:
            return f"an attention of {seqlen} tokens, {heads} heads and {groups} groups on {world_size} ranks"
        return None

    def sample(self, shape: Shape, environment: RunEnvironment, seed: int) -> GatheredCall:
        (seqlen, heads, groups, head_size), world = _sizes(shape), environment.world_size
        refuse(self.unsupported_shape(shape, world))
        window = shape.options.get("window")
        ranges = causal_ranges(2 * world, seqlen // (2 * world), window)
        sizes = [(seqlen // world, 1, count, head_size) for count in (heads, groups, groups, heads)]
        q, k, v, grad = environment.values(sizes, 20 * seed)
        stream = torch.cuda.Stream(q.device) if q.is_cuda else None

        def attention(moves: FusedMoves | NativeMoves) -> partial[torch.Tensor]:
            return partial(all_gather_attention, call=GatheredAttention(moves, _StandIn(), 0, stream))

        native = attention(NativeMoves(environment.group, ranges, q.device))
        return GatheredCall(
            environment.group, (q, k, v), (window,), native, lambda context: attention(FusedMoves(context, ranges)),
            (grad,),
        )  # fmt: skip


PROJECTIONS = (
    ProjectionCase("gemm_a2a", FRONT),
    ProjectionCase("a2a_gemm", BEHIND),
    ProjectionCase("gemm_a2a", FRONT, weight_layout="nn"),
    ProjectionCase("a2a_gemm", BEHIND, weight_layout="nn"),
    ProjectionCase("qkv_projection", FRONT, is_backward=True),
    ProjectionCase("output_projection", BEHIND, is_backward=True),
)
EXCHANGES = (ExchangeCase("to_heads", FRONT), ExchangeCase("to_sequence", BEHIND))
CASES: Sequence[BenchCase[Any, Any]] = (*PROJECTIONS, *EXCHANGES, GatheredCase(ALL_GATHER_ATTENTION))
