"""Packed sequences (THD) around an attention whose exchanges are fused (part of feature ``sp``).

RoPE's tables of the whole sequence, from those of a rank's part of it (part of feature ``sp``).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch.multiprocessing.reductions import StorageWeakRef

from ditron_train.runtime.device import is_capturing
from ditron_train.sp import packed_rows
from ditron_train.stream.cached_tensors import CachedTensor


class OneRank:
    """What RoPE takes for the context parallel group if every sequence is whole."""

    @staticmethod
    def size() -> int:
        """Ranks."""
        return 1

    @staticmethod
    def rank() -> int:
        """The only one."""
        return 0


def packed_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The packed sequences that an attention is called with, by name or by place, or None."""
    return next((given for given in (*args, *kwargs.values()) if isinstance(given, PackedSeqParams)), None)


def unsupported_reason_packed(packed: Any) -> str | None:
    """What of packed sequences is not covered."""
    if packed.qkv_format != "thd":
        return f"the packed sequences are {packed.qkv_format}"
    if getattr(packed, "cp_group", None) is not None or getattr(packed, "local_cp_size", None) is not None:
        return "the context parallel group changes from batch to batch"
    if packed.cu_seqlens_q is None:
        return "the lengths of the packed sequences are not given"
    return None


def starts_of(packed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """First rows, with padding, of the sequences of q and of k."""
    padded = packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded
    given = packed.cu_seqlens_q, packed.cu_seqlens_kv
    query, key = (one if with_padding is None else with_padding for with_padding, one in zip(padded, given))
    return query, query if key is None else key


_last_table: list[tuple[Any, int, tuple[int, int], CachedTensor]] = []


def table_of(packed: Any, world_size: int, num_local_rows: int, *, of_keys: bool = False) -> torch.Tensor:
    """Table of rows of a packed batch, of its q or of its keys; made once for all layers of a microbatch."""
    starts = starts_of(packed)[of_keys]
    sizes = (world_size, num_local_rows)
    # Without a version: whether it was written to meanwhile is not known. A captured CUDA graph makes the table at
    # each replay.
    if starts.is_inference() or is_capturing(starts.device):
        return packed_rows(starts, world_size, num_local_rows)
    if _last_table and _last_table[0][0] is starts and _last_table[0][1:3] == (starts._version, sizes):
        return _last_table[0][3].get()
    with torch.inference_mode(False):
        table = packed_rows(starts, world_size, num_local_rows)
    _last_table[:] = [(starts, starts._version, sizes, CachedTensor(table))]
    return table


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


def forget_tables() -> None:
    """Let go of all tables."""
    _TablesOf._entries.clear()
