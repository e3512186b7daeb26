"""Groups that only their members make, by ranks that have made different numbers of groups before."""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ditron_train.runtime.groups import forget_destroyed_groups, is_destroyed
from ditron_train.symm.groups import make_group
from tests.support.processes import run_workers, run_workers_once

_DEADLINE = timedelta(minutes=47)  # another than torch's default


def _pairs() -> tuple[list[int], float, timedelta, bool, bool]:
    """Even and odd ranks make groups of their own at once; then the parent is destroyed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parent = dist.new_group(list(range(world)), timeout=_DEADLINE)
    for _ in range(rank):  # members would wait for each other under different names
        dist.new_group([rank], use_local_synchronization=True)
    group = make_group(parent, list(range(rank % 2, world, 2)), "test_pairs")
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=group)
    ranks, before = dist.get_process_group_ranks(group), is_destroyed(group)
    backend: Any = group._get_backend(torch.device("cpu"))
    dist.destroy_process_group(parent)
    return ranks, total.item(), backend.options._timeout, before, is_destroyed(group)


def test_members_alone_make_a_group_which_belongs_to_its_parent_and_has_its_deadline() -> None:
    # In processes of their own: from torch 2.15 on, what counts groups differs between these ranks afterwards.
    for rank, outcome in enumerate(run_workers_once(4, _pairs)):
        assert outcome.ok, outcome.traceback
        assert outcome.value == ([rank % 2, rank % 2 + 2], 2.0 * (rank % 2) + 2, _DEADLINE, False, True)


def _bound() -> tuple[int, bool, float]:
    """A group of some ranks, where WORLD is bound to a device and torch would split its communicator."""
    world: Any = dist.group.WORLD
    rank, device, asked = dist.get_rank(), torch.device("cuda", 0), []
    world.bound_device_id = device
    distributed_c10d._get_split_source = lambda *arguments: asked.append(arguments)
    group = make_group(world, [rank], "test_bound")
    kept = world.bound_device_id == device
    world.bound_device_id = None
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=group)
    return len(asked), kept, total.item()


def test_members_alone_make_a_group_where_torch_would_split_the_world() -> None:
    assert hasattr(distributed_c10d, "_get_split_source")
    assert run_workers(2, _bound) == [(0, True, 0.0), (0, True, 1.0)]


def _rounds(num_rounds: int) -> list[int]:
    """How many groups torch knows behind each round: a group, one that is made for its sake, and its end."""
    found = []
    for _ in range(num_rounds):
        parent = dist.new_group(list(range(dist.get_world_size())))
        dist.barrier(make_group(parent, list(range(dist.get_world_size())), "test_rounds"))
        dist.destroy_process_group(parent)
        forget_destroyed_groups()
        found.append(len(distributed_c10d._world.pg_map))
    return found


def test_groups_made_for_a_destroyed_group_go_with_it() -> None:
    for outcome in run_workers_once(2, _rounds, 3):
        assert outcome.ok, outcome.traceback
        assert outcome.value == [outcome.value[0]] * 3


def _host_group_after_all_are_destroyed() -> bool:
    from ditron_train.megatron.plugin import batches

    parent = dist.new_group(list(range(dist.get_world_size())))
    group = weakref.ref(batches._host_group(parent))
    is_there = group() is not None and batches._known_host_group(parent) is group()
    del parent
    dist.destroy_process_group()
    gc.collect()
    return is_there and group() is None


def test_who_destroys_all_groups_closes_the_hosts_sockets() -> None:
    """A rank that waits there for one that restarts in place would wait until its deadline."""
    pytest.importorskip("megatron.core")
    outcomes = run_workers_once(2, _host_group_after_all_are_destroyed)
    assert [outcome.value for outcome in outcomes] == [True] * 2, [outcome.traceback for outcome in outcomes]
