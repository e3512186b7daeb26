"""``OpRecorder``: frequent ops of a context, or parts of them, are recorded and replayed as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Protocol

import torch

from ditron_train.stream import driver
from ditron_train.stream.events import current_handle, own_stream
from ditron_train.stream.recorded_graph import RecordedSequences


class _Streams(Protocol):
    """What a recorder knows of its ``OpContext``."""

    device: torch.device
    comm_handle: int
    is_cuda: bool
    is_joined: bool


class OpRecorder:
    """Recordings of one context: parts of ops on its communication stream, and whole ops.

    Args:
        context: The context of the ops.

    Attributes:
        is_enabled: Whether anything is recorded: on CUDA, with ``cuda.bindings``.
        is_capturing: Whether the current call is captured into a CUDA graph: then nothing is recorded or replayed.
        sequences: The recordings.
    """

    def __init__(self, context: _Streams) -> None:
        self._context = context
        self.is_enabled = context.is_cuda and driver.has_driver() and not torch.version.hip
        self.is_capturing = False
        self.sequences = RecordedSequences()

    def run(self, key: Hashable, enqueue: Callable[[], None], copied: Sequence[int]) -> None:
        """Runs what ``enqueue`` puts onto the communication stream, which must be the same for the same ``key``; it is
        recorded if it comes often. ``copied``: as for ``stream.recorded_graph.RecordedSequences.repeat``."""
        if not self.is_enabled or self.is_capturing:
            enqueue()
        elif not self.sequences.repeat(key, self._context.comm_handle, copied):
            enqueue()
            self.sequences.remember(key, enqueue, self._context.comm_handle, copied)

    def repeat(self, key: Hashable, copied: Sequence[int], *, forks: bool = True) -> bool:
        """Runs the op that is recorded for ``key`` on the current stream, including its part on the communication
        stream.

        Its order with other streams is that of an op without a recording. It runs after the communication stream's
        work since the current stream has waited for that; if the current stream has yet to wait for an op that was
        started (``start_all_gather``), an op that ``forks`` is not replayed.
        """
        if not self.is_enabled or self.is_capturing or (forks and not self._context.is_joined):
            return False
        return self.sequences.repeat(key, current_handle(self._context.device), copied)

    def remember(self, key: Hashable, enqueue: Callable[[], object], copied: Sequence[int]) -> None:
        """Called after an op that was not replayed. ``enqueue`` puts the op onto the current stream, and forks and
        joins the communication stream; it must allocate nothing, and do the same for the same ``key``."""
        if self.is_enabled and not self.is_capturing:
            captured = _recording_stream(self._context.device)
            self.sequences.remember(
                key,
                lambda: self._enqueue_on(captured, enqueue),
                current_handle(self._context.device),
                copied,
                captured.cuda_stream,
            )

    def _enqueue_on(self, stream: torch.cuda.Stream, enqueue: Callable[[], object]) -> None:
        is_joined = self._context.is_joined
        self.is_capturing = True  # parts with recordings of their own become part of this one
        try:
            with torch.cuda.stream(stream):
                enqueue()
        finally:
            self.is_capturing, self._context.is_joined = False, is_joined


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that ops are recorded on; nothing runs on it."""
    return own_stream(device)
