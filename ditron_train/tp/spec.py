"""AG-GEMM, GEMM-RS and GEMM-AR declared for the tools: against NCCL and cuBLAS one after the other, as in Megatron."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ditron_train.data import load_workloads
from ditron_train.policy import Cost, Function, ModelSizes, OpSpec, Place, Shape
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.values import make_values
from ditron_train.tp.ag_gemm import AgGemmPlan, ag_gemm
from ditron_train.tp.choices import (
    Choice,
    Layout,
    Op,
    Problem,
    choose,
    default_choice,
    entry_of,
    modelled_choice,
    tile_variants,
    transfer_variants,
    wire_bytes,
)
from ditron_train.tp.context import RowPartition, TPContext, can_copy, get_tp_context
from ditron_train.tp.gather import start_all_gather
from ditron_train.tp.gemm_ar import gemm_ar, gemm_ar_by
from ditron_train.tp.gemm_rs import gemm_rs, gemm_rs_by


class GemmCall(NamedTuple):
    """Operands of this rank: ``x`` [M / W, K] (AG-GEMM) or [M, K], ``weight`` [N, K] (nt) or [K, N] (nn)."""

    x: torch.Tensor
    weight: torch.Tensor
    group: dist.ProcessGroup


def linear_shapes(op: Op, world_size: int, on_gpu: bool) -> list[Shape]:
    """Published layers by their global M, N and K; a small one where kernels are interpreted."""
    if not on_gpu:
        return [Shape("custom", {"m": 256, "n": 256, "k": 256})]
    shapes = load_workloads()["ag_gemm" if op == "ag_gemm" else "gemm_rs"]["shapes"]
    return [Shape(one["model"], {"m": one["M"], "n": one["N"], "k": one["K"]}) for one in shapes]


def traced_linear(on_gpu: bool) -> Shape:
    """A layer of LLaMA-70B; a small one where kernels are interpreted."""
    return Shape("custom", {"m": 8192, "n": 28672, "k": 8192} if on_gpu else {"m": 256, "n": 256, "k": 256})


def why_not_linear(op: Op, shape: Shape, world_size: int, label: str | None = None) -> str | None:
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
    op: Op, shape: Shape, world_size: int, label: str | None = None
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of x and weight (nt) on each rank.

    Raises:
        SettingError: A size is not above 0, or does not divide over the ranks.
    """
    why = why_not_linear(op, shape, world_size, label)
    if why is not None:
        raise SettingError(why)
    m, n, k = (shape.sizes[name] for name in "mnk")
    if op == "ag_gemm":
        return (m // world_size, k), (n // world_size, k)
    return (m, k // world_size), (n, k // world_size)


class GemmSpec(OpSpec[GemmCall, TPContext]):
    """One op in one layout."""

    search_rounds = 2

    def __init__(self, op: Op, layout: Layout) -> None:
        self.op, self.layout = op, layout
        self.has_rows = layout == "nt"  # dgrad's layout is measured in the layers' backward
        self.row = op
        self.table_op = f"{op} {layout}"
        self.name = f"tp {op}" if layout == "nt" else f"tp {op} {layout}"

    def context(self, call: GemmCall) -> TPContext:
        return get_tp_context(call.group, call.x.device)

    def words(self, call: GemmCall, context: TPContext) -> str:
        m, n, k = self._sizes(call)
        return f"{self.name} {m}x{n}x{k} {str(call.x.dtype).removeprefix('torch.')}"

    def summed_dtype(self, call: GemmCall) -> torch.dtype | None:
        return call.x.dtype if self.op == "gemm_rs" else None

    def inputs(self, call: GemmCall) -> tuple[torch.Tensor, torch.Tensor]:
        return call.x, call.weight

    def _sizes(self, call: GemmCall) -> tuple[int, int, int]:
        """M of all ranks; N and K of this one."""
        n, k = call.weight.shape if self.layout == "nt" else call.weight.shape[::-1]
        m = call.x.shape[0] * (dist.get_world_size(call.group) if self.op == "ag_gemm" else 1)
        return m, n, k

    def problem(self, call: GemmCall) -> Problem:
        """The op at this shape, as tuning tables and the cost model take it."""
        world_size = dist.get_world_size(call.group)
        return Problem(self.op, *self._sizes(call), self.layout, call.x.dtype, world_size)

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, weight.t() if self.layout == "nt" else weight)

    def megatron(self, call: GemmCall) -> Function:
        if self.op == "gemm_ar":
            return lambda x, weight: [_sum(self._multiply(x, weight), call.group)]
        if self.op == "gemm_rs":
            return lambda x, weight: [_scatter(self._multiply(x, weight), call.group)]
        return lambda x, weight: [self._multiply(_gather(x, call.group), weight)]

    def fused(self, call: GemmCall, context: TPContext) -> Function:
        ops: dict[Op, Callable[..., Any]] = {"ag_gemm": ag_gemm, "gemm_rs": gemm_rs, "gemm_ar": gemm_ar}
        op = ops[self.op]
        return lambda x, weight: [op(x, weight, context=context, layout=self.layout)]

    def shapes(self, world_size: int, on_gpu: bool) -> list[Shape]:
        return linear_shapes(self.op, world_size, on_gpu)

    def traced_shape(self, world_size: int, on_gpu: bool) -> Shape:
        return traced_linear(on_gpu)

    def shapes_of_model(self, model: ModelSizes, world_size: int) -> list[Shape]:
        """See `OpSpec`: column layers gather, row layers scatter."""
        names = ("qkv", "fc1") if self.op == "ag_gemm" else ("proj", "fc2")
        matrices = [(name, *model.matrices[name]) for name in names]
        return [Shape(name, {"m": model.tokens, "n": n, "k": k}) for name, n, k in matrices]

    def why_not_shape(self, shape: Shape, world_size: int) -> str | None:
        return why_not_linear(self.op, shape, world_size)

    def sample(self, shape: Shape, place: Place, seed: int) -> GemmCall:
        x_shape, weight_shape = local_shapes(self.op, shape, place.world_size)
        if self.layout == "nn":
            weight_shape = weight_shape[::-1]
        x, weight = (
            make_values(one, place.dtype, place.device, seed=2 * seed + index, rank=place.rank)
            for index, one in enumerate((x_shape, weight_shape))
        )
        return GemmCall(x, weight, place.group)

    def cost(self, call: GemmCall, context: TPContext) -> Cost:
        m, n, k = self._sizes(call)
        return Cost(wire_bytes(self.problem(call)), 2.0 * m * n * k)

    def parts(self, call: GemmCall, context: TPContext) -> Mapping[str, Callable[[], object]]:
        (x, weight, group), (m, n, k) = call, self._sizes(call)
        parts: dict[str, Callable[[], object]] = {}
        if self.op == "ag_gemm":
            gathered = x.new_zeros(m, k)
            parts["gemm"] = lambda: self._multiply(gathered, weight)
            parts["comm"] = lambda: dist.all_gather_into_tensor(gathered, x, group=group)
            parts["link"] = lambda: start_all_gather(x, context=context).wait()
        else:
            partial = x.new_zeros(m, n)
            parts["gemm"] = lambda: self._multiply(x, weight)
            move: Callable[..., Any] = _sum if self.op == "gemm_ar" else _scatter
            parts["comm"] = lambda: move(partial, group)
        return parts

    def peers(self, call: GemmCall, context: TPContext) -> Mapping[str, Callable[[], object]]:
        if self.layout != "nt" or self.op == "gemm_ar" or context.target == "interpreter":
            return {}
        return {"async-TP": lambda: self._async_tp(call.x, call.weight, call.group.group_name)}

    def _async_tp(self, x: torch.Tensor, weight: torch.Tensor, group_name: str) -> torch.Tensor:
        import torch.distributed._symmetric_memory  # noqa: F401  (registers the ops)

        if self.op == "gemm_rs":
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.t(), "sum", 0, group_name)
        return torch.ops.symm_mem.fused_all_gather_matmul(x, [weight.t()], 0, group_name, return_A=False)[1][0]

    def comm_sms(self, call: GemmCall, context: TPContext) -> int:
        """See `OpSpec`: GEMM-RS and GEMM-AR send by the GEMM itself, by copy engines or behind the GEMM; behind the
        gather's copy engines one program forwards their signals."""
        if self.op != "ag_gemm" or context.target == "interpreter":
            return 0
        plan = choose(self.problem(call), context.machine).gather
        return plan.push_programs if plan.mode == "push" else 1

    def shape_class(self, call: GemmCall) -> str:
        return self.problem(call).shape_class

    def candidates(self, call: GemmCall, context: TPContext, ranked: Sequence[Any]) -> list[Choice]:
        """See `OpSpec`: first ways of moving data and what the cost model takes, then tiles with the two best ways:
        what the second loses with one tile it may win with another, since SMs that push are missing in the last
        wave."""
        problem, machine = self.problem(call), context.machine
        if not ranked:
            default = default_choice(problem, machine)
            modelled = replace(modelled_choice(problem, machine), source=default.source)
            return list(dict.fromkeys([default, *transfer_variants(problem, machine, default), modelled]))
        other = next((one for one in ranked if _way(one) != _way(ranked[0])), None)
        ways = [ranked[0]] if other is None else [ranked[0], other]
        if self.op == "gemm_ar" and ranked[0].gather.mode == "push":  # behind a product of cuBLAS's
            return ways
        return list(dict.fromkeys([*ways, *(variant for way in ways for variant in tile_variants(machine, way))]))

    def _prepared(self, call: GemmCall, context: TPContext, choice: Choice) -> Any:
        """The op as ``choice`` says (collective where it is new here, or buffers have grown since)."""
        problem = self.problem(call)
        key = ("tune", problem, choice)
        prepared = context.prepared.get(key)
        if prepared is None:
            if self.op == "gemm_ar":
                prepared = gemm_ar_by(context, problem, choice, can_copy=can_copy(context))
            else:
                prepare: Callable[..., Any] = AgGemmPlan if self.op == "ag_gemm" else gemm_rs_by
                prepared = prepare(context, _even(problem), problem, choice)
            context.prepared[key] = prepared
        return prepared

    def fused_as(self, call: GemmCall, context: TPContext, candidate: Choice) -> Function:
        problem = self.problem(call)

        def run(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
            context.enter("tune", problem.table_op, problem.m, problem.n, problem.k)
            prepared = self._prepared(call, context, candidate)
            if self.op != "gemm_rs":
                return [prepared.run(x, weight)]
            out = x.new_empty(problem.m // problem.world_size, problem.n)
            prepared.run(x, weight, out)
            return [out]

        return run

    def compile(self, call: GemmCall, context: TPContext, candidate: Choice) -> tuple[Hashable, Callable[[], None]]:
        """See `OpSpec`; sizes are specialised on by their divisibility alone."""
        problem, prepared = self.problem(call), self._prepared(call, context, candidate)
        aligned = problem.n % 16 == 0
        identity = (
            prepared.identity,
            problem.dtype,
            aligned,
            candidate.gather.mode,
            candidate.scatter,
            candidate.rounds,
        )
        return identity, lambda: prepared.compile(call.x, call.weight)

    def entry(self, call: GemmCall, candidate: Choice, *, is_native: bool) -> dict[str, Any]:
        problem = self.problem(call)
        entry = entry_of(problem, replace(candidate, use_native=is_native))
        return {**entry, "shape": f"{problem.m}x{problem.n}x{problem.k}"}


def _way(choice: Choice) -> tuple[str, str, int]:
    return choice.gather.mode, choice.scatter, choice.rounds


def _sum(partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    dist.all_reduce(partial, group=group)
    return partial


def _even(problem: Problem) -> RowPartition:
    return RowPartition.of([problem.m // problem.world_size] * problem.world_size)


def _gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    gathered = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
    dist.all_gather_into_tensor(gathered, x, group=group)
    return gathered


def _scatter(partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = partial.new_empty(partial.shape[0] // dist.get_world_size(group), partial.shape[1])
    dist.reduce_scatter_tensor(out, partial, group=group)
    return out


AG_GEMM, GEMM_RS, GEMM_AR = (GemmSpec(op, "nt") for op in ("ag_gemm", "gemm_rs", "gemm_ar"))
#: ``nn`` is dgrad's layout: tuned, but not a row of its own.
SPECS: Sequence[OpSpec[Any, Any]] = (AG_GEMM, GEMM_RS, GEMM_AR, GemmSpec("ag_gemm", "nn"), GemmSpec("gemm_rs", "nn"))
