"""The search: for each shape class first ways of moving data and what the cost model takes, then tiles with the two
best ways."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ditron_train.runtime.logs import get_logger
from ditron_train.tools.session import BenchSession
from ditron_train.tools.timing import measure
from ditron_train.tools.tune.rates import Observed
from ditron_train.tools.tune.trial import Trial, compile_all
from ditron_train.tp.choices import Choice, default_choice, entry_of, modelled_choice, tile_variants, transfer_variants
from ditron_train.tp.context import TPContext

__all__ = ["Result", "STAGES", "ShapeClass", "Turns", "search"]

STAGES = ("transfer", "tile")
_WORTH = 0.99  # of the default's time; what gains less may be noise, and the default it stays


@dataclass(frozen=True)
class Turns:
    """How long candidates are timed: in ``rounds`` they take turns, ``repetitions`` calls each, so drift hits all
    alike."""

    rounds: int
    repetitions: int


@dataclass
class Result:
    """What was seen of one shape: times by choice (us, of those with native's bits), and of native and its parts."""

    times_us: dict[Choice, float] = field(default_factory=dict)
    native_us: float = math.inf
    observed: Observed | None = None


class ShapeClass:
    """All shapes of one class of one op; they share the candidates and get the choice that is best over all of
    them."""

    def __init__(self, trials: Sequence[Trial], context: TPContext) -> None:
        self.trials = list(trials)
        self.problem = trials[0].problem
        self.machine = context.machine
        self.default = default_choice(self.problem, self.machine)
        self.results = [Result() for _ in trials]
        self.differing: list[Choice] = []

    def candidates(self, stage: str) -> list[Choice]:
        """What a stage tries; the first is its starting point."""
        if stage == "transfer":
            modelled = replace(modelled_choice(self.problem, self.machine), source=self.default.source)
            variants = transfer_variants(self.problem, self.machine, self.default)
            return list(dict.fromkeys([self.default, *variants, modelled]))
        best = self.best()
        if best is None:
            return []
        ways = [best, *self._best_other_way(best)]
        return list(dict.fromkeys([*ways, *(variant for way in ways for variant in tile_variants(self.machine, way))]))

    def _best_other_way(self, best: Choice) -> list[Choice]:
        """The quickest that moves data otherwise: what it loses to ``best`` with one tile it may win with another,
        since SMs that push are missing in the GEMM's last wave or are not."""
        tried = dict.fromkeys(choice for result in self.results for choice in result.times_us)
        others = [choice for choice in tried if _way(choice) != _way(best) and self.score(choice) < math.inf]
        return sorted(others, key=self.score)[:1]

    def score(self, choice: Choice) -> float:
        """Geometric mean over the shapes of time over the default's, or over native's where the default has other
        bits."""
        logs = []
        for result in self.results:
            if choice not in result.times_us:
                return math.inf
            logs.append(math.log(result.times_us[choice] / result.times_us.get(self.default, result.native_us)))
        return math.exp(sum(logs) / len(logs))

    def best(self) -> Choice | None:
        """The quickest choice with native's bits at every shape; None where there is none."""
        tried = dict.fromkeys(choice for result in self.results for choice in result.times_us)
        best = min(tried, key=self.score, default=None)
        if best is None or self.score(best) == math.inf:
            return None
        kept = self.default in tried and self.score(best) > _WORTH * self.score(self.default)
        return self.default if kept else best

    def entry(self) -> dict[str, object]:
        """The line of the table; times are those of the class's first shape."""
        best, result = self.best(), self.results[0]
        if best is None:
            return {
                **entry_of(self.problem, replace(self.default, use_native=True)),
                "native_us": round(result.native_us, 1),
            }
        slower = sum(math.log(r.times_us[best] / r.native_us) for r in self.results) >= 0
        return {
            **entry_of(self.problem, replace(best, use_native=slower)),
            "shape": "x".join(str(size) for size in (self.problem.m, self.problem.n, self.problem.k)),
            "ditron_us": round(result.times_us[best], 1),
            "default_us": round(result.times_us.get(self.default, math.inf), 1)
            if self.default in result.times_us
            else None,
            "native_us": round(result.native_us, 1),
            "tried": len(result.times_us),
        }


def _way(choice: Choice) -> tuple[str, str]:
    return choice.gather.mode, choice.scatter


def search(
    classes: Sequence[ShapeClass],
    turns: Turns,
    session: BenchSession,
    context: TPContext,
    *,
    advance: Callable[[str], None],
    keep: Callable[[], None],
) -> None:
    """Tries everything (collective).

    ``advance`` is told what was done after each shape of each stage; ``keep`` is called after each stage, so that what
    was found survives whatever ends the run.
    """
    for stage in STAGES:
        planned = [
            (shape_class, trial, result, shape_class.candidates(stage))
            for shape_class in classes
            for trial, result in zip(shape_class.trials, shape_class.results)
        ]
        compile_all([(trial, choice) for _, trial, _, choices in planned for choice in choices], context)
        for shape_class, trial, result, choices in planned:
            kept = [choice for choice in choices if _has_native_bits(shape_class, trial, choice, session)]
            _time(trial, result, kept, turns, session, first=stage == STAGES[0])
            advance(f"{trial.problem.table_op} {trial.problem.shape_class}")
        context.synchronize()
        keep()


def _has_native_bits(shape_class: ShapeClass, trial: Trial, choice: Choice, session: BenchSession) -> bool:
    if session.equal([trial.candidate(choice)(0)], [trial.native(0)]):
        return True
    shape_class.differing.append(choice)
    if session.rank == 0:
        p = trial.problem
        get_logger("tune").warning("%s %dx%dx%d: bits differ from native's with %s", p.table_op, p.m, p.n, p.k, choice)
    return False


def _time(
    trial: Trial, result: Result, choices: Sequence[Choice], turns: Turns, session: BenchSession, *, first: bool
) -> None:
    contenders: dict[object, Callable[[int], object]] = {"native": trial.native}
    if first:
        contenders.update(gemm=trial.gemm, comm=trial.collective)
        if trial.problem.op == "ag_gemm":
            contenders["link"] = trial.link
    contenders.update({choice: trial.candidate(choice) for choice in choices})
    timings = measure(
        contenders, group=None, device=session.device, repetitions=turns.repetitions, warmup=1, passes=turns.rounds
    )
    times = {name: timing.median_us for name, timing in timings.items()}
    # Drift between the stages is taken out by what both have timed: native.
    native_us = times["native"]
    scale = 1.0 if first else result.native_us / native_us
    for choice in choices:
        result.times_us.setdefault(choice, times[choice] * scale)
    if first:
        result.native_us = native_us
        result.observed = Observed(trial.problem, times["gemm"], times["comm"], times.get("link"))
