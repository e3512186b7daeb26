"""Symmetric memory of CUDA peers inside one node, from ``torch.distributed._symmetric_memory`` (CUDA backend).

Its NVSHMEM backend is not used: there ``barrier``, ``put_signal`` and ``wait_signal`` are empty. Multicast is neither
required nor touched.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ditron_train.symm.rendezvous import rendezvous
from ditron_train.symm.transport import Segment, all_ranks_or_raise

__all__ = ["TorchTransport"]


class TorchTransport:
    """``symm_mem.empty`` plus a rendezvous (`symm.rendezvous`)."""

    name = "torch"

    def allocate(self, group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> Segment:
        """See ``Transport.allocate``."""
        import torch.distributed._symmetric_memory as symm_mem

        error = None
        local = handle = None
        try:
            local = symm_mem.empty(num_bytes, dtype=torch.uint8, device=device)
            local.zero_()
        except RuntimeError as failure:
            error = f"cannot allocate {num_bytes} bytes: {failure}"
        all_ranks_or_raise(group, error, "allocating symmetric memory")
        try:
            handle = rendezvous(local, group)
        except (RuntimeError, AttributeError, TypeError) as failure:  # the last two: a torch without these private functions
            error = f"peers cannot reach each other: {failure}"
        all_ranks_or_raise(group, error, "mapping symmetric memory")
        torch.cuda.synchronize(device)  # zero-filled before any peer may write
        dist.barrier(group)
        # buffer_ptrs are bases of the allocation: ours starts at an offset when the allocator shares a block
        offset = local.data_ptr() - handle.buffer_ptrs[handle.rank]
        peers = [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(handle.world_size)]
        return Segment(
            local=local,
            peers=[local if rank == handle.rank else peer for rank, peer in enumerate(peers)],
            addresses=[address + offset for address in handle.buffer_ptrs],
        )
