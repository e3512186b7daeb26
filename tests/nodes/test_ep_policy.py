"""Whether tokens move by rails over posed nodes: what the policy finds by bits and times, and what is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import bodies_nodes as bodies  # noqa: E402

from tests.support.nodes import nodes_pool  # noqa: E402
from tests.support.patience import HANG_S  # noqa: E402

SLOW_MBIT, QUICK_MBIT = 1, 10_000


@pytest.mark.parametrize(("rate_mbit", "by_rails"), [(SLOW_MBIT, True), (QUICK_MBIT, False)], ids=["slow", "quick"])
def test_rails_are_taken_where_they_are_quicker(rate_mbit, by_rails):
    with nodes_pool(2, 2, rate_mbit=rate_mbit) as pool:
        for used, reason in pool.values(bodies.moe_layer, ("auto",), HANG_S):
            assert used == by_rails
            assert reason is None if by_rails else "it is not faster" in reason
        if not by_rails:  # where it is told to, also where they are slower
            assert pool.values(bodies.moe_layer, ("on",), HANG_S) == [(True, None)] * 4
            found = pool.values(bodies.moe_layer, ("off",), HANG_S)
            assert [used for used, _ in found] == [False] * 4
            assert None not in [reason for _, reason in found]
