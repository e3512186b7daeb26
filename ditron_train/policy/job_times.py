"""Times of both paths at calls of the job itself, without extra runs or waits for the device.

If both paths are bitwise identical, either may run at any call. So the calls of one range of rows alternate between
the paths, with events around each forward and backward, until both series are long enough. The events are read after
they have completed; then the ranks' hosts exchange medians once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.policy.uninitialized import is_filling
from ditron_train.symm.exchange import exchange

_WARM_UP = 4  # calls: of each path two, which load kernels
_FIRST_LOOK, _LAST_LOOK = 28, 896  # calls; each look comes at twice as many
_MIN = 8  # times of each path
_CLEAR = 2.5  # standard errors of the difference of two medians
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

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._calls, self._next_look = 0, _FIRST_LOOK
        self._open: list[TimedCall] = []
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
            if abs(self.native_us - self.fused_us) > _CLEAR * noise:
                self._settle(self.fused_us < self.native_us)
                return
        if self._calls >= _LAST_LOOK:
            self._settle(False)
        self._next_look = min(2 * self._calls, _LAST_LOOK) if min_rows >= _MIN else self._calls + _FIRST_LOOK

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


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
