"""Signals between kernels: a flag written or waited for by the stream itself, with a deadline.

A stream wait of the driver has no timeout, so each wait is three memory operations: write "begun" to pinned memory,
wait for the flag, write "done". If the flag is in host memory, it shows itself that the wait is over, and the last
write is left out (it takes 1.6 us or more of the stream's time). A watchdog thread reads these words (without CUDA
calls while all is well). When a wait has begun and is not done within the deadline, the thread records the failure in
the channel and releases the wait by writing the flag itself: from the host if the flag is in host memory, else from a
stream of its own, even while another thread captures a CUDA graph. The host then raises at the next ``Channel.check``,
even if the driver refuses the release.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from dataclasses import dataclass, field

import torch

from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.logs import get_logger
from ditron_train.stream import driver
from ditron_train.stream.events import own_stream
from ditron_train.symm.channel import Channel
from ditron_train.symm.control import cyclic_difference

_POLL_S = 0.05
_SLOTS = 4096


def waits_can_be_released() -> bool:
    """Whether a stream that waits for a flag in device memory can be released from another stream.

    With ``CUDA_DEVICE_MAX_CONNECTIONS=1`` it cannot: every kernel, copy and flag write of the process, on any stream,
    queues behind the wait (seen on H200). Then a stream can only wait for flags in host memory (``host_address``).
    """
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"


def stream_notify(channel: Channel, signal_address: int, epoch: int, stream: torch.cuda.Stream | None = None) -> None:
    """Sets the 32-bit flag at ``signal_address`` (here or at a peer) to ``epoch`` when the stream gets there; who sees
    the flag also sees what the stream did before. On the CPU it is set at once."""
    if channel.arena.device.type != "cuda":
        _flag(signal_address).value = cyclic_difference(epoch, 0)
        return
    stream = stream if stream is not None else torch.cuda.current_stream(channel.arena.device)
    driver.stream_memory_ops(stream.cuda_stream, [("write", signal_address, epoch)])


def stream_wait(
    channel: Channel,
    signal_address: int,
    epoch: int,
    *,
    peer: int,
    chunk: int,
    stream: torch.cuda.Stream | None = None,
    host_address: int | None = None,
) -> None:
    """Makes the stream wait until the local flag at ``signal_address`` is ``epoch`` or later, for at most ``turns``
    deadlines of the channel.

    ``peer`` and ``chunk`` name in an error what is missing. On the CPU it blocks the caller. Enqueue the producing
    kernel of this process, if any, before the wait: with one hardware queue the wait would block it. ``host_address``:
    the address at which the host can write the same flag, if it can. Releasing the wait then needs no work on the
    device, whose only hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``) the wait may be blocking.

    Raises:
        PeerTimeoutError: On the CPU at once; on a GPU at the channel's next ``check``.
    """
    if channel.arena.device.type != "cuda":
        _wait_on_cpu(channel, signal_address, epoch, peer, chunk)
        return
    if torch.cuda.is_current_stream_capturing():
        raise NotSupportedError("a stream wait cannot be captured: its epoch would be frozen in the graph")
    if host_address is None and not waits_can_be_released():
        raise NotSupportedError("with CUDA_DEVICE_MAX_CONNECTIONS=1 a stream can only wait for a flag in host memory")
    stream = stream if stream is not None else torch.cuda.current_stream(channel.arena.device)
    _watchdog().guard(channel, signal_address, epoch, peer, chunk, stream, host_address)


def _flag(address: int) -> ctypes.c_int32:
    return ctypes.c_int32.from_address(address)


def _wait_on_cpu(channel: Channel, address: int, epoch: int, peer: int, chunk: int) -> None:
    flag = _flag(address)
    turns = channel.turns
    deadline_s = time.monotonic() + turns * channel.timeout_s
    polls = 0
    while cyclic_difference(flag.value, epoch) < 0:
        channel.check()
        if time.monotonic() > deadline_s:
            channel.record_timeout(peer=peer, chunk=chunk, expected_epoch=epoch, seen_epoch=flag.value, turns=turns)
            break
        polls += 1
        if polls < 200:
            os.sched_yield()
        else:
            time.sleep(0.0002)
    channel.check()


@dataclass(eq=False)
class _Wait:
    channel: Channel
    address: int
    epoch: int
    peer: int
    chunk: int
    slot: int
    ticket: int
    host_address: int | None
    turns: int = 1
    begun_at_s: float | None = field(default=None)
    released: bool = False
    refusal: str = ""  # of the driver, as it was last logged


class _Watchdog:
    """Releases stream waits that pass their deadline. One daemon thread in a process, started at the first wait.

    The thread never drops an entry, which may hold the last reference to a channel and its symmetric memory: freeing
    these waits for the device, and so for a wait that this very thread has to release (seen as a deadlock). The caller
    that enqueues the next wait drops entries that are over.
    """

    def __init__(self) -> None:
        self._words = torch.zeros(2 * _SLOTS, dtype=torch.int32, device="cpu", pin_memory=True)
        self._progress = self._words.numpy()  # [slot] begun ticket, [_SLOTS + slot] done ticket
        self._lock = threading.Lock()
        self._waits: list[_Wait] = []
        self._over: list[_Wait] = []
        self._ticket = 0
        self._slots_in_use: set[int] = set()
        self._seen = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        self._release_streams: dict[torch.device, torch.cuda.Stream] = {}
        threading.Thread(target=self._run, name="ditron-watchdog", daemon=True).start()

    def guard(
        self,
        channel: Channel,
        address: int,
        epoch: int,
        peer: int,
        chunk: int,
        stream: torch.cuda.Stream,
        host_address: int | None,
    ) -> None:
        device = channel.arena.device
        with self._lock:
            if device not in self._release_streams:
                self._release_streams[device] = own_stream(device)  # one of torch's may be one that waits
        while (taken := self._take_slot()) is None:  # the host is far ahead; each wait ends, or is released in time
            time.sleep(_POLL_S)
        slot, ticket = taken
        with self._lock:
            # Nobody writes "done" for a wait that the host sees the end of: what it holds may be half a cycle behind.
            self._progress[_SLOTS + slot] = cyclic_difference(ticket, 1)
            entry = _Wait(channel, address, epoch, peer, chunk, slot, ticket, host_address, channel.turns)
            self._waits.append(entry)
            over, self._over = self._over, []
        del over
        base = self._words.data_ptr()
        operations = [("write", base + 4 * slot, entry.ticket), ("wait", address, epoch)]
        if host_address is None:
            operations.append(("write", base + 4 * (_SLOTS + slot), entry.ticket))
        driver.stream_memory_ops(stream.cuda_stream, operations)

    def _take_slot(self) -> tuple[int, int] | None:
        """A slot and its ticket; never the slot of a wait in flight. None if all slots are in flight: none can become
        free while this lock is held."""
        with self._lock:
            if len(self._slots_in_use) >= _SLOTS:
                return None
            while True:
                self._ticket = (self._ticket + 1) % 2**32  # compared cyclically, as epochs are
                slot = self._ticket % _SLOTS
                if slot not in self._slots_in_use:
                    self._slots_in_use.add(slot)
                    return slot, self._ticket

    def _run(self) -> None:
        try:
            driver.call_beside_captures()
        except Exception as error:  # it watches nevertheless
            get_logger("stream").warning("a release of a stream wait may break the capture of a CUDA graph: %s", error)
        while True:
            time.sleep(_POLL_S)
            self._poll(time.monotonic())

    def _poll(self, now_s: float) -> None:
        with self._lock:
            waits, self._waits = self._waits, []
            entry = None
            for entry in waits:
                if self._is_done(entry):
                    self._over.append(entry)
                    self._slots_in_use.discard(entry.slot)
                else:
                    self._waits.append(entry)
            del waits, entry  # held by the lists alone once the lock is free
            pending = list(self._waits)
        for entry in pending:
            try:
                self._look_at(entry, now_s)
            except Exception as error:  # of the driver, whatever it is: the other waits still want this thread
                self._refused(entry, error)

    def _refused(self, entry: _Wait, error: Exception) -> None:
        """A wait could not be released. It is tried again at each poll; the host has to raise nevertheless."""
        self._record(entry, cyclic_difference(entry.epoch, 1))  # what the flag holds cannot be read
        if str(error) != entry.refusal:
            entry.refusal = str(error)
            words = "%s: the stream wait for rank %d has passed its deadline and cannot be released: %s"
            get_logger("stream").error(words, entry.channel.op_name, entry.peer, error)

    def _is_done(self, entry: _Wait) -> bool:
        if entry.host_address is not None:
            return cyclic_difference(_flag(entry.host_address).value, entry.epoch) >= 0
        return cyclic_difference(int(self._progress[_SLOTS + entry.slot]), entry.ticket) >= 0

    def _look_at(self, entry: _Wait, now_s: float) -> None:
        if entry.begun_at_s is None and cyclic_difference(int(self._progress[entry.slot]), entry.ticket) >= 0:
            entry.begun_at_s = now_s
        timeout_s = entry.turns * entry.channel.timeout_s
        late = entry.begun_at_s is not None and now_s - entry.begun_at_s > timeout_s
        # After a failure everything that is enqueued is let through, begun or not: its results are discarded.
        if (late or entry.channel.failed) and not (entry.released or self._is_done(entry)):
            self._release(entry)

    def _release(self, entry: _Wait) -> None:
        if entry.host_address is not None:
            flag = _flag(entry.host_address)
            self._record(entry, flag.value)
            if cyclic_difference(flag.value, entry.epoch) < 0:
                flag.value = cyclic_difference(entry.epoch, 0)
        else:
            self._release_on_device(entry)
        entry.released = True
        get_logger("stream").error("%s: released a stream wait for rank %d", entry.channel.op_name, entry.peer)

    def _release_on_device(self, entry: _Wait) -> None:
        device = entry.channel.arena.device
        with torch.cuda.device(device):
            stream = self._release_streams[device].cuda_stream
            driver.memcpy_async(self._seen.data_ptr(), entry.address, 4, stream)
            self._release_streams[device].synchronize()
            self._record(entry, int(self._seen[0]))
            driver.memset_u32_async(entry.address, entry.epoch, 1, stream)

    def _record(self, entry: _Wait, seen_epoch: int) -> None:
        entry.channel.record_timeout(
            peer=entry.peer, chunk=entry.chunk, expected_epoch=entry.epoch, seen_epoch=seen_epoch, turns=entry.turns
        )


_the_watchdog: _Watchdog | None = None
_start_lock = threading.Lock()


def _watchdog() -> _Watchdog:
    global _the_watchdog
    with _start_lock:
        if _the_watchdog is None:
            _the_watchdog = _Watchdog()
        return _the_watchdog
