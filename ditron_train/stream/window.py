"""Windows: all ranks' copies of a symmetric buffer, mapped a second time at equal distances, so that one command of a
copy engine writes the flags of several ranks.

A copy engine takes 2 to 3 us for each command in addition to its bytes, and each flag would be a command
(``docs/measurements/runtime.md``). A strided copy is one command, even if its pieces are on different GPUs; the
driver's virtual memory management maps them at equal distances, ``stream.shared_mappings`` does between CPU processes.
Rows are not sent this way: one command to several GPUs runs at 89 GB/s, copies to one GPU at 375 GB/s (4 x H100,
``docs/measurements/tp.md``).

The same memory then has two addresses. The owner of a window writes through it by copy engines only, and its kernels
use the other address in operations that the stream orders before or after, as the CUDA C++ Programming Guide requires
("Virtual Aliasing Support").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from ditron_train.runtime.device import is_capturing
from ditron_train.runtime.errors import DitronError
from ditron_train.runtime.logs import get_logger, log_once
from ditron_train.stream import driver, shared_mappings
from ditron_train.stream.copies import StridedCopy, copy_strided
from ditron_train.symm.arena import SymmetricTensor

_REFUSALS = (DitronError, AttributeError, TypeError)  # the last two: other bindings than were seen
_KEY = ("window",)  # of a segment's mappings
_MIN_FLAGS = 3  # that are one command: it begins 5 us later, since another engine runs it (4 x H100)
_MAX_PITCH_BYTES = (1 << 31) - 1  # of copies of pieces (CU_DEVICE_ATTRIBUTE_MAX_PITCH)


@dataclass(frozen=True)
class Window:
    """``count`` copies of a buffer, ``pitch`` bytes from one to the next, each at ``offset`` bytes in its mapping;
    ``take_back`` undoes all mappings."""

    base: int
    pitch: int
    offset: int
    count: int
    take_back: Callable[[int, int], None]

    def address(self, position: int) -> int:
        """Address of the copy at ``position``."""
        assert 0 <= position < self.count
        return self.base + position * self.pitch + self.offset

    def unmap(self) -> None:
        """Undoes the mappings. An error of the driver must not keep the memory's owner from freeing the rest."""
        try:
            self.take_back(self.base, self.count * self.pitch)
        except DitronError as error:
            get_logger("stream").warning("a window stays mapped: %s", error)


def ring_window(tensor: SymmetricTensor) -> Window | None:
    """The copies of all ranks, listed twice, so that a range may begin at any rank and wrap around. They are mapped at
    the first call, until the memory is freed. None if they cannot be mapped: NVSHMEM's memory, or a GPU's without
    ``cuda-bindings``; not tried while a CUDA graph is captured."""
    segment, device = tensor.segment, tensor.local.device
    if not segment.is_mappable or (device.type == "cuda" and not driver.has_driver()):
        return None
    if _KEY not in segment.mappings:
        if is_capturing(device):  # not a time for the driver to map memory
            return None
        how = driver if device.type == "cuda" else shared_mappings
        segment.mappings[_KEY] = _map(how, list(segment.addresses) * 2, segment.num_bytes)
    return cast("Window | None", segment.mappings[_KEY])


def flags_of_peers(
    signals: SymmetricTensor, rank: int, offset: int, words: int, *, num_skipped: int = 0
) -> StridedCopy | None:
    """A strided copy of a word to each peer, from rank + 1 around to rank - 1, without the first ``num_skipped``; None
    if the words have to be sent one by one.

    Args:
        signals: The symmetric buffer of the flags.
        rank: This rank.
        offset: Offset of the flag in each peer's copy, in bytes.
        words: Address of as many equal 4-byte words as there are peers.
        num_skipped: How many peers to leave out.
    """
    count = len(signals.host_addresses) - 1 - num_skipped
    ring = ring_window(signals) if count >= _MIN_FLAGS else None
    if ring is None:
        return None
    return StridedCopy(ring.address(rank + 1 + num_skipped) + offset, ring.pitch, words, 4, 4, count)


def send_strided(strided_copies: Sequence[StridedCopy], stream: torch.cuda.Stream | None) -> bool:
    """``copy_strided`` through windows. Returns False if the driver refuses it: then nothing, or a part, has been
    sent."""
    try:
        copy_strided(strided_copies, stream)
    except _REFUSALS as error:
        _log_refusal(error)
        return False
    return True


def _log_refusal(why: object) -> None:
    log_once("windows", f"flags go to one peer after another, slower by some us for each: {why}")


def _map(how: Any, addresses: list[int], num_bytes: int) -> Window | None:
    if num_bytes > _MAX_PITCH_BYTES:
        _log_refusal(f"a copy engine takes no pieces {num_bytes} bytes apart")
        return None
    try:
        base, pitch, offset = how.map_side_by_side(addresses, num_bytes)
    except _REFUSALS as error:
        _log_refusal(error)
        return None
    return Window(base, pitch, offset, len(addresses), how.unmap)
