"""The search: for each class of shapes of an op the candidates that its `SearchSpace` names, in rounds that learn from
what was quickest, beside stock Megatron."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.runtime.device import is_interpreter
from ditron_train.runtime.logs import get_logger
from ditron_train.tools.cases import Shape
from ditron_train.tools.op_rows import OpCalls
from ditron_train.tools.session import BenchSession
from ditron_train.tools.timing import Contender, measure
from ditron_train.tools.tune.space import SearchSpace

_WORTH = 0.99  # of the default's time; what gains less may be noise, and the default it stays
_COMPILER_THREADS = 8
_LIMITED_BY_POWER_US = 1000.0  # a GPU's clock follows its power within milliseconds
_PARTS = ("gemm", "comm", "link")


@dataclass(frozen=True)
class Turns:
    """How long candidates are timed: in ``rounds`` they take turns, ``repetitions`` calls each, so drift hits all
    alike. At the end the quickest of long ops run ``sustained_s`` each, one after the other, as in a training step
    whose clock the power limits: what takes less power for its work is quicker there."""

    rounds: int
    repetitions: int
    sustained_s: int = 0


@dataclass
class Result:
    """What was seen of one shape: times by candidate (us, of those with the bits of stock Megatron), of that path and
    of its parts; ``num_tried``: candidates with the bits."""

    times_us: dict[Hashable, float] = field(default_factory=dict)
    native_us: float = math.inf
    parts_us: dict[str, float] = field(default_factory=dict)
    num_tried: int = 0


class ShapeClass:
    """All shapes of one class of one op; they share the candidates and get the choice that is best over all of
    them."""

    def __init__(self, space: SearchSpace[Any, Any], trials: Sequence[OpCalls]) -> None:
        self.space = space
        self.trials = list(trials)
        self.results = [Result() for _ in trials]
        self.differing: list[Hashable] = []
        self.default = self.candidates()[0]

    @property
    def first(self) -> Any:
        """A call of the class's first shape."""
        return self.trials[0].calls[0]

    @property
    def name(self) -> str:
        """Op and class, in words."""
        return f"{self.space.table_op} {self.space.shape_class(self.first)}"

    def candidates(self) -> list[Hashable]:
        """What the next round tries; the first is its starting point."""
        ranked = self.ranked() if any(result.times_us for result in self.results) else []
        if not ranked and any(result.native_us < math.inf for result in self.results):
            return []  # nothing had the bits
        return list(self.space.candidates(self.first, self.trials[0].context, ranked))

    def score(self, candidate: Hashable) -> float:
        """Geometric mean over the shapes of time over the default's, or over stock Megatron's if the default has
        other bits."""
        logs = []
        for result in self.results:
            if candidate not in result.times_us:
                return math.inf
            logs.append(math.log(result.times_us[candidate] / result.times_us.get(self.default, result.native_us)))
        return math.exp(sum(logs) / len(logs))

    def ranked(self) -> list[Hashable]:
        """What has the bits at every shape, the quickest first; the default stands in front of what is no gain."""
        tried = dict.fromkeys(candidate for result in self.results for candidate in result.times_us)
        found = sorted((one for one in tried if self.score(one) < math.inf), key=self.score)
        if found and self.default in found and self.score(found[0]) > _WORTH * self.score(self.default):
            found.remove(self.default)
            found.insert(0, self.default)
        return found

    def entry(self) -> dict[str, Any]:
        """The line of the table; times are those of the class's first shape."""
        ranked, result = self.ranked(), self.results[0]
        if not ranked:
            native = self.space.entry(self.first, self.default, is_native=True)
            return {**native, "native_us": round(result.native_us, 1)}
        best = ranked[0]
        slower = sum(math.log(one.times_us[best] / one.native_us) for one in self.results) >= 0
        default_us = result.times_us.get(self.default)
        return {
            **self.space.entry(self.first, best, is_native=slower),
            "ditron_us": round(result.times_us[best], 1),
            "default_us": None if default_us is None else round(default_us, 1),
            "native_us": round(result.native_us, 1),
            "tried": result.num_tried,
        }


def trials_of(session: BenchSession, space: SearchSpace[Any, Any], shapes: Sequence[Shape]) -> list[ShapeClass]:
    """The shapes of one op by class."""
    classes: dict[str, list[OpCalls]] = {}
    for shape in shapes:
        with space.case.surroundings(shape):
            calls = OpCalls(session, space.case, shape)
        classes.setdefault(space.shape_class(calls.calls[0]), []).append(calls)
    return [ShapeClass(space, trials) for trials in classes.values()]


