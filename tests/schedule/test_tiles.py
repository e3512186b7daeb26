"""Device orders against their NumPy twins, through a tiny interpreted kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from ditron_train.runtime.device import is_interpreter
from ditron_train.schedule import gather_row_tile_order, grouped_tile_order, row_tile_owners, scatter_row_tile_order
from ditron_train.schedule.tiles import gather_tile, grouped_tile, ordered_tile, scatter_tile

pytestmark = pytest.mark.skipif(not is_interpreter(), reason="runs in Triton's interpreter")


@triton.jit
def _list_tiles(
    out_ptr, order_ptr, rank, num_tiles_m, num_tiles_n,
    MODE: tl.constexpr, WORLD_SIZE: tl.constexpr, RANKS_PER_NODE: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    for tile_id in range(num_tiles_m * num_tiles_n):
        owner = -1
        if MODE == "grouped":
            tile_m, tile_n = grouped_tile(tile_id, num_tiles_m, num_tiles_n, GROUP_M)
        elif MODE == "ordered":
            tile_m, tile_n = ordered_tile(tile_id, order_ptr, num_tiles_m, num_tiles_n, GROUP_M)
        elif MODE == "gather":
            tile_m, tile_n, owner = gather_tile(
                tile_id, rank, num_tiles_m, num_tiles_n, WORLD_SIZE, RANKS_PER_NODE, GROUP_M
            )
        else:
            tile_m, tile_n, owner = scatter_tile(
                tile_id, rank, num_tiles_m, num_tiles_n, WORLD_SIZE, RANKS_PER_NODE, GROUP_M
            )
        tl.store(out_ptr + 3 * tile_id, tile_m)
        tl.store(out_ptr + 3 * tile_id + 1, tile_n)
        tl.store(out_ptr + 3 * tile_id + 2, owner)


def device_tiles(mode, num_tiles_m, num_tiles_n, group_m, *, order=None, rank=0, world_size=1, ranks_per_node=1):
    out = torch.full((num_tiles_m * num_tiles_n, 3), -7, dtype=torch.int32)
    table = torch.from_numpy(np.ascontiguousarray(order)) if order is not None else torch.zeros(1, dtype=torch.int32)
    _list_tiles[(1,)](out, table, rank, num_tiles_m, num_tiles_n, mode, world_size, ranks_per_node, group_m)
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


@given(st.data(), st.sampled_from([(1, 1), (2, 2), (4, 4), (4, 2), (6, 3), (6, 2), (8, 8), (8, 4)]))
@settings(max_examples=40, deadline=None)
def test_closed_forms_equal_the_tables_where_rows_divide(data, group):
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
    for mode, make_order in (("gather", gather_row_tile_order), ("scatter", scatter_row_tile_order)):
        order = make_order(row_starts, 8, rank, world_size, ranks_per_node)
        got = device_tiles(
            mode, num_tiles_m, num_tiles_n, group_m, rank=rank, world_size=world_size, ranks_per_node=ranks_per_node
        )
        assert np.array_equal(got[:, :2], grouped_tile_order(num_tiles_m, num_tiles_n, group_m, order))
        assert np.array_equal(got[:, 2], owners[got[:, 0]])
