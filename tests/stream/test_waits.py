"""Waits between kernels: bounded on the CPU, and on a GPU released by the watchdog, whose decisions are tested without
one."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import types
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ditron_train.runtime.errors import DitronError, PeerTimeoutError
from ditron_train.stream import events, waits
from tests.support.processes import run_workers


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


@pytest.mark.parametrize(
    "a, b, expected", [(3, 3, 0), (2, 3, -1), (-(2**31), 2**31 - 1, 1), (2**31 - 1, -(2**31), -1)]
)
def test_epochs_are_compared_cyclically(a, b, expected):
    assert waits.cyclic_difference(a, b) == expected


class _FakeChannel:
    """Records what the watchdog tells it."""

    op_name, timeout_s, turns = "fake", 0.2, 1

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
    watchdog._ticket, watchdog._slots_in_use = 0, set()
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
    assert channel.records == [{"peer": 1, "chunk": 0, "expected_epoch": 6, "seen_epoch": 4, "turns": 1}]


def test_the_watchdog_waits_as_many_deadlines_as_the_channel_had_when_the_wait_was_enqueued(monkeypatch):
    watchdog, channel, flag = _watchdog_without_a_gpu(), _FakeChannel(), ctypes.c_int32(4)
    watchdog._words = torch.from_numpy(watchdog._progress)
    channel.arena = types.SimpleNamespace(device=torch.device("cpu"))
    watchdog._release_streams = {channel.arena.device: None}
    monkeypatch.setattr(waits.driver, "stream_memory_ops", lambda stream, operations: None)
    address, channel.turns = ctypes.addressof(flag), 3
    watchdog.guard(channel, address, 6, 1, 0, types.SimpleNamespace(cuda_stream=0), address)
    channel.turns = 1
    (entry,) = watchdog._waits
    watchdog._progress[entry.slot] = entry.ticket
    for now_s in (100.0, 100.3, 100.5):
        watchdog._look_at(entry, now_s)
    assert flag.value == 4 and not channel.records
    watchdog._look_at(entry, 100.7)
    assert flag.value == 6 and channel.records[0]["turns"] == 3


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


def test_a_release_that_the_driver_refuses_is_an_error_on_the_host(caplog):
    """Others are released nevertheless, and it is tried again."""
    watchdog, refused, other = _watchdog_without_a_gpu(), _FakeChannel(), _FakeChannel()
    held, flag, texts = ctypes.c_int32(4), ctypes.c_int32(4), ["launch failed", "launch failed", "out of memory"]

    def on_device(entry: waits._Wait) -> None:
        if texts:
            raise RuntimeError(texts.pop(0))
        held.value = entry.epoch

    watchdog._release_on_device = on_device
    watchdog._waits = [_entry(refused, held, 6, ticket=9), _entry(other, flag, 6, ticket=10)]
    watchdog._waits[0].host_address = None
    watchdog._progress[[9, 10]] = 9, 10
    for now_s in (1.0, 2.0):
        watchdog._poll(now_s)
    assert refused.records == [{"peer": 1, "chunk": 0, "expected_epoch": 6, "seen_epoch": 5, "turns": 1}]
    assert flag.value == 6 and other.failed and held.value == 4 and not watchdog._waits[0].released
    for now_s in (3.0, 4.0, 5.0):
        watchdog._poll(now_s)
    assert held.value == 6 and watchdog._waits[0].released
    logged = [record.getMessage() for record in caplog.records if "cannot be released" in record.getMessage()]
    assert [text.rpartition(": ")[2] for text in logged] == ["launch failed", "out of memory"]


def test_the_watchdogs_thread_outlives_an_error(monkeypatch):
    monkeypatch.setattr(waits, "_POLL_S", 0.001)
    watchdog, channel, flag = _watchdog_without_a_gpu(), _FakeChannel(), ctypes.c_int32(4)
    channel.failed = True  # released at once
    errors = [RuntimeError("the driver does not answer")] * 3

    def release(entry: waits._Wait) -> None:
        if errors:
            raise errors.pop()
        flag.value = entry.epoch

    watchdog._release_on_device = release
    watchdog._waits = [_entry(channel, flag, 6, ticket=9)]
    watchdog._waits[0].host_address = None
    thread = threading.Thread(target=watchdog._run, daemon=True)
    thread.start()
    deadline_s = time.monotonic() + 20
    while flag.value != 6 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert flag.value == 6 and thread.is_alive()
    watchdog._waits.clear()


def test_the_watchdogs_thread_releases_beside_captures(monkeypatch):
    """What it calls to release a flag in device memory is refused while another thread captures a CUDA graph, and ends
    that."""
    watchdog, channel, flag, relaxed = _watchdog_without_a_gpu(), _FakeChannel(), ctypes.c_int32(4), []
    monkeypatch.setattr(waits, "_POLL_S", 0.001)
    monkeypatch.setattr(waits.driver, "call_beside_captures", lambda: relaxed.append(threading.get_ident()))
    channel.failed = True  # released at once

    def release(entry: waits._Wait) -> None:
        flag.value = entry.epoch if relaxed == [threading.get_ident()] else -1

    watchdog._release_on_device = release
    watchdog._waits = [_entry(channel, flag, 6, ticket=9)]
    watchdog._waits[0].host_address = None
    threading.Thread(target=watchdog._run, daemon=True).start()
    deadline_s = time.monotonic() + 20
    while flag.value == 4 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert flag.value == 6
    watchdog._waits.clear()


def test_what_lets_a_thread_call_beside_captures(monkeypatch):
    asked, status = [], [0]
    fake = types.SimpleNamespace(
        CUstreamCaptureMode=types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed"),
        cuThreadExchangeStreamCaptureMode=lambda mode: (asked.append(mode) or status[0], "global"),
    )
    monkeypatch.setattr(waits.driver, "_driver", lambda: fake)
    waits.driver.call_beside_captures()
    assert asked == ["relaxed"]
    status[0] = 1
    with pytest.raises(DitronError, match="driver call failed: 1"):
        waits.driver.call_beside_captures()


def test_a_wait_that_takes_long_keeps_its_slot():
    """Its words would say that it is over when the wait 4,096 tickets later is."""
    watchdog, flag = _watchdog_without_a_gpu(), ctypes.c_int32(0)
    first, _ = watchdog._take_slot()
    watchdog._waits = [_entry(_FakeChannel(), flag, 1, ticket=first)]
    slots = []
    for _ in range(2 * waits._SLOTS):
        slots.append(watchdog._take_slot()[0])
        watchdog._slots_in_use.discard(slots[-1])
    assert first not in slots and len(set(slots)) == waits._SLOTS - 1
    flag.value = 1
    watchdog._poll(1.0)
    assert first not in watchdog._slots_in_use


def test_a_wait_more_than_there_are_slots_waits_beside_the_watchdog(monkeypatch):
    """Not under its lock, or nobody could free a slot."""
    watchdog, channel = _watchdog_without_a_gpu(), _FakeChannel()
    watchdog._words, watchdog._release_streams = torch.from_numpy(watchdog._progress), {}
    channel.arena = types.SimpleNamespace(device=torch.device("cpu"))
    monkeypatch.setattr(waits, "own_stream", lambda device: None)
    monkeypatch.setattr(waits.driver, "stream_memory_ops", lambda stream, operations: None)
    stream, pauses = types.SimpleNamespace(cuda_stream=7), []

    def pause(seconds):
        if threading.current_thread() is not threading.main_thread():  # another test's watchdog
            return time.sleep(seconds)
        pauses.append(seconds)
        watchdog._poll(0.0)  # what the thread does meanwhile: the first finds nothing over
        for entry in watchdog._waits[:1]:
            watchdog._progress[waits._SLOTS + entry.slot] = waits.cyclic_difference(entry.ticket, 0)

    monkeypatch.setattr(waits, "time", types.SimpleNamespace(sleep=pause, monotonic=time.monotonic))
    for _ in range(waits._SLOTS):
        watchdog.guard(channel, 0, 1, 1, 0, stream, None)
    first = watchdog._waits[0].slot
    assert not pauses and watchdog._take_slot() is None
    watchdog.guard(channel, 0, 1, 1, 0, stream, None)
    assert len(pauses) == 2 and watchdog._waits[-1].slot == first and len(watchdog._waits) == waits._SLOTS


@pytest.mark.parametrize("first", [2**31 - waits._SLOTS - 5, 2**32 - waits._SLOTS - 5])
def test_tickets_wrap(first):
    """The words of a slot's wait before the wrap do not say that the one behind it is over."""
    watchdog, flag = _watchdog_without_a_gpu(), ctypes.c_int32(0)
    watchdog._ticket = first
    for _ in range(3 * waits._SLOTS):
        slot, ticket = watchdog._take_slot()
        entry = _entry(_FakeChannel(), flag, 1, ticket=ticket)
        entry.host_address = None
        known = watchdog._ticket - first > waits._SLOTS or watchdog._ticket < first  # the slot has been used before
        assert not (known and watchdog._is_done(entry))
        watchdog._progress[waits._SLOTS + slot] = waits.cyclic_difference(entry.ticket, 0)
        assert watchdog._is_done(entry)
        watchdog._slots_in_use.discard(slot)


