"""Whether tokens move by rails over simulated nodes: what the policy finds by bits and times, and what is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import bodies_nodes as bodies  # noqa: E402

from tests.support.nodes import nodes_pool  # noqa: E402
from tests.support.patience import HANG_S  # noqa: E402

SLOW_MBIT, QUICK_MBIT = 1, 10_000


@pytest.fixture(scope="module")
def nodes():
    with nodes_pool(2, 2, rate_mbit=QUICK_MBIT) as pool:
        yield pool


def test_native_is_kept_where_links_are_quick(nodes):
    for used, reason in nodes.values(bodies.moe_layer, ("auto",), HANG_S):
        assert not used and "it is not faster" in reason


def test_rails_are_taken_where_links_are_slow(nodes):
    # A token crosses once, not once for each of its four experts over there; each of its rows returns by either path.
    assert nodes.values(bodies.moe_layer, ("auto", SLOW_MBIT), HANG_S) == [(True, None)] * 4


def test_what_is_told_is_done_also_where_it_is_slower(nodes):
    assert nodes.values(bodies.moe_layer, ("on",), HANG_S) == [(True, None)] * 4
    found = nodes.values(bodies.moe_layer, ("off",), HANG_S)
    assert [used for used, _ in found] == [False] * 4
    assert None not in [reason for _, reason in found]
