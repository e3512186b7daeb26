"""The orders in which kernels take tiles, in NumPy: what the functions on the device are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ditron_train.schedule import gather_row_tile_order


def grouped_tile_order(
    num_tiles_m: int, num_tiles_n: int, group_m: int, row_order: np.ndarray | None = None
) -> np.ndarray:
    """All tiles in the order in which programs take them: ``group_m`` slots of rows at a time, column by column.

    A wave of programs then shares few rows of both operands, which stay in L2. Groups are made over slots, not rows,
    so a reordering by ``row_order`` (one of the two functions above) keeps that reuse.

    Returns:
        int32 [num_tiles_m * num_tiles_n, 2] of (row tile, column tile).
    """
    rows = np.arange(num_tiles_m) if row_order is None else np.asarray(row_order)
    tile_id = np.arange(num_tiles_m * num_tiles_n)
    tiles_per_group = group_m * max(num_tiles_n, 1)
    first_slot = tile_id // tiles_per_group * group_m
    group_size = np.minimum(num_tiles_m - first_slot, group_m)
    within = tile_id % tiles_per_group
    slot = first_slot + within % np.maximum(group_size, 1)
    return np.stack([rows[slot], within // np.maximum(group_size, 1)], axis=1).astype(np.int32).reshape(-1, 2)


def gather_tile_order(
    row_starts: Sequence[int] | np.ndarray,
    block_m: int,
    num_tiles_n: int,
    group_m: int,
    rank: int,
    world_size: int,
    ranks_per_node: int | None = None,
) -> np.ndarray:
    """All tiles of a gather in the order in which programs take them.

    If every rank owns the same whole number of row tiles, that is ``grouped_tile_order`` of each rank's rows by
    itself, so that no group waits for two ranks; else that of ``gather_row_tile_order``.

    Returns:
        int32 [num_tiles, 2] of (row tile, column tile).

    Raises:
        ValueError: As ``gather_row_tile_order``.
    """
    row_order = gather_row_tile_order(row_starts, block_m, rank, world_size, ranks_per_node)
    rows = np.diff(np.asarray(row_starts, dtype=np.int64))
    if rows[0] == 0 or rows[0] % block_m or np.any(rows != rows[0]):
        return grouped_tile_order(row_order.size, num_tiles_n, group_m, row_order)
    shards = row_order.reshape(world_size, -1)
    return np.concatenate([grouped_tile_order(shard.size, num_tiles_n, group_m, shard) for shard in shards])


def tiles_of_program(
    program: int, num_push: int, num_programs: int, num_early_tiles: int, num_tiles: int
) -> list[int]:
    """Twin of the deal in ``a2a_gemm_kernel``: the tiles of one program, in order."""
    early = range(program - num_push, num_early_tiles, num_programs - num_push) if program >= num_push else range(0)
    return [*early, *range(num_early_tiles + program, num_tiles, num_programs)]
