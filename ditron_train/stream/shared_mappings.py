"""Maps shared memory of CPU processes a second time, as ``stream.driver`` does with a GPU's, for ``stream.window``.

Linux's ``mremap`` maps the pages of a shared mapping a second time if the old size is given as 0.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

from ditron_train.runtime.errors import DitronError

_FAILED = ctypes.c_void_p(-1).value  # MAP_FAILED
_PROT_NONE = 0
_MAY_MOVE_TO_FIXED = 1 | 2  # MREMAP_MAYMOVE | MREMAP_FIXED


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    size, address = ctypes.c_size_t, ctypes.c_void_p
    libc.mmap.argtypes = [address, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mremap.argtypes = [address, size, size, ctypes.c_int, address]
    libc.mmap.restype = libc.mremap.restype = address
    libc.munmap.argtypes = [address, size]
    return libc


def _check(address: int | None) -> int:
    if address is None or address == _FAILED:
        raise DitronError(f"shared memory cannot be mapped once more: {os.strerror(ctypes.get_errno())}")
    return address


def map_side_by_side(addresses: Sequence[int], num_bytes: int) -> tuple[int, int, int]:
    """As ``stream.driver.map_side_by_side``, for shared mappings of ``num_bytes`` that begin at these addresses.

    Raises:
        DitronError: The addresses are not at the start of a page, or the system refuses the mapping.
    """
    if any(address % mmap.PAGESIZE for address in addresses):
        raise DitronError("shared memory that does not begin at a page cannot be mapped once more")
    pitch = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    total = len(addresses) * pitch
    base = _check(_libc().mmap(None, total, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0))
    try:
        for position, address in enumerate(addresses):
            _check(_libc().mremap(address, 0, pitch, _MAY_MOVE_TO_FIXED, base + position * pitch))
    except DitronError:
        unmap(base, total)
        raise
    return base, pitch, 0


def unmap(base: int, num_bytes: int) -> None:
    """Undoes ``map_side_by_side``; nothing may use the mapping any more."""
    if _libc().munmap(base, num_bytes):
        raise DitronError(f"shared memory cannot be unmapped: {os.strerror(ctypes.get_errno())}")
