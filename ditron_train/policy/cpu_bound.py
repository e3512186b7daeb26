"""Whether the job is CPU-bound at an op whose fused path takes more host time than stock Megatron.

Comparisons measure device time only, since in training the host is usually ahead of the device. If it is not, the
fused path's additional host time lengthens the step. This cannot be known before the job runs, so it is checked while
it runs.
"""

from __future__ import annotations

import itertools
import time
import weakref
from typing import NamedTuple

import torch

from ditron_train.policy.plan import Entry
from ditron_train.policy.uninitialized import is_filling
from ditron_train.runtime.device import is_capturing

_FIRST = 12  # calls that compile kernels and compare
_WINDOW = 32  # calls that are looked at, then twice as many each time
_MIN_WINDOWS, _MOST_WINDOWS, _WARM_UP_S = 3, 7, 20.0
_CALLS_OF_A_LATE_LOOK = 3.0  # at which what the host takes longer counts
_MIN_LOOKS = 16  # of another op that say something

_RECENT_S = 5.0  # what another op's looks say holds for so long


class _Window(NamedTuple):
    """What one window of an op's calls showed."""

    device: torch.device
    share: float
    looked_at_s: float
    number: int  # of the op's windows, from 1


_watching: weakref.WeakSet[CpuBound] = weakref.WeakSet()
_last_windows: dict[int, _Window] = {}  # that are over, by the number of who looked
_numbers = itertools.count()


class CpuBound:
    """Samples, at calls of one op and shape, how often the device has nothing left to run.

    Args:
        device: A GPU.
        gain_us: Device time that the fused path saves.
        longer_us: Host time that the fused path adds.

    A job's first steps exaggerate: its host loads and compiles what runs first. So a CPU-bound window of calls is
    followed by another one, and the last one counts; one window that is not CPU-bound is enough.

    Attributes:
        is_over: Whether a window has ended; the same on all ranks that make the same calls.
    """

    def __init__(self, device: torch.device, gain_us: float, longer_us: float) -> None:
        self._device, self._gain_us, self._longer_us = device, gain_us, longer_us
        self._calls = self._looks = self._late = 0
        self._num_windows, self._first, self._last = 1, _FIRST, _FIRST + _WINDOW
        self._is_closed = False
        self._begun_at_s = self._looked_at_s = time.monotonic()
        self._number = next(_numbers)
        _watching.add(self)

    @property
    def is_over(self) -> bool:
        """Whether the window has ended."""
        return self._calls >= self._last

    def count(self) -> None:
        """Counts a call of the op. Calls of an evaluation, which have no backward, do not count, nor do calls in which
        new tensors are filled, which take more host time."""
        if self._counts():
            self._calls += 1
            self.look()

    def count_within(self) -> bool:
        """As ``count``, unless this call would end the window: then it is not counted, and False is returned."""
        if self._counts() and self._calls + 1 >= self._last:
            return False
        self.count()
        return True

    def _counts(self) -> bool:
        return torch.is_grad_enabled() and not is_capturing(self._device) and not is_filling()

    def look(self) -> None:
        """Checks, at a call or at its backward, whether the current stream is idle, so that the CPU has fallen
        behind."""
        is_over = self._is_closed or is_capturing(self._device) or is_filling()
        if self._first < self._calls <= self._last and not is_over:
            self._looks += 1
            self._looked_at_s = time.monotonic()
            self._late += int(torch.cuda.current_stream(self._device).query())

    def lateness(self) -> float:
        """Ends the sampling and returns the share of samples at which the device waited for the host.

        If another op's recent samples show a larger share, it is theirs, but not from that op's first calls if this op
        is past its own: after a long kernel a sample finds work queued although the host's lead was used up just
        before, and will be after the next short kernel.
        """
        self._is_closed = True
        since_s = time.monotonic() - _RECENT_S
        for number in [one for one, window in _last_windows.items() if window.looked_at_s < since_s]:
            del _last_windows[number]
        mine = self._window()
        windows = {**_last_windows, **{one._number: one._window() for one in _watching if one._looks >= _MIN_LOOKS}}
        _last_windows[self._number] = windows[self._number] = mine
        min_windows, here = min(self._num_windows, _MIN_WINDOWS), self._device
        announced = (one for one in windows.values() if one.device == here and one.looked_at_s >= since_s)
        return max((one.share for one in announced if one.number >= min_windows), default=mine.share)

    def _window(self) -> _Window:
        return _Window(self._device, self._late / max(self._looks, 1), self._looked_at_s, self._num_windows)

    @property
    def age_s(self) -> float:
        """Seconds since this object was made."""
        return time.monotonic() - self._begun_at_s

    def looks_on(self, age_s: float) -> bool:
        """Whether a CPU-bound window may still belong to the job's first steps (``age_s``: the largest of all ranks):
        then the next window begins."""
        is_warm = self._num_windows >= _MIN_WINDOWS and age_s >= _WARM_UP_S
        if is_warm or self._num_windows >= _MOST_WINDOWS:
            return False
        self._first, self._last = self._last, self._last + (_WINDOW << self._num_windows)
        self._num_windows += 1
        self._looks = self._late = 0
        self._is_closed = False
        return True

    def unsupported_reason(self, lateness: float) -> str | None:
        """Why the op runs natively if the job is CPU-bound at this share of its calls, or None.

        If the job is CPU-bound, the step takes as long as the host, and device time that is saved is worth nothing.
        This holds at more calls than those whose sample found nothing queued, since the host's lead is used up before
        each of these (in a traced step in which a third of the samples found nothing queued, nearly all of the
        additional host time was lost).
        """
        late = min(1.0, _CALLS_OF_A_LATE_LOOK * lateness)
        if late * self._longer_us <= (1.0 - late) * self._gain_us:
            return None
        return (
            f"the job is CPU-bound at {late:.0%} of its calls (nothing was queued at {lateness:.0%}), and takes "
            f"{self._longer_us:.0f} us longer for it; the device gains {self._gain_us:.0f} us at the others"
        )


def cpu_bound_of(decision: Entry, device: torch.device) -> CpuBound | None:
    """The sampler for the op that was decided about; None if its fused path adds no host time."""
    if device.type != "cuda" or decision.native_us is None or decision.ditron_us is None:
        return None
    gain_us = decision.native_us - decision.ditron_us
    return CpuBound(device, gain_us, decision.host_longer_us) if decision.host_longer_us > 0 else None
