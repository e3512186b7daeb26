"""Stream operations that come again and again in one order, recorded as a CUDA graph: one call of the driver for all of them.

Sends of an AG-GEMM by copy engines (a kernel, then a copy and a flag for each of 3 peers; 4 H200s): 9.5 instead of 19.8 us of the
host's time, the whole op 35 instead of 46 (in another run, at three shapes, 42 to 69 instead of 61 to 87); on the device as before
within 1 %. A recording takes 51 us, and 84 KB of the GPU.

Tried as an experiment, not done here: whole ops as one graph, their GEMMs too, by the addresses of operands and results. Of the
host's time AG-GEMM then takes 17 to 25 us instead of 53 to 87, GEMM-RS by copies 18 to 27 instead of 97 to 168 (three shapes, 4
H200s), on the device as before within 1 %, at the shortest (57 us) within 4 %; equal bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from typing import Any

from ditron_train.runtime.errors import DitronError
from ditron_train.runtime.logs import log_once
from ditron_train.stream import driver

__all__ = ["RecordedSequences"]

_CALLS_BEFORE = 2  # a recording takes as long as five calls: not for what comes once or twice
_MOST_RECORDED = 256
_MOST_COUNTED = 4096
_IDLE_RUNS = 4096  # a recording that has not run in so many may go for another; a training step comes by its own in fewer


class _Recording:
    __slots__ = ("graph", "last_run")

    def __init__(self, graph: Any, last_run: int) -> None:
        self.graph, self.last_run = graph, last_run


class RecordedSequences:
    """Sequences for one stream, by keys that say all that they depend on.

    Bounded: where there are many, the one that has not run for longest goes, but only if it is idle. A step with more
    sequences than are kept would else record each of them anew whenever it comes; so the first stay, and the others run as they
    are. What is freed while it runs ends first (``cuGraphExecDestroy``).
    """

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self._recordings: dict[Hashable, _Recording] = {}
        self._calls: dict[Hashable, int] = {}
        self._most_recorded = _MOST_RECORDED
        self._num_runs = 0
        self._full_until = 0  # no recording is idle before this run

    def run(self, key: Hashable, enqueue: Callable[[], None]) -> None:
        """Runs what ``enqueue`` puts onto the stream, behind what the stream has; it must do the same for the same ``key``.

        Not while a CUDA graph is captured: one graph would be part of the other.
        """
        self._num_runs += 1
        recording = self._recordings.get(key)
        if recording is not None:
            recording.last_run = self._num_runs
            driver.graph_launch(recording.graph, self._stream)
            return
        enqueue()
        calls = self._calls.get(key, 0) + 1
        if calls > _CALLS_BEFORE and self._has_room():
            self._record(key, enqueue)
        else:
            if len(self._calls) >= _MOST_COUNTED:
                self._calls.clear()
            self._calls[key] = calls

    def _has_room(self) -> bool:
        if len(self._recordings) < self._most_recorded:
            return True
        if self._num_runs < self._full_until or not self._most_recorded:
            return False
        key, oldest = min(self._recordings.items(), key=lambda item: item[1].last_run)
        self._full_until = oldest.last_run + _IDLE_RUNS
        if self._num_runs < self._full_until:
            return False
        driver.graph_destroy(self._recordings.pop(key).graph)
        return True

    def _record(self, key: Hashable, enqueue: Callable[[], None]) -> None:
        del self._calls[key]
        try:
            self._recordings[key] = _Recording(driver.graph_record(self._stream, enqueue), self._num_runs)
        except DitronError as error:  # the GPU's memory is full, for instance; what this call asked for has been enqueued
            self._most_recorded = 0
            log_once("recorded sequences", f"stream operations that come again are no longer recorded: {error}")

    def clear(self) -> None:
        """Forgets everything; a sequence that is running ends as if it were kept."""
        recordings, self._recordings, self._calls = self._recordings, {}, {}
        for recording in recordings.values():
            driver.graph_destroy(recording.graph)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.clear()
