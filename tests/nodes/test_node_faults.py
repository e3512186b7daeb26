"""A node that dies, comes late or has a slow link, and a single rank: every survivor names it in deadline + 5 s."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import bodies_nodes as bodies  # noqa: E402

from tests.support.nodes import RATE_MBIT, nodes_pool  # noqa: E402
from tests.support.patience import HANG_S  # noqa: E402

TIMEOUT_S, CHOKED_MBIT = 3.0, 0.064
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
            assert num_errors == 2 and taken_s < TIMEOUT_S + 20


@pytest.mark.parametrize("op", OPS)
def test_link_too_slow_for_the_deadline(op, tmp_path):
    """All ranks run, and a node's link carries 8 kB/s from some moment on: all hear of the same rank. Which one it is
    says little, as nobody is missing."""
    named = set()
    with nodes_pool(2, 2) as pool, ThreadPoolExecutor(1) as thread:
        told = thread.submit(pool.values, bodies.link_chokes, (op, str(tmp_path), TIMEOUT_S), HANG_S)
        _await(tmp_path / "ready", told)
        pool.nodes.limit(1, CHOKED_MBIT)
        (tmp_path / "choked").touch()
        for rank in (0, 1):
            _await(tmp_path / f"done{rank}", told)
        pool.nodes.limit(1, RATE_MBIT)  # its ranks hear of it now
        for rank, (waiting, missing, taken_s, num_errors) in enumerate(told.result()):
            assert (waiting, num_errors) == (rank, 2)
            named |= missing
            assert rank in NODE or taken_s < TIMEOUT_S + 20
    assert len(named) == 1, "all name the same rank"


def _await(path, told):
    while True:
        is_over = told.done()  # asked first: who writes the file ends right behind it
        if path.exists():
            return
        assert not is_over, told.result()
        time.sleep(0.01)
