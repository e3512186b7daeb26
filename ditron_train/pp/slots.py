"""``Slots``: the buffers that messages land in, and tensors that lie in one of them until the last user lets go."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence

import torch

from ditron_train.pp.messages import LANE_NAMES
from ditron_train.symm.arena import SymmetricArena

__all__ = ["Slots", "lend"]

_NAME = "pp/slots"


class Slots:
    """Symmetric memory of a group: for each lane a ring of slots, and slots that may be lent (grown collectively).

    Args:
        count: Slots in each lane's ring.
        loans: Slots to lend, by lane.
    """

    def __init__(self, arena: SymmetricArena, count: int, loans: Sequence[int]) -> None:
        self._arena = arena
        self.count = count
        self.loans = tuple(loans)
        self.num_bytes = 0

    def reserve(self, num_bytes: int) -> None:
        """Collective: makes every slot hold ``num_bytes``; no message may be under way. What is lent stays where it is."""
        total = len(LANE_NAMES) * self.count + sum(self.loans)
        if self.num_bytes:  # other memory, even if the arena has that much: tensors are lent out of the present one
            num_bytes = max(num_bytes, self._arena.capacity_bytes(_NAME) // total + 1)
        num_bytes = -(-num_bytes // 256) * 256
        self._tensor = self._arena.tensor(_NAME, (total, num_bytes), torch.uint8)
        self.num_bytes = num_bytes

    def in_ring(self, rank: int, lane: int, message: int, num_bytes: int) -> torch.Tensor:
        """The first ``num_bytes`` of the slot of the ring's message ``message``, in ``rank``'s memory."""
        return self._at(rank, lane * self.count + message % self.count, num_bytes)

    def to_lend(self, rank: int, lane: int, loan: int, num_bytes: int) -> torch.Tensor:
        """The first ``num_bytes`` of slot ``loan`` of those that ``rank`` may lend."""
        return self._at(rank, len(LANE_NAMES) * self.count + sum(self.loans[:lane]) + loan, num_bytes)

    def _at(self, rank: int, place: int, num_bytes: int) -> torch.Tensor:
        owner = self._tensor.local if rank == self._arena.rank else self._tensor.peer(rank)
        return owner[place, :num_bytes]


class _DeviceBytes:
    """Device memory as torch takes it from elsewhere: the tensor's storage holds this object until it is freed."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory  # keeps the allocation, though the slots may grow meanwhile
        self.__cuda_array_interface__ = {
            "shape": (memory.numel(),),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }


def lend(memory: torch.Tensor, on_return: Callable[[], None]) -> torch.Tensor:
    """A tensor with a storage of its own over ``memory`` (uint8 ``[n]``, n > 0); ``on_return`` is called when nobody holds
    that storage any more, by whichever thread lets go last: it must not call CUDA.
    """
    if memory.device.type == "cuda":
        owner = _DeviceBytes(memory)
        lent = torch.as_tensor(owner, device=memory.device)
    else:
        owner = (ctypes.c_uint8 * memory.numel()).from_address(memory.data_ptr())
        owner.memory = memory
        lent = torch.frombuffer(owner, dtype=torch.uint8)
    assert lent.data_ptr() == memory.data_ptr()
    weakref.finalize(owner, on_return).atexit = False
    return lent
