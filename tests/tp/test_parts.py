"""Tensors gathered together, and products scattered as they are computed, between processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import bodies_parts as bodies  # noqa: E402

from tests.support.processes import run_workers, run_workers_once  # noqa: E402


@pytest.mark.parametrize("world_size, rows, columns", [(2, 8, 64), (4, 3, 16)])
def test_parts_arrive_whole_and_in_sequence(world_size, rows, columns):
    run_workers(world_size, bodies.check_parts, rows, columns)


@pytest.mark.parametrize("num_blocks", [1, 2, 4])
def test_parts_arrive_by_blocks_of_ranks(num_blocks):
    run_workers(4, bodies.check_blocks, 3, 16, num_blocks)


@pytest.mark.parametrize(
    "world_size, shape, num_products",
    [(2, (6, 3, 16), None), (4, (64, 24), None), (4, (64, 24), 2), (4, (8, 3, 16), 2), (4, (64, 24), 1)],
)
def test_shares_are_sent_as_they_are_computed(world_size, shape, num_products):
    run_workers(world_size, bodies.check_scatter_as_computed, shape, "bfloat16", num_products)


def test_parts_that_do_not_fit_are_refused_alike():
    first, second = run_workers(2, bodies.refused_parts)
    assert first == second and all(words.startswith("NotSupportedError: gather_of_parts") for words in first)


@pytest.mark.parametrize("what", ["sizes", "turns", "number"])
def test_ranks_that_differ_raise_the_same(what):
    first, second = (outcome.value for outcome in run_workers_once(2, bodies.mismatched_parts, what))
    assert first == second and first.startswith("MismatchError: ")
