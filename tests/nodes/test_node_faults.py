"""A node that dies or comes late, and a single rank of one: every survivor names it within deadline + 5 s."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import bodies_nodes as bodies  # noqa: E402

from tests.support.nodes import nodes_pool  # noqa: E402
from tests.support.patience import HANG_S  # noqa: E402

TIMEOUT_S = 3.0
NODE, RANK = (2, 3), (3,)
OPS = ("ep", "sp", "tp")
CASES = [("late", NODE), ("late", RANK), ("killed", RANK), ("killed", NODE)]  # who dies is not there for the next


@pytest.fixture(scope="module")
def outcomes():
    """Of each op, on nodes of its own: they wait at the same time."""
    with ExitStack() as stack, ThreadPoolExecutor(len(OPS)) as threads:
        pools = [stack.enter_context(nodes_pool(2, 2)) for _ in OPS]
        told = [
            threads.submit(pool.run, bodies.peers_fail, (op, CASES, TIMEOUT_S), HANG_S, stop_after_error_s=None)
            for op, pool in zip(OPS, pools)
        ]
        return {op: one.result() for op, one in zip(OPS, told)}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{'node' if case[1] == NODE else 'rank'}-{case[0]}")
def test_survivors_name_the_missing_rank(op, case, outcomes):
    fault, failing = case
    assert [outcome.exit_code for outcome in outcomes[op]] == [None, None, -9, -9]
    first = outcomes[op][0]
    assert first.ok, first.traceback
    answers = first.value[CASES.index(case)]
    assert len(answers) == 4 - len(failing) * (fault == "killed")
    for rank, (waiting, missing, taken_s, num_errors) in answers.items():
        assert (waiting, missing) == (rank, {failing[0]})
        if rank not in failing:  # the missing rank itself hears of it when it comes, at its next call at last
            assert num_errors == 2 and taken_s < TIMEOUT_S + 5
