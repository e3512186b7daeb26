"""``Sender`` and ``Receiver``: one direction of messages to one neighbour.

A lane is the sequence of messages from one stage to one neighbour in one direction (forward: activations to the next
stage; backward: gradients to the previous one). The receiver owns the memory that messages land in. It comes in two
kinds:

- slots to *lease*: the received tensor is in the slot and nothing is copied; when its last user has let go of it, the
  receiver's stream sets the slot's flag at the sender, and then its host counts it as returned;
- a *ring* of ``S`` slots, for when the sender sees none of those returned: the receiver copies the message out at
  once. A flag at the sender, *credit*, counts the messages that were copied out. Message ``k`` (from 0) of the ring
  lands in slot ``k % S``.

The sender's stream waits for the flag of the slot it uses (the ring: ``credit > k - S``), copies by copy engine, and
sets the flag *data* at the receiver, which counts fragments: the ring's messages are cut into several so that one is
copied out while the next is on the wire. The sender's host chooses the slot and says which in the message's header; so
the receiver's host waits for the header before it enqueues the receive. The order of a stream is the order of its
memory operations, and a stream's flag write is fenced at system scope, so no fragment is read before it is complete
and no slot is overwritten while it is in use. All counters only grow and are compared cyclically. On the CPU the same
code runs without streams: a copy is done when the call returns and a wait blocks the caller. What waits, copies and
sets flags is the channel's: by kernels (``kernel_channel``) the same ends run with the ring alone, and those of
``nvshmem_endpoints`` send headers with the data.

Why it cannot deadlock, even if the device has a single hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``) and every
wait therefore blocks all that is enqueued after it, which is also the CPU's behaviour: think of each rank as one
program that executes its sends and receives in the order in which the host enqueued them. A receive is enqueued only
when its data is asked for (``Receiver.take``), never when it is posted, so a prefetched receive holds up nothing.
Every call enqueues its sends before its receives. A send into a slot that was leased waits only for what its receiver
had enqueued before the send was. A send into the ring waits only for the credit of a message of the ring ``S``
earlier. Take any execution of the same schedule with blocking rendezvous, as the native communicator has: there
message ``k - 1`` of a lane is received before message ``k`` is posted, so what was ``S`` messages earlier has been
received for every ``S >= 1``, and each send of this package can run no later than there; a receive then follows its
send in that execution as in this package. With overlapped receives the rendezvous is the *posting*; a receiver keeps
at most ``S - 1`` posted messages and takes the oldest when it posts another, so posting message ``k - 1`` frees the
slot of message ``k``.

Small messages take longer than NCCL's kernel needs; what was tried: ``docs/measurements/pp.md``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from ditron_train.pp.channel import PipelineChannel
from ditron_train.pp.mailbox import MAX_LEASES
from ditron_train.pp.messages import Copy, Header, disagreement, fragment_ends, num_bytes_of
from ditron_train.pp.slots import Slots
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.stream.copies import copy_bytes
from ditron_train.stream.events import EventPool, StreamEvent, current_stream

if TYPE_CHECKING:
    from ditron_train.pp.nvshmem_channel import NvshmemChannel, NvshmemSlots

_DATA, _CREDIT, _LEASES = 0, 2, 4  # flag index = kind + lane; of a lease _LEASES + lane * MAX_LEASES + slot
_MAX_HELD = 1  # sends that nothing but this module keeps alive, besides the newest


def _lease_flag(lane: int, lease: int) -> int:
    return _LEASES + lane * MAX_LEASES + lease


@dataclass
class _Sent:
    """Keeps a message's storage alive until its copy is known to be complete."""

    tensor: torch.Tensor
    event: StreamEvent
    sent_from: torch.cuda.Stream


class _End:
    """One end of a lane to group rank ``peer``; ``header_on_host``: whether the receiver's host learns what is
    coming."""

    header_on_host = True

    def __init__(
        self, channel: PipelineChannel | NvshmemChannel, slots: Slots | NvshmemSlots, lane: int, peer: int
    ) -> None:
        self.channel, self.slots, self.lane, self.peer = channel, slots, lane, peer
        # For what ends through NVSHMEM never do: tell the neighbour's host, and lease the slot.
        self._host_channel, self._leasing_slots = cast(PipelineChannel, channel), cast(Slots, slots)
        self.messages = self._ring_messages = self._fragments = 0
        self._uses = [0] * slots.leases[lane]
        self._events = EventPool()
        device = channel.arena.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None


