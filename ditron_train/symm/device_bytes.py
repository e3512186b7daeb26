"""Device memory that torch did not allocate, as torch takes it."""

from __future__ import annotations

import functools
from typing import Any


class DeviceBytes:
    """``torch.as_tensor`` of it is a uint8 tensor over the memory; the tensor's storage holds this object until it is
    freed."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = _interface(address, num_bytes)


@functools.lru_cache(maxsize=4096)
def _interface(address: int, num_bytes: int) -> dict[str, Any]:
    """The same objects for the same memory: torch never lets go of the values, some 200 bytes a message of pipeline
    stages if each were new (github.com/pytorch/pytorch/issues/194877)."""
    return {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}
