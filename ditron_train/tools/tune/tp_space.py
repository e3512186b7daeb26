"""The choices of AG-GEMM, GEMM-RS and GEMM-AR that ``tune`` tries."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ditron_train.policy import Function
from ditron_train.tools.cases.tp_gemm import CASES, GemmCall, GemmCase
from ditron_train.tools.tune.space import SearchSpace
from ditron_train.tp.ag_gemm import ag_gemm_by
from ditron_train.tp.choices import (
    Choice,
    Problem,
    default_choice,
    entry_of,
    modelled_choice,
    tile_variants,
    transfer_variants,
    with_library,
)
from ditron_train.tp.context import RowPartition, TPContext, can_copy
from ditron_train.tp.gemm_ar import gemm_ar_by
from ditron_train.tp.gemm_rs import gemm_rs_by


class GemmSpace(SearchSpace[GemmCall, TPContext]):
    """Ways of moving data, then tile sizes."""

    case: GemmCase
    rounds = 2

    def __init__(self, case: GemmCase) -> None:
        super().__init__(case, f"{case.op.kind} {case.op.layout}")

    def shape_class(self, call: GemmCall) -> str:
        return self.case.op.problem(call).shape_class

    def candidates(self, call: GemmCall, context: TPContext, ranked: Sequence[Any]) -> list[Choice]:
        """First ways of moving data and what the cost model takes, then tiles with the two best ways:
        what the second loses with one tile it may win with another, since SMs that push are missing in the last
        wave."""
        problem, machine = self.case.op.problem(call), context.machine
        if not ranked:
            default = default_choice(problem, machine)
            modelled = replace(modelled_choice(problem, machine), source=default.source)
            can_split = problem.op != "gemm_ar" and machine.target != "interpreter" and problem.world_size > 1
            library = [with_library(default)] if can_split else []
            return list(dict.fromkeys([default, *transfer_variants(problem, machine, default), *library, modelled]))
        other = next((one for one in ranked if _way(one) != _way(ranked[0])), None)
        ways = [ranked[0]] if other is None else [ranked[0], other]
        if self.case.op.kind == "gemm_ar" and ranked[0].gather.mode == "push":  # behind a product of cuBLAS's
            return ways
        tiled = [way for way in ways if not way.by_library]
        return list(dict.fromkeys([*ways, *(variant for way in tiled for variant in tile_variants(machine, way))]))

    def _prepared(self, call: GemmCall, context: TPContext, choice: Choice) -> Any:
        """The op as ``choice`` says (collective if it is new here, or buffers have grown since)."""
        problem = self.case.op.problem(call)
        key = ("tune", problem, choice)
        prepared = context.prepared.get(key)
        if prepared is None:
            if self.case.op.kind == "gemm_ar":
                prepared = gemm_ar_by(context, problem, choice, can_copy=can_copy(context))
            else:
                prepare: Callable[..., Any] = ag_gemm_by if self.case.op.kind == "ag_gemm" else gemm_rs_by
                prepared = prepare(context, _even(problem), problem, choice)
            context.prepared[key] = prepared
        return prepared

    def run_as(self, call: GemmCall, context: TPContext, candidate: Choice) -> Function:
        problem = self.case.op.problem(call)

        def run(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
            context.enter("tune", problem.table_op, problem.m, problem.n, problem.k)
            prepared = self._prepared(call, context, candidate)
            if self.case.op.kind != "gemm_rs":
                return [prepared.run(x, weight)]
            out = x.new_empty(problem.m // problem.world_size, problem.n)
            prepared.run(x, weight, out)
            return [out]

        return run

    def compile(self, call: GemmCall, context: TPContext, candidate: Choice) -> tuple[Hashable, Callable[[], None]]:
        """Sizes are specialised on by their divisibility alone."""
        problem, prepared = self.case.op.problem(call), self._prepared(call, context, candidate)
        aligned = problem.n % 16 == 0
        identity = (
            prepared.identity,
            problem.dtype,
            aligned,
            candidate.gather.mode,
            candidate.scatter,
            candidate.rounds,
            candidate.by_library,
        )
        return identity, lambda: prepared.compile(call.x, call.weight)

    def entry(self, call: GemmCall, candidate: Choice, *, is_native: bool) -> dict[str, Any]:
        problem = self.case.op.problem(call)
        entry = entry_of(problem, replace(candidate, use_native=is_native))
        return {**entry, "shape": f"{problem.m}x{problem.n}x{problem.k}"}


def _way(choice: Choice) -> tuple[str, str, int, bool]:
    return choice.gather.mode, choice.scatter, choice.rounds, choice.by_library


def _even(problem: Problem) -> RowPartition:
    return RowPartition.of([problem.m // problem.world_size] * problem.world_size)


SPACES: Sequence[SearchSpace[Any, Any]] = tuple(GemmSpace(case) for case in CASES if isinstance(case, GemmCase))