class Sender(_End):
    """The sending end; ``messages``: sent so far, ``leased`` of them into slots that the receiver leases."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.leased = 0
        self._newest_lease = -1
        self._held: deque[_Sent] = deque()

    def announce(self, header: Header) -> None:
        """Publishes the header of the next message; waits while the receiver's host has ``HEADER_DEPTH`` unread."""
        message = self.messages
        headers = self._host_channel.mailbox.headers
        words = header.to_words()
        if not headers.has_room(self.peer, self.lane, message + 1):
            self._host_channel.wait_on_host(
                lambda: headers.has_room(self.peer, self.lane, message + 1), peer=self.peer, chunk=message
            )
        headers.write_header(self.peer, self.lane, message + 1, words)
        self.messages += 1

    def send(self, tensor: torch.Tensor, *, may_lease: bool = True) -> StreamEvent | None:
        """Enqueues the next message; returns the event after its copy (None on the CPU, where the copy is done).

        The storage is kept until the copy is complete. On a GPU the host waits only if the receiver's host has
        ``HEADER_DEPTH`` headers unread (``announce``); on the CPU it also waits while no slot is free. ``may_lease``:
        see ``ops.exchange``.
        """
        data = tensor.detach().contiguous()
        num_bytes = num_bytes_of(tuple(data.shape), data.dtype)
        lease = self._choose_lease() if may_lease and num_bytes else None
        self.announce(Header(tuple(data.shape), data.dtype, lease=lease))
        stream = self._stream
        if stream is not None:
            current = current_stream(data.device)
            self._events.record(current).hold(stream)
        ends = [num_bytes]
        if lease is None:
            slot, ends = self._slot_of_ring(stream), fragment_ends(num_bytes)
        else:
            slot = self._slot_to_lease(lease, stream)
        self._push(slot, data.data_ptr(), ends, stream)
        if stream is None:
            return None
        return self._hold(data, stream, current)

    def _push(self, slot: int, source: int, ends: list[int], stream: torch.cuda.Stream | None) -> None:
        begin = 0
        for end in ends:
            self._fragments += 1
            copy = Copy(slot + begin, source + begin, end - begin)
            self.channel.push(self.peer, _DATA + self.lane, self._fragments, copy, stream)
            begin = end

    def _choose_lease(self) -> int | None:
        """A slot that has come back, best one whose last use is known to be over; the others in the order of their
        use."""
        if not self._uses:
            return None
        own = self.channel.arena.rank
        returned = self._host_channel.mailbox.headers.returned(own, self.lane)
        count, first = len(self._uses), None
        for place in range(1, count + 1):
            lease = (self._newest_lease + place) % count
            if returned[lease] != self._uses[lease]:
                continue
            if self._host_channel.is_set(_lease_flag(self.lane, lease), self._uses[lease]):
                return lease
            first = lease if first is None else first
        return first

    def _slot_to_lease(self, lease: int, stream: torch.cuda.Stream | None) -> int:
        index, uses = _lease_flag(self.lane, lease), self._uses[lease]
        self.channel.wait_for(index, uses, peer=self.peer, chunk=self.messages - 1, stream=stream)
        self._uses[lease] = uses + 1
        self._newest_lease = lease
        self.leased += 1
        return self._leasing_slots.to_lease(self.peer, self.lane, lease)

    def _slot_of_ring(self, stream: torch.cuda.Stream | None) -> int:
        message = self._ring_messages
        self._ring_messages += 1
        taken = message - self.slots.count + 1
        if taken > 0:
            self.channel.wait_for(_CREDIT + self.lane, taken, peer=self.peer, chunk=self.messages - 1, stream=stream)
        return self.slots.in_ring(self.peer, self.lane, message)

    def _hold(self, data: torch.Tensor, stream: torch.cuda.Stream, sent_from: torch.cuda.Stream) -> StreamEvent:
        event = self._events.record(stream)
        self._held.append(_Sent(data, event, sent_from))
        while len(self._held) > 1 + _MAX_HELD:
            # Let the stream that sent it wait for an old copy rather than hold ever more memory: a host that is far
            # ahead would otherwise keep every message of a step alive.
            old = self._held.popleft()
            old.event.hold(old.sent_from)
            old.tensor.record_stream(old.sent_from)  # which need not be the one that it was allocated on
        return event

    def forget_leases(self) -> None:
        """See ``Receiver.forget_leases``, which counts as a use of each slot."""
        self._uses = [uses + 1 for uses in self._uses]

    def release_sent(self) -> None:
        """Drops what is known to be sent (no wait)."""
        while self._held and self._held[0].event.is_over():
            self._held.popleft()


