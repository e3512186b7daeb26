"""AG-GEMM, GEMM-RS and GEMM-AR as tools measure them: against NCCL and cuBLAS one after the other, as in Megatron."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ditron_train.data import load_workloads
from ditron_train.policy import Function, Op, Trial
from ditron_train.policy.op import Call, make_trial
from ditron_train.tools.arguments import refuse
from ditron_train.tools.cases.case import BenchCase, Cost, ModelSizes, RunEnvironment, Shape
from ditron_train.tools.fp8.recipes import unsupported_reason_aligned
from ditron_train.tools.results import FP8_PREFIX
from ditron_train.tools.timing import Timing
from ditron_train.tp.ag_gemm import ag_gemm
from ditron_train.tp.choices import Layout, Problem, choose, wire_bytes
from ditron_train.tp.choices import Op as Kind
from ditron_train.tp.context import TPContext, get_tp_context
from ditron_train.tp.gather import start_all_gather
from ditron_train.tp.gemm_ar import gemm_ar
from ditron_train.tp.gemm_rs import gemm_rs


class GemmCall(NamedTuple):
    """Operands of this rank: ``x`` [M / W, K] (AG-GEMM) or [M, K], ``weight`` [N, K] (nt) or [K, N] (nn)."""

    x: torch.Tensor
    weight: torch.Tensor
    group: dist.ProcessGroup


def linear_shapes(op: Kind, world_size: int, on_gpu: bool) -> list[Shape]:
    """Published layers by their global M, N and K; a small one if kernels are interpreted."""
    if not on_gpu:
        return [Shape("custom", {"m": 256, "n": 256, "k": 256})]
    shapes = load_workloads()["ag_gemm" if op == "ag_gemm" else "gemm_rs"]["shapes"]
    return [Shape(shape["model"], {"m": shape["M"], "n": shape["N"], "k": shape["K"]}) for shape in shapes]


def traced_linear(on_gpu: bool) -> Shape:
    """A layer of LLaMA-70B; a small one if kernels are interpreted."""
    return Shape("custom", {"m": 8192, "n": 28672, "k": 8192} if on_gpu else {"m": 256, "n": 256, "k": 256})


def unsupported_linear(op: Kind, shape: Shape, world_size: int, label: str | None = None) -> str | None:
    """Why ranks cannot share out a linear layer (``label`` in the words): all divide its rows, and N or K."""
    what = label or op
    m, n, k = (shape.sizes[name] for name in "mnk")
    split = "N" if op == "ag_gemm" else "K"
    if min(m, n, k) < 1:
        return f"{what} {m}x{n}x{k}: sizes have to be above 0"
    if (m % world_size and op != "gemm_ar") or (n if op == "ag_gemm" else k) % world_size:
        wanted = f"{split} has" if op == "gemm_ar" else f"M and {split} have"
        return f"{what} {m}x{n}x{k} does not divide over {world_size} ranks: {wanted} to"
    return None


def local_shapes(
    op: Kind, shape: Shape, world_size: int, label: str | None = None
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of x and weight (nt) on each rank.

    Raises:
        SettingError: A size is not above 0, or does not divide over the ranks.
    """
    refuse(unsupported_linear(op, shape, world_size, label))
    m, n, k = (shape.sizes[name] for name in "mnk")
    if op == "ag_gemm":
        return (m // world_size, k), (n // world_size, k)
    return (m, k // world_size), (n, k // world_size)


class GemmOp(Op[GemmCall, TPContext]):
    """One op in one layout."""

    def __init__(self, kind: Kind, layout: Layout) -> None:
        self.kind, self.layout = kind, layout
        self.name = f"tp {kind}" if layout == "nt" else f"tp {kind} {layout}"

    def make_context(self, call: GemmCall) -> TPContext:
        return get_tp_context(call.group, call.x.device)

    def inputs(self, call: GemmCall) -> tuple[torch.Tensor, torch.Tensor]:
        return call.x, call.weight

    def sizes(self, call: GemmCall) -> tuple[int, int, int]:
        """M of all ranks; N and K of this one."""
        n, k = call.weight.shape if self.layout == "nt" else call.weight.shape[::-1]
        m = call.x.shape[0] * (dist.get_world_size(call.group) if self.kind == "ag_gemm" else 1)
        return m, n, k

    def problem(self, call: GemmCall) -> Problem:
        """The op at this shape, as tuning tables and the cost model take it."""
        world_size = dist.get_world_size(call.group)
        return Problem(self.kind, *self.sizes(call), self.layout, call.x.dtype, world_size)

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, weight.t() if self.layout == "nt" else weight)

    def native(self, call: GemmCall) -> Function:
        if self.kind == "gemm_ar":
            return lambda x, weight: [_sum(self.multiply(x, weight), call.group)]
        if self.kind == "gemm_rs":
            return lambda x, weight: [_scatter(self.multiply(x, weight), call.group)]
        return lambda x, weight: [self.multiply(_gather(x, call.group), weight)]

    def fused(self, call: GemmCall, context: TPContext) -> Function:
        ops: dict[Kind, Callable[..., Any]] = {"ag_gemm": ag_gemm, "gemm_rs": gemm_rs, "gemm_ar": gemm_ar}
        op = ops[self.kind]
        return lambda x, weight: [op(x, weight, context=context, layout=self.layout)]

    def describe(self, call: GemmCall, context: TPContext) -> str:
        m, n, k = self.sizes(call)
        return f"{self.name} {m}x{n}x{k} {str(call.x.dtype).removeprefix('torch.')}"

    def trial(self, call: GemmCall, context: TPContext) -> Trial:
        return make_trial(self, call, context, summed_dtype=call.x.dtype if self.kind == "gemm_rs" else None)


class GemmCase(BenchCase[GemmCall, TPContext]):
    """Against NCCL and cuBLAS one after the other, as in Megatron."""

    op: GemmOp

    def __init__(self, kind: Kind, layout: Layout) -> None:
        super().__init__(GemmOp(kind, layout))
        self.has_rows = layout == "nt"  # dgrad's layout is measured in the layers' backward
        self.row = kind

    def shapes(self, world_size: int, on_gpu: bool) -> list[Shape]:
        return linear_shapes(self.op.kind, world_size, on_gpu)

    def traced_shape(self, world_size: int, on_gpu: bool) -> Shape:
        return traced_linear(on_gpu)

    def shapes_of_model(self, model: ModelSizes, world_size: int) -> list[Shape]:
        """Column layers gather, row layers scatter."""
        names = ("qkv", "fc1") if self.op.kind == "ag_gemm" else ("proj", "fc2")
        matrices = [(name, *model.matrices[name]) for name in names]
        return [Shape(name, {"m": model.tokens, "n": n, "k": k}) for name, n, k in matrices]

    def unsupported_shape(self, shape: Shape, world_size: int) -> str | None:
        return unsupported_linear(self.op.kind, shape, world_size)

    def sample(self, shape: Shape, environment: RunEnvironment, seed: int) -> GemmCall:
        x_shape, weight_shape = local_shapes(self.op.kind, shape, environment.world_size)
        if self.op.layout == "nn":
            weight_shape = weight_shape[::-1]
        x, weight = environment.values((x_shape, weight_shape), 2 * seed)
        return GemmCall(x, weight, environment.group)

    def cost(self, call: GemmCall, context: TPContext) -> Cost:
        m, n, k = self.op.sizes(call)
        return Cost(wire_bytes(self.op.problem(call)), 2.0 * m * n * k)

    def parts(self, call: GemmCall, context: TPContext) -> Mapping[str, Callable[[], object]]:
        (x, weight, group), (m, n, k) = call, self.op.sizes(call)
        parts: dict[str, Callable[[], object]] = {}
        if self.op.kind == "ag_gemm":
            gathered = x.new_zeros(m, k)
            parts["gemm"] = lambda: self.op.multiply(gathered, weight)
            parts["comm"] = lambda: dist.all_gather_into_tensor(gathered, x, group=group)
            parts["link"] = lambda: start_all_gather(x, context=context).wait()
        else:
            partial = x.new_zeros(m, n)
            parts["gemm"] = lambda: self.op.multiply(x, weight)
            move: Callable[..., Any] = _sum if self.op.kind == "gemm_ar" else _scatter
            parts["comm"] = lambda: move(partial, group)
        return parts

    def peers(self, call: GemmCall, context: TPContext) -> Mapping[str, Callable[[], object]]:
        if self.op.layout != "nt" or self.op.kind == "gemm_ar" or context.target == "interpreter":
            return {}
        return {"async-TP": lambda: self._async_tp(call.x, call.weight, call.group.group_name)}

    def _async_tp(self, x: torch.Tensor, weight: torch.Tensor, group_name: str) -> torch.Tensor:
        import torch.distributed._symmetric_memory  # noqa: F401  (registers the ops)

        if self.op.kind == "gemm_rs":
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.t(), "sum", 0, group_name)
        return torch.ops.symm_mem.fused_all_gather_matmul(x, [weight.t()], 0, group_name, return_A=False)[1][0]

    def comm_sms(self, call: GemmCall, context: TPContext) -> int:
        """GEMM-RS and GEMM-AR send by the GEMM itself, by copy engines or behind the GEMM; behind the
        gather's copy engines one program forwards their signals."""
        if self.op.kind != "ag_gemm" or context.target == "interpreter":
            return 0
        plan = choose(self.op.problem(call), context.machine).gather
        return plan.push_programs if plan.mode == "push" else 1


