"""Gathers and reduce-scatters whose copy engines send flags to several peers in one command: NCCL's bits, and the
memory is given back."""

from __future__ import annotations

import importlib
import random

import pytest
import torch
import torch.distributed as dist
from test_tp import gathered, normals, poison, scattered

from ditron_train.gemm import matmul_nt
from ditron_train.stream import driver
from ditron_train.tp import TPContext, gemm_rs, start_all_gather, start_reduce_scatter
from ditron_train.tp.gather import Gather
from ditron_train.tp.gemm_rs import GemmRsCopyPlan
from ditron_train.tp.reduce_scatter import ReduceScatter

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")


@pytest.fixture
def context(device):
    if dist.get_world_size() < 4:
        pytest.skip("needs 4 ranks")
    if not driver.has_driver():
        pytest.skip("needs cuda-bindings")
    context = TPContext(dist.new_group(list(range(dist.get_world_size()))), device)
    yield context
    context.arena.close()


def _prepared(context, kind):
    return [prepared for prepared in context.prepared.values() if isinstance(prepared, kind)]


def _with_strided_copies(context):
    """Kinds of prepared ops whose flags are one command."""
    gathers = {Gather for p in _prepared(context, Gather) if p._flags is not None}
    return gathers | {ReduceScatter for p in _prepared(context, ReduceScatter) if p._all_flags is not None}


def _captured(context, op):
    """A graph of what ``op`` does, and its results."""
    context.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        return graph, op()


@pytest.mark.parametrize("rows, columns", [(8, 64), (250, 1000), (1024, 4096)])
def test_late_ranks_and_poison(context, all_equal, rows, columns):
    """Recorded from the third call on; a captured graph runs in between."""
    world, rank = context.world_size, context.rank
    x, partial = normals(rows, columns, seed=1), normals(rows * world, columns, seed=2)

    def both():
        gather = start_all_gather(x, context=context)
        total = gather.wait().clone()
        return total, start_reduce_scatter(partial, context=context).wait()

    both()
    assert _with_strided_copies(context) == {Gather, ReduceScatter}
    graph, captured = _captured(context, both)
    for repeat in range(12):
        x.copy_(normals(rows, columns, seed=100 + repeat))
        partial.copy_(normals(rows * world, columns, seed=200 + repeat))
        if repeat % 3 == 0:
            poison(context)
        if random.Random(repeat * 17 + rank).random() < 0.3:
            torch.cuda._sleep(int(3e6))
        for mine, expected in zip(both(), (gathered(x), scattered(partial))):
            assert all_equal(mine, expected), repeat
        x.add_(1)  # what the buffers hold by now is not what the graph sends
        partial.add_(1)
        graph.replay()
        for replayed, expected in zip(captured, (gathered(x), scattered(partial))):
            assert all_equal(replayed, expected), repeat
    context.synchronize()


def test_flags_of_a_gemm_rs_that_wait_for_each_other(context, all_equal, monkeypatch):
    """New inputs each time and poison in between; the recorded op, and a captured one."""
    world, rank = context.world_size, context.rank
    monkeypatch.setattr(importlib.import_module("ditron_train.tp.gemm_rs"), "sums_in_parts", lambda *_: True)
    x, weight = normals(256 * world, 512, seed=1), normals(1024, 512, seed=2)

    def op():
        return gemm_rs(x, weight, context=context, scatter="copy")

    op()
    (prepared,) = _prepared(context, GemmRsCopyPlan)
    assert (prepared._scatter._first_flags is not None) == (world > 4)
    graph, captured = _captured(context, op)
    for repeat in range(12):
        for is_replay in (False, True):
            x.copy_(normals(256 * world, 512, seed=100 + 2 * repeat + is_replay))
            if repeat % 2 == 0:
                poison(context)
            if random.Random(repeat * 31 + rank).random() < 0.3:
                torch.cuda._sleep(int(3e6))
            found = captured if is_replay else op()
            if is_replay:
                graph.replay()
            assert all_equal(found, scattered(matmul_nt(x, weight))), (repeat, is_replay)
    context.synchronize()


def test_uneven_and_empty_shares(context, all_equal):
    world, rank = context.world_size, context.rank
    for counts in ([5 * r for r in range(world)], [world - r for r in range(world)], [64] * (world - 1) + [1]):
        for repeat in range(4):
            x = normals(counts[rank], 256, seed=10 * sum(counts) + repeat)
            poison(context)
            found = start_all_gather(x, context=context, row_counts=counts).wait().clone()
            assert all_equal(found, gathered(x, counts)), (counts, repeat)
    context.synchronize()


def test_memory_moves_and_is_given_back(device, context, all_equal, monkeypatch):
    """Buffers grow beside windows of flags; at the end everything is unmapped."""
    mapped, unmapped, map_once_more, unmap = [], [], driver.map_side_by_side, driver.unmap

    def noted_map(addresses, num_bytes):
        mapped.append((found := map_once_more(addresses, num_bytes))[0])
        return found

    def noted_unmap(base, num_bytes):
        unmapped.append(base)
        unmap(base, num_bytes)

    monkeypatch.setattr(driver, "map_side_by_side", noted_map)
    monkeypatch.setattr(driver, "unmap", noted_unmap)
    for rows in (64, 2048, 128, 8192):
        for repeat in range(4):
            x, partial = (
                normals(rows, 1024, seed=rows + repeat),
                normals(rows * context.world_size, 1024, seed=rows + repeat + 50),
            )
            assert all_equal(start_all_gather(x, context=context).wait(), gathered(x))
            assert all_equal(start_reduce_scatter(partial, context=context).wait(), scattered(partial))
    assert len(mapped) > len(unmapped)
    context.synchronize()
    torch.cuda.synchronize()
    free_bytes, peak_bytes = torch.cuda.mem_get_info()[0], context.arena.num_bytes
    context.arena.close()
    dist.barrier()  # peers have let go of this rank's memory, too
    assert sorted(mapped) == sorted(unmapped)
    if dist.get_world_size() <= torch.cuda.device_count():  # else other ranks free theirs on this GPU, too
        assert torch.cuda.mem_get_info()[0] >= free_bytes + peak_bytes // 2


def test_without_windows(context, all_equal, monkeypatch):
    """Where the driver maps nothing flags go to one peer after another."""
    from ditron_train.runtime.errors import DitronError

    def refuse(addresses, num_bytes):
        raise DitronError("not here")

    monkeypatch.setattr(driver, "map_side_by_side", refuse)
    for repeat in range(4):
        x, partial = normals(96, 128, seed=repeat), normals(96 * context.world_size, 128, seed=repeat + 50)
        assert all_equal(start_all_gather(x, context=context).wait(), gathered(x))
        assert all_equal(start_reduce_scatter(partial, context=context).wait(), scattered(partial))
    assert not _with_strided_copies(context)
    context.synchronize()
