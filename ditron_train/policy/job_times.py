"""Times of both paths at calls of the job itself, without extra runs or waits for the device.

If both paths are bitwise identical, either may run at any call. So the calls of one range of rows alternate between
the paths, with events around each forward and backward, until both series are long enough. The events are read after
they have completed; then the ranks' hosts exchange medians once.

Calls whose communication runs concurrently with another microbatch's computation have no time of their own. What such
a schedule runs as one, a forward with the backward of another microbatch, is timed instead (``run_of_schedule``), and
the paths alternate from training step to training step (``StepTimes``).
"""

from __future__ import annotations

import math
import statistics
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.policy.uninitialized import is_filling
from ditron_train.symm.exchange import exchange

_WARM_UP = 4  # calls: of each path two, which load kernels
_FIRST_LOOK, _LAST_LOOK = 28, 896  # calls; each look comes at twice as many
_WARM_UP_STEPS = 2  # training steps: of each path one
_FIRST_LOOK_STEPS, _LAST_LOOK_STEPS = 4, 64  # training steps: native, fused, fused, native, again and again
_MIN = 8  # times of each path
_CLEAR = 2.5  # standard errors of the difference of two medians
_CLEAR_STEPS = 4.0  # times of one training step depend on each other
_ERROR_OF_MEDIAN = 1.2533 * 1.4826  # of normal values, by their median absolute deviation

_Series = tuple[int, float, float]  # number of times, median, standard error


class JobTimes:
    """Times of one kind of call in one range of rows, of both paths, and which path is faster.

    Args:
        group: The ranks that make these calls together.

    Attributes:
        is_fused: Which path runs; None while both are measured.
        native_us, fused_us: Medians per row, of the slowest rank, once they are known.
    """

    _first_look, _last_look, _clear = _FIRST_LOOK, _LAST_LOOK, _CLEAR

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._calls, self._next_look = 0, self._first_look
        self._open: list[TimedCall | TimedMicrobatch] = []
        self._us: dict[bool, list[float]] = {False: [], True: []}
        self.is_fused: bool | None = None
        self.native_us = self.fused_us = math.nan

    def next_call(self, rows: int, has_backward: bool) -> TimedCall:
        """The observer of the next call, which all ranks make; the paths alternate."""
        self._calls += 1
        call = TimedCall(rows, self._calls % 2 == 0, has_backward)
        if self._calls > _WARM_UP and not is_filling():
            self._open.append(call)
        return call

    @property
    def is_due(self) -> bool:
        """Whether ``look`` has to be called before the next call; the same on all ranks."""
        return self.is_fused is None and self._calls >= self._next_look

    def look(self) -> None:
        """Compares both series over all ranks (collective, between the hosts). Sets ``is_fused`` once they differ by
        more than their noise, or if they have not done so for long."""
        still_open = []
        for call in self._open:
            us = call.us_per_row()
            if us is None:
                still_open.append(call)
            else:
                self._us[call.is_fused].append(us)
        self._open = still_open[-_LAST_LOOK:]
        gathered = exchange(self._group, [_series(self._us[False]), _series(self._us[True])])
        min_rows = min(series[0] for rank in gathered for series in rank)
        if min_rows >= _MIN:
            self.native_us, self.fused_us = (max(rank[path][1] for rank in gathered) for path in (0, 1))
            noise = max(math.hypot(native[2], fused[2]) for native, fused in gathered)
            if abs(self.native_us - self.fused_us) > self._clear * noise:
                self._settle(self.fused_us < self.native_us)
                return
        if self._calls >= self._last_look:
            self._settle(False)
        self._next_look = min(2 * self._calls, self._last_look) if min_rows >= _MIN else self._calls + self._first_look

    def _settle(self, is_fused: bool) -> None:
        self.is_fused = is_fused
        self._open.clear()


def _series(times: list[float]) -> _Series:
    if len(times) < _MIN:
        return len(times), math.inf, math.inf
    median = statistics.median(times)
    deviation = statistics.median(abs(time - median) for time in times)
    return len(times), median, _ERROR_OF_MEDIAN * deviation / math.sqrt(len(times))


class TimedCall:
    """An ``Observer`` of one call: events around its forward, and around its backward if it has one.

    Args:
        rows: Rows of the call.
        is_fused: Whether it runs fused.
        has_backward: Whether a backward follows, whose time is added.
    """

    def __init__(self, rows: int, is_fused: bool, has_backward: bool) -> None:
        self._rows, self.is_fused = rows, is_fused
        self._spans = [[_event(), _event()] for _ in range(1 + has_backward)]
        self._recorded = 0

    def run(self, x: torch.Tensor, run: Callable[[], Any], multiplied: Callable[[], torch.Tensor]) -> Any:
        """See ``Observer``."""
        self._spans[0][0].record()
        result = run()
        self._spans[0][1].record()
        self._recorded = 1
        y = result[0] if isinstance(result, tuple) else result
        if len(self._spans) > 1 and y.requires_grad:
            hooked: Any = y, x
            hooked[0].register_hook(lambda grad: self._spans[1][0].record())
            hooked[1].register_hook(self._end_backward)
        return result

    def _end_backward(self, grad: torch.Tensor) -> None:
        self._spans[1][1].record()
        self._recorded = 2

    def us_per_row(self) -> float | None:
        """Device time per row; None until the events have completed."""
        if self._recorded < len(self._spans) or not all(end.query() for _, end in self._spans):
            return None
        return float(sum(start.elapsed_time(end) for start, end in self._spans)) * 1e3 / self._rows


