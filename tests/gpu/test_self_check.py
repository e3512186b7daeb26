"""The self-check beside an untried library, on GPUs: it passes, and its kernels go the ways that ops go."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ditron_train.policy import self_check as room
from ditron_train.runtime import launch, versions
from ditron_train.runtime.groups import world_group

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")


@pytest.fixture
def newer(monkeypatch):
    found = versions.find_versions()
    monkeypatch.setattr(versions, "find_versions", lambda: {**found, "triton": "3.99.0"})
    room.forget_self_checks()
    yield
    room.forget_self_checks()


def test_it_passes(device, newer):
    assert room.self_check(world_group(), device) is None
    assert room.self_check(None, device) is None


def test_its_launches_are_direct_and_repeated(device, newer, monkeypatch):
    ways = []
    first, repeat = launch.KernelLaunch._first, launch.KernelLaunch.repeat
    monkeypatch.setattr(launch.KernelLaunch, "_first", lambda self, *a: (ways.append("first"), first(self, *a))[1])

    def repeated(self, key, stream):
        known = repeat(self, key, stream)
        ways.append("repeated" if known else "unknown")
        return known

    monkeypatch.setattr(launch.KernelLaunch, "repeat", repeated)
    assert room._launch_failure(device) is None
    assert ways == ["first", "repeated"]


def test_stale_values_are_seen(device, newer, monkeypatch):
    """What a rank expects is another launch's: the comparison tells them apart on the device, too."""
    values = room._values

    def of_another_launch(number, rank, where):
        return values(number + (rank == 0 and dist.get_rank() == 0), rank, where)

    monkeypatch.setattr(room, "_values", of_another_launch)
    reason = room.self_check(world_group(), device)
    assert (reason is None) == (dist.get_world_size() == 1)
    assert reason is None or "was not what was acquired" in reason
