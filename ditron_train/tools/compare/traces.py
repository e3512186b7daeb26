"""What the device did in one step of two jobs (``--ditron-record-trace``), side by side."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from rich.table import Table

from ditron_train.megatron.plugin.record_trace import trace_path
from ditron_train.runtime.errors import SettingError
from ditron_train.tools.compare.steps import Job
from ditron_train.tools.tables import terminal
from ditron_train.tools.trace.timeline import (
    Interval,
    exposed,
    idle,
    is_gemm,
    not_launched,
    read_chrome_trace,
    total_us,
    union,
)

_KERNELS = 10
_NAME_LENGTH = 56
_TOUCH_US = 0.5  # kernels behind each other overlap by this much at most in a trace's times


@dataclass(frozen=True)
class StepTrace:
    """One step on one rank."""

    step: int
    rank: int
    intervals: list[Interval]


@dataclass(frozen=True)
class KernelTime:
    """Kernels of one name in the two jobs, native's first: how many, and how long all of them together."""

    name: str
    counts: tuple[int, int]
    us: tuple[float, float]

    @property
    def difference_us(self) -> float:
        """By how much ours take longer."""
        return self.us[1] - self.us[0]


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


def phases_us(intervals: Sequence[Interval]) -> dict[str, float | None]:
    """How long what went on, in microseconds, by the words that the table shows; None where the trace does not tell.

    GEMMs, other computation and communication may run at once; communication that is not hidden and nothing never do.
    """
    gemms = [interval for interval in intervals if is_gemm(interval)]
    others = [interval for interval in intervals if interval.kind == "compute" and not is_gemm(interval)]
    tells = any(interval.launched_us is not None for interval in intervals)
    return {
        "the step, from its first kernel to its last": max(i.end_us for i in intervals)
        - min(i.start_us for i in intervals),
        "GEMMs, with communication in them or without": total_us(union(gemms)),
        "other computation": total_us(union(others)),
        "communication: moved or waited for": total_us(union(i for i in intervals if i.kind == "communication")),
        "  of it not hidden: nothing is computed": total_us(exposed(intervals)),
        "nothing runs": total_us(idle(intervals)),
        "  of it the host is late: not launched yet": total_us(not_launched(intervals)) if tells else None,
    }


def short_name(name: str) -> str:
    """A kernel's name without its result, parameters and namespaces, cut where it is long."""
    name = re.sub(r"^void ", "", name.replace("(anonymous namespace)", "anonymous"))
    if name.endswith(")") and not name.startswith("Mem"):  # Memcpy PtoP (Device -> Device)
        depth = 0
        for place in range(len(name) - 1, -1, -1):
            depth += {")": 1, "(": -1}.get(name[place], 0)
            if depth == 0:
                name = name[:place]
                break
    name = re.sub(r"\w+::", "", name)
    return name if len(name) <= _NAME_LENGTH else f"{name[: _NAME_LENGTH - 3]}..."


def kernel_differences(
    native: Sequence[Interval], ours: Sequence[Interval], count: int = _KERNELS
) -> list[KernelTime]:
    """The ``count`` names whose total times differ most, the largest difference first."""
    found: defaultdict[str, list[list[float]]] = defaultdict(lambda: [[], []])
    for job, intervals in enumerate((native, ours)):
        for interval in intervals:
            found[short_name(interval.name)][job].append(interval.end_us - interval.start_us)
    times = [KernelTime(name, (len(a), len(b)), (sum(a), sum(b))) for name, (a, b) in found.items()]
    return sorted(times, key=lambda time: (-abs(time.difference_us), time.name))[:count]


def alike_us(native: Sequence[Interval], ours: Sequence[Interval]) -> tuple[float, float] | None:
    """How long those computations took in the two jobs that ran alike, by name and number, with nothing beside them;
    None without any.

    They do the same work, so what differs is the clock that the GPU held: lower where it is warm, or has fewer waits
    to cool down in.
    """
    one, other = (_alone(intervals) for intervals in (native, ours))
    names = [name for name in one if len(one[name]) == len(other[name])]
    return (sum(sum(one[name]) for name in names), sum(sum(other[name]) for name in names)) if names else None


