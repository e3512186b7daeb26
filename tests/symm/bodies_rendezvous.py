"""What the workers of the rendezvous' tests run, on each rank: torch's exchange, keys and counter of the process
included."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed import distributed_c10d

from ditron_train.runtime.errors import ArenaError
from ditron_train.symm import rendezvous as module
from ditron_train.symm import transport_choice
from ditron_train.symm.rendezvous import rendezvous
from ditron_train.symm.transport_choice import TorchTransport

_LIBRARY = torch._C._distributed_c10d


def barrier(store: dist.Store, key: str, world_size: int) -> None:
    """torch's own, or where Python cannot call that (2.11) the same by other calls."""
    timeout = timedelta(seconds=20)
    if hasattr(store, "barrier"):
        store.barrier(key, world_size, timeout)
        return
    if store.add(key, 1) == world_size:
        store.set(f"{key}/all", b"1")
    store.wait([f"{key}/all"], timeout)


@contextmanager
def as_torch_does():
    """Replaces torch's rendezvous, which needs GPUs, by its exchange alone: all ranks' values, then a barrier."""
    counter = itertools.count()

    def exchange(store: dist.Store, rank: int, world_size: int, value: int) -> list[int]:
        keys = dist.PrefixStore(
            "CUDASymmetricMemory", store
        )  # C++, which calls a Python store as torch's rendezvous does
        number = next(counter)
        keys.set(f"{number}/{rank}", value.to_bytes(4, "little"))
        found = keys.multi_get([f"{number}/{peer}" for peer in range(world_size)])
        barrier(keys, str(next(counter)), world_size)
        return [int.from_bytes(value, "little") for value in found]

    def plain(local: torch.Tensor, group: dist.ProcessGroup) -> list[int]:
        store = dist.PrefixStore("plain", distributed_c10d._get_process_group_store(group))
        store.set_timeout(timedelta(seconds=3))
        return exchange(store, dist.get_rank(group), dist.get_world_size(group), int(local))

    def by_name(local: torch.Tensor, name: str) -> list[int]:
        group = _LIBRARY._resolve_process_group(name)
        store = next(alias.store for alias in module._aliases.values() if alias.name == name)
        return exchange(store, group.rank(), group.size(), int(local))

    with (
        mock.patch.object(module, "_count", itertools.count()),
        mock.patch.object(symm_mem, "rendezvous", plain),
        mock.patch.object(_LIBRARY._SymmetricMemory, "rendezvous", staticmethod(by_name)),
    ):
        yield plain


def overlapping_groups() -> dict[str, list]:
    """Ranks 0 and 1, then 1 and 2, then 0 and 1 again, then all: at each of these but the first two the ranks are out
    of step."""
    rank = dist.get_rank()
    low, high = dist.new_group([0, 1]), dist.new_group([1, 2])
    found: dict[str, list] = {"low": [], "high": [], "all": []}
    with as_torch_does():
        for turn in range(3):
            for name, group, ranks in (
                ("low", low, (0, 1)),
                ("low", low, (0, 1)),
                ("high", high, (1, 2)),
                ("all", None, (0, 1, 2)),
            ):
                if rank in ranks:
                    local = torch.tensor(100 * turn + rank)
                    found[name].append(rendezvous(local, group if group is not None else dist.group.WORLD))
    aliases = len(module._aliases)
    return {**found, "aliases": aliases}


def ranks_in_step_take_torchs_own_way() -> int:
    low = dist.new_group([0, 1])
    with as_torch_does():
        for _ in range(3):
            assert rendezvous(torch.tensor(dist.get_rank()), low) == [0, 1]
    return sum(group is low for group in module._aliases)


def stand_in_shows_the_fault() -> list[str]:
    """Ranks out of step by torch's own way: what the other tests prove rests on the stand-in counting as torch
    does."""
    rank = dist.get_rank()
    alone, both = dist.new_group([0]), dist.new_group([0, 1])
    with as_torch_does() as plain:
        if rank == 0:
            plain(torch.tensor(rank), alone)
        try:
            return [str(plain(torch.tensor(rank), both))]
        except RuntimeError as error:
            return [type(error).__name__]
        finally:
            dist.barrier()


def a_rendezvous_fails() -> tuple[list[str], int]:
    """What each rank hears of its arenas' first buffers, one after the other: of all ranks, of the first two, of all
    but the first; and how many rendezvous it has been through. The last but one cannot map the first."""
    rank, world, num_met = dist.get_rank(), dist.get_world_size(), 0
    lists = [list(range(world)), [0, 1], list(range(1, world))]
    groups = [dist.new_group(ranks) for ranks in lists]

    def meet(local: torch.Tensor, group: dist.ProcessGroup) -> None:
        nonlocal num_met
        num_met += 1
        if rank == world - 2:
            raise RuntimeError("no way to rank 0")

    def hear(group: dist.ProcessGroup) -> str:
        try:
            TorchTransport().allocate(group, torch.device("cpu"), 512)
        except ArenaError as error:
            return str(error)
        return "no error"

    def empty(num_bytes: int, **options: object) -> torch.Tensor:
        return torch.empty(num_bytes, **options)

    with (
        mock.patch.object(symm_mem, "empty", empty),
        mock.patch.object(transport_choice, "rendezvous", meet),
        mock.patch.object(TorchTransport, "_unsupported_reason", ""),
    ):
        return [hear(group) for group, ranks in zip(groups, lists) if rank in ranks], num_met
