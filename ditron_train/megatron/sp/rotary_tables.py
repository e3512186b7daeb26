"""RoPE's tables of the whole sequence, from those of a rank's part of it (part of feature ``sp``)."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.runtime.device import is_capturing
from ditron_train.stream.cached_tensor import CachedTensor


def whole_rotary_table(local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """RoPE's table of what ``group`` exchanges, from the local one [s / W, ...]; gathered once a table object."""
    known = _TablesOf.get(local, group)
    if known is not None:
        return known
    world = dist.get_world_size(group)
    gathered = [torch.empty_like(local) for _ in range(world)]
    dist.all_gather(gathered, local.contiguous(), group=group)
    halves = [table.chunk(2, dim=0) for table in gathered]
    whole = torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)], dim=0)
    # In a graph it is the graph's own, which replays fill; nobody knows when an inference tensor was written to.
    if not is_capturing(local.device) and not local.is_inference():
        _TablesOf.put(local, group, whole)
    return whole


class _TablesOf:
    """Whole tables by the identity of the local ones, for as long as those live (tensors compare by value) and nobody
    writes to them (positions in several dimensions change from batch to batch, and may come in one buffer), and by the
    ranks that exchange."""

    _entries: dict[tuple[int, dist.ProcessGroup], tuple[Any, int, CachedTensor]] = {}

    @classmethod
    def get(cls, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor | None:
        entry = cls._entries.get((id(local), group))
        is_known = entry is not None and entry[0]() is local and entry[1] == local._version
        return entry[2].get() if entry is not None and is_known else None

    @classmethod
    def put(cls, local: torch.Tensor, group: dist.ProcessGroup, whole: torch.Tensor) -> None:
        key = id(local), group
        reference = weakref.ref(local, lambda _: cls._entries.pop(key, None))
        cls._entries[key] = (reference, local._version, CachedTensor(whole))

    @classmethod
    def clear(cls) -> None:
        cls._entries.clear()


def forget_tables() -> None:
    """Let go of all tables."""
    _TablesOf.clear()
