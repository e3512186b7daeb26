"""Which rows of keys and values move between the ranks of a context parallel group: pure functions of the ranges that
chunks attend to.

A sequence of 2 W chunks of ``rows`` rows each; rank ``r`` of W owns chunks ``r`` and ``2 W - 1 - r``, and attends in
two steps: with the queries of the first, then of the second. ``ranges[i]`` are the first row and the end of the keys
that the queries of chunk ``i`` see.
"""

from __future__ import annotations

from collections.abc import Sequence

Range = tuple[int, int]


def chunks_of(rank: int, world_size: int) -> tuple[int, int]:
    """The two chunks that a rank owns, in the order of its steps."""
    return rank, 2 * world_size - 1 - rank


def causal_ranges(num_chunks: int, rows: int, window: int | None = None) -> tuple[Range, ...]:
    """The range of each of the 2 W chunks if no query sees a later key, or one more than ``window`` before it."""
    firsts = [0 if window is None else max(0, chunk * rows - window) for chunk in range(num_chunks)]
    return tuple((first, (chunk + 1) * rows) for chunk, first in enumerate(firsts))


def needed_rows(ranges: Sequence[Range], rows: int, chunk: int, reader: int) -> Range:
    """Rows of ``chunk``, counted from its first, that the queries of chunk ``reader`` see; (0, 0): none."""
    first, end = ranges[reader]
    first, end = max(first - chunk * rows, 0), min(end - chunk * rows, rows)
    return (first, end) if first < end else (0, 0)


def rows_by_step(ranges: Sequence[Range], rows: int, chunk: int, rank: int) -> tuple[list[Range], list[Range]]:
    """Rows of ``chunk`` that ``rank`` needs for its first step, and those that it needs only for the second."""
    world = len(ranges) // 2
    (first, end), (later, later_end) = (needed_rows(ranges, rows, chunk, one) for one in chunks_of(rank, world))
    if first == end:
        return [], [(later, later_end)] if later < later_end else []
    others = [(later, min(later_end, first)), (max(later, end), later_end)]
    return [(first, end)], [one for one in others if one[0] < one[1]]


def hull_of_steps(ranges: Sequence[Range], rows: int, chunk: int, rank: int) -> Range:
    """The least range of rows of ``chunk`` with all that ``rank`` needs in both steps; (0, 0): none."""
    needed = [one for step in rows_by_step(ranges, rows, chunk, rank) for one in step]
    return (min(first for first, _ in needed), max(end for _, end in needed)) if needed else (0, 0)
