"""torch's rendezvous of symmetric memory, for ranks that have been through different ones before.

``torch.distributed._symmetric_memory`` (2.11 to 2.13: ``StoreExchange``) names what a rendezvous exchanges by one
counter of the process, whatever the group. Ranks of a group whose processes have been through another number of
rendezvous by then wait for each other's keys until the store gives up: the stages of a pipeline do that, since the
first one needs the memory of tensor parallelism before that of the pipeline, and the last one after it (seen on 4 GPUs
with tensor and pipeline parallelism, TP 2 x PP 2). Such ranks rendezvous over a store of their group that counts anew.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.runtime.groups import GroupCache
from ditron_train.symm.exchange import exchange, store_of

_COUNTED = re.compile(r"([^/]+)/(\d+)(/.*)?")

#: How many times this process has been through a rendezvous: each adds as much to torch's counter, whatever the group.
_count = itertools.count()
_names = (f"ditron_train rendezvous {number}" for number in itertools.count())


@dataclass(frozen=True)
class _Alias:
    """What torch takes for a process group of its own in a rendezvous: the same ranks over a renumbered store."""

    name: Any  # text; torch's stubs have a type of their own for it
    store: RenumberedStore  # kept: C++ holds the store, but not its Python methods
    group: dist.ProcessGroup  # kept: C++ finds it by a weak reference

    def forget(self) -> None:
        torch._C._distributed_c10d._unregister_process_group(self.name)


_aliases: GroupCache[dist.ProcessGroup, _Alias] = GroupCache(_Alias.forget)


class RenumberedStore(dist.Store):
    """A store whose keys ``word/number...`` bear the group's own numbers: 0 for the first that is used here, then 1...

    The ranks of a group use it for the same exchanges in the same order, so equal numbers mean the same exchange.

    Args:
        store: Where it keeps everything; the group's.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[tuple[str, str], int] = {}

    def _renumbered(self, key: str) -> str:
        counted = _COUNTED.fullmatch(key)
        if counted is None:
            return key
        word, number, rest = counted.groups()
        return f"{word}/{self._numbers.setdefault((word, number), len(self._numbers))}{rest or ''}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._renumbered(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._renumbered(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._renumbered(key), amount)

    def check(self, keys: list[str]) -> bool:
        return self._store.check([self._renumbered(key) for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        renumbered = [self._renumbered(key) for key in keys]
        if timeout is None:
            self._store.wait(renumbered)
        else:
            self._store.wait(renumbered, timeout)


def _alias_of(group: dist.ProcessGroup) -> _Alias:
    """The group's alias in this process; where torch looks for a store differs between 2.11 and 2.13, so it is known
    at both."""
    if group not in _aliases:
        name: Any = next(_names)
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        store = RenumberedStore(dist.PrefixStore("rendezvous", store_of(group)))
        alias = _Alias(name, store, dist.ProcessGroup(store, rank, world_size))
        torch._C._distributed_c10d._register_process_group(name, alias.group)
        torch._C._distributed_c10d._SymmetricMemory.set_group_info(name, rank, world_size, store)
        _aliases[group] = alias
    return _aliases[group]


def rendezvous(local: torch.Tensor, group: dist.ProcessGroup) -> torch._C._distributed_c10d._SymmetricMemory:
    """``symm_mem.rendezvous`` (collective over ``group``), whatever its ranks have been through before.

    Args:
        local: This rank's memory, from ``symm_mem.empty``.
        group: Who maps it.

    Raises:
        RuntimeError: As ``symm_mem.rendezvous`` does.
    """
    import torch.distributed._symmetric_memory as symm_mem

    if len(set(exchange(group, next(_count)))) == 1:
        return symm_mem.rendezvous(local, group)
    return torch._C._distributed_c10d._SymmetricMemory.rendezvous(local, _alias_of(group).name)
