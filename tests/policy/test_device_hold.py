"""The device waits as long as the launches take, twice over, within bounds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ditron_train.policy import probe as device_hold
from ditron_train.policy.probe import DeviceHold


def _launch(start: DeviceHold, name: str, launches_us: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = iter([1.0, 1.0 + launches_us / 1e6])
    monkeypatch.setattr(device_hold, "time", SimpleNamespace(perf_counter=lambda: next(clock_s)))
    with start.launching(name):
        pass


def test_the_slowest_call_counts_and_of_each_the_quickest_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    start = DeviceHold()
    assert start.length_us == 200
    _launch(start, "fused", 50, monkeypatch)
    assert start.length_us == 200
    _launch(start, "peer", 1e6, monkeypatch)  # it compiles
    assert start.length_us == 3000
    _launch(start, "peer", 600, monkeypatch)
    assert start.length_us == pytest.approx(1200)
    _launch(start, "fused", 700, monkeypatch)  # slower than before: something else took the host's time
    assert start.length_us == pytest.approx(1200)


def test_the_device_waits_that_long(monkeypatch: pytest.MonkeyPatch) -> None:
    cycles = []
    monkeypatch.setattr(torch.cuda, "_sleep", cycles.append)
    start = DeviceHold()
    start.wait()
    _launch(start, "", 1000, monkeypatch)
    start.wait()
    assert cycles == [pytest.approx(200 * 1980), pytest.approx(2000 * 1980)]
