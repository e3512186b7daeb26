"""What ranks of posed nodes run."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from ditron_train.runtime.errors import ArenaError
from ditron_train.symm import SymmetricArena
from ditron_train.symm.exchange import exchange
from ditron_train.symm.groups import make_group
from ditron_train.symm.transport import is_one_node, node_of_process


def places():
    """Names of the nodes of all ranks, and whether the job takes itself for one of one node."""
    return [name for name, _, _ in exchange(dist.group.WORLD, node_of_process())], is_one_node()


def shared_memory(ranks_per_node):
    """What a node's ranks hand each other through memory; and what all ranks get that ask for it together."""
    rank, num = dist.get_rank(), dist.get_world_size()
    node = rank // ranks_per_node * ranks_per_node
    group = make_group(dist.group.WORLD, list(range(node, node + ranks_per_node)), "node")
    arena = SymmetricArena(group, torch.device("cpu"))
    box = arena.tensor("box", (num,), torch.int32)
    for peer in range(ranks_per_node):
        box.peer(peer)[rank] = rank + 1
    arena.quiesce()
    found = box.local.tolist()
    arena.close()
    try:
        SymmetricArena(dist.group.WORLD, torch.device("cpu")).tensor("box", (num,), torch.int32)
    except ArenaError as error:
        return found, str(error)
    return found, None


def rates(num_bytes):
    """MB/s from rank 0 to rank 1 of its node, and to the first rank of the last node."""
    rank, far = dist.get_rank(), dist.get_world_size() - int(os.environ["LOCAL_WORLD_SIZE"])
    data, found = torch.ones(num_bytes, dtype=torch.uint8), []
    for peer in (1, far):
        for _ in range(2):
            dist.barrier()
            begun_s = time.perf_counter()
            if rank == 0:
                dist.send(data, peer)
            elif rank == peer:
                dist.recv(data, 0)
            dist.barrier()
            taken_s = time.perf_counter() - begun_s
        found.append(num_bytes / taken_s / 1e6)
    return found
