"""``PipelineChannel``, ``Sender`` and ``Receiver``: one direction of messages to one neighbour.

A lane is the sequence of messages from one stage to one neighbour in one direction (forward: activations to the next
stage; backward: gradients to the previous one). The receiver owns a ring of ``S`` slots. Two flags carry a lane:

- *data*, at the receiver: fragments that have arrived since the beginning;
- *credit*, at the sender: messages that the receiver has taken out of their slots since the beginning.

Message ``k`` (from 0) goes into slot ``k % S``. The sender's stream waits until ``credit > k - S`` (the slot's last message is
out), copies each fragment by copy engine and sets *data* behind it. The receiver's stream waits for *data*, copies the
fragment into a fresh tensor, and sets *credit* behind the last one. The order of a stream is the order of its memory
operations, and a stream's flag write is fenced at system scope, so no fragment is read before it is complete and no slot is
overwritten before it is out. Both counters only grow and are compared cyclically. On the CPU the same code runs
without streams: a copy is done when the call returns and a wait blocks the caller.

Why it cannot deadlock, even where the device has a single hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``) and every
wait therefore blocks all that is enqueued after it, which is also the CPU's behaviour: think of each rank as one
program that executes its sends and receives in the order in which the host enqueued them. A receive is enqueued only when
its data is asked for (``ReceiveHandle.wait``), never when it is posted, so a prefetched receive holds up nothing. A send
waits only for the credit of a message ``S`` earlier. Every call enqueues its sends before its receives. Take any
execution of the same schedule with blocking rendezvous, as the native communicator has: there message ``k - 1`` of a lane
is received before message ``k`` is posted, so ``k - S`` has been received for every ``S >= 1``, and each send of ours can
run no later than there; a receive then follows its send in that execution as in ours. With overlapped receives the rendezvous
is the *posting*; a receiver keeps at most ``S - 1`` posted messages in their slots and takes the oldest out when it posts
another, so posting message ``k - 1`` frees the slot of message ``k``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ditron_train.pp.mailbox import Mailbox
from ditron_train.pp.messages import LANE_NAMES, Header, fragment_ends, num_bytes_of
from ditron_train.runtime.errors import DitronError, MismatchError, NotSupportedError, PeerTimeoutError
from ditron_train.runtime.records import note_error
from ditron_train.stream import put, stream_notify, stream_wait
from ditron_train.stream.waits import cyclic_difference
from ditron_train.symm.arena import SymmetricArena
from ditron_train.symm.channel import Channel

__all__ = ["PipelineChannel", "Receiver", "Sender", "Slots"]

_DATA, _CREDIT = 0, 2  # flag index = kind + lane
_KIND_TIMEOUT, _KIND_MISMATCH = 1, 2
_MAX_HELD = 1  # sends that nothing but this module keeps alive, besides the newest


class PipelineChannel(Channel):
    """The flags and the failure record of a pipeline group's messages; a failure of one rank is raised by all.

    Flags lie in the mailbox where streams can reach it, else in symmetric device memory.
    """

    def __init__(self, arena: SymmetricArena, mailbox: Mailbox) -> None:
        super().__init__(arena, "pp", 2 * len(LANE_NAMES))
        self.mailbox = mailbox
        self._raised: DitronError | None = None

    def address(self, rank: int, index: int) -> int:
        """Address of flag ``index`` of ``rank`` for this rank's streams."""
        if self.mailbox.has_flags:
            return self.mailbox.flag_address(rank, index)
        return self.signals.host_addresses[rank] + 4 * index

    def wait_for(
        self, index: int, epoch: int, *, peer: int, chunk: int, stream: torch.cuda.Stream | None
    ) -> None:
        """Holds the stream (CPU: the caller) until this rank's flag is ``epoch`` or later; bounded.

        Where the host sees that it is, nothing is enqueued: what the flag stands for is complete, so whatever is enqueued
        from now on finds it complete.
        """
        own = self.arena.rank
        host_address = None
        if self.mailbox.has_flags:
            if cyclic_difference(self.mailbox.flag_value(own, index), epoch) >= 0:
                return
            host_address = self.mailbox.flag_host_address(own, index)
        stream_wait(
            self, self.address(own, index), epoch, peer=peer, chunk=chunk, stream=stream, host_address=host_address
        )

    def notify(self, rank: int, index: int, epoch: int, stream: torch.cuda.Stream | None) -> None:
        """Sets flag ``index`` of ``rank`` once the stream has got there."""
        stream_notify(self, self.address(rank, index), epoch, stream)

    def record_timeout(self, *, peer: int, chunk: int, expected_epoch: int, seen_epoch: int) -> None:
        """See ``Channel``; tells the other ranks of the node, unless one of them has failed before."""
        if self.mailbox.failed:
            return
        self.mailbox.post_fault([_KIND_TIMEOUT, self.arena.rank, peer, chunk, expected_epoch, seen_epoch])
        super().record_timeout(peer=peer, chunk=chunk, expected_epoch=expected_epoch, seen_epoch=seen_epoch)

    @property
    def failed(self) -> bool:
        """Whether this rank or another one has recorded a failure (host memory only)."""
        return super().failed or self.mailbox.failed

    def fail_mismatch(self, text: str) -> None:
        """Records on all ranks of the node that neighbours disagree, and raises it here."""
        self.mailbox.post_fault([_KIND_MISMATCH, self.arena.rank], text)
        self.check()

    def check(self) -> None:
        """Raises what this or another rank of the node has recorded, in the same words on all of them.

        Raises:
            PeerTimeoutError: A wait passed its deadline.
            MismatchError: Neighbours disagree on a message.
        """
        if self._raised is None and self.mailbox.failed:
            self._raised = self._error_of_all()
            note_error(self._raised, self.arena.group_name)
        if self._raised is not None:
            raise self._raised
        super().check()

    def _error_of_all(self) -> DitronError:
        (kind, reporter, *fields), text = self.mailbox.fault()
        if kind == _KIND_MISMATCH:
            return MismatchError(text)
        peer, chunk, expected, seen = fields
        return PeerTimeoutError(
            op=self.op_name,
            group=self.arena.group_name,
            waiting_rank=reporter,
            missing_rank=peer,
            chunk=chunk,
            expected_epoch=expected,
            seen_epoch=seen,
            timeout_s=self.timeout_s,
        )

    def wait_on_host(self, ready: Callable[[], bool], *, peer: int, chunk: int) -> None:
        """Blocks the host until ``ready()``, at most the deadline; for what only hosts exchange.

        Raises:
            PeerTimeoutError: It did not become so in time.
        """
        deadline_s = time.monotonic() + self.timeout_s
        while not ready():
            self.check()
            if time.monotonic() > deadline_s:
                self.record_timeout(peer=peer, chunk=chunk, expected_epoch=chunk + 1, seen_epoch=chunk)
                self.check()
            time.sleep(0.0001)


