"""Which transport a group's symmetric memory comes from, and the one of CUDA peers inside one node.

``TorchTransport`` is ``torch.distributed._symmetric_memory`` (CUDA backend). Its NVSHMEM backend is not used: there
``barrier``, ``put_signal`` and ``wait_signal`` are empty. Multicast is neither required nor touched.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from ditron_train.runtime.errors import ArenaError
from ditron_train.runtime.settings import get_settings
from ditron_train.symm.exchange import exchange, on_all_ranks
from ditron_train.symm.nvshmem_transport import NvshmemTransport
from ditron_train.symm.rendezvous import rendezvous
from ditron_train.symm.shm_transport import ShmTransport
from ditron_train.symm.transport import Segment, Transport, node_of_process


class TorchTransport:
    """``symm_mem.empty`` plus a rendezvous (`symm.rendezvous`).

    If one fails on some rank, its ranks have come to different points of it, and torch's count of them is out of
    step from then on: the next one would wait for keys that nobody sets. So there is none any more for these ranks,
    whatever their groups.

    ``sees_peers``: whether the processes see each other's GPUs.
    """

    name = "torch"
    _unsupported_reason = ""

    def __init__(self, sees_peers: bool = True) -> None:
        # The driver copies to memory of a GPU that the process does not see as within a GPU, by a kernel: that
        # waits for multiprocessors behind a GEMM which fills them (measured on H200; hints for batches do not help).
        self.copies_by_engine = sees_peers

    def allocate(self, group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> Segment:
        """See ``Transport.allocate``."""
        import torch.distributed._symmetric_memory as symm_mem

        def reserve() -> torch.Tensor:
            if TorchTransport._unsupported_reason:
                raise RuntimeError(f"not again after {TorchTransport._unsupported_reason}")
            return symm_mem.empty(num_bytes, dtype=torch.uint8, device=device).zero_()

        local = on_all_ranks(group, f"allocating {num_bytes} bytes of symmetric memory", reserve, (RuntimeError,))
        errors = (RuntimeError, AttributeError, TypeError)  # the last two: a torch without these private functions
        try:
            handle = on_all_ranks(
                group, "reaching the peers' symmetric memory", lambda: rendezvous(local, group), errors
            )
        except ArenaError as error:
            TorchTransport._unsupported_reason = str(error)
            raise
        torch.cuda.synchronize(device)  # zero-filled before any peer may write
        exchange(group, None)
        # buffer_ptrs are bases of the allocation: this buffer starts at an offset when the allocator shares a block
        offset = local.data_ptr() - handle.buffer_ptrs[handle.rank]
        peers = [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(handle.world_size)]
        return Segment(
            local=local,
            peers=[local if rank == handle.rank else peer for rank, peer in enumerate(peers)],
            addresses=[address + offset for address in handle.buffer_ptrs],
            is_mappable=device.type == "cuda" and not torch.version.hip,
        )


_OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_set_here: list[bool] = []


def _tell_gpus_apart(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Has torch accept GPUs that have one ordinal in several processes, as if each process sees its own GPU alone (Ray
    masks the others): torch tells GPUs apart by ordinals, this by UUIDs (collective over ``group``). Returns whether
    all processes see all GPUs, the same on every rank.

    Raises:
        ArenaError: Ranks share a GPU, and torch has not been told to accept that; on every rank.
    """
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    gpus = exchange(group, (device.index, uuid, _OVERLAPPING in os.environ and not _set_here))
    ordinals, uuids, is_accepted = zip(*gpus)
    sees_peers = len(set(ordinals)) >= len(set(uuids))
    if any(is_accepted) or not all(uuids):
        return sees_peers
    if len(set(uuids)) < len(uuids):
        sharing = [rank for rank, one in enumerate(uuids) if uuids.count(one) > 1]
        raise ArenaError(f"group ranks {sharing} share a GPU: symmetric memory needs a GPU for each rank")
    if not sees_peers:
        os.environ[_OVERLAPPING] = "1"
        _set_here.append(True)
    return sees_peers


def _spans_nodes(group: dist.ProcessGroup) -> bool:
    return len(set(exchange(group, node_of_process()))) > 1


def select_transport(group: dist.ProcessGroup, device: torch.device, name: str | None = None) -> Transport:
    """Chooses the transport of a group (collective).

    ``name`` or ``DITRON_TRANSPORT`` forces one; ``auto`` takes ``shm`` for CPU, ``torch`` if the group is inside
    one node ("node" means one torchrun agent), and ``nvshmem`` across nodes.

    Raises:
        ArenaError: The transport does not fit the device or the nodes, or is not installed; the same on every rank.
    """
    name = name or get_settings().transport
    is_chosen = name != "auto"
    if not is_chosen:
        if device.type == "cpu":
            name = "shm"
        else:
            name = "nvshmem" if _spans_nodes(group) else "torch"
    names = exchange(group, name)
    if len(set(names)) > 1:
        raise ArenaError(f"ranks chose different transports: {names}; set DITRON_TRANSPORT to one of them everywhere")
    if name not in ("shm", "torch", "nvshmem") or (name == "shm") != (device.type == "cpu"):
        raise ArenaError(f"transport {name!r} does not serve {device.type} tensors")
    if name == "shm":
        return ShmTransport()
    if name == "torch":
        # Tried between nodes, it would fail in the middle, and there would be none inside a node either.
        if is_chosen and _spans_nodes(group):
            raise ArenaError("the transport torch reaches the ranks of one torchrun agent, and this group has several")
        return TorchTransport(_tell_gpus_apart(group, device))
    return NvshmemTransport.get(group, device)
