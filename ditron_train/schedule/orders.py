"""Orders of row tiles and of chunks, in NumPy: pure functions of (shape, rank, world).

Rows of a matrix [M, ...] are spread over the ranks of a group: rank ``r`` owns rows ``row_starts[r]`` up to
``row_starts[r + 1]`` (uneven and empty shares are allowed). Row tile ``t`` covers rows ``t * block_m`` up to
``(t + 1) * block_m``, so it may straddle ranks.

Gather mode (data arrives, compute follows): local rows first, then ranks in the order in which their data arrives; a
tile that straddles ranks comes after all whole tiles of the last of them.
Scatter mode (results leave): rows of the farthest rank first, rows that this rank owns last; a tile that straddles
ranks comes before all whole tiles of the first of them, since several ranks wait for it.

Several nodes: node ``n`` holds ranks ``n * ranks_per_node`` up to ``(n + 1) * ranks_per_node``. Gather starts in the
own node, scatter in the next one. Inside another node, gather starts with the rank of the same local index, since data
crosses nodes between equal local indices and is forwarded to neighbours from there.

The order of a whole shape is a small int32 table which a kernel loads (``ordered_tile``); for row counts that divide
evenly, ``gather_tile`` and ``scatter_tile`` need no table.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal

import numpy as np

ChunkMode = Literal["gather_push", "gather_pull", "scatter_push", "sum_push"]


@cache
def _node_by_node(
    rank: int, world_size: int, ranks_per_node: int | None, *, first: int = 0, step: int = 1
) -> np.ndarray:
    """All ranks, node after node from the own node plus ``first`` on, in each from the own place plus ``first`` on."""
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a group of {world_size}")
    num_local = world_size if ranks_per_node is None else ranks_per_node
    if num_local < 1 or world_size % num_local:
        raise ValueError(f"world size {world_size} does not divide into nodes of {num_local} ranks")
    (node, local), position = divmod(rank, num_local), np.arange(world_size)
    of_node = (node + first + step * (position // num_local)) % (world_size // num_local)
    in_node = (local + first + step * (position % num_local)) % num_local
    order = (of_node * num_local + in_node).astype(np.int32)
    order.flags.writeable = False
    return order


def arrival_order(rank: int, world_size: int, ranks_per_node: int | None = None) -> np.ndarray:
    """Ranks in the order in which their data arrives at ``rank``: itself, rank + 1, ..., then node by node.

    Returns:
        int32 [world_size], a permutation whose first entry is ``rank``.

    Raises:
        ValueError: The rank is not in the group, or nodes do not divide it.
    """
    return _node_by_node(rank, world_size, ranks_per_node)


def delivery_order(rank: int, world_size: int, ranks_per_node: int | None = None) -> np.ndarray:
    """Ranks in the order in which ``rank`` computes what it owes them: rank + 1, rank + 2, ..., itself last.

    With several nodes the next node is first and the own node last.

    Returns:
        int32 [world_size], a permutation whose last entry is ``rank``.

    Raises:
        ValueError: The rank is not in the group, or nodes do not divide it.
    """
    return _node_by_node(rank, world_size, ranks_per_node, first=1)


def chunk_order(rank: int, world_size: int, mode: ChunkMode, ranks_per_node: int | None = None) -> np.ndarray:
    """The order in which ``rank`` moves chunks so that they arrive in the order in which they are consumed.

    * ``gather_push``: destinations of the own chunk. A consumer wants the ranks after it first, so rank - 1 comes
    first.
    * ``gather_pull``: sources, in the own order of consumption.
    * ``scatter_push``: destinations of results, in the order in which they are computed.
    * ``sum_push``: destinations of partial sums. NCCL's ring order, in which they are added up, begins with the rank
      after the owner, so rank - 1 comes first, as for ``gather_push``.

    Returns:
        int32 [world_size - 1], every rank but the own one.

    Raises:
        ValueError: An unknown mode, a rank outside the group, or nodes that do not divide it.
    """
    if mode == "gather_pull":
        return arrival_order(rank, world_size, ranks_per_node)[1:]
    if mode == "scatter_push":
        return delivery_order(rank, world_size, ranks_per_node)[:-1]
    if mode not in ("gather_push", "sum_push"):
        raise ValueError(f"mode {mode!r} is not gather_push, gather_pull, scatter_push or sum_push")
    # In front is whose order of arrival has this rank in front.
    return _node_by_node(rank, world_size, ranks_per_node, step=-1)[1:]


def rank_blocks(order: Sequence[int], num_blocks: int) -> list[range]:
    """Consecutive ranks, as many in each of ``num_blocks`` blocks, in the order in which ``order`` comes to a block.

    Raises:
        ValueError: ``num_blocks`` does not divide the ranks.
    """
    world_size = len(order)
    if num_blocks < 1 or world_size % num_blocks:
        raise ValueError(f"{world_size} ranks do not divide into {num_blocks} blocks")
    size = world_size // num_blocks
    firsts = dict.fromkeys(int(rank) // size * size for rank in order)
    return [range(first, first + size) for first in firsts]


def order_in_block(rank: int, block: range) -> list[int]:
    """The ranks of ``block`` in the order in which ``rank`` sends to them: those of another block send to each of
    them in turn, and never two of them to one at a time."""
    return sorted(block, key=lambda one: (one - rank) % len(block))


def _checked_row_starts(row_starts: Sequence[int] | np.ndarray, block_m: int) -> np.ndarray:
    starts = np.asarray(row_starts, dtype=np.int64)
    if block_m < 1:
        raise ValueError(f"tiles of {block_m} rows")
    if starts.ndim != 1 or starts.size < 2 or starts[0] != 0 or np.any(np.diff(starts) < 0):
        raise ValueError("row_starts must be [world_size + 1], begin with 0 and never fall")
    return starts


def row_tile_owners(row_starts: Sequence[int] | np.ndarray, block_m: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last rank whose rows each row tile holds: what a tile waits for, or whom it is owed to.

    Args:
        row_starts: int [world_size + 1], see the module's docstring.
        block_m: Rows of a tile.

    Returns:
        Two int32 [ceil(M / block_m)]. Ranks without rows are never first or last; they may be between.

    Raises:
        ValueError: ``row_starts`` is not such a table, or ``block_m`` is not above 0.
    """
    starts = _checked_row_starts(row_starts, block_m)
    num_rows = int(starts[-1])
    first_row = np.arange(0, num_rows, block_m)
    last_row = np.minimum(first_row + block_m, num_rows) - 1
    # side="right" skips the empty ranks in front of the owner: the owner is the last rank that starts at or before the
    # row
    first = np.searchsorted(starts, first_row, side="right") - 1
    last = np.searchsorted(starts, last_row, side="right") - 1
    return first.astype(np.int32), last.astype(np.int32)


