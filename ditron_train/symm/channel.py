"""``Channel``: the signals of one op on one group, with its epochs, its deadline and its record of what went wrong.

Two groups never share a signal buffer, and ops do only if they run one after the other in the order of the context
(``tp``'s gathers; ``ep``'s combine, alone and with a GEMM). Epochs are monotonic and wrap cyclically at 2**31; a
signal is never reset: a waiter waits until ``signal - epoch >= 0``. The epoch is counted in device memory by the
kernels themselves (``lang.next_epoch``), so a captured CUDA graph replays with fresh epochs; ``pp``, whose messages
are not captured, counts on the host.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from ditron_train.runtime.device import is_capturing
from ditron_train.runtime.errors import ArenaError, DitronError, MismatchError, NotSupportedError, PeerTimeoutError
from ditron_train.runtime.flight_recorder import note_error
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.runtime.settings import get_settings
from ditron_train.runtime.values import to_device
from ditron_train.symm.arena import SymmetricArena, SymmetricTensor
from ditron_train.symm.control import (
    CONTROL_ABORT,
    CONTROL_RANK,
    CONTROL_RECORD_ADDRESS,
    CONTROL_TIMEOUT_NS,
    CONTROL_WORDS,
    CONTROL_WORLD_SIZE,
    DTYPES,
    KIND_MISMATCH,
    KIND_OVERFLOW,
    KIND_REFUSED,
    KIND_TIMEOUT,
    READY_WORDS,
    RECORD_CHUNK,
    RECORD_EXPECTED,
    RECORD_KIND,
    RECORD_PEER,
    RECORD_SEEN,
    RECORD_STATE,
    RECORD_TURNS,
    RECORD_WORDS,
    TICKET_ROLES,
    TICKET_UNIT_LOG2,
    cyclic_difference,
)

_READY_READ_S = 2.0  # start signals are read for an error's words; the error must not be late

_recording = threading.Lock()
_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


class ChannelPointers(NamedTuple):
    """A channel as a kernel takes it, in one argument.

    Attributes:
        signals: Own flags, int32.
        signals_addresses: Of the flags of every rank, int64.
        ready: Own start signals, int32.
        ready_addresses: Of the start signals of every rank, int64.
        signature: What travels with a start signal, int32.
        tickets: Launch counters, int64.
        control: The control block, int64.
    """

    signals: torch.Tensor
    signals_addresses: torch.Tensor
    ready: torch.Tensor
    ready_addresses: torch.Tensor
    signature: torch.Tensor
    tickets: torch.Tensor
    control: torch.Tensor


class _StartSignals:
    """Reads start signals of both epoch parities through a ``mirror`` on the host."""

    def __init__(self, buffers: torch.Tensor | Sequence[torch.Tensor], mirror: torch.Tensor) -> None:
        self._buffers, self._mirror = buffers, mirror
        self._mirrored: Any = None  # the event at the end of the last copy into it

    def read(self, epoch: int, deadline_s: float) -> list[list[int]]:
        """As ``Channel.start_signals``."""
        signal_buffer = self._buffers[epoch & 1]
        if signal_buffer.device.type != "cuda":
            return signal_buffer.tolist()
        nothing = [[0] * READY_WORDS for _ in range(len(signal_buffer))]
        if torch.cuda.is_current_stream_capturing() or not self._is_mirrored(deadline_s):
            return nothing
        with torch.cuda.device(signal_buffer.device), torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            self._mirror.copy_(signal_buffer, non_blocking=True)
            self._mirrored = torch.cuda.current_stream().record_event()
        return self._mirror.tolist() if self._is_mirrored(deadline_s) else nothing

    def _is_mirrored(self, deadline_s: float) -> bool:
        """Waits until the last copy into the mirror is over: one that missed its deadline may still land there, so no
        other begins before, and nothing is read."""
        while not (is_over := self._mirrored is None or self._mirrored.query()) and time.monotonic() < deadline_s:
            time.sleep(0.001)
        return is_over


class Channel:
    """Signals, epochs and error record of op ``op_name`` on ``arena``'s group (constructed collectively).

    Attributes:
        signals: int32 ``SymmetricTensor`` of data-arrival flags; peers write, this rank waits.
        ready: int32 ``SymmetricTensor`` ``[2, world_size, READY_WORDS]``: start signals with signatures, by epoch
            parity.
        control: int64 control block on the device (see ``symm.control``).
        tickets: int64 ``[TICKET_ROLES]``. Slots 0 and 1 are launch counters, one for each kernel role of the op: slot
            0 of the kernel that sends (or of the only one), slot 1 of the kernel that waits for what arrives. Slots 2
            and 3 are zero at first and free for the op's own counters.
        signatures: Made by ``signature``; to be cleared when no launch that uses one is under way.
        turns: How many deadlines a wait of a host or a stream takes; that of a kernel takes one.

    Args:
        signature_fields: Names of the signature's fields, for error messages (at most ``READY_WORDS - 1``); the values
            of ``dtype`` are types.
        first_epoch: Epoch before the first launch; tests start near the wrap.
        by_address: Kernels write the peers' flags; False if NVSHMEM's calls do, on whichever node they are.

    Raises:
        NotSupportedError: Ranks of the group are on other nodes, where kernels cannot write flags; on every rank
            alike.
    """

    def __init__(
        self,
        arena: SymmetricArena,
        op_name: str,
        num_signals: int,
        *,
        signature_fields: Sequence[str] = (),
        first_epoch: int = 0,
        by_address: bool = True,
    ) -> None:
        assert len(signature_fields) < READY_WORDS
        self.arena = arena
        self.op_name = op_name
        self.signature_fields = tuple(signature_fields)
        self.timeout_s = get_settings().timeout_s
        self.turns = 1
        device = arena.device
        self.signals = self._filled(f"{op_name}/signals", (num_signals,), first_epoch)
        # So it is on every rank: each lacks the ranks of the other nodes.
        if by_address and 0 in self.signals.host_addresses:
            raise NotSupportedError(
                f"{op_name}: the group has ranks on other nodes, whose memory cannot be addressed from here"
            )
        self.ready = self._filled(f"{op_name}/ready", (2, arena.world_size, READY_WORDS), first_epoch)
        self.tickets = torch.zeros(TICKET_ROLES, dtype=torch.int64, device=device)
        self.tickets[:2] = first_epoch << TICKET_UNIT_LOG2
        on_host: Any = {"device": "cpu", "pin_memory": device.type == "cuda"}
        self._record = torch.zeros(RECORD_WORDS, dtype=torch.int64, **on_host)
        words_of_record: Any = self._record.numpy()
        self._record_view: memoryview = memoryview(words_of_record)  # to read a word takes a quarter of numpy's time
        self._host_record: list[int] | None = None  # what the host recorded, in the order of a record's words
        self._abort_word = torch.ones(1, dtype=torch.int64, **on_host)
        self._reader = _StartSignals(self.ready.local, torch.zeros(self.ready.shape[1:], dtype=torch.int32, **on_host))
        words = [0] * CONTROL_WORDS
        words[CONTROL_TIMEOUT_NS] = min(int(self.timeout_s * 1e9), 2**62)  # what kernels add to a clock
        words[CONTROL_RECORD_ADDRESS] = self._record.data_ptr()
        words[CONTROL_RANK] = arena.rank
        words[CONTROL_WORLD_SIZE] = arena.world_size
        self.control = torch.tensor(words, dtype=torch.int64, device=device)
        self.signatures: dict[tuple[int | torch.dtype, ...], torch.Tensor] = {}
        self.overflow_hint = ""  # what a slot is and which setting makes room, for the error of an op that has slots
        self.bounds: tuple[str, ...] = ()  # what an op's kernels refuse more of than it covers, by a record's chunk
        self._error: DitronError | None = None
        _channels.add(self)

    def _filled(self, name: str, shape: tuple[int, ...], epoch: int) -> SymmetricTensor:
        tensor = self.arena.tensor(name, shape, torch.int32)
        self.arena.quiesce()  # a channel of this name before this one may have used the memory
        tensor.local.fill_(cyclic_difference(epoch, 0))
        self.arena.quiesce()
        return tensor

    @property
    def epoch(self) -> int:
        """Of the last launch that the device has begun (a sync)."""
        return int(self.tickets[0]) >> TICKET_UNIT_LOG2

    def pointers(self, signature: torch.Tensor) -> ChannelPointers:
        """What a kernel takes, with a ``signature`` of this channel; as long as no flags are added."""
        signals, ready = self.signals, self.ready
        return ChannelPointers(
            signals.local, signals.addresses, ready.local, ready.addresses, signature, self.tickets, self.control
        )

    def reserve_signals(self, num_signals: int) -> None:
        """Makes room for ``num_signals`` flags (collective, with a sync, if there are fewer).

        Raises:
            ArenaError: There is no room, on every rank alike. The former number of flags is kept if there is room for
                them.
        """
        before = self.signals.local.numel()
        if before >= num_signals:
            return
        epoch = self.epoch  # a fresh flag must not be ahead of it after a wrap
        name = f"{self.op_name}/signals"
        try:
            self.signals = self._filled(name, (num_signals,), epoch)
        except ArenaError:
            if not self.arena.capacity_bytes(name):  # the former flags' memory has been freed
                self.signals = self._filled(name, (before,), epoch)
            raise

    def signature(self, values: Sequence[int | torch.dtype]) -> torch.Tensor:
        """The int32 ``[READY_WORDS]`` device tensor that travels with the start signal; cached by its values.

        Raises:
            NotSupportedError: New values while a CUDA graph is being captured, whose copy of them would be made at
                each replay.
        """
        key = tuple(values)
        tensor = self.signatures.get(key)
        if tensor is None:
            assert len(key) == len(self.signature_fields)
            if is_capturing(self.arena.device):
                raise NotSupportedError(f"{self.op_name}: run this shape once before a CUDA graph is captured: {key}")
            numbers = (DTYPES.index(value) if isinstance(value, torch.dtype) else value for value in key)
            words = [0, *(cyclic_difference(number, 0) for number in numbers)]
            words += [0] * (READY_WORDS - len(words))
            tensor = self.signatures[key] = to_device(
                torch.tensor(words, dtype=torch.int32, device="cpu"), self.arena.device
            )
        return tensor

    def check(self) -> None:
        """Raises what a kernel of this channel or its host recorded; reads host memory only, no sync.

        Raises:
            PeerTimeoutError: A wait passed its deadline.
            MismatchError: The ranks' signatures differ.
        """
        if self._error is None and (self._host_record or self._record_view[RECORD_STATE]):
            self._error = _recorded_error(self, self._host_record or list(self._record_view))
            note_error(self._error, self.arena.group_name)
        if self._error is not None:
            raise self._error

    def synchronize(self) -> None:
        """Waits for the device, then ``check``s: after it, results of earlier calls are known to be good."""
        if self.arena.device.type == "cuda":
            torch.cuda.synchronize(self.arena.device)
        self.check()

    def record_timeout(self, *, peer: int, chunk: int, expected_epoch: int, seen_epoch: int, turns: int = 1) -> None:
        """Records from the host that a wait of ``turns`` deadlines passed them; waits of kernels have their own.

        The host's record and the kernels' are stored apart, each is complete before it is visible, and the first that
        is visible wins: the host writes none if a kernel's is complete, and a host's record is raised even if a
        kernel's is completed after it. The kernels' waits then end, too, but not at a known moment: the abort word is
        set beside all streams, by a thread of its own that nobody waits for, since anything that is asked of a GPU may
        block while a stream is held up. It is left unset while the current stream is captured; each wait then ends at
        its own deadline.
        """
        self._record_on_host([1, KIND_TIMEOUT, peer, chunk, expected_epoch, seen_epoch, turns])

    def record_mismatch(self, epoch: int) -> None:
        """Records from the host that the ranks' signatures of a call differ; in the order of ``record_timeout``."""
        self._record_on_host([1, KIND_MISMATCH, 0, 0, epoch, 0, 1])

    def _record_on_host(self, record: list[int]) -> None:
        with _recording:  # a watchdog's thread may record, too
            if self.failed:
                return
            self._host_record = record
        if self.arena.device.type != "cuda":
            self.control[CONTROL_ABORT] = 1
        elif not torch.cuda.is_current_stream_capturing():
            threading.Thread(
                target=partial(_abort_kernels, self.control, self._abort_word), name="ditron-abort", daemon=True
            ).start()

    @property
    def failed(self) -> bool:
        """Whether a failure is recorded (host memory only)."""
        return self._host_record is not None or bool(self._record_view[RECORD_STATE])

    def start_signals(self, epoch: int, *, patient: bool = False) -> list[list[int]]:
        """The start signal of every rank, [epoch, signature...], as this rank's signal buffer for ``epoch`` holds it
        now.

        Read beside the current stream, which may be held up by anything (with ``CUDA_DEVICE_MAX_CONNECTIONS=1`` so is
        what is beside it); zeros if that takes too long, or is not allowed since a CUDA graph is being captured:
        then the error names the rank that was recorded, and of a mismatch no rank's arguments.

        Args:
            epoch: Of the call.
            patient: Reads again, for a while, until all ranks have begun the call: a difference is recorded as soon as
                two have, and every rank is to give the same words.
        """
        deadline_s = time.monotonic() + _READY_READ_S
        signals = self._reader.read(epoch, deadline_s)
        while patient and any(words[0] != epoch for words in signals) and time.monotonic() < deadline_s:
            time.sleep(0.001)
            signals = self._reader.read(epoch, deadline_s)
        return signals

    def describe_mismatch(self, epoch: int) -> str:
        """The same words on every rank: what each rank of the group called, in rank order."""
        calls = []
        for rank, words in enumerate(self.start_signals(epoch, patient=True)):
            if words[0] != epoch:
                calls.append(f"rank {rank}: not heard")
                continue
            fields = zip(self.signature_fields, words[1:])
            named = (f"{name}={DTYPES[value] if name == 'dtype' else value}" for name, value in fields)
            calls.append(f"rank {rank}: {', '.join(named)}")
        return (
            f"{self.op_name} on group {self.arena.group_name}: the ranks called it with different arguments, and the "
            f"result must not be used. " + "; ".join(calls)
        )


