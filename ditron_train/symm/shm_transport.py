"""Symmetric memory for CPU processes of one machine: one POSIX shared-memory file a rank and segment."""

from __future__ import annotations

import mmap
import os
import secrets
from contextlib import suppress

import torch
import torch.distributed as dist

from ditron_train.symm.exchange import exchange, on_all_ranks
from ditron_train.symm.transport import Segment

FOLDER = "/dev/shm"  # where shared memory is a file


def map_file(path: str, num_bytes: int, create: bool) -> mmap.mmap:
    """Maps a file of shared memory, made anew or there already.

    Raises:
        OSError: It cannot be made or opened, or there is no room for it.
    """
    flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        if create:
            os.posix_fallocate(descriptor, 0, num_bytes)  # fails here when /dev/shm is full, not later by SIGBUS
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def discard_file(path: str) -> None:
    """Removes the name of a file of shared memory, if it is there: who has mapped it keeps the memory.

    If that cannot be (a read-only folder says so of files that never were, too), nothing is raised: what came
    before says more.
    """
    with suppress(OSError):
        os.unlink(path)


class ShmTransport:
    """Files under ``/dev/shm``; every rank unlinks all of them as soon as all are mapped, or one rank does not come:
    they stay only if all ranks die at once."""

    name = "shm"
    copies_by_engine = True

    def allocate(self, group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> Segment:
        """See ``Transport.allocate``."""
        rank = dist.get_rank(group)
        path = os.path.join(FOLDER, f"ditron-{os.getpid()}-{secrets.token_hex(8)}")

        def reserve() -> mmap.mmap:
            return map_file(path, num_bytes, create=True)

        def map_all() -> list[mmap.mmap]:
            return [own if peer == path else map_file(peer, num_bytes, create=False) for peer in paths]

        paths = exchange(group, path)  # before there is a file, so that the others can remove one of a rank that dies
        try:
            own = on_all_ranks(group, f"reserving {num_bytes} bytes in {FOLDER}", reserve, (OSError,))
            maps = on_all_ranks(group, "mapping the peers' shared memory", map_all, (OSError,))
        finally:
            for peer in paths:
                discard_file(peer)
        tensors = [torch.frombuffer(mapped, dtype=torch.uint8) for mapped in maps]
        addresses = [tensor.data_ptr() for tensor in tensors]
        return Segment(local=tensors[rank], peers=list(tensors), addresses=addresses, is_mappable=True)