class TimedRun:
    """Events around one run of a schedule, on the stream that waits for all streams of the run.

    Args:
        is_combined: Whether it is the forward of one microbatch and the backward of another.
    """

    def __init__(self, is_combined: bool) -> None:
        self.is_combined = is_combined
        self._start, self._end = _event(), _event()
        self._start.record()

    def end(self) -> None:
        """The run has been enqueued."""
        self._end.record()

    def us(self) -> float | None:
        """Device time of the run; None until it has completed."""
        return float(self._start.elapsed_time(self._end)) * 1e3 if self._end.query() else None


class TimedMicrobatch:
    """Device time of one microbatch in a step, forward and backward, with a part of filling and draining the pipeline.

    Args:
        is_fused: The step's path.
        runs: Runs, and their shares in this microbatch.
    """

    def __init__(self, is_fused: bool, runs: Sequence[tuple[TimedRun, float]]) -> None:
        self.is_fused, self._runs = is_fused, runs

    def us_per_row(self) -> float | None:
        """The sum, as of one row; None until all runs have completed."""
        times = [us * share for run, share in self._runs if (us := run.us()) is not None]
        return sum(times) if len(times) == len(self._runs) else None


def microbatches_of(is_fused: bool, runs: Sequence[TimedRun]) -> list[TimedMicrobatch]:
    """A step's runs as one time for each combined run, to which runs of a forward or a backward alone, when a
    pipeline is filled and drained, add equal parts; as one time if there is no combined run."""
    combined = [run for run in runs if run.is_combined]
    shared = [(run, 1.0 / max(len(combined), 1)) for run in runs if not run.is_combined]
    if not combined:
        return [TimedMicrobatch(is_fused, shared)] if shared else []
    return [TimedMicrobatch(is_fused, [(run, 1.0), *shared]) for run in combined]


class StepTimes(JobTimes):
    """Times of a schedule's runs, one path for all of a training step's calls: one step of each path to warm up, then
    native, fused, fused, native, again and again.

    All ranks of the group run the same schedule, so they agree on the step's number and path without talking.
    """

    _first_look, _last_look, _clear = _FIRST_LOOK_STEPS, _LAST_LOOK_STEPS, _CLEAR_STEPS

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._first_step = _schedule.step
        self._is_fused_now = False
        self.runs: list[TimedRun] = []
        _schedule.watching.add(self)

    def path(self) -> bool:
        """Whether a call in the current step is fused (collective, between the hosts, at the first call of a step in
        which times are compared)."""
        self._calls = number = self._timed_steps
        if self.is_due:
            self.look()
        if self.is_fused is None:
            self._is_fused_now = number == -1 or (number >= 0 and number % 4 in (1, 2))
        else:
            self._is_fused_now = self.is_fused
        return self._is_fused_now

    @property
    def _timed_steps(self) -> int:
        """Steps that were timed before the current one."""
        return _schedule.step - self._first_step - _WARM_UP_STEPS

    def end_step(self) -> None:
        """Keeps the times of the step's runs, but for those of a warm-up; stops if no call came in the step."""
        if self._calls != self._timed_steps:
            _schedule.watching.discard(self)
        elif self._calls >= 0:
            self._open += microbatches_of(self._is_fused_now, self.runs)
        self.runs.clear()


class _Schedule:
    """Where the process is in its schedule: the number of its training step, and what times its runs."""

    def __init__(self) -> None:
        self.step, self._had_backward = 0, False
        self.watching: weakref.WeakSet[StepTimes] = weakref.WeakSet()

    @contextmanager
    def run(self, has_forward: bool, has_backward: bool) -> Iterator[None]:
        if has_forward and not has_backward and self._had_backward:
            for times in list(self.watching):
                times.end_step()
            self.step += 1  # a pipeline is empty between two steps, and is filled by forwards alone
        self._had_backward = has_backward
        watching = [times for times in self.watching if times.is_fused is None and not is_filling()]
        run = TimedRun(has_forward and has_backward) if watching else None
        try:
            yield
        except BaseException:
            for times in watching:
                times.runs.clear()
            raise
        if run is not None:
            run.end()
            for times in watching:
                times.runs.append(run)


_schedule = _Schedule()


def run_of_schedule(has_forward: bool, has_backward: bool) -> AbstractContextManager[None]:
    """A context around what a schedule runs as one: the forward of one microbatch, the backward of another, or both.
    On entry and exit the current stream has waited for all streams of it."""
    return _schedule.run(has_forward, has_backward)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
