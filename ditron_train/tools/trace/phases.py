"""Where the time went: what the device did natively and fused, side by side."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from ditron_train.tools.tables import terminal
from ditron_train.tools.trace.timeline import (
    Interval,
    exposed,
    idle,
    is_gemm,
    length_us,
    not_launched,
    total_us,
    union,
)

_KERNELS = 10
_NAME_LENGTH = 56
_TOUCH_US = 0.5  # kernels behind each other overlap by this much at most in a trace's times


@dataclass(frozen=True)
class KernelTime:
    """Kernels of one name in the two jobs, native's first: how many, and how long all of them together."""

    name: str
    counts: tuple[int, int]
    us: tuple[float, float]

    @property
    def difference_us(self) -> float:
        """By how much the fused ones take longer."""
        return self.us[1] - self.us[0]


def phases_us(intervals: Sequence[Interval], whole: str = "the step") -> dict[str, float | None]:
    """How long what went on, in microseconds, by the words that the table shows; None if the trace does not tell.

    GEMMs, other computation and communication may run at once; communication that is not hidden and nothing never do.
    """
    gemms = [interval for interval in intervals if is_gemm(interval)]
    others = [interval for interval in intervals if interval.kind == "compute" and not is_gemm(interval)]
    tells = any(interval.launched_us is not None for interval in intervals)
    return {
        f"{whole}, from its first kernel to its last": length_us(intervals),
        "GEMMs, with communication in them or without": total_us(union(gemms)),
        "other computation": total_us(union(others)),
        "communication: moved or waited for": total_us(union(i for i in intervals if i.kind == "communication")),
        "  of it not hidden: nothing is computed": total_us(exposed(intervals)),
        "nothing runs": total_us(idle(intervals)),
        "  of it CPU-bound: not launched yet": total_us(not_launched(intervals)) if tells else None,
    }


def short_name(name: str) -> str:
    """A kernel's name without its result, parameters and namespaces, cut if it is long."""
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
    native: Sequence[Interval], fused: Sequence[Interval], count: int = _KERNELS
) -> list[KernelTime]:
    """The ``count`` names whose total times differ most, the largest difference first."""
    found: defaultdict[str, list[list[float]]] = defaultdict(lambda: [[], []])
    for job, intervals in enumerate((native, fused)):
        for interval in intervals:
            found[short_name(interval.name)][job].append(interval.end_us - interval.start_us)
    times = [KernelTime(name, (len(a), len(b)), (sum(a), sum(b))) for name, (a, b) in found.items()]
    return sorted(times, key=lambda time: (-abs(time.difference_us), time.name))[:count]


def alike_us(native: Sequence[Interval], fused: Sequence[Interval]) -> tuple[float, float] | None:
    """How long those computations took in the two jobs that ran alike, by name and number, with nothing beside them;
    None without any.

    They do the same work, so what differs is the clock that the GPU held: lower when it is warm, or has fewer waits
    to cool down in.
    """
    one, other = (_alone(intervals) for intervals in (native, fused))
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


def at_best(native: Sequence[Interval], fused: Sequence[Interval]) -> str:
    """One sentence: what hiding all communication that is exposed natively would reach, and what the fused path
    did."""
    native_us, fused_us, left_us = length_us(native), length_us(fused), total_us(exposed(native))
    computed_us = native_us - left_us
    reached = f"; fused took {fused_us:.0f} us: {native_us / fused_us:.2f}x"
    if not computed_us:
        return f"natively nothing but communication ran{reached}"
    return (
        f"with none of the {left_us:.0f} us that nothing hides natively the call takes {computed_us:.0f} instead of "
        f"{native_us:.0f} us: at best {native_us / computed_us:.2f}x{reached}"
    )


def show_phases(title: str, native: Sequence[Interval], fused: Sequence[Interval], whole: str = "the step") -> None:
    """Prints what went on, which kernels' times differ most, and how the GPU's clock differed.

    Args:
        title: Of the first table, in which times are milliseconds.
        whole: What the traces are of.
    """
    console = terminal()
    on_cpu = all(interval.lane.startswith("CPU") for interval in (*native, *fused))
    if on_cpu:
        console.print("the traces hold no GPU's work: what follows is the host's GEMMs and collectives")
    console.print(_phase_table(f"{title}, ms", phases_us(native, whole), phases_us(fused, whole)))
    console.print(_kernel_table(kernel_differences(native, fused)))
    alike = alike_us(native, fused)
    if alike is not None and not on_cpu:
        console.print(
            f"what both ran alike with nothing beside it: {_ms(alike[0])} and {_ms(alike[1])} ms, "
            f"{alike[1] / alike[0]:.3f} of native's "
            "time, by the clock that the GPU held",
            highlight=False,
        )


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _phase_table(title: str, native: dict[str, float | None], fused: dict[str, float | None]) -> Table:
    table = _table(title, "what the device does", "native", "fused", "difference")
    for words, before in native.items():
        after = fused[words]
        change = "-" if before is None or after is None else _signed_ms(after - before)
        table.add_row(words, _ms(before), _ms(after), change)
    return table


def _kernel_table(kernels: Sequence[KernelTime]) -> Table:
    columns = ("native, calls", "ms", "fused, calls", "ms", "difference")
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
