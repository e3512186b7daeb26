"""Which tiles of a symmetric result are computed, whole or in quarters."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ditron_train.schedule import lower_triangle_tile_order

QUARTER_TIME = 0.4  # of a quarter of a tile, in units of a whole one: small tiles use the tensor cores less well
_MIN_QUARTERED_BLOCK = 32


@lru_cache(maxsize=1024)
def triangle_tiles(size: int, block_m: int, block_n: int, group_m: int, num_programs: int) -> tuple[np.ndarray, int]:
    """Covers the lower triangle of a [size, size] result.

    If the last wave has few tiles, these are computed in quarters (of a tile on the diagonal: three), so that it
    takes less than half the time: 136 tiles of a 2048 x 2048 result would else take 132 programs two waves.

    Args:
        size: Rows and columns of the result.
        block_m: Rows of a tile.
        block_n: Columns of a tile; only square tiles are quartered.
        group_m: See ``lower_triangle_tile_order``.
        num_programs: Tiles of a wave.

    Returns:
        int32 [num_whole + num_quarters, 2]: (row, column) of whole tiles in units of tiles, then of quarters in units
        of half a tile's side; and num_whole.
    """
    tiles = lower_triangle_tile_order(size, block_m, block_n, group_m)
    num_waves, tail = divmod(len(tiles), num_programs)
    if tail == 0 or block_m != block_n or block_m < _MIN_QUARTERED_BLOCK:
        return tiles, len(tiles)
    by_cost = np.argsort(tiles[:, 0] != tiles[:, 1], kind="stable")  # the diagonal first
    is_whole = np.ones(len(tiles), dtype=bool)
    is_whole[by_cost[:tail]] = False
    quarters = (2 * tiles[~is_whole][:, None, :] + np.array([[0, 0], [1, 0], [0, 1], [1, 1]], dtype=np.int32)).reshape(
        -1, 2
    )
    half = block_m // 2
    needed = (quarters[:, 1] <= quarters[:, 0]) & (quarters[:, 0] * half < size)
    quarters = quarters[needed]
    most_waves = 1 if num_waves else 2
    if len(quarters) > most_waves * num_programs:
        return tiles, len(tiles)
    return np.concatenate([tiles[is_whole], quarters]).astype(np.int32), int(is_whole.sum())


def triangle_waves(size: int, block_m: int, block_n: int, group_m: int, num_programs: int) -> float:
    """Time of ``triangle_tiles``, in units of a whole tile."""
    tiles, num_whole = triangle_tiles(size, block_m, block_n, group_m, num_programs)
    quarters = len(tiles) - num_whole
    return -(-num_whole // num_programs) + QUARTER_TIME * -(-quarters // num_programs)
