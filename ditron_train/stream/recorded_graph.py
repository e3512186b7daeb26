"""Frequent sequences of stream operations, recorded as CUDA graphs: one driver call replays a whole sequence.

This saves half of the host time, and none on the device (``docs/measurements/tp.md``).

A copy in a graph is bound to the allocation that contained its address when it was recorded: with another allocation
at the address, launching the graph ended in a segmentation fault in the driver or a launch failure on the GPU. So a
recording keeps the driver's numbers of the allocations that its copies touch. Kernels in a graph are not bound to
allocations.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch

from ditron_train.runtime.errors import DitronError
from ditron_train.runtime.logs import log_once
from ditron_train.stream import driver

_CALLS_BEFORE = 2  # a recording takes as long as five calls: not for what comes once or twice
_MOST_RECORDED = 512
_MOST_COUNTED = 4096
# A recording that has not run in so many may go for another; a training step comes by its own in fewer.
_IDLE_RUNS = 4096
_MOST_REFUSED = 8  # sequences: each costs as much as five calls, and a GPU whose memory is full refuses all of them

_NEVER = -sys.maxsize  # calls of what is not to be recorded


@cache
def counts_allocations() -> bool:
    """Whether torch's allocator counts its allocations; another allocator may not."""
    return not torch.cuda.is_available() or torch.cuda.get_allocator_backend() == "native"


def _num_allocated() -> int:
    """How often torch has allocated memory of the current GPU."""
    if not counts_allocations():
        return 0
    counts: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict().get("allocation", {})
    return int(counts.get("all", {}).get("allocated", 0))


class _Recording:
    __slots__ = ("allocations", "graph", "last_run")

    def __init__(self, graph: Any, allocations: list[int | None], last_run: int) -> None:
        self.graph, self.allocations, self.last_run = graph, allocations, last_run


class RecordedSequences:
    """Sequences by keys that determine everything they do: ``repeat`` one, or run it and ``remember`` it.

    Their number is bounded. If a new one does not fit, it replaces the least recently used one, but only if that one
    is idle: else a step with more sequences than fit would record all of them again in every step. So the first
    recordings stay, and further sequences run unrecorded. A recording that is freed while it runs ends first
    (``cuGraphExecDestroy``).

    A sequence that cannot be recorded is not tried again; after ``_MOST_REFUSED`` of them nothing new is recorded, and
    existing recordings stay.

    A recording holds addresses, not memory; it is dropped if the memory of its copies belongs to another allocation by
    now. A key with addresses of tensors is valid as long as the caller holds tensors at these addresses, and orders
    its stream after their last writers and before their next ones, as for the operations themselves: on the device the
    graph is one more entry of that stream.
    """

    def __init__(self) -> None:
        self._recordings: dict[Hashable, _Recording] = {}
        self._calls: dict[Hashable, int] = {}
        self._most_recorded = _MOST_RECORDED
        self._num_runs = 0
        self._num_refused = 0
        self._full_until = 0  # no recording is idle before this run

    def repeat(self, key: Hashable, stream: int, copied: Sequence[int] = ()) -> bool:
        """Enqueues what is recorded for ``key`` on the stream; returns False if nothing is recorded.

        Not to be called while a CUDA graph is captured: one graph would become part of the other.

        Args:
            key: Determines everything that the sequence does, ``copied`` included.
            stream: Handle of the stream.
            copied: Addresses of torch's memory that copies of the sequence, not its kernels, read or write.
        """
        self._num_runs += 1
        recording = self._recordings.get(key)
        if recording is None:
            return False
        if recording.allocations != [driver.allocation_of(address) for address in copied]:
            driver.graph_destroy(self._recordings.pop(key).graph)
            return False
        recording.last_run = self._num_runs
        driver.graph_launch(recording.graph, stream)
        return True

    def remember(
        self,
        key: Hashable,
        enqueue: Callable[[], object],
        stream: int,
        copied: Sequence[int] = (),
        captured: int | None = None,
    ) -> None:
        """Called after a run that was not a replay: records the sequence if it comes often.

        Args:
            key: As for ``repeat``.
            enqueue: Puts the sequence onto the stream; it must do the same for the same ``key``. A sequence that
                allocates GPU memory is never recorded: a graph would keep using memory that has been freed.
            stream: The stream that it will be replayed on.
            copied: As for ``repeat``; if the driver does not know one of them, nothing is recorded.
            captured: The stream that ``enqueue`` uses (None: ``stream``). The legacy default stream cannot be
                captured.
        """
        if key in self._recordings:  # one that could not be repeated this time
            return
        calls = self._calls.get(key, 0) + 1
        if calls > _CALLS_BEFORE and self._has_room():
            self._calls.pop(key, None)
            allocations = [driver.allocation_of(address) for address in copied]
            if None not in allocations:
                self._record(key, enqueue, stream, stream if captured is None else captured, allocations)
            return
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

    def _record(
        self, key: Hashable, enqueue: Callable[[], object], stream: int, captured: int, allocations: list[int | None]
    ) -> None:
        graph = None
        try:
            num_allocated = _num_allocated()
            graph = driver.graph_record(captured, enqueue)
            if _num_allocated() == num_allocated:
                driver.graph_upload(graph, stream)  # else the first launch does
                self._recordings[key] = _Recording(graph, allocations, self._num_runs)
                return
        # The GPU's memory is full, or another library's code cannot be recorded; what this call asked for has been
        # enqueued.
        except (DitronError, RuntimeError) as error:
            self._num_refused += 1
            if self._num_refused >= _MOST_REFUSED:
                self._most_recorded = 0
            log_once("recorded sequences", f"stream operations that come again are not recorded: {error}")
        if graph is not None:
            driver.graph_destroy(graph)
        self._calls[key] = _NEVER

    def clear(self) -> None:
        """Drops all recordings; a sequence that is running still ends."""
        recordings, self._recordings, self._calls = self._recordings, {}, {}
        for recording in recordings.values():
            driver.graph_destroy(recording.graph)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.clear()
