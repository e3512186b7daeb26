"""Timing: the maximum over ranks, the spread of the two measurements, inputs in turn."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from ditron_train.tools import timing
from ditron_train.tools.timing import _summary, measure, num_input_sets
from tests.support.processes import run_workers


def _slow_on_rank_one() -> tuple[float, float, list[int]]:
    calls: list[int] = []

    def contender(index: int) -> None:
        calls.append(index)
        time.sleep(0.03 if dist.get_rank() == 1 else 0.0)

    timings = measure(
        {"slow": contender, "quick": lambda index: None}, device=torch.device("cpu"), repetitions=3, warmup=1
    )
    return timings["slow"].median_us, timings["quick"].median_us, calls


def _order_of_calls(interleaved: bool) -> str:
    calls: list[str] = []
    contenders = {name: lambda index, name=name: calls.append(name) for name in "ab"}
    measure(contenders, device=torch.device("cpu"), repetitions=1, warmup=1, interleaved=interleaved)
    return "".join(calls)


def test_the_slowest_rank_counts() -> None:
    (slow_0, quick_0, calls), (slow_1, quick_1, _) = run_workers(2, _slow_on_rank_one)
    assert slow_0 == slow_1 and quick_0 == quick_1
    assert 30_000 <= slow_0 < 300_000 and quick_0 < 30_000
    assert calls == [0, 1, 2, 3] * 2  # measured twice, each with a set of inputs of its own


@pytest.mark.parametrize("interleaved, expected", [(True, "abab" + "baba"), (False, "aabb" + "bbaa")])
def test_contenders_take_turns(interleaved: bool, expected: str) -> None:
    assert run_workers(1, _order_of_calls, interleaved) == [expected]


class _Event:
    """An event of a device that has done nothing until the host waits for it."""

    waited: list[int] = []
    enqueued = 0

    def __init__(self, enable_timing: bool) -> None:
        self.place: int | None = None

    def record(self) -> None:
        assert self.place is None, "an event of two calls"
        _Event.enqueued += 1
        self.place = _Event.enqueued

    def synchronize(self) -> None:
        _Event.waited.append((_Event.enqueued - self.place) // 2)

    def elapsed_time(self, end: _Event) -> float:
        return end.place / 1e3


def test_the_host_is_eight_calls_ahead_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Event, "waited", [])
    monkeypatch.setattr(_Event, "enqueued", 0)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    for name in ("_sleep", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda argument: None)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    contenders = [lambda index: None] * 2
    times_us = timing._time_cuda(contenders, torch.device("cpu"), repetitions=6, warmup=4, inside=False)
    assert _Event.waited == [7] * 12  # calls behind the one that is waited for
    assert [round(time_us) for time_us in times_us[0]] == [18, 22, 26, 30, 34, 38]  # of the fifth to the tenth turn


def test_median_and_spread() -> None:
    summary = _summary([[10.0, 11.0, 90.0], [12.0, 13.0, 14.0]])
    assert summary.median_us == 12.5
    assert summary.spread == pytest.approx(2.0 / 12.5)


def test_inputs_outside_the_cache() -> None:
    assert num_input_sets(1, torch.device("cpu")) == 2
