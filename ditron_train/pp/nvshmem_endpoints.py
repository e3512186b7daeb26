"""Sender and receiver through NVSHMEM: a message and its flag by one put-with-signal, to a neighbour whose memory need
not be mapped.

No host memory is shared between nodes, so a message carries its header: it is before the data in the slot,
is sent with the first fragment, and a kernel of the receiver compares it with what was expected. The protocol is that
of ``endpoints``' ring: *data* counts fragments at the receiver, *credit* counts messages copied out at the sender.
NVSHMEM promises that a signal is seen after the data that was put with it; waits are kernels of one warp with a
deadline, since NVSHMEM's own wait on a stream has none. A put reads symmetric memory, so what is sent is copied into
it first; two local copies cost little compared with a network.
"""

from __future__ import annotations

import torch

from ditron_train.pp.endpoints import Incoming, Receiver, Sender
from ditron_train.pp.messages import Header, num_bytes_of
from ditron_train.pp.nvshmem_channel import HEADER_BYTES, SLOT_HEADER_BYTES, NvshmemChannel, NvshmemSlots
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.stream.copies import copy_bytes


class NvshmemSender(Sender):
    """A ``Sender`` by put-with-signal; nothing is leased."""

    channel: NvshmemChannel
    slots: NvshmemSlots
    header_on_host = False

    def announce(self, header: Header) -> None:
        """The header is sent with the message."""
        self._header = self.channel.header_address(header)
        self.messages += 1

    def _push(self, slot: int, source: int, ends: list[int], stream: torch.cuda.Stream | None) -> None:
        staged = self.slots.staging(self.lane)
        copy_bytes(staged - SLOT_HEADER_BYTES, self._header, HEADER_BYTES, stream)
        if ends[-1]:
            copy_bytes(staged, source, ends[-1], stream)
        slot, staged = slot - SLOT_HEADER_BYTES, staged - SLOT_HEADER_BYTES
        super()._push(slot, staged, [SLOT_HEADER_BYTES + end for end in ends], stream)


class NvshmemReceiver(Receiver):
    """Receives what a ``NvshmemSender`` sends; headers are compared on the device, when a message is taken."""

    channel: NvshmemChannel
    slots: NvshmemSlots
    header_on_host = False

    def next_header(self) -> Header:
        """Not known here.

        Raises:
            NotSupportedError: Always.
        """
        raise NotSupportedError("a message's shape is not known before it arrives through NVSHMEM")

    def verify(self) -> None:
        """Does nothing: no header reaches the host."""
        self._unverified.clear()

    def _take_next(self, stream: torch.cuda.Stream | None) -> None:
        incoming = self._posted[0]
        num_bytes = num_bytes_of(incoming.header.shape, incoming.header.dtype)
        incoming.tensor = self._copy_out(incoming, num_bytes, stream)
        incoming.done_on = stream
        self._posted.popleft()  # as in ``Receiver``

    def _wait_for_fragment(self, incoming: Incoming, begin: int, stream: torch.cuda.Stream | None) -> None:
        if begin:  # the header came with the first one
            super()._wait_for_fragment(incoming, begin, stream)
            return
        self._fragments += 1
        slot = self.slots.in_ring(self.channel.arena.rank, self.lane, self._ring_messages - 1)
        self.channel.wait_for_message(
            self.lane,
            self._fragments,
            slot - SLOT_HEADER_BYTES,
            incoming.header,
            peer=self.peer,
            message=incoming.message,
            lane=self.lane,
            stream=stream,
        )
