"""``Slots``: the buffers that messages land in, and tensors that are in one of them until the last user lets go.

``LastingSizes``: how slots grow to hold messages of varying lengths whose maximum is not known beforehand.

A message that does not fit a slot goes by the network. At the first call of a step every rank announces the largest
such message so far, and reads at the first call of the next step what all ranks announced at the last. Since all of
them began that step, nobody waits, unless a step sends in one direction only, and all read the same values. So slots
grow two steps after the first message that did not fit.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ditron_train.pp.channel import PipelineChannel
from ditron_train.pp.messages import LANE_NAMES
from ditron_train.symm.arena import SymmetricArena
from ditron_train.symm.device_bytes import DeviceBytes

_NAME = "pp/slots"


class Slots:
    """Symmetric memory of a group: for each lane a ring of slots, and slots that may be leased (grown collectively).

    Args:
        count: Slots in each lane's ring.
        leases: Slots to lease, by lane.
    """

    def __init__(self, arena: SymmetricArena, count: int, leases: Sequence[int]) -> None:
        self._arena = arena
        self.count = count
        self.leases = tuple(leases)
        self.num_bytes = 0

    @property
    def total(self) -> int:
        """All of a rank."""
        return len(LANE_NAMES) * self.count + sum(self.leases)

    def reserve(self, num_bytes: int) -> None:
        """Collective: makes every slot hold ``num_bytes``; no message may be in transit. What is leased stays where it
        is."""
        total = self.total
        if self.num_bytes:  # other memory, even if the arena has that much: tensors are leased out of the present one
            num_bytes = max(num_bytes, self._arena.capacity_bytes(_NAME) // total + 1)
        num_bytes = -(-num_bytes // 256) * 256
        self._tensor = self._arena.tensor(_NAME, (total, num_bytes), torch.uint8)
        self._bases = self._tensor.host_addresses
        self.num_bytes = num_bytes

    def in_ring(self, rank: int, lane: int, message: int) -> int:
        """Address of the slot of the ring's message ``message`` in ``rank``'s memory."""
        return self._bases[rank] + (lane * self.count + message % self.count) * self.num_bytes

    def to_lease(self, rank: int, lane: int, lease: int) -> int:
        """Address of slot ``lease`` of those that ``rank`` may lease."""
        place = len(LANE_NAMES) * self.count + sum(self.leases[:lane]) + lease
        return self._bases[rank] + place * self.num_bytes

    def lease_tensor(self, lane: int, lease: int, num_bytes: int, on_return: Callable[[], None]) -> torch.Tensor:
        """A uint8 tensor ``[num_bytes]`` (above 0) with a storage of its own over this rank's slot ``lease``.

        ``on_return`` is called when nobody holds that storage any more, by whichever thread lets go last: it must not
        call CUDA. The memory stays, though the slots may grow meanwhile.
        """
        device = self._arena.device
        address = self.to_lease(self._arena.rank, lane, lease)
        owner: Any  # torch's storage holds it, and it holds the memory
        if device.type == "cuda":
            owner = DeviceBytes(address, num_bytes)
            leased = torch.as_tensor(owner, device=device)
        else:
            owner = (ctypes.c_uint8 * num_bytes).from_address(address)
            leased = torch.frombuffer(owner, dtype=torch.uint8)
        owner.memory = self._tensor.local
        assert leased.data_ptr() == address
        weakref.finalize(owner, on_return).atexit = False
        return leased


class LastingSizes:
    """Of the messages of a group inside a node, the largest that did not fit a slot.

    Args:
        channel: Of the group, whose mailbox all of its ranks share.
    """

    def __init__(self, channel: PipelineChannel) -> None:
        self._channel = channel
        self._largest = self._steps = 0

    def note(self, num_bytes: int) -> None:
        """A message of this rank did not fit."""
        self._largest = max(self._largest, num_bytes)

    def of_last_step(self) -> int:
        """At the first call of a step, on every rank: the largest that any of them had noted at the first call of the
        last step; 0 if there was none.

        Raises:
            PeerTimeoutError: A rank did not begin the last step in time.
        """
        mailbox, largest = self._channel.mailbox, 0
        if self._steps:
            largest = max(self._announced_by(rank) for rank in range(mailbox.world_size))
        self._steps += 1
        mailbox.values.announce(self._largest)
        return largest

    def _announced_by(self, rank: int) -> int:
        """What a rank announced at the last step, which its host may still have to begin."""
        values = self._channel.mailbox.values
        self._channel.wait_on_host(lambda: values.announced(rank) is not None, peer=rank, chunk=self._steps - 1)
        return values.announced(rank) or 0
