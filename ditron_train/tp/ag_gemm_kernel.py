"""The kernel of an AG-GEMM (the gather in front of it: ``gather_kernels``). What was tried, with its times:
``docs/measurements/tp.md``.

The gathered activation ``[M, K]`` is a single buffer of a rank: a peer writes into it only after this rank's start
signal of the epoch (``dl.announce``: everything that its stream had before is done). Arrival is told by flags that
hold the epoch, one for each (source rank, granule).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.gemm.configs import Tile
from ditron_train.gemm.kernels import biased, store_tile, tile_product
from ditron_train.schedule.tiles import gather_tile


class AgGemmConstants(NamedTuple):
    """What ``ag_gemm_kernel`` is compiled for; see there."""

    tile: Tile
    flags_per_rank: int
    world_size: int
    even: bool
    halve_tail: bool


class _Gathered(NamedTuple):
    """Rows of all ranks as a tile reads them: from the buffer by ``desc``, own ones by ``own_desc`` where shares are
    even."""

    desc: Any
    own_desc: Any
    tables: Any
    num_rows: Any
    granule_rows: Any
    epoch: Any
    rank: Any


@triton.jit
def _rows_token(gathered, channel, row, last_row, OP: tl.constexpr, TARGET: tl.constexpr):
    """Waits for rows [row, last_row] of the gathered buffer, whichever peers they belong to: a zero, as
    ``dl.wait_token``.

    The loops stand under conditions that only the running kernel knows to hold: beside a bare loop the compiler would
    not flatten the loop of tiles.
    """
    rank, granule_rows = gathered.rank, gathered.granule_rows
    token = tl.cast(0, tl.int32)
    if OP.even:
        shard_rows = gathered.num_rows // OP.world_size
        owner = row // shard_rows
        flags = channel.signals + owner * OP.flags_per_rank
        first = row % shard_rows
        last = first + last_row - row
        if (first <= last) & (owner != rank):
            for flag in range(first // granule_rows, last // granule_rows + 1):
                token += dl.wait_token(flags + flag, gathered.epoch, channel.control, owner, flag, TARGET)
    elif row <= last_row:
        for owner in range(0, OP.world_size):
            start = tl.load(gathered.tables.starts + owner)
            low = tl.maximum(row, start)
            high = tl.minimum(last_row, tl.load(gathered.tables.starts + owner + 1) - 1)
            if (low <= high) & (owner != rank):
                flags = channel.signals + owner * OP.flags_per_rank
                for flag in range((low - start) // granule_rows, (high - start) // granule_rows + 1):
                    token += dl.wait_token(flags + flag, gathered.epoch, channel.control, owner, flag, TARGET)
    return token


@triton.jit
def _gathered_product(
    tile_id,
    part,
    gathered,
    b_desc,
    scale,
    bias,
    channel,
    N,
    K,
    PART_N: tl.constexpr,
    OP: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Columns ``part * PART_N`` on, PART_N of them, of tile ``tile_id``, once its rows are there: (product, row,
    column)."""
    TILE: tl.constexpr = OP.tile
    M, rank = gathered.num_rows, gathered.rank
    tiles_m, tiles_n = tl.cdiv(M, TILE.block_m), tl.cdiv(N, TILE.block_n)
    tile_m, tile_n = gather_tile(
        tile_id, gathered.tables.order, rank, tiles_m, tiles_n, TILE.group_m, OP.world_size, OP.even
    )
    row = tile_m * TILE.block_m
    col = tile_n * TILE.block_n + part * PART_N
    last_row = tl.minimum(row + TILE.block_m, M) - 1
    source_row = row + _rows_token(gathered, channel, row, last_row, OP, TARGET)
    desc = gathered.desc
    if OP.even:
        shard_rows = M // OP.world_size
        if row // shard_rows == rank:
            source_row -= rank * shard_rows
            desc = gathered.own_desc
    num_k_tiles = tl.cdiv(K, TILE.block_k)
    acc = tile_product(
        desc, b_desc, source_row, col, num_k_tiles, TILE.block_m, PART_N, TILE.block_k, TILE.transpose_b
    )
    return biased(acc, scale, bias, col, N, PART_N), row, col


@triton.jit(do_not_specialize=["M", "K", "granule_rows", "num_whole_tiles"])
def ag_gemm_kernel(
    a_desc,
    own_desc,
    b_desc,
    half_b_desc,
    c_desc,
    channel,
    tables,
    scales,
    bias,
    M,
    N,
    K,
    granule_rows,
    num_whole_tiles,
    OP: tl.constexpr,
    TARGET: tl.constexpr,
):
    """C [M, N] = gathered A [M, K] @ B, persistent; a tile starts when the rows that it reads have arrived.

    It waits (acquire, then a fence for the descriptor loads) for the peers' pushes or copy engines of this epoch,
    which are enqueued before it and need no SM that this grid could take (the grid leaves theirs free).

    Program p computes tiles p, p + num_programs, ... of the gather's order, own rows first, as one pipelined loop
    (``flatten``): the wait of a tile stands where its first loads are issued, under the last products of the tile
    before, and costs nothing where the rows are there (``dl.wait_token``).

    Args:
        a_desc, own_desc: The gathered rows, and this rank's own where the caller has them.
        b_desc, half_b_desc, c_desc: B in whole tiles and in halves of them, and the result.
        channel: ``ChannelPointers``.
        tables: ``RowTables``.
        scales: ``TensorScales`` of FP8 operands (of A one for the rows of all ranks), else None.
        bias: [N], added before the result is rounded, or None.
        M, N, K, granule_rows, num_whole_tiles: Sizes; a flag stands for ``granule_rows`` rows.
        OP: ``AgGemmConstants``. ``even``: every rank owns the same whole number of row tiles, and own rows are read
            through ``own_desc``, so that nobody copies them in front of the GEMM; else the order is a table, a tile
            may wait for several ranks, and own rows have been copied to their place. ``halve_tail``: the tiles from
            ``num_whole_tiles`` on, at most half a wave, are computed in halves of columns, as in ``gemm_kernel``.
        TARGET: See ``runtime.device.kernel_target``.
    """
    TILE: tl.constexpr = OP.tile
    HALF_N: tl.constexpr = TILE.block_n // 2
    epoch = dl.next_epoch(channel.tickets + 1)
    rank = dl.rank(channel.control)
    scale = None
    if scales is not None:
        scale = tl.load(scales.a) * tl.load(scales.b)
    gathered = _Gathered(a_desc, own_desc, tables, M, granule_rows, epoch, rank)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    for tile_id in tl.range(program, num_whole_tiles, num_programs, flatten=True):
        acc, row, col = _gathered_product(
            tile_id, 0, gathered, b_desc, scale, bias, channel, N, K, TILE.block_n, OP, TARGET
        )
        store_tile(c_desc, acc, row, col, TILE.block_m, TILE.block_n, TILE.split_store)
    if OP.halve_tail:
        num_halves = 2 * (tl.cdiv(M, TILE.block_m) * tl.cdiv(N, TILE.block_n) - num_whole_tiles)
        for half_id in range(program, num_halves, num_programs):
            tile_id = num_whole_tiles + half_id // 2
            acc, row, col = _gathered_product(
                tile_id, half_id % 2, gathered, half_b_desc, scale, bias, channel, N, K, HALF_N, OP, TARGET
            )
            store_tile(c_desc, acc, row, col, TILE.block_m, HALF_N, False)
