"""The choices of the exchanges around an attention and of their projections that ``tune`` tries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ditron_train.policy import Function
from ditron_train.sp.choices import ProjectionChoice, choice_entry, default_choice, exchange_class, tiles, transfers
from ditron_train.sp.context import SPContext
from ditron_train.sp.transfer_sizes import EXCHANGE_PROGRAMS
from ditron_train.tools.cases.sp import EXCHANGES, PROJECTIONS, ExchangeCase, ProjectionCall, ProjectionCase
from ditron_train.tools.tune.space import SearchSpace


class ProjectionSpace(SearchSpace[ProjectionCall, SPContext]):
    """How much moves data, then tile sizes."""

    case: ProjectionCase
    rounds = 2
    most_shapes = 1

    def shape_class(self, call: ProjectionCall) -> str:
        return self.case.op.tuned(call).shape_class

    def candidates(
        self, call: ProjectionCall, context: SPContext, ranked: Sequence[Any]
    ) -> Sequence[ProjectionChoice]:
        """First how much moves data, then tiles."""
        if ranked:
            return [ranked[0], *tiles(ranked[0], context)]
        default = default_choice(self.case.op.tuned(call), context)
        return [default, *transfers(default, context)]

    def run_as(self, call: ProjectionCall, context: SPContext, candidate: ProjectionChoice) -> Function:
        return self.case.op.run_as(call, context, candidate)

    def entry(self, call: ProjectionCall, candidate: ProjectionChoice, *, is_native: bool) -> dict[str, Any]:
        sizes = "x".join(map(str, self.case.op.product(call)))
        return {**choice_entry(candidate), "native": is_native, "shape": sizes}


class ExchangeSpace(SearchSpace[ProjectionCall, SPContext]):
    """Programs that move data."""

    case: ExchangeCase
    most_shapes = 1

    def shape_class(self, call: ProjectionCall) -> str:
        return exchange_class(*self.case.op.sent(call))

    def candidates(self, call: ProjectionCall, context: SPContext, ranked: Sequence[Any]) -> Sequence[Any]:
        """On the CPU one program moves everything."""
        return list(dict.fromkeys([EXCHANGE_PROGRAMS, *((8, 16, 24, 48, 64) if context.is_cuda else ())]))

    def run_as(self, call: ProjectionCall, context: SPContext, candidate: int) -> Function:
        return self.case.op.run_as(call, context, candidate)

    def entry(self, call: ProjectionCall, candidate: Any, *, is_native: bool) -> dict[str, Any]:
        return {"programs": candidate, "native": is_native}


SPACES: Sequence[SearchSpace[Any, Any]] = (
    *(ProjectionSpace(case, f"{case.row} {case.op.weight_layout}") for case in PROJECTIONS if not case.op.is_backward),
    *(ExchangeSpace(case, case.row) for case in EXCHANGES),
)