def _alone(intervals: Sequence[Interval]) -> defaultdict[str, list[float]]:
    """By name, how long computations took beside which nothing ran."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    in_order = sorted(intervals, key=lambda interval: interval.start_us)
    nexts = [interval.start_us for interval in in_order[1:]] + [math.inf]
    busy_until = -math.inf
    for interval, next_start in zip(in_order, nexts):
        is_alone = busy_until <= interval.start_us + _TOUCH_US and next_start >= interval.end_us - _TOUCH_US
        if is_alone and interval.kind == "compute":
            found[interval.name].append(interval.end_us - interval.start_us)
        busy_until = max(busy_until, interval.end_us)
    return found


def trace_table(native: StepTrace, ours: StepTrace) -> dict[str, list[float | None]]:
    """`phases_us` of both, native's first, in milliseconds."""
    phases = [phases_us(trace.intervals) for trace in (native, ours)]
    return {
        words.strip(): [None if phase[words] is None else round((phase[words] or 0.0) / 1e3, 2) for phase in phases]
        for words in phases[0]
    }


def _gained(native: StepTrace, ours: StepTrace, times_ms: tuple[Sequence[float], Sequence[float]]) -> str | None:
    """How much of the communication that nothing hid is hidden, and how much of it the step gained; None without
    any."""
    before, after = (total_us(exposed(trace.intervals)) / 1e3 for trace in (native, ours))
    if not before:
        return None
    gained_ms = mean(times_ms[0]) - mean(times_ms[1])
    return (
        f"communication that nothing hid: {before:.2f} ms natively, {100 * (1 - after / before):.0f} % of it hidden "
        f"with ditron_train; the step gained {gained_ms:.2f} ms, {100 * gained_ms / before:.0f} % of it"
    )


def show_traces(
    native: StepTrace, ours: StepTrace, *, times_ms: tuple[Sequence[float], Sequence[float]] | None = None
) -> None:
    """Prints both tables, how the GPU's clock differed, and, with the steps' times, what became of communication.

    Raises:
        SettingError: They are of different ranks.
    """
    if native.rank != ours.rank:
        raise SettingError(f"the traces are of different ranks: {native.rank} natively, {ours.rank} with ditron_train")
    steps = str(native.step) if native.step == ours.step else f"{native.step} natively, {ours.step} with ditron_train"
    console = terminal()
    on_cpu = all(interval.lane.startswith("CPU") for trace in (native, ours) for interval in trace.intervals)
    if on_cpu:
        console.print("the traces hold no GPU's work: what follows is the host's GEMMs and collectives")
    console.print(
        _phase_table(f"rank {native.rank} in step {steps}, ms", phases_us(native.intervals), phases_us(ours.intervals))
    )
    console.print(_kernel_table(kernel_differences(native.intervals, ours.intervals)))
    alike = alike_us(native.intervals, ours.intervals)
    if alike is not None and not on_cpu:
        console.print(
            f"what both ran alike with nothing beside it: {_ms(alike[0])} and {_ms(alike[1])} ms, "
            f"{alike[1] / alike[0]:.3f} of native's "
            "time, by the clock that the GPU held",
            highlight=False,
        )
    gained = None if times_ms is None else _gained(native, ours, times_ms)
    if gained is not None:
        console.print(gained, highlight=False)


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _phase_table(title: str, native: dict[str, float | None], ours: dict[str, float | None]) -> Table:
    table = _table(title, "what the device does", "native", "ours", "difference")
    for words, before in native.items():
        after = ours[words]
        change = "-" if before is None or after is None else _signed_ms(after - before)
        table.add_row(words, _ms(before), _ms(after), change)
    return table


def _kernel_table(kernels: Sequence[KernelTime]) -> Table:
    columns = ("native, calls", "ms", "ours, calls", "ms", "difference")
    table = _table(f"the {len(kernels)} kernels whose time differs most", "kernel", *columns)
    for kernel in kernels:
        counts, times = map(str, kernel.counts), map(_ms, kernel.us)
        cells = [cell for pair in zip(counts, times) for cell in pair]
        table.add_row(kernel.name, *cells, _signed_ms(kernel.difference_us))
    return table


def _ms(us: float | None) -> str:
    return "-" if us is None else f"{us / 1e3:.2f}"


def _signed_ms(us: float) -> str:
    return f"{us / 1e3:+.2f}"
