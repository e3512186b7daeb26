"""Device memory that torch did not allocate, as torch takes it."""

from __future__ import annotations


class DeviceBytes:
    """``torch.as_tensor`` of it is a uint8 tensor over the memory; the tensor's storage holds this object until it is
    freed."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
