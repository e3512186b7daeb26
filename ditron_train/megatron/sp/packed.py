"""Packed sequences (THD) around an attention whose exchanges are ours (part of feature ``sp``)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from ditron_train.runtime.device import is_capturing
from ditron_train.sp import packed_rows
from ditron_train.stream.cached_tensor import CachedTensor


class OneRank:
    """What RoPE takes for the context parallel group where every sequence is whole."""

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


def why_not_packed(packed: Any) -> str | None:
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


def table_of(packed: Any, world_size: int, num_local_rows: int) -> torch.Tensor:
    """Table of rows of a packed batch; made once for all layers of a microbatch."""
    starts, _ = starts_of(packed)
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
