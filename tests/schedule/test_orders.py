"""Orders in NumPy, by property."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ditron_train.schedule import (
    arrival_order,
    chunk_order,
    delivery_order,
    gather_row_tile_order,
    lower_triangle_tile_order,
    order_in_block,
    rank_blocks,
    row_tile_owners,
    scatter_row_tile_order,
)
from tests.support.orders_of_tiles import grouped_tile_order


@st.composite
def groups(draw):
    """(rank, world_size, ranks_per_node or None)."""
    num_nodes, num_local = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    world_size = num_nodes * num_local
    per_node = num_local if num_nodes > 1 or draw(st.booleans()) else None
    return draw(st.integers(0, world_size - 1)), world_size, per_node


@st.composite
def layouts(draw):
    """(row_starts, block_m, rank, world_size, ranks_per_node): uneven and empty shares, straddling tiles."""
    rank, world_size, per_node = draw(groups())
    rows = draw(st.lists(st.integers(0, 70), min_size=world_size, max_size=world_size))
    return np.cumsum([0, *rows]), draw(st.integers(1, 48)), rank, world_size, per_node


def owners_of(row_starts, block_m, tile):
    """Ranks with rows in a tile, row by row: the slow truth."""
    rows = range(tile * block_m, min((tile + 1) * block_m, int(row_starts[-1])))
    return sorted(
        {next(r for r in range(len(row_starts) - 1) if row_starts[r] <= row < row_starts[r + 1]) for row in rows}
    )


@given(groups())
def test_arrival_is_a_permutation_with_own_rank_and_own_node_first(group):
    rank, world_size, per_node = group
    order = arrival_order(*group)
    num_local = per_node or world_size
    assert order.dtype == np.int32 and sorted(order) == list(range(world_size))
    assert order[0] == rank
    assert set(order[:num_local] // num_local) == {rank // num_local}
    if per_node is None:
        assert list(order) == [(rank + i) % world_size for i in range(world_size)]


@given(groups())
def test_delivery_is_a_permutation_with_own_rank_last_and_next_node_first(group):
    rank, world_size, per_node = group
    order = delivery_order(*group)
    num_local = per_node or world_size
    num_nodes = world_size // num_local
    assert order.dtype == np.int32 and sorted(order) == list(range(world_size))
    assert order[-1] == rank
    assert set(order[:num_local] // num_local) == {(rank // num_local + 1) % num_nodes}
    if per_node is None:
        assert list(order) == [(rank + 1 + i) % world_size for i in range(world_size)]


@given(groups())
def test_chunks_are_pushed_in_the_order_in_which_they_are_consumed(group):
    rank, world_size, per_node = group
    order = chunk_order(rank, world_size, "gather_push", per_node)
    places = [list(arrival_order(consumer, world_size, per_node)).index(rank) for consumer in order]
    assert sorted([*order, rank]) == list(range(world_size))
    assert places == list(range(1, world_size))
    assert list(chunk_order(rank, world_size, "gather_pull", per_node)) == list(arrival_order(*group))[1:]
    assert list(chunk_order(rank, world_size, "scatter_push", per_node)) == list(delivery_order(*group))[:-1]


@given(world_size=st.integers(1, 16))
def test_partial_sums_arrive_in_the_order_of_the_sum(world_size):
    orders = [list(chunk_order(rank, world_size, "sum_push")) for rank in range(world_size)]
    for owner in range(world_size):
        senders = [(owner + step) % world_size for step in range(1, world_size)]  # NCCL's ring
        assert [orders[sender].index(owner) for sender in senders] == list(range(world_size - 1))


@given(groups())
def test_at_each_step_of_a_push_every_rank_receives_from_one(group):
    _, world_size, per_node = group
    orders = np.stack([chunk_order(rank, world_size, "gather_push", per_node) for rank in range(world_size)])
    for step in range(world_size - 1):
        assert sorted(orders[:, step]) == list(range(world_size))


@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from(["gather_push", "sum_push"]))
def test_at_each_step_of_a_push_by_blocks_every_rank_receives_from_one(num_blocks, size, mode):
    world_size, orders = num_blocks * size, []
    for rank in range(world_size):
        blocks = rank_blocks([rank, *chunk_order(rank, world_size, mode).tolist()], num_blocks)
        assert sorted(one for block in blocks for one in block) == list(range(world_size)) and rank in blocks[0]
        if num_blocks == world_size:
            assert [block.start for block in blocks[1:]] == chunk_order(rank, world_size, mode).tolist()
        orders.append([one for block in blocks for one in order_in_block(rank, block) if one != rank])
    for step in range(world_size - 1):
        assert sorted(order[step] for order in orders) == list(range(world_size))


def test_blocks_divide_the_ranks():
    for num_blocks in (0, 4):
        with pytest.raises(ValueError, match="6 ranks do not divide"):
            rank_blocks(range(6), num_blocks)


@given(layouts())
def test_owners_are_those_of_the_rows(layout):
    row_starts, block_m, *_ = layout
    first, last = row_tile_owners(row_starts, block_m)
    assert len(first) == len(last) == -(-int(row_starts[-1]) // block_m)
    for tile in range(len(first)):
        owners = owners_of(row_starts, block_m, tile)
        assert (first[tile], last[tile]) == (owners[0], owners[-1])


@given(layouts())
@settings(max_examples=200)
def test_gather_never_computes_a_tile_before_one_that_could_start_earlier(layout):
    row_starts, block_m, rank, world_size, per_node = layout
    order = gather_row_tile_order(*layout)
    place = {int(r): i for i, r in enumerate(arrival_order(rank, world_size, per_node))}
    assert order.dtype == np.int32 and sorted(order) == list(range(-(-int(row_starts[-1]) // block_m)))
    owners = [owners_of(row_starts, block_m, int(tile)) for tile in order]
    ready = [max(place[r] for r in o) for o in owners]
    assert ready == sorted(ready)  # so tiles of local rows alone are first
    for slot, own in enumerate(owners):
        if len(own) > 1:  # comes after every whole tile of each of its ranks
            assert all(slot > s for s, o in enumerate(owners) if len(o) == 1 and o[0] in own)


@given(layouts())
@settings(max_examples=200)
def test_scatter_computes_first_what_is_owed_farthest(layout):
    row_starts, block_m, rank, world_size, per_node = layout
    order = scatter_row_tile_order(*layout)
    place = {int(r): i for i, r in enumerate(delivery_order(rank, world_size, per_node))}
    assert order.dtype == np.int32 and sorted(order) == list(range(-(-int(row_starts[-1]) // block_m)))
    owners = [owners_of(row_starts, block_m, int(tile)) for tile in order]
    owed = [min(place[r] for r in o) for o in owners]
    assert owed == sorted(owed)
    for slot, own in enumerate(owners):
        if len(own) > 1:  # comes before every whole tile of each of its ranks
            assert all(slot < s for s, o in enumerate(owners) if len(o) == 1 and o[0] in own)
        if own == [rank]:  # this rank's own rows last: nothing that a peer waits for comes after
            assert all(o == [rank] for o in owners[slot:])


def test_orders_of_a_shape_that_can_be_checked_by_hand():
    # 3 ranks of 10, 6, 8 rows in tiles of 4: tile 2 holds rows 8..11 (ranks 0, 1), the others are whole
    row_starts = [0, 10, 16, 24]
    assert [list(x) for x in row_tile_owners(row_starts, 4)] == [[0, 0, 0, 1, 2, 2], [0, 0, 1, 1, 2, 2]]
    assert list(gather_row_tile_order(row_starts, 4, 0, 3)) == [0, 1, 3, 2, 4, 5]
    assert list(gather_row_tile_order(row_starts, 4, 1, 3)) == [3, 4, 5, 0, 1, 2]
    assert list(scatter_row_tile_order(row_starts, 4, 0, 3)) == [2, 3, 4, 5, 0, 1]
    assert list(scatter_row_tile_order(row_starts, 4, 1, 3)) == [4, 5, 2, 0, 1, 3]


@given(st.integers(0, 20), st.integers(0, 9), st.integers(1, 9))
def test_grouped_order_is_a_permutation_group_by_group(num_tiles_m, num_tiles_n, group_m):
    tiles = grouped_tile_order(num_tiles_m, num_tiles_n, group_m)
    assert sorted(map(tuple, tiles)) == [(m, n) for m in range(num_tiles_m) for n in range(num_tiles_n)]
    groups_in_order = tiles[:, 0] // group_m
    assert list(groups_in_order) == sorted(groups_in_order)


@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, 40), st.integers(1, 9))
def test_the_triangle_is_covered_once_and_nothing_above_it_is_computed(size, block_m, block_n, group_m):
    tiles = lower_triangle_tile_order(size, block_m, block_n, group_m)
    covered = np.zeros((size, size), dtype=int)
    for tile_m, tile_n in tiles:
        row, col = tile_m * block_m, tile_n * block_n
        assert col <= min(row + block_m, size) - 1
        covered[row : row + block_m, col : col + block_n] += 1
    assert np.all(covered[np.tril_indices(size)] == 1)
    assert list(tiles[:, 0] // group_m) == sorted(tiles[:, 0] // group_m)


@pytest.mark.parametrize(
    "call",
    [
        lambda: lower_triangle_tile_order(-1, 8, 8, 1),
        lambda: lower_triangle_tile_order(8, 8, 8, 0),
        lambda: arrival_order(2, 2),
        lambda: delivery_order(0, 6, 4),
        lambda: chunk_order(0, 4, "sideways"),
        lambda: row_tile_owners([0, 4, 2], 4),
        lambda: row_tile_owners([1, 4], 4),
        lambda: row_tile_owners([0, 4], 0),
        lambda: gather_row_tile_order([0, 4, 8], 4, 0, 3),
    ],
)
def test_bad_input_raises(call):
    with pytest.raises(ValueError):
        call()
