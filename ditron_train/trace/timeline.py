"""Reads a Chrome trace of ``torch.profiler`` and finds the communication that nothing covers.

A fused kernel counts as computation from its start to its end: waits inside it do not show here, only in its time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Interval", "computation_us", "exposed", "read_chrome_trace", "total_us"]

Kind = Literal["compute", "communication"]
# Kernels that only move or wait for data of other ranks; fused kernels compute, so they are not among them.
_COMMUNICATION = re.compile(r"nccl|gloo|c10d|push_|_push|gather_(start|wait)|agree_|exchange|Memcpy PtoP", re.IGNORECASE)
_CPU_COMPUTE = re.compile(r"^(aten::(mm|addmm|bmm|baddbmm)|ditron_train)\b")


@dataclass(frozen=True)
class Interval:
    """Something that ran on one lane, in microseconds from the start of the trace."""

    lane: str
    kind: Kind
    name: str
    start_us: float
    end_us: float


def read_chrome_trace(path: Path) -> list[Interval]:
    """Returns kernels and copies of the GPU; of a trace without a GPU, GEMMs, ops of ours and collectives of the CPU.

    Raises:
        ValueError: The file is no Chrome trace.
    """
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no Chrome trace: {error!r}") from error
    complete = [event for event in events if event.get("ph") == "X" and event.get("dur", 0) > 0]
    found = [_gpu_interval(event) for event in complete if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not found:
        found = [_cpu_interval(event) for event in complete if event.get("cat") in ("cpu_op", "user_annotation")]
    intervals = [interval for interval in found if interval is not None]
    if not intervals:
        return []
    origin = min(interval.start_us for interval in intervals)
    moved = [Interval(i.lane, i.kind, i.name, i.start_us - origin, i.end_us - origin) for i in intervals]
    return sorted(moved, key=lambda interval: (interval.start_us, interval.lane))


def _gpu_interval(event: dict) -> Interval:
    start, name = float(event["ts"]), event["name"]
    stream = event.get("args", {}).get("stream", event.get("tid"))
    lane = f"copy engine, stream {stream}" if event["cat"] == "gpu_memcpy" else f"stream {stream}"
    kind: Kind = "communication" if _COMMUNICATION.search(name) else "compute"
    return Interval(lane, kind, name, start, start + float(event["dur"]))


def _cpu_interval(event: dict) -> Interval | None:
    start, name = float(event["ts"]), event["name"]
    if _CPU_COMPUTE.search(name):
        kind: Kind = "compute"
    elif _COMMUNICATION.search(name):
        kind = "communication"
    else:
        return None
    return Interval(f"CPU thread {event.get('tid')}", kind, name, start, start + float(event["dur"]))


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def exposed(intervals: Sequence[Interval]) -> list[tuple[float, float]]:
    """Returns the spans in which data moved between ranks and nothing was computed: the communication not hidden."""
    compute = _union((i.start_us, i.end_us) for i in intervals if i.kind == "compute")
    left: list[tuple[float, float]] = []
    for start, end in _union((i.start_us, i.end_us) for i in intervals if i.kind == "communication"):
        for low, high in compute:
            if high <= start or low >= end:
                continue
            if low > start:
                left.append((start, low))
            start = max(start, high)
        if start < end:
            left.append((start, end))
    return left


def total_us(spans: Iterable[tuple[float, float]]) -> float:
    """Length of spans that do not overlap."""
    return sum(end - start for start, end in spans)


def computation_us(intervals: Sequence[Interval]) -> float:
    """Time in which something was computed, communication beside it or not."""
    return total_us(_union((i.start_us, i.end_us) for i in intervals if i.kind == "compute"))
