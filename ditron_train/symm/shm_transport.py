"""Symmetric memory for CPU processes of one machine: one POSIX shared-memory file a rank and segment."""

from __future__ import annotations

import mmap
import os
import secrets

import torch
import torch.distributed as dist

from ditron_train.symm.transport import Segment, all_ranks_or_raise, exchange

__all__ = ["ShmTransport"]

_FOLDER = "/dev/shm"


def _map_file(path: str, num_bytes: int, create: bool) -> mmap.mmap:
    flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        if create:
            os.posix_fallocate(descriptor, 0, num_bytes)  # fails here when /dev/shm is full, not later by SIGBUS
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)


class ShmTransport:
    """Files under ``/dev/shm``; they are unlinked as soon as every rank has mapped them, so a crash leaves none."""

    name = "shm"

    def allocate(self, group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> Segment:
        """See ``Transport.allocate``."""
        rank = dist.get_rank(group)
        path = os.path.join(_FOLDER, f"ditron-{os.getpid()}-{secrets.token_hex(8)}")
        error = None
        own = None
        try:
            own = _map_file(path, num_bytes, create=True)
        except OSError as failure:
            error = f"cannot reserve {num_bytes} bytes in {_FOLDER}: {failure}"
        try:
            all_ranks_or_raise(group, error, "allocating shared memory")
            paths = exchange(group, path)
            maps = [own if peer == rank else None for peer in range(len(paths))]
            try:
                for peer, peer_path in enumerate(paths):
                    if peer != rank:
                        maps[peer] = _map_file(peer_path, num_bytes, create=False)
            except OSError as failure:
                error = f"cannot map a peer's shared memory: {failure}"
            all_ranks_or_raise(group, error, "mapping shared memory")
        finally:
            if own is not None:
                os.unlink(path)
        tensors = [torch.frombuffer(mapped, dtype=torch.uint8) for mapped in maps]
        return Segment(local=tensors[rank], peers=list(tensors), addresses=[tensor.data_ptr() for tensor in tensors])
