"""What a transport is: one way to allocate memory that all ranks of a group can address.

A transport hands out ``Segment``s. Three exist: ``torch`` (``torch.distributed._symmetric_memory``, CUDA peers of one
node), ``nvshmem`` (nvshmem4py, also across nodes) and ``shm`` (POSIX shared memory, CPU processes of one machine).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from ditron_train.runtime.errors import ArenaError


class Mapping(Protocol):
    """Memory that is mapped once more."""

    def unmap(self) -> None:
        """Takes it back."""


@dataclass
class Segment:
    """One symmetric allocation of ``num_bytes`` on every rank of a group.

    Attributes:
        local: uint8 tensor of ``num_bytes`` in this rank's memory.
        peers: The same allocation of each group rank, mapped here; ``None`` if a peer's memory cannot be addressed.
        addresses: Base address in this process of each group rank's allocation; 0 if it cannot be addressed.
        release: Gives this rank's mappings and memory back; called once, collectively, by ``free``.
        is_mappable: Whether each rank's part is in a mapping of its own, of the driver's or the system's, which can
            be made once more.
        mappings: What has been mapped once more, by what it is for (None: it cannot be); goes before the memory does.

    Raises:
        ArenaError: One of ``peers`` is stored elsewhere than ``addresses`` say: what is stored there would reach
            nobody.
    """

    local: torch.Tensor
    peers: list[torch.Tensor | None]
    addresses: list[int]
    release: Callable[[], None] = field(default=lambda: None)
    is_mappable: bool = False
    mappings: dict[Hashable, Mapping | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        elsewhere = [
            rank
            for rank, (peer, address) in enumerate(zip(self.peers, self.addresses))
            if peer is not None and peer.data_ptr() != address
        ]
        if elsewhere:  # torch copies, without a word, what it takes for another device's
            raise ArenaError(f"torch does not take the memory of group ranks {elsewhere} from where it is mapped")

    @property
    def num_bytes(self) -> int:
        """Size of each rank's part."""
        return self.local.numel()

    def free(self) -> None:
        """Gives back everything; nothing uses it any more."""
        for mapping in self.mappings.values():
            if mapping is not None:
                mapping.unmap()
        self.mappings.clear()
        self.release()


class Transport(Protocol):
    """Allocates symmetric memory for one process group.

    Attributes:
        name: What ``DITRON_TRANSPORT`` calls it.
        copies_by_engine: Whether copies to peers need no multiprocessors, the same on every rank.
    """

    name: str
    copies_by_engine: bool

    def allocate(self, group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> Segment:
        """Collective over ``group``: the same ``num_bytes`` on every rank, zero-filled.

        Raises:
            ArenaError: On every rank, if any rank could not allocate or map.
        """
        ...


def node_of_process() -> tuple[str, str, str]:
    """What the processes of one node have in common; a torchrun agent counts as a node."""
    return (socket.gethostname(), os.environ.get("NCCL_HOSTID", ""), os.environ.get("GROUP_RANK", "0"))


def is_one_node() -> bool:
    """Whether torchrun started all ranks of the job on one node (no communication; False if it did not start
    them)."""
    return os.environ.get("LOCAL_WORLD_SIZE") == str(dist.get_world_size())
