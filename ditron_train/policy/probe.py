"""One probe: native and fused on the same data, bits compared on every rank, times the maximum over the ranks."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, Union

import torch
import torch.distributed as dist

from ditron_train.policy.uninitialized import torch_fill
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.values import have_same_bits

#: Runs forward and backward once: outputs and gradients, in an order of the caller's choice.
Run = Callable[[], Sequence[torch.Tensor]]
#: As of ``probe``.
HostCounts = Union[bool, Literal["alone"]]

_WARM_UPS, _REPEATS, _CPU_REPEATS = 2, 4, 2
_FEW_ROUNDS, _MOST_ROUNDS = 6, 12  # of native, fused, fused, native
_LONG_US = 20_000.0  # of a call; a round is 24 of them
#: Student's t that one in two hundred series of equal times exceeds, by the number of rounds. It is evaluated up to
#: six times, so about one in fifty series looks faster by chance.
_LARGEST_BY_CHANCE = {4: 5.841, 5: 4.604, 6: 4.032, 8: 3.499, 10: 3.250, 12: 3.106}

_SHORTEST_US = 200.0
_LONGEST_US = 3000.0  # a first call compiles, and one that waits for the device takes what the hold takes
_CYCLES_PER_US = 1980  # of an H200; if the clock is slower, the device waits longer

_on_cpu = False  # on simulated nodes: what runs on the CPU, in the interpreter, is compared and timed, too
_is_timed_without_fill = False


def compares(device: torch.device) -> bool:
    """Whether a probe compares and times on ``device``."""
    return device.type == "cuda" or _on_cpu


def time_without_fill(is_on: bool) -> None:
    """Sets whether PyTorch's fill of new tensors is off while paths are timed, as it will be in the job's steps."""
    global _is_timed_without_fill
    _is_timed_without_fill = is_on


class DeviceHold:
    """Makes the device wait for twice the host time of the launches of the slowest of several calls.

    In training the host is ahead of the device. If it is not ahead in a timing, that measures the host
    (``docs/measurements/runtime.md``).
    """

    def __init__(self) -> None:
        self._launches_us: dict[Hashable, float] = {}

    @property
    def length_us(self) -> float:
        """How long the device waits, in us: the same for each call, since a device is quicker after a rest."""
        return min(_LONGEST_US, max(_SHORTEST_US, 2 * max(self._launches_us.values(), default=0.0)))

    def wait(self) -> None:
        """Makes the device wait, on the current stream."""
        torch.cuda._sleep(round(self.length_us * _CYCLES_PER_US))  # type: ignore[no-untyped-call]

    @contextmanager
    def launching(self, name: Hashable = None) -> Iterator[None]:
        """A context around the launches of the call ``name``; the quickest counts, since the first may compile."""
        start_s = time.perf_counter()
        yield
        launches_us = (time.perf_counter() - start_s) * 1e6
        self._launches_us[name] = min(launches_us, self._launches_us.get(name, math.inf))


@dataclass(frozen=True)
class Observation:
    """What a probe saw, the same on every rank of the group.

    Attributes:
        bits_equal: Whether every bit of every result is equal on every rank; None if they were not compared
            (interpreter).
        native_us: Median time of the native run, maximum over the ranks; None if it was not measured.
        ditron_us: Median time of the fused run, likewise.
        is_clear: Whether the difference of the times is larger than their variation: all but a few times of one path
            are above those of the other, or the fused path was faster in so many rounds that chance is unlikely.
        host_longer_us: Host time that the fused path adds, if jobs are to be checked for being CPU-bound.
    """

    bits_equal: bool | None
    native_us: float | None
    ditron_us: float | None
    is_clear: bool = True
    host_longer_us: float = 0.0

    @property
    def is_faster(self) -> bool:
        """Whether the fused path is faster beyond doubt."""
        return self.native_us is not None and (self.ditron_us or 0.0) < self.native_us and self.is_clear


def times_us(
    run: Run,
    device: torch.device,
    group: dist.ProcessGroup,
    launches_us: list[float] | None = None,
    is_ahead: bool = True,
) -> list[float]:
    """Device times of ``run`` on this rank, in us (collective).

    As in training, the host is ahead of the device, so that the time of launches does not count. A barrier on the
    device makes the ranks begin together.

    Args:
        launches_us: Receives the host's times of the launches.
        is_ahead: Whether the host is ahead; else the device is idle at the beginning, and waits for each launch.
    """
    times = []
    if device.type != "cuda":
        for _ in range(_CPU_REPEATS):  # of each of two measurements; the comparison has warmed it up
            dist.barrier(group)
            begun_s = time.perf_counter()
            run()
            times.append((time.perf_counter() - begun_s) * 1e6)
        return times
    device_hold = DeviceHold()
    barrier = torch.zeros(1, device=device)
    for repeat in range(_WARM_UPS + _REPEATS):
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        if is_ahead:
            device_hold.wait()
        dist.all_reduce(barrier, group=group)
        if not is_ahead:
            torch.cuda.synchronize(device)
        start.record()
        with device_hold.launching():
            begun_s = time.perf_counter()
            run()
            launched_us = (time.perf_counter() - begun_s) * 1e6
        end.record()
        torch.cuda.synchronize(device)
        if repeat >= _WARM_UPS:
            times.append(start.elapsed_time(end) * 1e3)
            if launches_us is not None:
                launches_us.append(launched_us)
    return times


def _low_median_high(times: list[float], part: int) -> tuple[float, float, float]:
    """Lowest, median and highest of ``times``, without one in ``part`` of them at either end."""
    ordered = sorted(times)
    left_out = len(times) // part
    return ordered[left_out], statistics.median(ordered), ordered[-1 - left_out]


def _faster_by_round(ratios: Sequence[float]) -> bool:
    """Whether the mean over rounds of fused time / native time is below 1, by Student's t."""
    if len(ratios) not in _LARGEST_BY_CHANCE:
        return False
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    return 1.0 - statistics.mean(ratios) > _LARGEST_BY_CHANCE[len(ratios)] * error


