"""What the device did in one step of two jobs (``--ditron-record-trace``), side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from ditron_train.megatron.plugin.record_trace import trace_path
from ditron_train.runtime.errors import SettingError
from ditron_train.tools.compare.steps import Job
from ditron_train.tools.tables import terminal
from ditron_train.tools.trace.phases import phases_us, show_phases
from ditron_train.tools.trace.timeline import Interval, exposed, read_chrome_trace, total_us


@dataclass(frozen=True)
class StepTrace:
    """One step on one rank."""

    step: int
    rank: int
    intervals: list[Interval]


def is_traced(job: Job) -> bool:
    """Whether the job's notes name a trace."""
    return job.header.get("trace") is not None


def read_step_trace(folder: Path, job: Job) -> StepTrace:
    """Reads the trace that stands beside a job's notes.

    Raises:
        SettingError: The notes name none, or it is not there, cannot be read, or holds nothing that ran.
    """
    if not is_traced(job):
        raise SettingError(f"the job in {folder} recorded no trace: start it with --ditron-record-trace middle, too")
    try:
        step, rank = (int(job.header["trace"][name]) for name in ("step", "rank"))
    except (KeyError, TypeError, ValueError):
        raise SettingError(f"the notes in {folder} name no trace: {job.header['trace']}") from None
    path = trace_path(folder, rank)
    try:
        intervals = read_chrome_trace(path)
    except FileNotFoundError:
        raise SettingError(f"no trace {path}: did the job end before step {step}?") from None
    except (OSError, ValueError) as error:
        raise SettingError(f"cannot read the trace: {error}") from None
    if not intervals:
        raise SettingError(f"{path} holds nothing that ran")
    return StepTrace(step, rank, intervals)


def trace_table(native: StepTrace, fused: StepTrace) -> dict[str, list[float | None]]:
    """`phases_us` of both, native's first, in milliseconds."""
    phases = [phases_us(trace.intervals) for trace in (native, fused)]
    return {
        words.strip(): [None if phase[words] is None else round((phase[words] or 0.0) / 1e3, 2) for phase in phases]
        for words in phases[0]
    }


def _gained(native: StepTrace, fused: StepTrace, times_ms: tuple[Sequence[float], Sequence[float]]) -> str | None:
    """How much of the communication that nothing hid is hidden, and how much of it the step gained; None without
    any."""
    before, after = (total_us(exposed(trace.intervals)) / 1e3 for trace in (native, fused))
    if not before:
        return None
    gained_ms = mean(times_ms[0]) - mean(times_ms[1])
    return (
        f"communication that nothing hid: {before:.2f} ms natively, {100 * (1 - after / before):.0f} % of it hidden "
        f"with ditron_train; the step gained {gained_ms:.2f} ms, {100 * gained_ms / before:.0f} % of it"
    )


def show_traces(
    native: StepTrace, fused: StepTrace, *, times_ms: tuple[Sequence[float], Sequence[float]] | None = None
) -> None:
    """Prints both tables, how the GPU's clock differed, and, with the steps' times, what became of communication.

    Raises:
        SettingError: They are of different ranks.
    """
    if native.rank != fused.rank:
        raise SettingError(
            f"the traces are of different ranks: {native.rank} natively, {fused.rank} with ditron_train"
        )
    steps = (
        str(native.step) if native.step == fused.step else f"{native.step} natively, {fused.step} with ditron_train"
    )
    show_phases(f"rank {native.rank} in step {steps}", native.intervals, fused.intervals)
    gained = None if times_ms is None else _gained(native, fused, times_ms)
    if gained is not None:
        terminal().print(gained, highlight=False)