def _positions_of_owners(
    row_starts: Sequence[int] | np.ndarray, block_m: int, order: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each row tile: earliest and latest position in ``order`` of the ranks with rows in it, and whether it
    straddles."""
    starts = _checked_row_starts(row_starts, block_m)
    if starts.size - 1 != order.size:
        raise ValueError(f"row_starts is for {starts.size - 1} ranks, the group has {order.size}")
    position = np.empty(order.size, dtype=np.int64)
    position[order] = np.arange(order.size)
    has_rows = np.diff(starts) > 0
    first, last = row_tile_owners(starts, block_m)
    earliest, latest = position[first], position[last]
    for tile in np.flatnonzero(first != last):
        low, high = first[tile], last[tile]
        owners = position[low : high + 1][has_rows[low : high + 1]]
        earliest[tile], latest[tile] = owners.min(), owners.max()
    return earliest, latest, first != last


def gather_row_tile_order(
    row_starts: Sequence[int] | np.ndarray, block_m: int, rank: int, world_size: int, ranks_per_node: int | None = None
) -> np.ndarray:
    """Row tiles in gather mode: this rank's own first, then as data arrives; straddling tiles after whole tiles of
    their last rank.

    Returns:
        int32 [ceil(M / block_m)], a permutation: entry ``slot`` is the row tile to compute in that slot.

    Raises:
        ValueError: As ``row_tile_owners`` and ``arrival_order``, or a table for another world size.
    """
    order = arrival_order(rank, world_size, ranks_per_node)
    _, latest, straddles = _positions_of_owners(row_starts, block_m, order)
    return np.lexsort((np.arange(latest.size), straddles, latest)).astype(np.int32)


def scatter_row_tile_order(
    row_starts: Sequence[int] | np.ndarray, block_m: int, rank: int, world_size: int, ranks_per_node: int | None = None
) -> np.ndarray:
    """Row tiles in scatter mode: farthest rank first, this rank's own last; straddling tiles before whole tiles of
    their first rank.

    Returns:
        int32 [ceil(M / block_m)], a permutation: entry ``slot`` is the row tile to compute in that slot.

    Raises:
        ValueError: As ``row_tile_owners`` and ``delivery_order``, or a table for another world size.
    """
    order = delivery_order(rank, world_size, ranks_per_node)
    earliest, _, straddles = _positions_of_owners(row_starts, block_m, order)
    return np.lexsort((np.arange(earliest.size), ~straddles, earliest)).astype(np.int32)


def lower_triangle_tile_order(size: int, block_m: int, block_n: int, group_m: int) -> np.ndarray:
    """Tiles of a symmetric [size, size] result that touch its lower triangle, in an order that is kind to L2.

    ``group_m`` row tiles are walked together, column by column, as by ``tiles.grouped_tile``: both operands are the
    same matrix, so a wave of programs shares the panels with few rows and few columns.

    Returns:
        int32 [num_tiles, 2] of (row tile, column tile).

    Raises:
        ValueError: A size below 0, or tiles without rows, columns or groups.
    """
    if size < 0 or min(block_m, block_n, group_m) < 1:
        raise ValueError(f"size {size}, tiles of {block_m} x {block_n} in groups of {group_m}")
    num_tiles_m, num_tiles_n = -(-size // block_m), -(-size // block_n)
    tile_m, tile_n = np.divmod(np.arange(num_tiles_m * num_tiles_n), max(num_tiles_n, 1))
    last_row = np.minimum((tile_m + 1) * block_m, size) - 1
    touches = tile_n * block_n <= last_row
    tile_m, tile_n = tile_m[touches], tile_n[touches]
    order = np.lexsort((tile_m, tile_n, tile_m // group_m))
    return np.stack([tile_m[order], tile_n[order]], axis=1).astype(np.int32)