def _sum(partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    dist.all_reduce(partial, group=group)
    return partial


def _gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    gathered = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
    dist.all_gather_into_tensor(gathered, x, group=group)
    return gathered


def _scatter(partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = partial.new_empty(partial.shape[0] // dist.get_world_size(group), partial.shape[1])
    dist.reduce_scatter_tensor(out, partial, group=group)
    return out


class GemmShapedCase(BenchCase[Call, Any]):
    """Another op at the shapes of a GEMM.

    Args:
        op, row: The op, and what rows call it.
        gemm: The case of the GEMM.
    """

    def __init__(self, op: Op[Call, Any], row: str, gemm: GemmCase) -> None:
        super().__init__(op)
        self.row, self.gemm = row, gemm

    def shapes(self, world_size: int, on_gpu: bool) -> Sequence[Shape]:
        return self.gemm.shapes(world_size, on_gpu)

    def traced_shape(self, world_size: int, on_gpu: bool) -> Shape:
        return self.gemm.traced_shape(world_size, on_gpu)

    def shapes_of_model(self, model: ModelSizes, world_size: int) -> Sequence[Shape]:
        return self.gemm.shapes_of_model(model, world_size)

    def unsupported_shape(self, shape: Shape, world_size: int) -> str | None:
        return self.gemm.unsupported_shape(shape, world_size)


class RecipeCase(GemmShapedCase[Call]):
    """An op in a recipe, at the shapes of AG-GEMM or GEMM-RS that the recipe takes.

    Args:
        op, row, gemm: As of `GemmShapedCase`.
        recipe: By Megatron's name.
    """

    def __init__(self, op: Op[Call, Any], row: str, gemm: GemmCase, recipe: str) -> None:
        super().__init__(op, row, gemm)
        self.recipe = recipe

    def shapes(self, world_size: int, on_gpu: bool) -> list[Shape]:
        shapes = super().shapes(world_size, on_gpu)
        return [shape for shape in shapes if self.unsupported_shape(shape, world_size) is None]

    def unsupported_shape(self, shape: Shape, world_size: int) -> str | None:
        reason = super().unsupported_shape(shape, world_size)
        return reason or unsupported_reason_aligned(self.gemm.op.kind, shape, world_size, self.recipe)

    def columns(self, call: Call, context: Any, timings: Mapping[str, Timing]) -> Mapping[str, Any]:
        return {"dtype": FP8_PREFIX + self.recipe}


AG_GEMM, GEMM_RS, GEMM_AR = (GemmCase(kind, "nt") for kind in ("ag_gemm", "gemm_rs", "gemm_ar"))
#: ``nn`` is dgrad's layout: tuned, but not a row of its own.
AG_GEMM_NN, GEMM_RS_NN = GemmCase("ag_gemm", "nn"), GemmCase("gemm_rs", "nn")
CASES: Sequence[BenchCase[Any, Any]] = (AG_GEMM, GEMM_RS, GEMM_AR, AG_GEMM_NN, GEMM_RS_NN)
