"""Symmetric memory through nvshmem4py: peers of one node by address, other nodes by put and signal.

NVSHMEM allocates over all processes at once, and allocation is collective over all of them. So the whole reserve
(``DITRON_ARENA_BYTES``, else 2 GiB) is taken once over WORLD, at the first arena, and groups carve from it: members
agree on an offset that is free on all of them. nvshmem4py's tensors are whole allocations (slices are refused by its
own calls), so peers are addressed by ``bindings.ptr``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ditron_train.runtime.errors import ArenaError
from ditron_train.runtime.settings import get_settings
from ditron_train.symm.device_bytes import DeviceBytes
from ditron_train.symm.transport import Segment, all_ranks_or_raise, exchange

__all__ = ["NvshmemTransport"]

_ALIGNMENT_BYTES = 4096
_DEFAULT_RESERVE_BYTES = 2 << 30


class NvshmemTransport:
    """One per process: NVSHMEM can be initialised once."""

    name = "nvshmem"
    _instance: NvshmemTransport | None = None

    def __init__(self, reserve: torch.Tensor) -> None:
        self._reserve = reserve
        self._next_free_byte = 0

    @classmethod
    def get(cls, group: dist.ProcessGroup, device: torch.device) -> NvshmemTransport:
        """The process's transport, started at the first call (collective over WORLD, which must hold ``group``).

        Raises:
            ArenaError: nvshmem4py is missing or does not start; the same on every rank.
        """
        if cls._instance is None:
            world = dist.group.WORLD
            error = None
            reserve = None
            try:
                reserve = _start(device)
            except Exception as failure:  # nvshmem4py raises classes of its own; every rank must hear of it
                error = f"{type(failure).__name__}: {failure}"
            all_ranks_or_raise(world, error, "starting NVSHMEM")
            cls._instance = cls(reserve)
        return cls._instance

    def allocate(self, group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> Segment:
        """See ``Transport.allocate``."""
        import nvshmem.bindings

        size = -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        offset = max(exchange(group, self._next_free_byte))
        if offset + size > self._reserve.numel():
            raise ArenaError(
                f"symmetric memory: {size} bytes more than {self._reserve.numel() - offset} left of the NVSHMEM "
                f"reserve of {self._reserve.numel()}; raise DITRON_ARENA_BYTES"
            )
        self._next_free_byte = offset + size
        local = self._reserve[offset : offset + num_bytes]
        local.zero_()
        rank = dist.get_rank(group)
        peers: list[torch.Tensor | None] = []
        addresses: list[int] = []
        for peer in range(dist.get_world_size(group)):
            base = nvshmem.bindings.ptr(self._reserve.data_ptr(), dist.get_global_rank(group, peer))
            address = local.data_ptr() if peer == rank else (base + offset if base else 0)
            addresses.append(address)
            mapped = torch.as_tensor(DeviceBytes(address, num_bytes), device=device) if address else None
            peers.append(local if peer == rank else mapped)
        torch.cuda.synchronize(device)
        dist.barrier(group)
        return Segment(local=local, peers=peers, addresses=addresses)


def _start(device: torch.device) -> torch.Tensor:
    """Initialises NVSHMEM over WORLD by broadcasting its unique id, and takes the reserve."""
    import nvshmem.core
    from cuda.core import Device

    cuda_device = Device(device.index)
    cuda_device.set_current()
    rank = dist.get_rank()
    unique_ids = [nvshmem.core.get_unique_id(empty=rank != 0)]
    dist.broadcast_object_list(unique_ids, src=0)
    nvshmem.core.init(
        device=cuda_device,
        uid=unique_ids[0],
        rank=rank,
        nranks=dist.get_world_size(),
        initializer_method="uid",
    )
    reserve_bytes = get_settings().arena_bytes or _DEFAULT_RESERVE_BYTES
    return nvshmem.core.tensor((reserve_bytes,), dtype=torch.uint8)