def _compared_us(
    native: Run,
    fused: Run,
    device: torch.device,
    group: dist.ProcessGroup,
    is_equal: bool,
    needs_bits: bool,
    is_ahead: bool,
) -> tuple[bool, float, float, bool, float]:
    """Whether bits are equal on all ranks; median times of both paths, of the slowest rank; whether they differ
    clearly; the host time that the fused path adds.

    The order is native, fused, fused, native: a GPU slows down as it gets warm, so the path that is timed first would
    have an advantage of up to 2 %. Few calls cannot tell similar times apart (two ranks' messages over one link seemed
    to be 0.61x after eight calls), so there are more rounds until the ranges of both paths do not overlap, at last
    those of the middle half, or until the rounds' ratios agree: a GPU's clock may vary by more than the paths differ,
    but it does so for both. Short calls get more rounds while the fused path seems faster: a layer that gains 2 % is
    worth seconds of probing.

    Args:
        is_equal: Whether bits are equal on this rank.
        needs_bits: As of ``probe``.
        is_ahead: As of ``times_us``.
    """
    natives: list[float] = []
    of_fused: list[float] = []
    launches: dict[Run, list[float]] = {native: [], fused: []}
    ratios: list[float] = []
    for number in range(1, _MOST_ROUNDS + 1):
        first, *middle, last = (
            times_us(run, device, group, launches[run], is_ahead) for run in (native, fused, fused, native)
        )
        natives += first + last
        of_fused += sum(middle, [])
        part, host_longer_us = 8 if number < _FEW_ROUNDS else 4, 0.0
        if launches[fused]:
            host_longer_us = max(0.0, statistics.median(launches[fused]) - statistics.median(launches[native]))
        ranges = *_low_median_high(natives, part), *_low_median_high(of_fused, part)
        mine = float(not is_equal), *ranges, *map(statistics.median, (first + last, sum(middle, []))), host_longer_us
        # The slowest rank counts; a difference on one rank is a difference.
        different, low, native_us, high, fused_low, fused_us, fused_high, *more = _most_of_ranks(mine, device, group)
        native_round_us, round_us_of_fused, host_longer_us = more
        ratios.append(round_us_of_fused / native_round_us)
        is_clear = fused_high < low or high < fused_low or (fused_us < native_us and _faster_by_round(ratios))
        if is_clear or (different and needs_bits):
            break
        if number >= _FEW_ROUNDS and not fused_us < native_us < _LONG_US:
            break
    return different == 0.0, native_us, fused_us, is_clear, host_longer_us