@dataclass(eq=False)
class Incoming:
    """A posted message.

    Attributes:
        message: Its number.
        header: What is expected.
        tensor: What arrived; None until it is taken.
        done_on: The stream that its arrival was enqueued on (GPU).
        arrived: The moment of its arrival there, if messages after it may be enqueued on that stream before it is
            used.
    """

    message: int
    header: Header
    tensor: torch.Tensor | None = None
    done_on: torch.cuda.Stream | None = None
    arrived: StreamEvent | None = None


class _Lease:
    """One use of a slot, from the message's arrival until the receiver has told the sender that it is over."""

    def __init__(self, slot: int, use: int) -> None:
        self.slot, self.use = slot, use
        self.stream: torch.cuda.Stream | None = None  # whose work uses the tensor


class Receiver(_End):
    """The receiving end."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._posted: deque[Incoming] = deque()
        self._unverified: deque[tuple[int, Header]] = deque()
        self._let_go: deque[_Lease] = deque()  # appended to by whichever thread frees a leased tensor
        self._leased: dict[Incoming, _Lease] = {}
        self._copied_on: torch.cuda.Stream | None = None

    def next_header(self) -> Header:
        """Header of the next message that is not posted yet; blocks the host until its sender has enqueued it."""
        return self._header_of(self.messages)

    def _header_of(self, message: int) -> Header:
        headers = self._host_channel.mailbox.headers
        words = headers.read_header(self.lane, message + 1)
        if words is None:
            headers.await_header(self.peer, self.lane, message + 1)
            self._host_channel.wait_on_host(
                lambda: headers.read_header(self.lane, message + 1) is not None, peer=self.peer, chunk=message
            )
            words = headers.read_header(self.lane, message + 1)
            assert words is not None
        return Header.from_words(words)

    def expect(self, header: Header) -> int:
        """Counts the next message as ``header``, which is compared with the sender's as soon as that is known."""
        message = self.messages
        self.messages += 1
        self._unverified.append((message, header))
        return message

    def verify(self) -> None:
        """Compares the headers that have come since with what was expected."""
        headers = self._host_channel.mailbox.headers
        while self._unverified:
            message, expected = self._unverified[0]
            words = headers.read_header(self.lane, message + 1)
            if words is None:
                break
            self._unverified.popleft()
            sent = Header.from_words(words)
            if not sent.is_taken_as(expected):
                own = self.channel.arena.rank
                how = " through the network" if sent.by_network else ""
                group = self.channel.arena.group_name
                self._host_channel.fail_mismatch(
                    disagreement(group, self.lane, message, (self.peer, f"{sent}{how}"), (own, str(expected)))
                )
        needed = [self.messages, *(entry[0] for entry in list(self._unverified)[:1])]
        needed += [incoming.message for incoming in list(self._posted)[:1]]
        headers.acknowledge(self.lane, min(needed))

    def post(self, header: Header) -> Incoming:
        """Counts the next message as ``header``, to be taken by ``take``."""
        if num_bytes_of(header.shape, header.dtype) > self.slots.num_bytes:
            raise NotSupportedError(f"a message of {header} is larger than the slots of {self.slots.num_bytes} bytes")
        incoming = Incoming(self.expect(header), header)
        self._posted.append(incoming)
        while len(self._posted) >= self.slots.count:
            oldest = self._posted[0]
            self._take_next(self._stream)
            if self._stream is not None:
                oldest.arrived = self._events.record(self._stream)
        return incoming

    def take(self, incoming: Incoming) -> torch.Tensor:
        """The message, ready for what is enqueued on the current stream from now on (CPU: it is there).

        Blocks the host until the sender's host has enqueued the message.
        """
        stream = None if self._stream is None else current_stream(self.channel.arena.device)
        while incoming.tensor is None:
            self._take_next(stream)
        if incoming.done_on != stream:
            assert stream is not None and incoming.done_on is not None
            (incoming.arrived or self._events.record(incoming.done_on)).hold(stream)
            incoming.tensor.record_stream(stream)
        lease = self._leased.pop(incoming, None)
        if lease is not None:
            lease.stream = stream
        return incoming.tensor

    def _take_next(self, stream: torch.cuda.Stream | None) -> None:
        incoming = self._posted[0]
        sent = self._header_of(incoming.message)
        self.verify()
        num_bytes = num_bytes_of(sent.shape, sent.dtype)
        if sent.lease is None:
            incoming.tensor = self._copy_out(incoming, num_bytes, stream)
        else:
            incoming.tensor = self._borrow(incoming, sent.lease, num_bytes, stream)
        incoming.done_on = stream
        self._posted.popleft()  # not before: if there was no memory for it, it is still the next one in the ring

    def _wait_for_fragment(self, incoming: Incoming, begin: int, stream: torch.cuda.Stream | None) -> None:
        """For the next fragment of the lane, which starts at byte ``begin`` of ``incoming``."""
        self._fragments += 1
        self.channel.wait_for(
            _DATA + self.lane, self._fragments, peer=self.peer, chunk=incoming.message, stream=stream
        )

    def _borrow(self, incoming: Incoming, slot: int, num_bytes: int, stream: torch.cuda.Stream | None) -> torch.Tensor:
        self._wait_for_fragment(incoming, 0, stream)
        self._uses[slot] += 1
        lease = self._leased[incoming] = _Lease(slot, self._uses[slot])
        leased = self._leasing_slots.lease_tensor(self.lane, slot, num_bytes, partial(self._let_go.append, lease))
        return leased.view(incoming.header.dtype).view(incoming.header.shape)

    def _copy_out(self, incoming: Incoming, num_bytes: int, stream: torch.cuda.Stream | None) -> torch.Tensor:
        header, device = incoming.header, self.channel.arena.device
        tensor = torch.empty(header.shape, dtype=header.dtype, device=device)
        if stream is not None and stream != current_stream(device):
            # The allocator may have handed out memory that is still in use on the current stream.
            self._events.record(current_stream(device)).hold(stream)
            tensor.record_stream(stream)
        if stream is not None and self._copied_on is not None and self._copied_on != stream:
            # The credit counts messages: none may be copied out, and counted, before the earlier ones.
            self._events.record(self._copied_on).hold(stream)
        self._copied_on = stream
        slot = self.slots.in_ring(self.channel.arena.rank, self.lane, self._ring_messages)
        self._ring_messages += 1
        target, begin = tensor.data_ptr(), 0
        for end in fragment_ends(num_bytes):
            self._wait_for_fragment(incoming, begin, stream)
            if end > begin:
                copy_bytes(target + begin, slot + begin, end - begin, stream)
            begin = end
        self.channel.notify(self.peer, _CREDIT + self.lane, self._ring_messages, stream)
        return tensor

    def forget_leases(self) -> None:
        """After the slots have grown: what is still leased is in the old memory, so all slots are there to be used."""
        mailbox = self._host_channel.mailbox
        for slot in range(len(self._uses)):
            self._uses[slot] += 1
            mailbox.set_flag(self.peer, _lease_flag(self.lane, slot), self._uses[slot])
            mailbox.headers.returned(self.peer, self.lane)[slot] = self._uses[slot]

    def return_leases(self) -> None:
        """Gives the slots of leased tensors that nobody holds any more back to the sender, after their last use."""
        while self._let_go:
            lease = self._let_go.popleft()
            if lease.use != self._uses[lease.slot]:
                continue  # it is in memory of before the slots grew
            self.channel.notify(self.peer, _lease_flag(self.lane, lease.slot), lease.use, lease.stream)
            self._host_channel.mailbox.headers.returned(self.peer, self.lane)[lease.slot] = lease.use
