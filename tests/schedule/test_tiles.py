"""Device orders against their NumPy twins, through a tiny interpreted kernel."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from ditron_train.runtime.device import is_interpreter
from ditron_train.schedule import arrival_order, gather_row_tile_order, row_tile_owners, scatter_row_tile_order
from ditron_train.schedule.tiles import gather_tile, grouped_tile, ordered_tile, scatter_tile
from ditron_train.tp.context import RowPartition
from tests.support.orders_of_tiles import gather_tile_order, grouped_tile_order

pytestmark = pytest.mark.skipif(not is_interpreter(), reason="runs in Triton's interpreter")


@triton.jit
def _list_tiles(
    out_ptr,
    order_ptr,
    rank,
    num_tiles_m,
    num_tiles_n,
    MODE: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    RANKS_PER_NODE: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN: tl.constexpr,
):
    for tile_id in range(num_tiles_m * num_tiles_n):
        owner = -1
        if MODE == "grouped":
            tile_m, tile_n = grouped_tile(tile_id, num_tiles_m, num_tiles_n, GROUP_M)
        elif MODE == "ordered":
            tile_m, tile_n = ordered_tile(tile_id, order_ptr, num_tiles_m, num_tiles_n, GROUP_M)
        elif MODE == "gather":
            tile_m, tile_n = gather_tile(tile_id, order_ptr, rank, num_tiles_m, num_tiles_n, GROUP_M, WORLD_SIZE, EVEN)
        else:
            tile_m, tile_n, owner = scatter_tile(
                tile_id, rank, num_tiles_m, num_tiles_n, WORLD_SIZE, RANKS_PER_NODE, GROUP_M
            )
        tl.store(out_ptr + 3 * tile_id, tile_m)
        tl.store(out_ptr + 3 * tile_id + 1, tile_n)
        tl.store(out_ptr + 3 * tile_id + 2, owner)


def device_tiles(
    mode, num_tiles_m, num_tiles_n, group_m, *, order=None, rank=0, world_size=1, ranks_per_node=1, even=True
):
    out = torch.full((num_tiles_m * num_tiles_n, 3), -7, dtype=torch.int32)
    table = torch.from_numpy(np.ascontiguousarray(order)) if order is not None else torch.zeros(1, dtype=torch.int32)
    _list_tiles[(1,)](out, table, rank, num_tiles_m, num_tiles_n, mode, world_size, ranks_per_node, group_m, even)
    return out.numpy()


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_grouped_tile_equals_its_twin(num_tiles_m, num_tiles_n, group_m):
    got = device_tiles("grouped", num_tiles_m, num_tiles_n, group_m)
    assert np.array_equal(got[:, :2], grouped_tile_order(num_tiles_m, num_tiles_n, group_m))


@given(
    st.lists(st.integers(0, 40), min_size=4, max_size=4),
    st.integers(0, 3),
    st.sampled_from([None, 2]),
    st.integers(1, 5),
)
@settings(max_examples=25, deadline=None)
def test_ordered_tile_equals_its_twin_for_uneven_rows(rows, rank, ranks_per_node, group_m):
    row_starts = np.cumsum([0, *rows])
    for make_order in (gather_row_tile_order, scatter_row_tile_order):
        order = make_order(row_starts, 16, rank, 4, ranks_per_node)
        if order.size:
            got = device_tiles("ordered", order.size, 3, group_m, order=order)
            assert np.array_equal(got[:, :2], grouped_tile_order(order.size, 3, group_m, order))


@st.composite
def gathers(draw):
    """(row_starts, rank, group_m, columns of tiles) of 4 ranks: even shares of whole tiles of 8 rows, and others."""
    even = [8 * draw(st.integers(1, 6))] * 4
    rows = draw(st.one_of(st.just(even), st.lists(st.integers(0, 40), min_size=4, max_size=4).filter(any)))
    return np.cumsum([0, *rows]), draw(st.integers(0, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 3))


def device_gather(row_starts, rank, group_m, num_tiles_n):
    """The tiles of ``gather_tile``, as an AG-GEMM calls it."""
    even = RowPartition.of(np.diff(row_starts)).is_even(8)
    order = gather_row_tile_order(row_starts, 8, rank, 4)
    options = dict(order=None if even else order, rank=rank, world_size=4, even=even)
    return device_tiles("gather", order.size, num_tiles_n, group_m, **options)[:, :2]


@given(gathers())
@settings(max_examples=60, deadline=None)
def test_gather_tile_equals_its_twin(gather):
    row_starts, rank, group_m, num_tiles_n = gather
    expected = gather_tile_order(row_starts, 8, num_tiles_n, group_m, rank, 4)
    assert np.array_equal(device_gather(*gather), expected)


@given(gathers(), st.sampled_from([None, 2, 1]))
@settings(max_examples=60, deadline=None)
def test_no_tile_of_a_gather_comes_before_one_whose_rows_are_there_sooner(gather, ranks_per_node):
    row_starts, rank, group_m, num_tiles_n = gather
    tiles = gather_tile_order(row_starts, 8, num_tiles_n, group_m, rank, 4, ranks_per_node)
    assert len(set(map(tuple, tiles))) == len(tiles) == -(-int(row_starts[-1]) // 8) * num_tiles_n
    if RowPartition.of(np.diff(row_starts)).is_even(8):
        owners = tiles[:, 0] // (row_starts[1] // 8)
        arrivals = [owner for index, owner in enumerate(owners) if index == 0 or owner != owners[index - 1]]
        assert arrivals == list(arrival_order(rank, 4, ranks_per_node))


@given(st.data(), st.sampled_from([(1, 1), (2, 2), (4, 4), (4, 2), (6, 3), (6, 2), (8, 8), (8, 4)]))
@settings(max_examples=40, deadline=None)
def test_scatter_tile_equals_the_table_where_rows_divide(data, group):
    world_size, ranks_per_node = group
    rank = data.draw(st.integers(0, world_size - 1))
    tiles_per_rank, num_tiles_n, group_m = (
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 9)),
    )
    row_starts = np.arange(world_size + 1) * tiles_per_rank * 8
    num_tiles_m = world_size * tiles_per_rank
    owners, _ = row_tile_owners(row_starts, 8)
    order = scatter_row_tile_order(row_starts, 8, rank, world_size, ranks_per_node)
    group = dict(rank=rank, world_size=world_size, ranks_per_node=ranks_per_node)
    got = device_tiles("scatter", num_tiles_m, num_tiles_n, group_m, **group)
    assert np.array_equal(got[:, :2], grouped_tile_order(num_tiles_m, num_tiles_n, group_m, order))
    assert np.array_equal(got[:, 2], owners[got[:, 0]])


@pytest.mark.parametrize("block_m", [1, 4])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_partitions_that_share_a_table_have_one_order(world_size, block_m):
    """Every partition of a few rows over the ranks, empty shares among them."""
    tables, num_partitions = {}, 0
    for counts in itertools.product(range(10), repeat=world_size):
        partition = RowPartition.of(counts)
        owners = [one.tolist() for one in row_tile_owners(partition.starts, block_m)]
        for rank in range(world_size):
            orders = [
                order(partition.starts, block_m, rank, world_size).tolist()
                for order in (gather_row_tile_order, scatter_row_tile_order)
            ]
            key = rank, partition.owners_key(block_m)
            assert tables.setdefault(key, (owners, orders)) == (owners, orders), counts
            num_partitions += 1
    assert len(tables) < num_partitions or block_m == 1
