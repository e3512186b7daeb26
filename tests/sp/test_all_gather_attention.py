"""Gathered keys and values, and their gradients back, on several processes: bits of the native exchanges around the
same attention."""

from __future__ import annotations

import pathlib
import random
import sys

import pytest
import torch

from ditron_train.schedule.keys import causal_ranges, needed_rows, rows_by_step
from tests.support.processes import run_workers

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import bodies_keys  # noqa: E402
from bodies_keys import attended_ranges  # noqa: E402


def random_case(draw, **fixed):
    groups, rows = draw.choice([1, 2]), draw.choice([1, 4, 7])
    windows = [(-1, -1), (0, 0), (draw.randrange(1, 3 * rows + 1), 0), (2 * rows, 0)]
    return (
        dict(
            heads=groups * draw.choice([1, 2, 3]),
            groups=groups,
            rows=rows,
            batch=draw.choice([1, 2]),
            head_dim=draw.choice([8, 16]),
            seq_dim=draw.choice([0, 1]),
            causal=True,
            window=draw.choice(windows),
            dtype=torch.bfloat16,
        )
        | fixed
    )


@pytest.mark.parametrize("world, num_cases", [(2, 4), (4, 2)])
def test_bits_are_those_of_the_native_exchanges(world, num_cases):
    draw = random.Random(world)
    cases = [random_case(draw) for _ in range(num_cases)]
    cases += [random_case(draw, rows=7, window=(5, 0), seq_dim=seq_dim) for seq_dim in (0, 1)]
    cases += [random_case(draw, causal=False, window=window) for window in ((-1, -1), (3, 2))]
    cases.append(random_case(draw, dtype=torch.float32))
    assert min(run_workers(world, bodies_keys.run_cases, cases)) > 0


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_come_late_are_waited_for(world):
    draw = random.Random(1)
    cases = [random_case(draw, window=window) for window in ((-1, -1), (3, 0))]
    run_workers(world, bodies_keys.run_cases, cases, 0.05)


def test_epochs_wrap():
    cases = [random_case(random.Random(2))] * 2
    run_workers(2, bodies_keys.run_cases, cases, 0.0, 2**31 - 3)


def test_only_needed_rows_are_sent():
    """Without a window a rank sends chunk p to all and chunk 2 W - 1 - p to the ranks before it; with one, the rows
    of the window alone; of gradients as much comes back."""
    row_bytes, rows, world = 2 * 8 * 4, 4, 4
    found = run_workers(world, bodies_keys.count_sent, rows, (-1, -1))
    chunks = [(world - 1) + rank for rank in range(world)]
    assert [gathered for gathered, _ in found] == [count * rows * row_bytes for count in chunks]
    backwards = [sum(peer > rank for peer in range(world)) for rank in range(world)]
    assert [scattered for _, scattered in found] == [
        (rank * 1 + count * 2) * rows * row_bytes for rank, count in enumerate(backwards)
    ]  # fmt: skip
    found = run_workers(world, bodies_keys.count_sent, rows, (2, 0))
    # The last rank's chunks follow each other, and the first rank owns the first chunk and the last.
    assert [gathered for gathered, _ in found] == [2 * row_bytes, *[4 * row_bytes] * (world - 2), 2 * row_bytes]
    assert sum(gathered for gathered, _ in found) == sum(scattered for _, scattered in found)


def test_ranges_are_those_of_the_mask():
    assert causal_ranges(4, 3) == ((0, 3), (0, 6), (0, 9), (0, 12)) == attended_ranges(4, 3)
    assert causal_ranges(4, 3, 2) == ((0, 3), (1, 6), (4, 9), (7, 12)) == attended_ranges(4, 3, window=(2, 0))
    assert attended_ranges(4, 3, causal=False, window=(2, 1)) == ((0, 4), (1, 7), (4, 10), (7, 12))
    assert attended_ranges(4, 3, causal=False) == ((0, 12),) * 4


@pytest.mark.parametrize("seed", range(20))
def test_every_needed_row_is_sent_once(seed):
    draw = random.Random(seed)
    world, rows = draw.choice([1, 2, 3, 4]), draw.choice([1, 5, 8])
    window = draw.choice([-1, draw.randrange(20)]), draw.choice([-1, 0, draw.randrange(20)])
    ranges = attended_ranges(2 * world, rows, causal=draw.random() < 0.5, window=window)
    for rank in range(world):
        for chunk in range(2 * world):
            first, second = (
                [row for one in step for row in range(*one)] for step in rows_by_step(ranges, rows, chunk, rank)
            )
            needed = [set(range(*needed_rows(ranges, rows, chunk, own))) for own in (rank, 2 * world - 1 - rank)]
            assert sorted(first) == sorted(needed[0])
            assert sorted(first + second) == sorted(needed[0] | needed[1])