def _most_of_ranks(mine: Sequence[float], device: torch.device, group: dist.ProcessGroup) -> list[float]:
    worst = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    return worst.tolist()


def check_memory(needed_bytes: int, device: torch.device, group: dist.ProcessGroup) -> None:
    """Refuses a probe on every rank if any rank lacks the memory for it (collective).

    A rank that ran out of memory in the middle of a probe would leave the others waiting in a collective.

    Memory that torch's allocator holds unused is returned to the driver first, and only the driver's free memory
    counts: unused parts of blocks that are in use serve no larger sizes, and it cannot be known which sizes they do
    serve. Returning memory waits for the device, as a probe does anyway, and every probe that compares ends with it.

    Raises:
        NotSupportedError: A rank lacks the memory; the same on every rank.
    """
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(device)
    (missing_bytes,) = _most_of_ranks([float(needed_bytes - free_bytes)], device, group)
    if missing_bytes > 0:
        raise NotSupportedError(f"a rank has {max(int(missing_bytes) >> 20, 1)} MiB of memory too few to compare")


def same_bits(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> bool:
    """Whether all of them have equal bits. If the native path gives a NaN for a job's data, the fused path has to give
    a NaN, too, of any bits."""
    return len(expected) == len(found) and all(map(_same_bits_or_nan, expected, found))


def _same_bits_or_nan(a: torch.Tensor, b: torch.Tensor) -> bool:
    if have_same_bits(a, b):
        return True
    if a.shape != b.shape or a.dtype != b.dtype or not a.is_floating_point() or a.element_size() == 1:
        return False
    nan = a.isnan() & b.isnan()
    return bool(nan.any()) and have_same_bits(a.masked_fill(nan, 0.0), b.masked_fill(nan, 0.0))


def _compare(native: Run, fused: Run, device: torch.device) -> bool:
    found = fused()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return same_bits(native(), found)


def probe(
    native: Run,
    fused: Run,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    timed: bool = True,
    needs_bits: bool = True,
    extra_cases: Sequence[tuple[Run, Run]] = (),
    host_counts: HostCounts = False,
) -> Observation:
    """Runs both paths (collective over ``group``) and returns what all ranks observed; times only if ``timed``.

    In the interpreter the fused path runs once, to see that it can: its GEMMs are NumPy's there, so times mean
    nothing.

    Args:
        needs_bits: Whether the fused path is rejected if its bits differ, whatever its time: then it is timed once.
        extra_cases: Further runs of both paths on other data: compared, not timed.
        host_counts: Whether the fused path has to be faster also when the device waits for the host: a path that is
            faster when the host is ahead is then timed again on an idle device. ``alone``: it has to be faster on an
            idle device, and no slower when the host is ahead.

    Raises:
        Whatever ``fused`` raises, on every rank alike.
    """
    if not compares(device):
        fused()
        return Observation(None, None, None)
    # All of them: they are collective.
    equal = all([_compare(*pair, device) for pair in ((native, fused), *extra_cases)])
    if timed:
        with torch_fill(False) if _is_timed_without_fill else nullcontext():
            is_ahead = host_counts != "alone"
            observation = Observation(*_compared_us(native, fused, device, group, equal, needs_bits, is_ahead))
            if host_counts and observation.is_faster and (observation.bits_equal or not needs_bits):
                other = Observation(*_compared_us(native, fused, device, group, equal, needs_bits, not is_ahead))
                if is_ahead or (other.ditron_us or 0.0) > (other.native_us or 0.0):
                    observation = other
        if host_counts:
            observation = replace(observation, host_longer_us=0.0)
    else:
        observation = Observation(_most_of_ranks([float(not equal)], device, group) == [0.0], None, None)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # a probe's tensors have sizes that training may never ask for again
    return observation
