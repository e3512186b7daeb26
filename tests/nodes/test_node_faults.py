"""A node that dies or comes late, and a single rank of one: every survivor names it within deadline + 5 s."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import bodies_nodes as bodies  # noqa: E402

from tests.support.nodes import run_on_nodes_once  # noqa: E402

TIMEOUT_S = 3.0
NODE, RANK = (2, 3), (3,)


@pytest.mark.parametrize("op", ["ep", "sp", "tp"])
@pytest.mark.parametrize("fault", ["killed", "late"])
@pytest.mark.parametrize("failing", [NODE, RANK], ids=["node", "rank"])
def test_survivors_name_the_missing_rank(op, fault, failing):
    outcomes = run_on_nodes_once(2, 2, bodies.peer_fails, op, fault, failing, TIMEOUT_S)
    for outcome in outcomes:
        if outcome.rank in failing and fault == "killed":
            assert outcome.exit_code == -9
            continue
        assert outcome.ok, outcome.traceback
        name, missing, waiting, taken_s, num_errors = outcome.value
        assert (name, missing, waiting) == ("PeerTimeoutError", {failing[0]}, outcome.rank)
        if outcome.rank not in failing:  # the missing rank itself hears of it when it comes, at its next call at last
            assert num_errors == 2 and taken_s < TIMEOUT_S + 5
