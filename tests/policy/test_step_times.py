"""Times of a schedule's runs: paths alternate from step to step, and the faster one stays."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ditron_train.policy import job_times
from ditron_train.policy.job_times import StepTimes, _Schedule, run_of_schedule
from tests.support.processes import run_workers

#: A step of each path to warm up, then native, fused, fused, native, again and again.
ALTERNATING = [False, True, *[False, True, True, False] * 16]


class _Event:
    """An event on a clock that tests advance."""

    now_us = 0.0
    is_over = True

    def record(self) -> None:
        self.at_us = _Event.now_us

    def query(self) -> bool:
        return _Event.is_over

    def elapsed_time(self, end: _Event) -> float:
        return (end.at_us - self.at_us) / 1e3


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_times, "_event", _Event)
    monkeypatch.setattr(job_times, "exchange", lambda group, mine: [mine, mine])
    monkeypatch.setattr(job_times, "_schedule", _Schedule())


def _run(times: StepTimes, us: dict[bool, float], *kinds: tuple[bool, bool]) -> bool:
    """Runs of a step, with a forward, a backward or both; the step's path."""
    paths = set()
    for has_forward, has_backward in kinds:
        with run_of_schedule(has_forward, has_backward):
            if has_forward:
                paths.add(times.path())
            _Event.now_us += us[times._is_fused_now] / (1 if has_forward and has_backward else 2)
        _Event.now_us += 1e6  # what runs between two runs is not theirs
    assert len(paths) == 1
    return paths.pop()


FILL, BOTH, DRAIN = (True, False), (True, True), (False, True)


@pytest.mark.parametrize("warmup, steady", [(1, 4), (3, 9)])
@pytest.mark.parametrize(
    "us, is_fused", [({False: 100.0, True: 90.0}, True), ({False: 90.0, True: 100.0}, False)], ids=["fused", "native"]
)
def test_the_faster_path_stays(us: dict[bool, float], is_fused: bool, warmup: int, steady: int) -> None:
    times = StepTimes(None)  # type: ignore[arg-type]
    kinds = [*[FILL] * warmup, *[BOTH] * steady, *[DRAIN] * warmup]
    assert [_run(times, us, *kinds) for _ in range(9)] == [*ALTERNATING[:6], *[is_fused] * 3]
    part = 1 + warmup / steady  # a forward alone, and a backward alone, take half of the time
    assert times.is_fused is is_fused
    assert (times.native_us, times.fused_us) == (pytest.approx(us[False] * part), pytest.approx(us[True] * part))


@pytest.mark.parametrize("kinds", [[FILL, BOTH, DRAIN], [FILL, DRAIN], [FILL, FILL, DRAIN, DRAIN]])
def test_few_runs_a_step_take_more_steps(kinds: list[tuple[bool, bool]]) -> None:
    times = StepTimes(None)  # type: ignore[arg-type]
    paths = [_run(times, {False: 100.0, True: 90.0}, *kinds) for _ in range(19)]
    assert paths == [*ALTERNATING[:18], True]


def test_what_is_not_faster_is_native_in_the_end() -> None:
    times, kinds = StepTimes(None), [FILL, *[BOTH] * 4, DRAIN]  # type: ignore[arg-type]
    paths = [_run(times, {False: 100.0, True: 100.0}, *kinds) for _ in range(68)]
    assert paths == [*ALTERNATING, False, False] and times.native_us == times.fused_us


def test_what_is_slower_alone_counts() -> None:
    """Quicker by a tenth where a forward and a backward are combined, and slower by as much elsewhere."""
    times, kinds = StepTimes(None), [FILL, BOTH, BOTH, DRAIN]  # type: ignore[arg-type]
    us = {FILL: (100.0, 150.0), DRAIN: (100.0, 150.0), BOTH: (200.0, 180.0)}
    for _ in range(11):
        for kind in kinds:
            with run_of_schedule(*kind):
                _ = kind[0] and times.path()
                _Event.now_us += us[kind][times._is_fused_now]
    assert times.is_fused is False and (times.native_us, times.fused_us) == (300.0, 330.0)


