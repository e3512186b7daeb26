"""The projections around an attention declared for the tools: GEMM-A2A and A2A-GEMM against cuBLAS and all-to-alls,
and the backward of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ditron_train.data import load_workloads
from ditron_train.policy import Cost, Function, ModelSizes, OpSpec, Place, Shape
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.values import make_values
from ditron_train.sp.a2a_gemm import a2a_gemm
from ditron_train.sp.choices import (
    Product,
    ProjectionChoice,
    ProjectionOp,
    choice_entry,
    choose,
    default_choice,
    tiles,
    transfers,
)
from ditron_train.sp.context import SPContext, get_sp_context
from ditron_train.sp.functions import output_projection, qkv_projection
from ditron_train.sp.gemm_a2a import gemm_a2a
from ditron_train.sp.layouts import HeadsLayout, output_layout, qkv_layout
from ditron_train.sp.native import AllToAlls, exchange_natively
from ditron_train.sp.transfer import WeightLayout

_LONG_FLOP = 8e12  # of one GEMM: some 10 ms, which vary less
_MOST_OF_LONG = 5


class ProjectionCall(NamedTuple):
    """Operands of this rank.

    Attributes:
        x: In front of the attention [s / W, b, hidden], behind it [s, b, heads / W, head size].
        weight: [columns of all heads, hidden], behind the attention [hidden, columns of all heads].
        layout: Columns of one rank.
        exchange: Of Megatron's path.
        group: Context parallel group.
        gradients: Of the results; empty where a row measures the forward pass.
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