def search(
    classes: Sequence[ShapeClass],
    turns: Turns,
    session: BenchSession,
    *,
    advance: Callable[[str], None],
    keep: Callable[[], None],
) -> None:
    """Tries everything (collective).

    ``advance`` is told what was done after each shape of each round; ``keep`` is called after each round, so that what
    was found survives whatever ends the run.
    """
    for number in range(max((one.space.rounds for one in classes), default=0)):
        active = [one for one in classes if number < one.space.rounds]
        planned = [
            (one, trial, result, candidates)
            for one in active
            for candidates in [one.candidates()]
            for trial, result in zip(one.trials, one.results, strict=True)
        ]
        tried = [(one.space, trial, candidate) for one, trial, _, some in planned for candidate in some]
        _compile_all(tried, session)
        for shape_class, trial, result, candidates in planned:
            with trial.case.surroundings(trial.shape):
                kept = [one for one in candidates if _has_native_bits(shape_class, trial, one, session)]
                _time(shape_class.space, trial, result, kept, turns, session, first=number == 0)
            advance(shape_class.name)
        if session.device.type == "cuda":
            torch.cuda.synchronize(session.device)
        keep()
    if turns.sustained_s > 0:
        for one in classes:
            _sustain(one, turns.sustained_s, session)
        keep()


def _sustain(shape_class: ShapeClass, seconds: int, session: BenchSession) -> None:
    """Times native, the default and the quickest two candidates of a long op again, each alone for ``seconds``, of
    which the second half counts, forwards and backwards. Only these are ranked then."""
    ranked = shape_class.ranked()
    for trial, result in zip(shape_class.trials, shape_class.results, strict=True):
        if len(ranked) < 2 or result.native_us < _LIMITED_BY_POWER_US:
            continue
        finalists = dict.fromkeys([*ranked[:2], *([shape_class.default] if shape_class.default in ranked else [])])
        contenders: dict[Hashable, Contender] = {"native": trial.run(is_fused=False)}
        contenders.update({one: _run_as(shape_class.space, trial, one) for one in finalists})
        calls = math.ceil(seconds * 1e6 / result.native_us / 2)
        with trial.case.surroundings(trial.shape):
            timings = measure(contenders, device=session.device, repetitions=calls, warmup=calls, interleaved=False)
        result.native_us = timings.pop("native").median_us
        result.times_us = {one: timing.median_us for one, timing in timings.items()}


def _run_as(space: SearchSpace[Any, Any], trial: OpCalls, candidate: Hashable) -> Contender:
    def run(index: int) -> list[torch.Tensor]:
        call = trial.calls[index % len(trial.calls)]
        return list(space.run_as(call, trial.context, candidate)(*space.case.op.inputs(call)))

    return run


def _compile_all(tried: Sequence[tuple[SearchSpace[Any, Any], OpCalls, Hashable]], session: BenchSession) -> None:
    """Compiles the kernels of all that is tried, each by one of the ranks, several at a time, so that every rank finds
    them in Triton's cache (collective; ranks of one machine share that cache)."""
    by_kernel: dict[Hashable, Callable[[], None]] = {}
    for space, trial, candidate in tried:
        found = space.compile(trial.calls[0], trial.context, candidate)
        if found is not None:
            by_kernel.setdefault((space.case.op.name, found[0]), found[1])
    if is_interpreter():
        return
    from triton import AsyncCompileMode

    mine = list(by_kernel.values())[session.rank :: session.world_size]
    with ThreadPoolExecutor(_COMPILER_THREADS) as executor, AsyncCompileMode(executor):
        for compile_one in mine:
            compile_one()
    torch.cuda.synchronize(session.device)
    dist.barrier()


def _has_native_bits(shape_class: ShapeClass, trial: OpCalls, candidate: Hashable, session: BenchSession) -> bool:
    fused: Callable[[int], Any] = _run_as(shape_class.space, trial, candidate)
    native = trial.run(is_fused=False)
    if session.equal(list(fused(0)), list(native(0))):
        return True
    shape_class.differing.append(candidate)
    if session.rank == 0:
        get_logger("tune").warning("%s: bits differ from native's with %s", shape_class.name, candidate)
    return False


def _time(
    space: SearchSpace[Any, Any],
    trial: OpCalls,
    result: Result,
    candidates: Sequence[Hashable],
    turns: Turns,
    session: BenchSession,
    *,
    first: bool,
) -> None:
    contenders: dict[Hashable, Contender] = {"native": trial.run(is_fused=False)}
    if first:
        parts = trial.case.parts(trial.calls[0], trial.context)
        contenders.update({name: lambda index, name=name: parts[name]() for name in _PARTS if name in parts})
    names = list(contenders)
    contenders.update({candidate: _run_as(space, trial, candidate) for candidate in candidates})
    timings = measure(contenders, device=session.device, repetitions=turns.repetitions, warmup=1, passes=turns.rounds)
    times = {name: timing.median_us for name, timing in timings.items()}
    # Drift between the rounds is taken out by what both have timed: native.
    scale = 1.0 if first else result.native_us / times["native"]
    for candidate in candidates:
        result.times_us.setdefault(candidate, times[candidate] * scale)
    result.num_tried = len(result.times_us)
    if first:
        result.native_us = times["native"]
        result.parts_us = {str(name): times[name] for name in names if name != "native"}