def test_a_run_that_ends_in_an_error_has_no_time_and_ends_the_step() -> None:
    times, us = StepTimes(None), {False: 100.0, True: 90.0}  # type: ignore[arg-type]
    kinds = [FILL, *[BOTH] * 8, DRAIN]
    assert [_run(times, us, *kinds) for _ in range(3)] == ALTERNATING[:3]
    with pytest.raises(KeyboardInterrupt):
        _fail(times)
    assert [_run(times, us, *kinds) for _ in range(3)] == [True, False, True]
    assert (times.native_us, times.fused_us) == (pytest.approx(112.5), pytest.approx(101.25))


def _fail(times: StepTimes) -> None:
    """A step whose first run with a backward ends in an error, after a time that would count."""
    with run_of_schedule(*FILL):
        assert times.path()
    with run_of_schedule(*BOTH):
        _Event.now_us += 1.0
        raise KeyboardInterrupt


def test_a_layer_that_has_gone_native_for_another_reason_is_timed_no_longer() -> None:
    times, us = StepTimes(None), {False: 100.0, True: 90.0}  # type: ignore[arg-type]
    kinds = [FILL, *[BOTH] * 4, DRAIN]
    assert [_run(times, us, *kinds) for _ in range(3)] == ALTERNATING[:3]
    for _ in range(2):
        for kind in kinds:
            with run_of_schedule(*kind):
                pass
    assert times not in job_times._schedule.watching and not times.runs and len(times._open) == 4


def test_events_that_are_not_over_are_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    times, us = StepTimes(None), {False: 100.0, True: 90.0}  # type: ignore[arg-type]
    kinds = [FILL, *[BOTH] * 4, DRAIN]
    monkeypatch.setattr(_Event, "is_over", False)
    assert [_run(times, us, *kinds) for _ in range(7)] == ALTERNATING[:7]
    monkeypatch.setattr(_Event, "is_over", True)
    assert [_run(times, us, *kinds) for _ in range(4)] == [*ALTERNATING[7:10], True]


def _decided(by_rank: list[dict[bool, float]]) -> tuple[Any, ...]:
    events, schedule = (
        mock.patch.object(job_times, name, new) for name, new in (("_event", _Event), ("_schedule", _Schedule()))
    )
    with events, schedule:
        times = StepTimes(dist.group.WORLD)  # type: ignore[arg-type]
        kinds = [FILL, *[BOTH] * 4, DRAIN]
        paths = [_run(times, by_rank[dist.get_rank()], *kinds) for _ in range(8)]
        return paths, times.native_us, times.fused_us


def test_the_slowest_rank_counts() -> None:
    quick, slow = {False: 100.0, True: 90.0}, {False: 99.0, True: 110.0}
    for paths, native_us, fused_us in run_workers(2, _decided, [quick, slow]):
        assert paths == [*ALTERNATING[:6], False, False] and (native_us, fused_us) == (125.0, 137.5)


@pytest.mark.parametrize("gain_us, is_fused", [(-5.0, False), (20.0, True)])
def test_steps_that_differ_from_each_other_mislead_nobody(
    gain_us: float, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of 500 us differ by a hundredth, and so do steps from each other."""
    kinds, found = [FILL, *[BOTH] * 7, DRAIN], []
    for seed in range(10):
        monkeypatch.setattr(job_times, "_schedule", _Schedule())
        times, draw = StepTimes(None), random.Random(seed)  # type: ignore[arg-type]
        for _ in range(70):
            of_step_us = draw.gauss(500.0, 5.0)
            for kind in kinds:
                with run_of_schedule(*kind):
                    _ = kind[0] and times.path()
                    _Event.now_us += draw.gauss(of_step_us, 5.0) - gain_us * times._is_fused_now
        found.append(times.is_fused)
    assert found == [is_fused] * 10
