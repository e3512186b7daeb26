"""Waits between kernels: bounded on the CPU, and on a GPU released by the watchdog, whose decisions are tested without one."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ditron_train.runtime.errors import PeerTimeoutError
from ditron_train.stream import waits
from ditron_train.testing.processes import run_workers


def _channel(name: str):
    from ditron_train.symm import Channel, get_arena

    return Channel(get_arena(dist.group.WORLD, torch.device("cpu")), name, 4)


def _wait_for_the_other(late_s: float) -> float:
    from ditron_train.stream import stream_notify, stream_wait

    channel = _channel("test_waits")
    peer = 1 - dist.get_rank()
    time.sleep(late_s * dist.get_rank())
    stream_notify(channel, channel.signals.host_addresses[peer], 7)
    begin_s = time.monotonic()
    stream_wait(channel, channel.signals.host_addresses[1 - peer], 7, peer=peer, chunk=0)
    stream_wait(channel, channel.signals.host_addresses[1 - peer], 6, peer=peer, chunk=0)
    return time.monotonic() - begin_s


def test_a_wait_ends_when_the_flag_is_there():
    waited, _ = run_workers(2, _wait_for_the_other, 0.4)
    assert 0.2 < waited < 10


def _wait_in_vain() -> str:
    from ditron_train.stream import stream_wait

    channel = _channel("test_waits_in_vain")
    try:
        stream_wait(channel, channel.signals.host_addresses[dist.get_rank()] + 4, 3, peer=1 - dist.get_rank(), chunk=5)
    except PeerTimeoutError as error:
        return f"{error.missing_rank} {error.chunk} {error.expected_epoch} {error.seen_epoch}"
    return "no error"


def test_a_wait_on_the_cpu_is_bounded():
    assert run_workers(2, _wait_in_vain, env={"DITRON_TIMEOUT_S": "0.5"}) == ["1 5 3 0", "0 5 3 0"]


@pytest.mark.parametrize("a, b, expected", [(3, 3, 0), (2, 3, -1), (-(2**31), 2**31 - 1, 1), (2**31 - 1, -(2**31), -1)])
def test_epochs_are_compared_cyclically(a, b, expected):
    assert waits.cyclic_difference(a, b) == expected


class _FakeChannel:
    """Records what the watchdog tells it."""

    op_name, timeout_s = "fake", 0.2

    def __init__(self) -> None:
        self.failed = False
        self.records: list[dict] = []

    def record_timeout(self, **fields: int) -> None:
        self.failed = True
        self.records.append(fields)


def _watchdog_without_a_gpu() -> waits._Watchdog:
    watchdog = object.__new__(waits._Watchdog)
    watchdog._progress = np.zeros(2 * waits._SLOTS, dtype=np.int32)
    watchdog._lock, watchdog._waits, watchdog._over = threading.Lock(), [], []
    return watchdog


def _entry(channel: _FakeChannel, flag: ctypes.c_int32, epoch: int, ticket: int) -> waits._Wait:
    address = ctypes.addressof(flag)
    return waits._Wait(channel, address, epoch, 1, 0, ticket % waits._SLOTS, ticket, address)


def test_the_watchdog_counts_from_when_a_wait_begins():
    watchdog, channel, flag = _watchdog_without_a_gpu(), _FakeChannel(), ctypes.c_int32(4)
    entry = _entry(channel, flag, 6, ticket=9)
    watchdog._look_at(entry, now_s=100.0)
    assert flag.value == 4 and not channel.records, "not begun: behind other work of its stream"
    watchdog._progress[9] = 9
    watchdog._look_at(entry, now_s=200.0)
    watchdog._look_at(entry, now_s=200.1)
    assert flag.value == 4 and not channel.records
    watchdog._look_at(entry, now_s=200.3)
    assert flag.value == 6
    assert channel.records == [{"peer": 1, "chunk": 0, "expected_epoch": 6, "seen_epoch": 4}]


def test_the_watchdog_leaves_done_waits_alone_and_lets_all_through_after_a_failure():
    watchdog, channel, flag = _watchdog_without_a_gpu(), _FakeChannel(), ctypes.c_int32(1)
    done, pending, behind = (_entry(channel, flag, epoch, ticket) for epoch, ticket in ((1, 3), (2, 4), (3, 5)))
    watchdog._progress[3] = watchdog._progress[waits._SLOTS + 3] = 3
    watchdog._progress[4] = 4
    for entry in (done, pending, behind):
        watchdog._look_at(entry, 10.0)
        watchdog._look_at(entry, 10.1)
    assert flag.value == 1
    watchdog._look_at(done, 20.0)
    assert not channel.records
    watchdog._look_at(pending, 20.0)
    watchdog._look_at(behind, 20.0)
    assert flag.value == 3 and pending.released and behind.released


def test_a_release_never_takes_a_flag_back():
    watchdog, channel, flag = _watchdog_without_a_gpu(), _FakeChannel(), ctypes.c_int32(-(2**31) + 2)
    channel.failed = True
    watchdog._look_at(_entry(channel, flag, 2**31 - 1, 8), 1.0)
    assert flag.value == -(2**31) + 2


def test_what_says_that_a_wait_is_over():
    """The flag itself where the host can read it, else the word that the stream writes behind the wait."""
    watchdog, channel, flag = _watchdog_without_a_gpu(), _FakeChannel(), ctypes.c_int32(5)
    seen, unseen = _entry(channel, flag, 6, ticket=9), _entry(channel, flag, 6, ticket=10)
    unseen.host_address = None
    watchdog._progress[waits._SLOTS + 9] = 9
    assert not watchdog._is_done(seen) and not watchdog._is_done(unseen)
    watchdog._progress[waits._SLOTS + 10] = 10
    assert watchdog._is_done(unseen)
    flag.value = 6
    assert watchdog._is_done(seen)


def test_the_watchdogs_thread_lets_go_of_nothing():
    """What it would free could wait for the device."""
    watchdog, flags = _watchdog_without_a_gpu(), [ctypes.c_int32(1), ctypes.c_int32(0)]
    watchdog._waits = [_entry(_FakeChannel(), flag, 1, ticket) for ticket, flag in enumerate(flags)]
    channels = [weakref.ref(entry.channel) for entry in watchdog._waits]
    for now_s in (1.0, 2.0):
        watchdog._poll(now_s)
        assert [len(watchdog._over), len(watchdog._waits)] == [1, 1]
    flags[1].value = 1
    watchdog._poll(3.0)
    assert not watchdog._waits and all(channel() is not None for channel in channels)
    watchdog._over.clear()
    assert all(channel() is None for channel in channels)
