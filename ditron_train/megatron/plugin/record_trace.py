"""Records one training step on one rank as a Chrome trace (``--ditron-record-trace``; ``compare`` reads it)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, supported_activities

from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.files import export_trace

MIDDLE = "middle"


@dataclass(frozen=True)
class TraceRequest:
    """What ``--ditron-record-trace`` names.

    Attributes:
        step: Number of the step as Megatron counts, from 1; None: the one in the middle of those that ``compare``
            times.
        rank: That is recorded.
    """

    step: int | None
    rank: int

    def step_of(self, first: int, last: int | None) -> int:
        """The step, of a job that begins with step ``first`` and ends with ``last``; the same on every rank.

        Raises:
            SettingError: The job does not come to that step, or it is the middle that is asked for and no end is
                known.
        """
        if self.step is None and last is None:
            raise SettingError(f"--ditron-record-trace {MIDDLE} needs to know how long the job is (--train-iters)")
        if self.step is None:
            assert last is not None
            num_steps = last - first + 1
            skip = steps_of_warmup(num_steps)
            return first + skip + max(num_steps - skip - 1, 0) // 2
        if self.step < first or (last is not None and self.step > last):
            raise SettingError(
                f"--ditron-record-trace: no step {self.step} in a job of the steps {first} to {last or 'its end'}"
            )
        return self.step


def parse_trace_request(text: str) -> TraceRequest:
    """Reads ``STEP[,RANK]``; STEP is a number or ``middle``, RANK is 0 if it is not given.

    Raises:
        ValueError: It is something else.
    """
    step, _, rank = text.partition(",")
    try:
        request = TraceRequest(None if step == MIDDLE else int(step), int(rank or 0))
    except ValueError:
        request = TraceRequest(0, 0)
    if request.rank < 0 or (request.step is not None and request.step < 1):
        raise ValueError(f"{text!r} is not STEP[,RANK] such as 15 or {MIDDLE},3")
    return request


def steps_of_warmup(num_steps: int) -> int:
    """How many steps at the beginning of a job ``compare`` leaves out of the times, unless it is told."""
    return min(num_steps // 2, 10)


def trace_path(folder: Path, rank: int | str) -> Path:
    """The file of ``rank`` (``*``: a pattern for those of all) among the notes in ``folder``."""
    return folder / f"trace-rank{rank}.json"


class StepTracer:
    """Traces one step on one rank; the other ranks wait if that takes the host long, so that no step is delayed by
    it.

    Args:
        path: Where this rank writes; None: another rank does.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._profiler: profile | None = None

    def start(self) -> None:
        """Before the step. Collective."""
        if self._path is not None:
            # Of a process that replays CUDA graphs it must not be torn down.
            os.environ.setdefault("TEARDOWN_CUPTI", "0")
            gpu, cpu = ProfilerActivity.CUDA, ProfilerActivity.CPU
            self._profiler = profile(activities=[gpu if gpu in supported_activities() else cpu])
            self._profiler.prepare_trace()
        _rendezvous()
        if self._profiler is not None:
            self._profiler.start_trace()

    def stop(self) -> None:
        """After the step; what it launched is waited for, and written. Collective."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if self._profiler is not None:
            self._profiler.stop_trace()
            assert self._path is not None
            export_trace(self._profiler, self._path)
            self._profiler = None
        _rendezvous()


def _rendezvous() -> None:
    dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
