"""Windows: ranks' copies of symmetric memory mapped once more, side by side, so that one command of a copy engine reaches several.

A copy engine takes 2 to 3 us for each command beside its bytes, and a flag is a command, too: of a gather of 8192 x 4096 by 8
ranks, seven copies of 8 MiB with their flags, 35 of 191 us. A copy of pieces at equal distances is one command, also where they
lie on different GPUs; the driver's virtual memory management puts them there (2 H200s: windows of two buffers for 8 ranks took
2.5 ms to map).

Memory is the same by every address. The owner of a window writes or reads through it by copy engines alone, and its own kernels
use the other addresses in operations that the stream orders before or behind, as aliases of memory require (CUDA C++ Programming
Guide, "Virtual Aliasing Support").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ditron_train.runtime.device import is_capturing
from ditron_train.runtime.errors import DitronError
from ditron_train.runtime.logs import log_once
from ditron_train.stream import driver
from ditron_train.symm.arena import SymmetricTensor

__all__ = ["Window", "ring_window", "window"]

_MAX_PITCH_BYTES = (1 << 31) - 1  # of copies of pieces (CU_DEVICE_ATTRIBUTE_MAX_PITCH)


@dataclass(frozen=True)
class Window:
    """``count`` copies of a buffer, ``pitch`` bytes from one to the next, each ``offset`` bytes into its mapping."""

    base: int
    pitch: int
    offset: int
    count: int

    def address(self, position: int) -> int:
        """Of the copy at ``position``."""
        assert 0 <= position < self.count
        return self.base + position * self.pitch + self.offset

    def unmap(self) -> None:
        """Takes it back."""
        driver.unmap(self.base, self.count * self.pitch)


class _NoWindow:
    def unmap(self) -> None:
        """Nothing was mapped."""


def window(tensor: SymmetricTensor, ranks: Sequence[int]) -> Window | None:
    """The copies of these group ranks, in this order, each as often as it is named; mapped at the first call for them, until the
    memory is freed. None where they cannot be mapped: other transports than ``torch``, no ``cuda-bindings``, the CPU; while a
    CUDA graph is captured that is not tried."""
    segment = tensor.segment
    if not (segment.is_mappable and driver.has_driver()):
        return None
    key = ("window", *ranks)
    if key not in segment.mappings:
        if is_capturing(tensor.local.device):  # not a time for the driver to map memory
            return None
        segment.mappings[key] = _map([segment.addresses[rank] for rank in ranks])
    found = segment.mappings[key]
    return found if isinstance(found, Window) else None


def ring_window(tensor: SymmetricTensor) -> Window | None:
    """``window`` of all ranks, twice around, so that neighbours lie side by side from any rank on."""
    world_size = len(tensor.host_addresses)
    return window(tensor, [*range(world_size)] * 2)


def _map(addresses: list[int]) -> Window | _NoWindow:
    try:
        base, pitch, offset = driver.map_side_by_side(addresses)
    except DitronError as error:
        log_once("windows", f"copies to several peers are commands of their own, slower by some us each: {error}")
        return _NoWindow()
    found = Window(base, pitch, offset, len(addresses))
    if pitch <= _MAX_PITCH_BYTES:
        return found
    found.unmap()
    return _NoWindow()
