"""Measures device time: medians over repetitions of the maximum over ranks, contenders in turn, twice.

The contenders take turns repetition by repetition, the second time in reverse order: whatever drifts, such as the
clock of a GPU at its power limit, meets all of them alike. (Measured one after another, the one behind a bare
collective found a rested GPU and looked up to 7 % quicker than it is.)

All ranks call ``measure`` with the same names in the same order: in front of every repetition stands a barrier of the
group on the device, so the ranks start together and a repetition lasts until the slowest rank is done. On CUDA the
device waits before that barrier (`policy.probe.DeviceHold`), so that the host is ahead and its cost is not measured.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from ditron_train.policy.probe import DeviceHold

Contender = Callable[[int], object]
"""Runs once on the current stream; its argument counts up, and chooses the set of inputs."""

Name = TypeVar("Name", bound=Hashable)
_PASSES = 2
# Of the host: memory that two streams used comes back when the device is done with it, and an allocator that ran out
# of it would wait for the device inside a measurement (native exchanges of 12 GB).
_MOST_CALLS_AHEAD = 8


@dataclass(frozen=True)
class Timing:
    """``median_us`` over all repetitions; ``spread``: relative difference of the medians of the two measurements."""

    median_us: float
    spread: float


def num_input_sets(set_bytes: int, device: torch.device, *, most: int = 8) -> int:
    """Returns how many sets of inputs, used in turn, are never found in the L2 cache (CPU: 2)."""
    if device.type != "cuda":
        return 2
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(most, -(-2 * l2_bytes // max(set_bytes, 1)) + 1))


def measure(
    contenders: Mapping[Name, Contender],
    *,
    device: torch.device,
    repetitions: int = 15,
    warmup: int = 4,
    inside: bool = False,
    passes: int = _PASSES,
    interleaved: bool = True,
) -> dict[Name, Timing]:
    """Times every contender, in turn, and then all of them once more (``passes``: how often in all).

    Args:
        contenders: Functions by name; the same names in the same order on every rank.
        device: CUDA events are used on CUDA, the process's clock on CPU.
        repetitions: Timed calls of each measurement.
        warmup: Calls in front of each measurement, not timed.
        passes: Measurements of each contender.
        interleaved: Whether contenders take turns repetition by repetition; not if a change of contender costs
            time.
        inside: Only a part of each call counts: contenders take ``around``, which makes the context manager of that
            part.

    Returns:
        Timings by name, the same on every rank.
    """
    measured: dict[Name, list[list[float]]] = {name: [] for name in contenders}
    time_interleaved = _time_cuda if device.type == "cuda" else _time_cpu
    for index in range(passes):
        names = list(contenders)[:: -1 if index % 2 else 1]
        for together in [names] if interleaved else [[name] for name in names]:
            times = time_interleaved([contenders[name] for name in together], device, repetitions, warmup, inside)
            slowest = torch.tensor(times, dtype=torch.float64, device=device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            for name, of_one in zip(together, slowest.tolist()):
                measured[name].append(of_one)
    return {name: _summary(all_passes) for name, all_passes in measured.items()}


def _summary(passes: list[list[float]]) -> Timing:
    medians = [statistics.median(times) for times in passes]
    median = statistics.median([time_us for times in passes for time_us in times])
    return Timing(median, (max(medians) - min(medians)) / median)


@contextmanager
def _marked(mark_start: Callable[[], object], mark_end: Callable[[], object]) -> Iterator[None]:
    mark_start()
    yield
    mark_end()


def _call(contender: Callable[..., object], index: int, mark: Callable[[int], object], inside: bool) -> None:
    """One call, with ``mark(0)`` at its start and ``mark(1)`` at its end, or of the part of it that counts."""
    around = partial(_marked, partial(mark, 0), partial(mark, 1))
    if inside:
        contender(index, around=around)
        return
    with around():
        contender(index)


def _time_cuda(
    contenders: Sequence[Callable[..., object]], device: torch.device, repetitions: int, warmup: int, inside: bool
) -> list[list[float]]:
    barrier = torch.zeros(1, device=device)
    ends: deque[torch.cuda.Event] = deque()
    device_hold = DeviceHold()
    calls = range(warmup + repetitions)
    # Of each call its own, warm-up too: the host would wait for the last call that an event of several was recorded
    # in.
    events = [[[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in calls] for _ in contenders]
    for index in calls:
        for place, (contender, of_one) in enumerate(zip(contenders, events)):
            pair = of_one[index]
            if len(ends) == _MOST_CALLS_AHEAD:
                ends.popleft().synchronize()
            device_hold.wait()
            dist.all_reduce(barrier)
            with device_hold.launching(place):
                _call(contender, index, lambda edge, pair=pair: pair[edge].record(), inside)
            ends.append(pair[1])
    torch.cuda.synchronize(device)
    return [[1e3 * start.elapsed_time(end) for start, end in of_one[warmup:]] for of_one in events]


def _time_cpu(
    contenders: Sequence[Callable[..., object]], device: torch.device, repetitions: int, warmup: int, inside: bool
) -> list[list[float]]:
    edges: list[tuple[list[float], list[float]]] = [([], []) for _ in contenders]
    for index in range(warmup + repetitions):
        for contender, of_one in zip(contenders, edges):
            dist.barrier()
            _call(contender, index, lambda edge, of_one=of_one: of_one[edge].append(time.perf_counter()), inside)
    return [[1e6 * (end - start) for start, end in zip(*of_one)][warmup:] for of_one in edges]
