"""Processes that see one GPU each: it is told apart by its UUID, and two ranks on one GPU are refused."""

import pytest

from tests.support.processes import run_workers_once
from tests.symm import bodies_masked as bodies

_REFUSED = "group ranks [0, 1] share a GPU: symmetric memory needs a GPU for each rank"


def _values(body, *args):
    outcomes = run_workers_once(2, body, *args)
    assert all(outcome.ok for outcome in outcomes), [outcome.traceback for outcome in outcomes]
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize(
    "gpus, variable, logged",
    [
        ([(0, "a"), (1, "b")], None, ("", None)),
        ([(0, "a"), (0, "b")], None, ("", "1")),
        ([(0, "a"), (0, "a")], None, (_REFUSED, None)),
        ([(0, "a"), (1, "a")], None, (_REFUSED, None)),  # each process sees them in another order
        ([(0, "a"), (0, "a")], "1", ("", "1")),  # as tests on one GPU ask for
        ([(0, ""), (0, "")], None, ("", None)),  # a library without UUIDs: torch decides
    ],
    ids=["seen by all", "masked", "shared", "shared in other orders", "shared on purpose", "without UUIDs"],
)
def test_one_visible_gpu(gpus, variable, logged):
    assert _values(bodies.said_of, gpus, variable) == [logged] * 2


def test_what_is_accepted_for_one_group_is_not_for_the_next():
    assert _values(bodies.masked_then_shared) == [[("", "1"), (_REFUSED, None)]] * 2


@pytest.mark.parametrize("gpus, by_engine", [([(0, "a"), (1, "b")], True), ([(0, "a"), (0, "b")], False)])
def test_copy_engines_reach_gpus_that_the_process_sees(gpus, by_engine):
    assert _values(bodies.copies_by_engine, gpus) == [by_engine] * 2
