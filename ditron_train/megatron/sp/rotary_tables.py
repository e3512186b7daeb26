"""RoPE's tables of the whole sequence, from those of a rank's part of it (part of feature ``sp``)."""

from __future__ import annotations

from collections.abc import Hashable

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from ditron_train.runtime.device import is_capturing
from ditron_train.stream.cached_tensor import CachedTensor


def whole_rotary_table(local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """RoPE's table of what ``group`` exchanges, from the local one [s / W, ...]; gathered once a table."""
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
    """Whole tables by the memory of the local ones, for as long as that lives (tensors compare by value, and layers
    that are computed again get the table detached, as another object) and nobody writes to it (positions in several
    dimensions change from batch to batch, and may come in one buffer), and by the ranks that exchange.

    Whether a table is known follows from what is asked for alone, so that all ranks gather or none: memory that an
    entry holds weakly is not given to another storage.
    """

    _entries: dict[Hashable, tuple[StorageWeakRef, int, CachedTensor]] = {}

    @staticmethod
    def _key(local: torch.Tensor, group: dist.ProcessGroup) -> Hashable:
        return local.untyped_storage()._cdata, local.storage_offset(), local.shape, local.stride(), local.dtype, group

    @classmethod
    def get(cls, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor | None:
        entry = None if local.is_inference() else cls._entries.get(cls._key(local, group))
        return entry[2].get() if entry is not None and entry[1] == local._version else None

    @classmethod
    def put(cls, local: torch.Tensor, group: dist.ProcessGroup, whole: torch.Tensor) -> None:
        for key in [key for key, (storage, *_) in cls._entries.items() if storage.expired()]:
            del cls._entries[key]
        entry = StorageWeakRef(local.untyped_storage()), local._version, CachedTensor(whole)
        cls._entries[cls._key(local, group)] = entry

    @classmethod
    def clear(cls) -> None:
        cls._entries.clear()


def forget_tables() -> None:
    """Let go of all tables."""
    _TablesOf.clear()