class Slots:
    """The ring buffers of both lanes, as symmetric memory ``[lane, slot, bytes]`` of the group (grown collectively)."""

    def __init__(self, arena: SymmetricArena, count: int) -> None:
        self._arena = arena
        self.count = count
        self.num_bytes = 0

    def reserve(self, num_bytes: int) -> None:
        """Collective: makes every slot hold ``num_bytes``; no message may be under way."""
        num_bytes = -(-num_bytes // 256) * 256
        shape = (len(LANE_NAMES), self.count, num_bytes)
        self._tensor = self._arena.tensor("pp/slots", shape, torch.uint8)
        self.num_bytes = num_bytes

    def at(self, rank: int, lane: int, message: int, num_bytes: int) -> torch.Tensor:
        """The first ``num_bytes`` of message ``message``'s slot in ``rank``'s memory."""
        slot = message % self.count
        owner = self._tensor.local if rank == self._arena.rank else self._tensor.peer(rank)
        return owner[lane, slot, :num_bytes]


@dataclass
class _Sent:
    """Keeps a message's storage alive until its copy is known to be complete."""

    tensor: torch.Tensor
    event: torch.cuda.Event
    sent_from: torch.cuda.Stream


class Sender:
    """The sending end of a lane, to group rank ``peer``."""

    def __init__(self, channel: PipelineChannel, slots: Slots, lane: int, peer: int) -> None:
        self.channel, self.slots, self.lane, self.peer = channel, slots, lane, peer
        self.messages = 0
        self._fragments = 0
        self._held: deque[_Sent] = deque()
        device = channel.arena.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def announce(self, header: Header) -> int:
        """Publishes the header of the next message and returns the message's number."""
        message = self.messages
        mailbox = self.channel.mailbox
        words = header.to_words()
        if not mailbox.has_room(self.peer, self.lane, message + 1):
            self.channel.wait_on_host(
                lambda: mailbox.has_room(self.peer, self.lane, message + 1), peer=self.peer, chunk=message
            )
        mailbox.write_header(self.peer, self.lane, message + 1, words)
        self.messages += 1
        return message

    def send(self, tensor: torch.Tensor) -> torch.cuda.Event | None:
        """Enqueues the next message; returns the event behind its copy (None on the CPU, where it is done).

        The storage is kept until the copy is complete. Never blocks the host on a GPU; on the CPU it blocks while no slot is
        free.
        """
        data = tensor.detach().contiguous()
        message = self.announce(Header(tuple(data.shape), data.dtype))
        num_bytes = num_bytes_of(tuple(data.shape), data.dtype)
        stream = self._stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(data.device))
        if message >= self.slots.count:
            taken = message - self.slots.count + 1
            self.channel.wait_for(_CREDIT + self.lane, taken, peer=self.peer, chunk=message, stream=stream)
        slot = self.slots.at(self.peer, self.lane, message, num_bytes)
        source = data.view(-1).view(torch.uint8) if num_bytes else data
        begin = 0
        for end in fragment_ends(num_bytes):
            if end > begin:
                put(slot[begin:end], source[begin:end], stream)
            self._fragments += 1
            self.channel.notify(self.peer, _DATA + self.lane, self._fragments, stream)
            begin = end
        if stream is None:
            return None
        return self._hold(data, stream)

    def _hold(self, data: torch.Tensor, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        self._held.append(_Sent(data, event, torch.cuda.current_stream(data.device)))
        while len(self._held) > 1 + _MAX_HELD:
            # Let the stream that sent it wait for an old copy rather than hold ever more memory: a host that is far ahead
            # would otherwise keep every message of a step alive.
            old = self._held.popleft()
            old.sent_from.wait_event(old.event)
        return event

    def release_sent(self) -> None:
        """Drops what is known to be sent (no wait)."""
        while self._held and self._held[0].event.query():
            self._held.popleft()


@dataclass
class Incoming:
    """A posted message: where it goes and how far it is."""

    message: int
    tensor: torch.Tensor
    posted_on: torch.cuda.Stream | None
    posted: torch.cuda.Event | None = None
    done_on: torch.cuda.Stream | None = None
    done: torch.cuda.Event | None = None
    taken: bool = field(default=False)


class Receiver:
    """The receiving end of a lane, from group rank ``peer``."""

    def __init__(self, channel: PipelineChannel, slots: Slots, lane: int, peer: int) -> None:
        self.channel, self.slots, self.lane, self.peer = channel, slots, lane, peer
        self.messages = 0
        self._fragments = 0
        self._posted: deque[Incoming] = deque()
        self._unverified: deque[tuple[int, Header]] = deque()
        device = channel.arena.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def next_header(self) -> Header:
        """Header of the next message that is not posted yet; blocks the host until its sender has enqueued it."""
        mailbox, sequence = self.channel.mailbox, self.messages + 1
        words = mailbox.read_header(self.lane, sequence)
        if words is None:
            self.channel.wait_on_host(
                lambda: mailbox.read_header(self.lane, sequence) is not None, peer=self.peer, chunk=self.messages
            )
            words = mailbox.read_header(self.lane, sequence)
            assert words is not None
        return Header.from_words(words)

    def expect(self, header: Header) -> int:
        """Counts the next message as ``header``, which is compared with the sender's as soon as that is known.

        Raises:
            MismatchError: It differs; on all ranks of the node.
        """
        message = self.messages
        self.messages += 1
        self._unverified.append((message, header))
        self.verify()
        return message

    def verify(self) -> None:
        """Compares the headers that have come since with what was expected."""
        mailbox = self.channel.mailbox
        while self._unverified:
            message, expected = self._unverified[0]
            words = mailbox.read_header(self.lane, message + 1)
            if words is None:
                return
            self._unverified.popleft()
            mailbox.acknowledge(self.lane, message + 1)
            sent = Header.from_words(words)
            if sent != expected:
                own = self.channel.arena.rank
                how = " through the network" if sent.by_network else ""
                self.channel.fail_mismatch(
                    f"pp on group {self.channel.arena.group_name}: rank {self.peer} sent {sent}{how} as "
                    f"{LANE_NAMES[self.lane]} message {message}, rank {own} expected {expected}; the stages of a pipeline "
                    "must agree on the shape and type of what they exchange"
                )

    def post(self, header: Header) -> Incoming:
        """Makes the tensor for the next message, to be filled by ``take``."""
        if num_bytes_of(header.shape, header.dtype) > self.slots.num_bytes:
            raise NotSupportedError(f"a message of {header} is larger than the slots of {self.slots.num_bytes} bytes")
        message = self.expect(header)
        device = self.channel.arena.device
        tensor = torch.empty(header.shape, dtype=header.dtype, device=device)
        incoming = Incoming(message, tensor, None)
        if device.type == "cuda":
            incoming.posted_on = torch.cuda.current_stream(device)
            incoming.posted = torch.cuda.Event()
            incoming.posted.record(incoming.posted_on)
        self._posted.append(incoming)
        while len(self._posted) >= self.slots.count:
            self._take_next(self._stream)
        return incoming

    def take(self, incoming: Incoming) -> None:
        """Makes ``incoming.tensor`` ready for what is enqueued on the current stream from now on (CPU: fills it)."""
        stream = None
        if incoming.posted_on is not None:
            stream = torch.cuda.current_stream(self.channel.arena.device)
        while not incoming.taken:
            self._take_next(stream)
        if stream is not None and incoming.done_on != stream:
            stream.wait_event(incoming.done)
        if stream is not None and incoming.posted_on != stream:
            incoming.tensor.record_stream(stream)

    def _take_next(self, stream: torch.cuda.Stream | None) -> None:
        incoming = self._posted.popleft()
        incoming.taken = True
        tensor = incoming.tensor
        if stream is not None and incoming.posted_on != stream:
            stream.wait_event(incoming.posted)  # the allocator may have handed out memory that is still in use there
            tensor.record_stream(stream)
        num_bytes = tensor.numel() * tensor.element_size()
        slot = self.slots.at(self.channel.arena.rank, self.lane, incoming.message, num_bytes)
        target = tensor.view(-1).view(torch.uint8) if num_bytes else tensor
        begin = 0
        for end in fragment_ends(num_bytes):
            self._fragments += 1
            self.channel.wait_for(
                _DATA + self.lane, self._fragments, peer=self.peer, chunk=incoming.message, stream=stream
            )
            if end > begin:
                put(target[begin:end], slot[begin:end], stream)
            begin = end
        self.channel.notify(self.peer, _CREDIT + self.lane, incoming.message + 1, stream)
        if stream is not None:
            incoming.done_on = stream
            incoming.done = torch.cuda.Event()
            incoming.done.record(stream)