@pytest.mark.parametrize("in_host_memory_before", [True, False])
def test_a_wait_in_device_memory_is_not_over_half_a_cycle_of_tickets_later(monkeypatch, in_host_memory_before):
    """Nothing says in a slot that waits in host memory are done."""
    watchdog, channel, flag = _watchdog_without_a_gpu(), _FakeChannel(), ctypes.c_int32(0)
    watchdog._words, watchdog._release_streams = torch.from_numpy(watchdog._progress), {}
    channel.arena = types.SimpleNamespace(device=torch.device("cpu"))
    monkeypatch.setattr(waits, "own_stream", lambda device: None)
    monkeypatch.setattr(waits.driver, "stream_memory_ops", lambda stream, operations: None)
    address = ctypes.addressof(flag)
    stream = types.SimpleNamespace(cuda_stream=7)
    watchdog._ticket = 2**31 + 5 - waits._SLOTS
    if in_host_memory_before:
        watchdog.guard(channel, address, -1, 1, 0, stream, address)
        watchdog._poll(0.0)
    watchdog._ticket = 2**31 + 5
    watchdog.guard(channel, address, 1, 1, 0, stream, None)
    (entry,) = watchdog._waits
    watchdog._progress[entry.slot] = waits.cyclic_difference(entry.ticket, 0)  # begun
    released: list[waits._Wait] = []
    watchdog._release_on_device = released.append
    for now_s in (1.0, 1.0 + 2 * channel.timeout_s):
        watchdog._poll(now_s)
    assert released == [entry]