def _abort_kernels(control: torch.Tensor, abort_word: torch.Tensor) -> None:
    """By a copy engine, since kernels that wait may leave no multiprocessor free."""
    with suppress(RuntimeError), torch.cuda.device(control.device):  # a broken GPU runs no kernels
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            control.narrow(0, CONTROL_ABORT, 1).copy_(abort_word, non_blocking=True)
        control.record_stream(stream)  # it must not be another's memory when the copy comes


def _recorded_error(channel: Channel, words: Sequence[int]) -> DitronError:
    """What the ``words`` of a record say."""
    kind, peer = words[RECORD_KIND], words[RECORD_PEER]
    if kind == KIND_MISMATCH:
        return MismatchError(channel.describe_mismatch(words[RECORD_EXPECTED]))
    if kind == KIND_OVERFLOW:
        return DitronError(
            f"{channel.op_name} on group {channel.arena.group_name}: {words[RECORD_SEEN]} rows for slot "
            f"{words[RECORD_CHUNK]} of rank {peer}, room for {words[RECORD_EXPECTED]}{channel.overflow_hint}"
        )
    if kind == KIND_REFUSED:
        return DitronError(
            f"{channel.op_name} on group {channel.arena.group_name}: {channel.bounds[words[RECORD_CHUNK]]}: "
            f"{words[RECORD_SEEN]} on rank {peer}, at most {words[RECORD_EXPECTED]} are covered"
        )
    chunk, expected, seen, turns = words[RECORD_CHUNK : RECORD_TURNS + 1]
    return _timeout_error(channel, peer, chunk, expected, seen, turns or 1)


