"""Whether tokens move by rails over posed nodes: what the policy finds by bits and times, and what is told."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import bodies_nodes as bodies  # noqa: E402

from tests.support.nodes import nodes_pool  # noqa: E402
from tests.support.patience import HANG_S  # noqa: E402

SLOW_MBIT, QUICK_MBIT = 1, 10_000


@pytest.fixture(scope="module")
def slow():
    """What ranks of nodes with slow links decide: it takes a minute of waiting, beside which the others run."""
    with nodes_pool(2, 2, rate_mbit=SLOW_MBIT) as pool, ThreadPoolExecutor(1) as thread:
        yield thread.submit(pool.values, bodies.moe_layer, ("auto",), HANG_S)


def test_native_is_kept_where_links_are_quick(slow):
    with nodes_pool(2, 2, rate_mbit=QUICK_MBIT) as pool:
        for used, reason in pool.values(bodies.moe_layer, ("auto",), HANG_S):
            assert not used and "it is not faster" in reason
        # where it is told to, also where they are slower
        assert pool.values(bodies.moe_layer, ("on",), HANG_S) == [(True, None)] * 4
        found = pool.values(bodies.moe_layer, ("off",), HANG_S)
        assert [used for used, _ in found] == [False] * 4
        assert None not in [reason for _, reason in found]


def test_rails_are_taken_where_links_are_slow(slow):
    assert slow.result() == [(True, None)] * 4
