"""Reads a Chrome trace of ``torch.profiler`` and finds the exposed communication.

A fused kernel counts as computation from its start to its end: waits inside it do not show here, only in its time.
Lanes are streams, split into copy engines, kernels that compute, and kernels that communicate, by the number of SMs
that they take.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ditron_train.runtime.files import parse_json, read_regular

Kind = Literal["compute", "communication"]
# Kernels that only move or wait for data of other ranks; fused kernels compute, so they are not among them.
_COMMUNICATION = re.compile(
    r"nccl|gloo|c10d|nvshmem|userbuffers|deep_ep|push_|_push|gather_start|(gather|keys)_wait|exchange|receive_kernel|arrived|await_|notify_"
    r"|agree_kernel|return_rows|sum_returned|Memcpy PtoP",
    re.IGNORECASE,
)
# cuBLAS's and CUTLASS's, the fused path alone or fused with communication, the optimizer's; attention is made of
# CUTLASS, too, and is none.
_GEMM = re.compile(
    r"^(?!.*(flash|fmha|sdpa|attn)).*(nvjet|gemm|gemv|splitKreduce|wgrad_kernel|addmm_kernel|symmetric_kernel|aten::\w*mm\b)",
    re.IGNORECASE,
)
# What stands in front of the recorded call: a wait that lets the host get ahead, and a barrier.
_HEAD_START, _BARRIER = re.compile("spin_kernel"), re.compile("nccl.*AllReduce")
_CPU_COMPUTE = re.compile(r"^(aten::(mm|addmm|bmm|baddbmm)|ditron_train)\b")


@dataclass(frozen=True)
class Interval:
    """Something that ran on one lane, in microseconds from the start of the trace.

    ``launched_us``: when the host had handed it to the device; None if the trace does not tell.
    """

    lane: str
    kind: Kind
    name: str
    start_us: float
    end_us: float
    launched_us: float | None = None


def read_chrome_trace(path: Path) -> list[Interval]:
    """Returns kernels and copies of the GPU; of a trace without a GPU, GEMMs, ops of this package and collectives of
    the CPU.

    Raises:
        ValueError: The file is no Chrome trace.
    """
    try:
        return _intervals(parse_json(read_regular(path))["traceEvents"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path} is no Chrome trace: {error!r}") from error


def _intervals(events: Sequence[dict[str, Any]]) -> list[Interval]:
    complete = [event for event in events if event.get("ph") == "X" and event.get("dur", 0) > 0]
    calls = {_correlation(event): event for event in complete if event.get("cat") in ("cuda_runtime", "cuda_driver")}
    found: list[Interval | None] = [
        _gpu_interval(event, calls) for event in complete if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    if not found:
        found = [_cpu_interval(event) for event in complete if event.get("cat") in ("cpu_op", "user_annotation")]
    intervals = _without_device_hold([interval for interval in found if interval is not None])
    if not intervals:
        return []
    origin = min(interval.start_us for interval in intervals)
    moved = [
        replace(
            i, start_us=i.start_us - origin, end_us=i.end_us - origin,
            launched_us=None if i.launched_us is None else i.launched_us - origin,
        )
        for i in intervals
    ]  # fmt: skip
    return sorted(moved, key=lambda interval: (interval.start_us, interval.lane))


def _without_device_hold(intervals: list[Interval]) -> list[Interval]:
    """What runs behind the barrier that the recorder puts in front of a call, if it did."""
    in_order = sorted(intervals, key=lambda interval: interval.start_us)
    starts = [place for place, interval in enumerate(in_order) if _HEAD_START.search(interval.name)]
    if not starts:
        return intervals
    ends = [interval.end_us for interval in in_order[starts[0] :] if _BARRIER.search(interval.name)]
    begin_us = ends[0] if ends else in_order[starts[0]].end_us
    return [interval for interval in in_order if interval.start_us >= begin_us]


def _correlation(event: dict) -> int | None:
    return event.get("args", {}).get("correlation")


def _gpu_interval(event: dict, calls: dict[int | None, dict]) -> Interval:
    start, name = float(event["ts"]), event["name"]
    stream = event.get("args", {}).get("stream", event.get("tid"))
    lane = f"copy engine, stream {stream}" if event["cat"] == "gpu_memcpy" else f"stream {stream}"
    kind: Kind = "communication" if _COMMUNICATION.search(name) else "compute"
    call = calls.get(_correlation(event))
    launched = None if call is None else float(call["ts"])
    # A copy's call may return when the copy is done.
    if call is not None and launched is not None and event["cat"] != "gpu_memcpy":
        launched += float(call["dur"])
    return Interval(lane, kind, name, start, start + float(event["dur"]), launched)


def _cpu_interval(event: dict) -> Interval | None:
    start, name = float(event["ts"]), event["name"]
    if _CPU_COMPUTE.search(name):
        kind: Kind = "compute"
    elif _COMMUNICATION.search(name):
        kind = "communication"
    else:
        return None
    return Interval(f"CPU thread {event.get('tid')}", kind, name, start, start + float(event["dur"]))


def union(intervals: Iterable[Interval]) -> list[tuple[float, float]]:
    """Returns the spans, in order and apart, in which at least one of ``intervals`` ran."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((interval.start_us, interval.end_us) for interval in intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def exposed(intervals: Sequence[Interval]) -> list[tuple[float, float]]:
    """Returns the spans in which data moved between ranks and nothing was computed: the communication not hidden."""
    compute = union(i for i in intervals if i.kind == "compute")
    left: list[tuple[float, float]] = []
    place = 0
    for start, end in union(i for i in intervals if i.kind == "communication"):
        while place < len(compute) and compute[place][0] < end:
            low, high = compute[place]
            if low > start:
                left.append((start, low))
            start = max(start, high)
            if high >= end:
                break  # it may cover the beginning of the next span, too
            place += 1
        if start < end:
            left.append((start, end))
    return left


def idle(intervals: Sequence[Interval]) -> list[tuple[float, float]]:
    """Returns the spans between the first start and the last end in which nothing ran."""
    busy = union(intervals)
    return [(end, start) for (_, end), (start, _) in zip(busy, busy[1:])]


def not_launched(intervals: Sequence[Interval]) -> list[tuple[float, float]]:
    """Returns the part of ``idle`` in which the host had not handed over yet what ran next: the device waited for the
    host.

    In the rest of ``idle`` it waited for something else: another rank, by a wait between kernels, or its own next
    launch.
    """
    launched: dict[float, float] = {}  # by start
    for interval in intervals:
        if interval.launched_us is not None:
            launched[interval.start_us] = min(interval.launched_us, launched.get(interval.start_us, math.inf))
    spans = ((start, min(launched.get(end, start), end)) for start, end in idle(intervals))
    return [(start, end) for start, end in spans if end > start]


def length_us(intervals: Sequence[Interval]) -> float:
    """From the first start to the last end."""
    return max(i.end_us for i in intervals) - min(i.start_us for i in intervals)


def total_us(spans: Iterable[tuple[float, float]]) -> float:
    """Length of spans that do not overlap."""
    return sum(end - start for start, end in spans)


def is_gemm(interval: Interval) -> bool:
    """Whether it multiplies matrices, communication in the same kernel or not; attention is not counted."""
    return interval.kind == "compute" and _GEMM.search(interval.name) is not None
