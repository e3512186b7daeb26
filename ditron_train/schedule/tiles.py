"""Orders of tiles on the device; each equals its NumPy twin in ``tests/support/orders_of_tiles.py``."""

import triton
import triton.language as tl


@triton.jit
def grouped_tile(tile_id, num_tiles_m, num_tiles_n, GROUP_M: tl.constexpr):
    """Tile ``tile_id`` of the L2-friendly order: GROUP_M rows of tiles at a time, column by column within them.

    Twin: ``grouped_tile_order``. Returns (tile_m, tile_n).
    """
    tiles_per_group = GROUP_M * num_tiles_n
    first_m = (tile_id // tiles_per_group) * GROUP_M
    group_size = min(num_tiles_m - first_m, GROUP_M)
    within = tile_id % tiles_per_group
    return first_m + within % group_size, within // group_size


@triton.jit
def compute_tiles(
    num_tiles_m, num_tiles_n, COMPUTE: tl.constexpr, args, GROUP_M: tl.constexpr, SPLIT_LAST_WAVE: tl.constexpr
):
    """Calls ``COMPUTE(tile_m, tile_n, HALF, *args)`` for this program's share of the tiles, in the grouped order.

    With SPLIT_LAST_WAVE a last wave that is at most half full is computed in tiles of half the columns, which
    ``tile_n`` then counts, so that it takes half the time. ``flatten`` makes one loop of tiles and K blocks. ``args``
    stand in the call itself: a tuple with a name would lose its constants.
    """
    num_programs = tl.num_programs(0)
    num_tiles = num_tiles_m * num_tiles_n
    num_whole = num_tiles
    if SPLIT_LAST_WAVE:
        tail = num_tiles % num_programs
        num_whole = tl.where(2 * tail <= num_programs, num_tiles - tail, num_tiles)
    for tile in tl.range(tl.program_id(0), num_whole, num_programs, flatten=True):
        tile_m, tile_n = grouped_tile(tile, num_tiles_m, num_tiles_n, GROUP_M)
        COMPUTE(tile_m, tile_n, False, *args)
    if SPLIT_LAST_WAVE:
        for half in range(tl.program_id(0), 2 * (num_tiles - num_whole), num_programs):
            tile_m, tile_n = grouped_tile(num_whole + half // 2, num_tiles_m, num_tiles_n, GROUP_M)
            COMPUTE(tile_m, tile_n * 2 + half % 2, True, *args)


@triton.jit
def ordered_tile(tile_id, order_ptr, num_tiles_m, num_tiles_n, GROUP_M: tl.constexpr):
    """As ``grouped_tile``, with slot -> row tile looked up in a table (int32 [num_tiles_m]).

    Twin: ``grouped_tile_order(..., row_order)``, with the table of ``gather_row_tile_order`` or
    ``scatter_row_tile_order``: uneven rows, straddling tiles and several nodes are all in the table.
    """
    slot, tile_n = grouped_tile(tile_id, num_tiles_m, num_tiles_n, GROUP_M)
    return tl.load(order_ptr + slot), tile_n


@triton.jit
def gather_tile(
    tile_id,
    order_ptr,
    rank,
    num_tiles_m,
    num_tiles_n,
    GROUP_M: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Tile ``tile_id`` of a gather on one node: this rank's own tiles first, then in the order of arrival.

    With EVEN every rank owns the same whole number of row tiles, and the groups of row tiles that are walked together
    end with a rank's rows: none waits for two ranks. Else ``ordered_tile``. Twin: ``gather_tile_order``. Returns
    (tile_m, tile_n).
    """
    if EVEN:
        shard_tiles_m = num_tiles_m // WORLD_SIZE
        shard_tiles = shard_tiles_m * num_tiles_n
        step = tile_id // shard_tiles
        local_m, tile_n = grouped_tile(tile_id - step * shard_tiles, shard_tiles_m, num_tiles_n, GROUP_M)
        tile_m = (rank + step) % WORLD_SIZE * shard_tiles_m + local_m
    else:
        tile_m, tile_n = ordered_tile(tile_id, order_ptr, num_tiles_m, num_tiles_n, GROUP_M)
    return tile_m, tile_n


@triton.jit
def scatter_tile(
    tile_id,
    rank,
    num_tiles_m,
    num_tiles_n,
    WORLD_SIZE: tl.constexpr,
    RANKS_PER_NODE: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Scatter order without a table, if every rank owns the same whole number of row tiles.

    Rows of rank + 1 first, those that this rank owns last, the next node before its own. Twin: ``grouped_tile_order``
    of ``scatter_row_tile_order``. Returns (tile_m, tile_n, owner): the tile belongs to rank ``owner``.
    """
    NUM_NODES: tl.constexpr = WORLD_SIZE // RANKS_PER_NODE
    slot, tile_n = grouped_tile(tile_id, num_tiles_m, num_tiles_n, GROUP_M)
    tiles_per_rank = num_tiles_m // WORLD_SIZE
    position = slot // tiles_per_rank
    node = (rank // RANKS_PER_NODE + 1 + position // RANKS_PER_NODE) % NUM_NODES
    local = (rank % RANKS_PER_NODE + 1 + position % RANKS_PER_NODE) % RANKS_PER_NODE
    owner = node * RANKS_PER_NODE + local
    return owner * tiles_per_rank + slot % tiles_per_rank, tile_n, owner
