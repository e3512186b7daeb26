"""Symmetric memory through nvshmem4py: peers of one node by address, other nodes by put and signal.

NVSHMEM allocates over all processes at once, and allocation is collective over all of them. So the whole reserve
(``DITRON_ARENA_BYTES``, else 2 GiB) is taken once over WORLD, and groups carve from it: members agree on an offset
that is free on all of them, and give it back when their arena lets go of it. nvshmem4py's tensors are whole
allocations (slices are refused by its own calls), so peers are addressed by ``bindings.ptr``.

The start is a step of its own (`start_nvshmem`): a group that is not the whole job cannot wait for the other ranks
when it needs memory. The stages of a pipeline come to that one after the other, each with what the stage before it has
computed.
"""

from __future__ import annotations

import ctypes
from functools import partial

import torch
import torch.distributed as dist

from ditron_train.runtime.device import with_index
from ditron_train.runtime.errors import ArenaError, PeerTimeoutError
from ditron_train.runtime.groups import world_group
from ditron_train.runtime.settings import get_settings
from ditron_train.runtime.versions import check_used
from ditron_train.symm.device_bytes import DeviceBytes
from ditron_train.symm.exchange import exchange, on_all_ranks
from ditron_train.symm.reserve import Reserve, first_common_gap
from ditron_train.symm.transport import Segment

_ALIGNMENT_BYTES = 4096
_DEFAULT_RESERVE_BYTES = 2 << 30


def start_nvshmem(device: torch.device | str = "cuda") -> None:
    """Starts NVSHMEM on all ranks of the job, for groups that are only a part of it; further calls do nothing.

    Collective over WORLD: called at a point to which all ranks come without waiting for each other. Megatron's runs do
    it by themselves; a group of all ranks does not need it.

    Raises:
        ArenaError: nvshmem4py is missing or does not start on a rank, or a rank did not arrive within
            ``DITRON_TIMEOUT_S``; on every rank alike.
    """
    NvshmemTransport.get(world_group(), with_index(device))


class NvshmemTransport:
    """One per process: NVSHMEM can be initialised once."""

    name = "nvshmem"
    copies_by_engine = True
    _instance: NvshmemTransport | None = None
    _unsupported_reason = ""  # of the last start

    def __init__(self, reserve: torch.Tensor) -> None:
        self._memory = reserve
        self._reserve = Reserve(reserve.numel())

    @classmethod
    def get(cls, group: dist.ProcessGroup, device: torch.device) -> NvshmemTransport:
        """The process's transport, which the first group of all ranks starts.

        Raises:
            ArenaError: It is not started and ``group`` is not the whole job, or as `start_nvshmem`; on every rank of
                the group alike.
        """
        if cls._instance is None:
            world_size, num_ranks = dist.get_world_size(), dist.get_world_size(group)
            if num_ranks < world_size:
                raise ArenaError(
                    cls._unsupported_reason
                    or f"NVSHMEM starts on all {world_size} ranks of a job at once, and this group has {num_ranks}: "
                    f"call ditron_train.symm.start_nvshmem() on every rank before"
                )
            try:
                cls._instance = cls(_start(device))
            except (ArenaError, PeerTimeoutError) as error:
                cls._unsupported_reason = str(error)
                if isinstance(error, ArenaError):
                    raise
                raise ArenaError(f"NVSHMEM starts on all ranks of a job at once: {error}") from error
        return cls._instance

    def allocate(self, group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> Segment:
        """See ``Transport.allocate``."""
        size = -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        offset = first_common_gap(exchange(group, self._reserve.gaps), size)
        if offset is None:
            raise ArenaError(
                f"symmetric memory: no {size} bytes are free on all ranks in the NVSHMEM reserve of "
                f"{self._reserve.num_bytes}; raise DITRON_ARENA_BYTES"
            )
        self._reserve.take(offset, size)
        try:
            return on_all_ranks(
                group,
                "mapping the peers' NVSHMEM memory",
                lambda: self._map(group, device, offset, num_bytes),
                (ArenaError,),
            )
        except ArenaError:  # of every rank alike
            self._reserve.give_back(offset)
            raise

    def _map(self, group: dist.ProcessGroup, device: torch.device, offset: int, num_bytes: int) -> Segment:
        """This rank's part of the reserve, zeroed, and where its peers' are."""
        import nvshmem.bindings

        local = self._memory[offset : offset + num_bytes]
        local.zero_()
        rank = dist.get_rank(group)
        peers: list[torch.Tensor | None] = []
        addresses: list[int] = []
        for peer in range(dist.get_world_size(group)):
            if peer == rank:
                peers.append(local)
                addresses.append(local.data_ptr())
                continue
            base = nvshmem.bindings.ptr(self._memory.data_ptr(), dist.get_global_rank(group, peer))
            address = base + offset if base else 0
            peers.append(torch.as_tensor(DeviceBytes(address, num_bytes), device=device) if address else None)
            addresses.append(address)
        torch.cuda.synchronize(device)
        return Segment(local, peers, addresses, release=partial(self._reserve.give_back, offset))


def _start(device: torch.device) -> torch.Tensor:
    """Initialises NVSHMEM over WORLD by broadcasting its unique id, and takes the reserve; a rank that fails fails
    all."""
    world = world_group()
    on_all_ranks(world, "loading NVSHMEM", _load)
    reserve_bytes = _agreed_reserve_bytes(world)
    import nvshmem.bindings
    import nvshmem.core
    from cuda.core import Device

    rank = dist.get_rank()
    unique_id = on_all_ranks(world, "starting NVSHMEM", lambda: nvshmem.core.get_unique_id(empty=rank != 0))
    num_bytes = nvshmem.bindings.uniqueid_dtype.itemsize
    id_of_first = exchange(world, ctypes.string_at(unique_id.ptr, num_bytes))[0]
    if not isinstance(id_of_first, bytes) or len(id_of_first) != num_bytes:
        raise ArenaError("starting NVSHMEM: ranks have different versions of nvshmem4py")
    ctypes.memmove(unique_id.ptr, id_of_first, num_bytes)

    def initialise() -> torch.Tensor:
        cuda_device = Device(device.index)
        cuda_device.set_current()
        nvshmem.core.init(
            device=cuda_device, uid=unique_id, rank=rank, nranks=dist.get_world_size(), initializer_method="uid"
        )
        reserve: torch.Tensor = nvshmem.core.tensor((reserve_bytes,), dtype=torch.uint8)
        return reserve

    return on_all_ranks(world, "starting NVSHMEM", initialise)


def _load() -> None:
    check_used("nvshmem4py", "nvidia-nvshmem")
    import cuda.core  # noqa: F401
    import nvshmem.bindings
    import nvshmem.core  # noqa: F401


def _agreed_reserve_bytes(world: dist.ProcessGroup) -> int:
    """NVSHMEM allocates the same on all processes.

    Raises:
        ArenaError: ``DITRON_ARENA_BYTES`` differs; on every rank alike.
    """
    sizes: list[int] = exchange(world, get_settings().arena_bytes or _DEFAULT_RESERVE_BYTES)
    if len(set(sizes)) > 1:
        raise ArenaError(f"NVSHMEM takes as much on every rank, but DITRON_ARENA_BYTES says {sizes}")
    return sizes[0]
