"""What the workers of the exchanges' tests run, on each rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ditron_train.runtime.errors import PeerTimeoutError
from ditron_train.symm import exchange as module
from ditron_train.tp import TPContext

CPU = torch.device("cpu")


def _timeout_of(call: Callable[[], object]) -> tuple[int, str]:
    """Who is missing, and the words."""
    least, module._LEAST_TIMEOUT_S = module._LEAST_TIMEOUT_S, 1.0
    os.environ["DITRON_TIMEOUT_S"] = "1"
    try:
        call()
    except PeerTimeoutError as error:
        return error.missing_rank, str(error)
    finally:
        module._LEAST_TIMEOUT_S = least
        del os.environ["DITRON_TIMEOUT_S"]
    raise AssertionError("nobody was missing")


def overlapping_groups_in_turn() -> tuple[list, int]:
    """What each group's ranks said, and how many keys are left in the store of the largest."""
    rank, world = dist.get_rank(), dist.get_world_size()
    lists = [list(range(world)), [0, 1], list(range(1, world))]
    groups = [dist.new_group(ranks) for ranks in lists]
    said = []
    for repeat in range(10):
        said = [module.exchange(group, (repeat, rank)) for group, ranks in zip(groups, lists) if rank in ranks]
    dist.barrier()
    keys = module._meetings[groups[0]].store
    left = sum(keys.check([f"{number}/{rank}"]) for number in range(11) for rank in range(world))
    return said, left


def a_rank_does_not_come() -> tuple[int, str] | None:
    group = dist.new_group(list(range(dist.get_world_size())))
    answer = None
    if dist.get_rank() != 2:
        answer = _timeout_of(lambda: module.exchange(group, "here"))
    dist.barrier()
    return answer


def a_rank_comes_too_late() -> tuple[int, float, list[str]]:
    """Who was missing, how long it took to hear that, and what all said when they met afterwards."""
    group = dist.new_group(list(range(dist.get_world_size())))
    if dist.get_rank() == 2:
        dist.barrier()
    start_s = time.monotonic()
    missing, _ = _timeout_of(lambda: module.exchange(group, "nobody hears this"))
    seconds = time.monotonic() - start_s
    if dist.get_rank() != 2:
        dist.barrier()
    return missing, seconds, module.exchange(group, f"rank {dist.get_rank()}")


def a_step_that_meets_nobody() -> tuple[int, float] | None:
    """Who was missing from a step that all ranks do together, and how long it took to say so."""
    group, answer = dist.new_group(list(range(dist.get_world_size()))), None
    if dist.get_rank() != 2:
        start_s = time.monotonic()
        missing, _ = _timeout_of(lambda: module.on_all_ranks(group, "meeting", lambda: module.exchange(group, "here")))
        answer = missing, time.monotonic() - start_s
    dist.barrier()
    return answer


def groups_of_different_sizes() -> tuple[int, str]:
    """Rank 0 was given the group of the first two ranks, the others that of all."""
    pair, everyone = dist.new_group([0, 1]), dist.new_group(list(range(dist.get_world_size())))
    answer = _timeout_of(lambda: TPContext(pair if dist.get_rank() == 0 else everyone, CPU))
    dist.barrier()
    return answer


def groups_of_one_name() -> list[list[str]]:
    """As if a group had been destroyed and another been given its name, and with it its part of the store."""
    group = dist.new_group(list(range(dist.get_world_size())))
    return [module._Meeting(group).exchange(text) for text in ("old", "new")]


def groups_of_one_name_and_other_ranks() -> list[list[str]]:
    """As if a group of two ranks had been destroyed, and one of three been given its name and its part of the store."""
    pair, everyone = dist.new_group([0, 1]), dist.new_group(list(range(dist.get_world_size())))
    part, find_store = dist.PrefixStore("one name", distributed_c10d._get_default_store()), distributed_c10d._get_process_group_store
    distributed_c10d._get_process_group_store = lambda group: part
    try:
        groups = [("old", pair), ("new", everyone)] if dist.get_rank() < 2 else [("new", everyone)]
        return [module._Meeting(group).exchange(text) for text, group in groups]
    finally:
        distributed_c10d._get_process_group_store = find_store
