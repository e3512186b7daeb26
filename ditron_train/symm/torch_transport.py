"""Symmetric memory of CUDA peers inside one node, from ``torch.distributed._symmetric_memory`` (CUDA backend).

Its NVSHMEM backend is not used: there ``barrier``, ``put_signal`` and ``wait_signal`` are empty. Multicast is neither
required nor touched.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ditron_train.runtime.errors import ArenaError
from ditron_train.symm.exchange import exchange, on_all_ranks
from ditron_train.symm.rendezvous import rendezvous
from ditron_train.symm.transport import Segment


class TorchTransport:
    """``symm_mem.empty`` plus a rendezvous (`symm.rendezvous`).

    Where one fails on some rank, its ranks have come to different points of it, and torch's count of them is out of
    step from then on: the next one would wait for keys that nobody sets. So there is none any more for these ranks,
    whatever their groups.
    """

    name = "torch"
    _why_not = ""

    def allocate(self, group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> Segment:
        """See ``Transport.allocate``."""
        import torch.distributed._symmetric_memory as symm_mem

        def reserve() -> torch.Tensor:
            if TorchTransport._why_not:
                raise RuntimeError(f"not again after {TorchTransport._why_not}")
            return symm_mem.empty(num_bytes, dtype=torch.uint8, device=device).zero_()

        local = on_all_ranks(group, f"allocating {num_bytes} bytes of symmetric memory", reserve, (RuntimeError,))
        errors = (RuntimeError, AttributeError, TypeError)  # the last two: a torch without these private functions
        try:
            handle = on_all_ranks(
                group, "reaching the peers' symmetric memory", lambda: rendezvous(local, group), errors
            )
        except ArenaError as error:
            TorchTransport._why_not = str(error)
            raise
        torch.cuda.synchronize(device)  # zero-filled before any peer may write
        exchange(group, None)
        # buffer_ptrs are bases of the allocation: ours starts at an offset when the allocator shares a block
        offset = local.data_ptr() - handle.buffer_ptrs[handle.rank]
        peers = [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(handle.world_size)]
        return Segment(
            local=local,
            peers=[local if rank == handle.rank else peer for rank, peer in enumerate(peers)],
            addresses=[address + offset for address in handle.buffer_ptrs],
            is_mappable=device.type == "cuda" and not torch.version.hip,
        )