def _timeout_error(
    channel: Channel, peer: int, chunk: int, expected_epoch: int, seen_epoch: int, turns: int
) -> PeerTimeoutError:
    """Names the rank that is really missing: a peer that has begun the call may itself be waiting for one that has
    not, and both waits end at about the same time, so that either may be the one that was recorded."""
    epochs = [words[0] for words in channel.start_signals(expected_epoch)]
    absent = [rank for rank, epoch in enumerate(epochs) if cyclic_difference(epoch, expected_epoch) < 0]
    if absent and peer not in absent and channel.arena.rank not in absent:
        peer, chunk, seen_epoch = absent[0], -1, epochs[absent[0]]
    return PeerTimeoutError(
        op=channel.op_name,
        group=channel.arena.group_name,
        waiting_rank=channel.arena.rank,
        missing_rank=peer,
        chunk=chunk,
        expected_epoch=expected_epoch,
        seen_epoch=seen_epoch,
        timeout_s=turns * channel.timeout_s,
    )


@outside_compile
def check_all(group_name: str | None = None) -> None:
    """``check``s every live channel of this process whose arena is open; of one group, if named."""
    for channel in list(_channels):
        if not channel.arena.closed and group_name in (None, channel.arena.group_name):
            channel.check()


def forget_failed() -> None:
    """Takes channels that failed out of ``check_all``: for a caller that has handled their errors and is done with
    them."""
    for channel in list(_channels):
        if channel.failed:
            _channels.discard(channel)