def test_waits_are_released_on_a_stream_that_nobody_else_has(monkeypatch):
    """torch deals 32 out again and again: a release on the one that waits, or one that waits for it, would wait as
    well."""
    watchdog, channel, asked = _watchdog_without_a_gpu(), _FakeChannel(), []
    watchdog._words, watchdog._release_streams = torch.from_numpy(watchdog._progress), {}
    device = torch.device("cuda", 1)
    channel.arena = types.SimpleNamespace(device=device)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext(asked.append(device)))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: f"stream {handle} of {device}")
    monkeypatch.setattr(events.driver, "stream_create", lambda: 77)
    monkeypatch.setattr(waits.driver, "stream_memory_ops", lambda stream, operations: None)
    for epoch in (1, 2):
        watchdog.guard(channel, 0, epoch, 1, 0, types.SimpleNamespace(cuda_stream=7), None)
    assert watchdog._release_streams == {device: "stream 77 of cuda:1"} and asked == [device]


@pytest.mark.parametrize("in_host_memory", [True, False])
def test_what_a_guarded_wait_puts_onto_the_stream(monkeypatch, in_host_memory):
    """Run here as the stream would: begun, the wait, and done where the flag itself cannot say so."""
    watchdog, channel, flag = _watchdog_without_a_gpu(), _FakeChannel(), ctypes.c_int32(0)
    watchdog._words, watchdog._release_streams = torch.from_numpy(watchdog._progress), {}
    channel.arena = types.SimpleNamespace(device=torch.device("cpu"))
    enqueued: list[tuple[str, int, int]] = []
    monkeypatch.setattr(waits, "own_stream", lambda device: None)
    monkeypatch.setattr(waits.driver, "stream_memory_ops", lambda stream, operations: enqueued.extend(operations))
    address = ctypes.addressof(flag)
    for epoch in (1, 2):
        stream = types.SimpleNamespace(cuda_stream=7)
        watchdog.guard(channel, address, epoch, 1, 0, stream, address if in_host_memory else None)
    assert [kind for kind, _, _ in enqueued] == ["write", "wait", *([] if in_host_memory else ["write"])] * 2
    assert [(at, value) for kind, at, value in enqueued if kind == "wait"] == [(address, 1), (address, 2)]
    for _, at, value in enqueued:
        (ctypes.c_int32.from_address(at)).value = value
        watchdog._poll(0.0)
    assert not watchdog._waits and not watchdog._slots_in_use and len(watchdog._over) == 2 and not channel.records