class ProjectionSpec(OpSpec[ProjectionCall, SPContext]):
    """One projection and its exchange, forward or backward; with ``weight_layout`` ``nn`` the data gradient that the
    other projection's backward runs, which ``tune`` takes by itself."""

    search_rounds = 2
    num_sets = 1  # one alone is larger than the L2 cache, and the longest fill the memory

    def __init__(self, op: str, side: Side, *, backward: bool = False, weight_layout: WeightLayout = "nt") -> None:
        self.row, self.has_rows = op, weight_layout == "nt"
        self.name = f"sp {op}" if self.has_rows else f"sp {op} {weight_layout}"
        self.side, self._weight_layout = side, weight_layout
        self._is_backward = backward
        self.table_op = None if backward else f"{op} {weight_layout}"
        self.measured = "backward" if backward else "forward"

    def context(self, call: ProjectionCall) -> SPContext:
        return get_sp_context(call.group, call.x.device)

    def inputs(self, call: ProjectionCall) -> tuple[torch.Tensor, torch.Tensor]:
        return call.x, call.weight

    def grads(self, call: ProjectionCall) -> Sequence[torch.Tensor]:
        return call.gradients

    def megatron(self, call: ProjectionCall) -> Function:
        exchange, layout, factor = call.exchange, call.layout, self._factor
        if self.side.towards_heads:
            return lambda x, weight: exchange_natively(
                exchange, True, *exchange.split(torch.matmul(x, factor(weight)), layout)
            )
        return lambda x, weight: [torch.matmul(exchange_natively(exchange, False, x)[0].flatten(2), factor(weight))]

    def _factor(self, weight: torch.Tensor) -> torch.Tensor:
        """``weight`` as [K, N]."""
        return weight.t() if self._weight_layout == "nt" else weight

    def megatron_backward(self, call: ProjectionCall) -> Function | None:
        """See `OpSpec`: dgrad with its exchange, and wgrad."""
        exchange, grads, gathered = call.exchange, call.gradients, call.gathered
        if not self._is_backward:
            return None

        def of_front(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
            mixed = exchange.join(exchange.to_sequence(grads), call.layout)
            return [torch.matmul(mixed, weight), mixed.flatten(0, 1).t().matmul(x.flatten(0, 1))]

        def behind(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
            (grad,) = grads
            assert gathered is not None, "kept by the forward pass"
            grad_gathered = torch.matmul(grad, weight).view(*grad.shape[:2], -1, x.shape[-1])
            return [*exchange.to_heads([grad_gathered]), grad.flatten(0, 1).t().matmul(gathered.flatten(0, 1))]

        return of_front if self.side.towards_heads else behind

    def fused(self, call: ProjectionCall, context: SPContext) -> Function:
        options: dict[str, Any] = dict(context=context, layout=call.layout)
        if not self._is_backward:
            return self.fused_as(call, context, None)
        if self.side.towards_heads:
            return lambda x, weight: list(qkv_projection(x, weight, **options))
        return lambda x, weight: [output_projection(x, weight, **options)]

    def shapes(self, world_size: int, on_gpu: bool) -> list[Shape]:
        return attention_shapes(world_size, on_gpu)

    def shapes_of_model(self, model: ModelSizes, world_size: int) -> list[Shape]:
        return [_shape("custom", model.seq_length, model.heads, model.groups, model.channels)]

    def why_not_shape(self, shape: Shape, world_size: int) -> str | None:
        """See `OpSpec`: ranks share out groups, and two chunks of the sequence each."""
        seqlen, heads, groups, _ = _sizes(shape)
        if seqlen % (2 * world_size) or groups % world_size or heads % groups:
            sizes = ", ".join(f"{name} {size}" for name, size in shape.sizes.items())
            return f"an attention of {sizes} does not divide over {world_size} ranks"
        return None

    def most_repetitions(self, shape: Shape, world_size: int) -> int | None:
        """See `OpSpec`: the longest shapes would take minutes."""
        seqlen, heads, groups, head_size = _sizes(shape)
        flops = 2 * (seqlen // world_size) * heads * head_size * (heads + 2 * groups) * head_size
        return _MOST_OF_LONG if flops > _LONG_FLOP else None

    def sample(self, shape: Shape, place: Place, seed: int) -> ProjectionCall:
        why = self.why_not_shape(shape, place.world_size)
        if why is not None:
            raise SettingError(why)
        world, (seqlen, heads, groups, head_size) = place.world_size, _sizes(shape)
        hidden, side = heads * head_size, self.side
        first = 20 * seed + (side.first_backward_seed if self._is_backward else side.first_seed)

        def values(offset: int, *size: int) -> torch.Tensor:
            return make_values(size, place.dtype, place.device, seed=first + offset, rank=place.rank)

        exchange = AllToAlls(place.group, place.device)
        if self._weight_layout == "nn":
            return self._data_gradient(shape, exchange, values)
        if side.towards_heads:
            layout = qkv_layout(heads, groups, head_size, world)
            x, weight = values(0, seqlen // world, 1, hidden), values(1, world * layout.num_columns, hidden)
            call = ProjectionCall(x, weight, layout, exchange, place.group)
            lead = (seqlen, 1)
            results: list[tuple[int, ...]] = [(*lead, layout.num_heads(part), head_size) for part in range(3)]
        else:
            layout = output_layout(heads, head_size, world)
            x, weight = values(0, seqlen, 1, heads // world, head_size), values(1, hidden, hidden)
            gathered = exchange.to_sequence([x])[0].flatten(2)
            call = ProjectionCall(x, weight, layout, exchange, place.group, gathered=gathered)
            results = [(seqlen // world, 1, hidden)]
        if not self._is_backward:
            return call
        return call._replace(gradients=tuple(values(2 + part, *size) for part, size in enumerate(results)))

    def _data_gradient(self, shape: Shape, exchange: AllToAlls, values: Callable[..., torch.Tensor]) -> ProjectionCall:
        """Of the output projection, whose result goes to heads, or of QKV's, whose gradient comes from them: in one
        part, which moves as many bytes."""
        world, (seqlen, heads, groups, head_size) = exchange.world_size, _sizes(shape)
        hidden, num_heads = heads * head_size, heads if self.side.towards_heads else heads + 2 * groups
        layout, columns = output_layout(num_heads, head_size, world), num_heads * head_size
        if self.side.towards_heads:
            x, weight, gathered = values(0, seqlen // world, 1, hidden), values(1, hidden, columns), None
        else:
            x, weight = values(0, seqlen, 1, num_heads // world, head_size), values(1, columns, hidden)
            gathered = exchange.to_sequence([x])[0].flatten(2)
        return ProjectionCall(x, weight, layout, exchange, exchange.group, gathered=gathered)

    def cost(self, call: ProjectionCall, context: SPContext) -> Cost | None:
        """See `OpSpec`: what a rank sends to all is the product, or what is multiplied."""
        if self._is_backward:
            return None
        m, n, k = self._product(call)
        elements = m * (n if self.side.towards_heads else k)
        wire_bytes = elements * call.x.element_size() * (context.world_size - 1) / context.world_size
        return Cost(wire_bytes, 2.0 * m * n * k)

    def _product(self, call: ProjectionCall) -> tuple[int, int, int]:
        """M, N and K of the forward pass on this rank."""
        rows = call.x.shape[:2].numel()
        k, n = self._factor(call.weight).shape
        return rows if self.side.towards_heads else rows // call.exchange.world_size, n, k

    def parts(self, call: ProjectionCall, context: SPContext) -> Mapping[str, Callable[[], object]]:
        if self._is_backward:
            return {}
        x, factor, exchange = call.x, self._factor(call.weight), call.exchange
        if self.side.towards_heads:
            parts = exchange.split(torch.matmul(x, factor), call.layout)
            return {"gemm": lambda: torch.matmul(x, factor), "comm": lambda: exchange.to_heads(parts)}
        gathered = call.gathered
        assert gathered is not None, "of every sample"
        return {"gemm": lambda: torch.matmul(gathered, factor), "comm": lambda: exchange.to_sequence([x])}

    def peers(self, call: ProjectionCall, context: SPContext) -> Mapping[str, Callable[[], object]]:
        if self._is_backward or not self.side.towards_heads or not self.has_rows:
            return {}
        x, weight, exchange = call.x, call.weight, call.exchange
        return {"one all-to-all": lambda: exchange.one_to_heads(torch.matmul(x, weight.t()), call.layout)}

    def comm_sms(self, call: ProjectionCall, context: SPContext) -> int:
        """See `OpSpec`: what a product is pulled by, or pushes before it multiplies; the backward of one projection is
        the other's product."""
        if context.target == "interpreter":
            return 0
        return choose(self._tuned(call), context).programs

    def _tuned(self, call: ProjectionCall) -> Product:
        """The product that is measured, as tuning tables take it: of a backward pass the data gradient's."""
        m, n, k = self._product(call)
        if self._is_backward:
            op: ProjectionOp = "a2a_gemm" if self.side.towards_heads else "gemm_a2a"
            return Product(op, "nn", m, k, n, call.x.dtype)
        op = "gemm_a2a" if self.side.towards_heads else "a2a_gemm"
        return Product(op, self._weight_layout, m, n, k, call.x.dtype)

    def tuned_shapes(self, world_size: int, on_gpu: bool) -> list[Shape]:
        """See `OpSpec`: one layer; the longest fill the memory."""
        return self.shapes(world_size, on_gpu)[:1]

    def shape_class(self, call: ProjectionCall) -> str:
        return self._tuned(call).shape_class

    def candidates(
        self, call: ProjectionCall, context: SPContext, ranked: Sequence[Any]
    ) -> Sequence[ProjectionChoice]:
        """See `OpSpec`: first how much moves data, then tiles."""
        if ranked:
            return [ranked[0], *tiles(ranked[0], context)]
        default = default_choice(self._tuned(call), context)
        return [default, *transfers(default, context)]

    def fused_as(self, call: ProjectionCall, context: SPContext, candidate: ProjectionChoice | None) -> Function:
        """See `OpSpec`; None: what the op chooses itself."""
        options: dict[str, Any] = dict(
            context=context, layout=call.layout, choice=candidate, weight_layout=self._weight_layout
        )
        if self.side.towards_heads:
            return lambda x, weight: list(gemm_a2a(x, weight, **options))
        behind: Callable[..., Any] = a2a_gemm
        return lambda x, weight: [behind((x,), weight, **options)]

    def entry(self, call: ProjectionCall, candidate: ProjectionChoice, *, is_native: bool) -> dict[str, Any]:
        sizes = "x".join(map(str, self._product(call)))
        return {**choice_entry(candidate), "native": is_native, "shape": sizes}


SPECS: Sequence[OpSpec[Any, Any]] = (
    ProjectionSpec("gemm_a2a", FRONT),
    ProjectionSpec("a2a_gemm", BEHIND),
    ProjectionSpec("gemm_a2a", FRONT, weight_layout="nn"),
    ProjectionSpec("a2a_gemm", BEHIND, weight_layout="nn"),
    ProjectionSpec("qkv_projection", FRONT, backward=True),
    ProjectionSpec("output_projection", BEHIND, backward=True),
)
