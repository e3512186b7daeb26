"""What the workers of ``test_strided_copies`` run: flags to several peers at once, between processes."""

from __future__ import annotations

import random
import time
from unittest import mock

import torch
import torch.distributed as dist
from bodies_tp import gather_rows, integers, ring_reduce

from ditron_train.runtime.errors import DitronError
from ditron_train.stream import shared_mappings
from ditron_train.stream import window as windows
from ditron_train.tp import TPContext, start_all_gather, start_reduce_scatter
from ditron_train.tp.gather import Gather
from ditron_train.tp.reduce_scatter import ReduceScatter

_SHAPES = [(8, 16), (3, 40), (64, 128), (8, 16)]  # rows of a rank, columns: buffers grow, and move


def _refuse(*arguments):
    raise DitronError("not here")


def check_strided_copies(refused_mapping: list[int], refused_copies: list[int]) -> tuple[list[bool], int, int]:
    """Whether each prepared op sends flags to several peers at once here, windows mapped, and unmapped at the end.

    ``refused_mapping``, ``refused_copies``: ranks where memory cannot be mapped, or pieces cannot be copied."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mapped, unmapped = [], []

    def noted_map(addresses, num_bytes, do=shared_mappings.map_side_by_side):
        found = do(addresses, num_bytes)
        mapped.append(found[0])
        return found

    def noted_unmap(base, num_bytes, do=shared_mappings.unmap):
        unmapped.append(base)
        do(base, num_bytes)

    how = {"map_side_by_side": _refuse if rank in refused_mapping else noted_map, "unmap": noted_unmap}
    copies = {"copy_strided": _refuse} if rank in refused_copies else {"_MAX_PITCH_BYTES": windows._MAX_PITCH_BYTES}
    with mock.patch.multiple(shared_mappings, **how), mock.patch.multiple(windows, **copies):
        context = TPContext(dist.new_group(list(range(world))), torch.device("cpu"))
        rng = random.Random(rank)
        for rows, columns in _SHAPES:
            for repeat in range(3):
                _compare(context, rows, columns, seed=100 * rows + 10 * repeat, late_s=rng.random() * 0.02)
        for counts in ([5 * r for r in range(world)], [world - r for r in range(world)]):
            x = integers((counts[rank], 16), sum(counts) + rank)
            found = start_all_gather(x, context=context, row_counts=counts).wait()
            assert torch.equal(found, gather_rows(x, counts)), counts
        flags = {Gather: "_flags", ReduceScatter: "_all_flags"}
        is_strided_copy = [
            getattr(p, flags[type(p)]) is not None for p in context.prepared.values() if type(p) in flags
        ]
        context.arena.close()
    assert sorted(mapped) == sorted(unmapped)
    return is_strided_copy, len(mapped), len(unmapped)


def _compare(context: TPContext, rows: int, columns: int, seed: int, late_s: float) -> None:
    rank, world = context.rank, context.world_size
    for name in ("tp.gathered", "tp.partials"):
        num_bytes = context.arena.capacity_bytes(name)
        if num_bytes:
            context.arena.tensor(name, (num_bytes // 4,), torch.float32).local.fill_(float("nan"))
    dist.barrier()
    time.sleep(late_s)
    x = integers((rows, columns), seed + rank)
    assert torch.equal(start_all_gather(x, context=context).wait(), gather_rows(x, [rows] * world))
    partial = torch.randn((rows * world, columns), generator=torch.Generator().manual_seed(seed + rank)).bfloat16()
    started = start_reduce_scatter(partial, context=context)
    parts = [torch.empty_like(partial) for _ in range(world)]
    dist.all_gather(parts, partial)
    assert torch.equal(started.wait(), ring_reduce([part.chunk(world)[rank] for part in parts], rank))
