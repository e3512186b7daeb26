"""Bad input: the same clear error on every rank, nothing hung."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from bodies_ep import error_of, error_of_scattered_nodes  # noqa: E402

from tests.support.processes import run_workers, run_workers_once  # noqa: E402


@pytest.mark.parametrize(
    "case, name, words",
    [
        ("wide_token", "NotSupportedError", "a token has 3 experts, top-k is 2"),
        ("wide_padding", "NotSupportedError", "a routing map has 12 entries beyond top-k, padding allows 2"),
        ("routing_type", "NotSupportedError", "bool"),
        ("routing_shape", "NotSupportedError", r"\(3, 5\)"),
        ("probs_shape", "NotSupportedError", "differs"),
        ("probs_dtype", "NotSupportedError", "float64"),
        ("tokens_dtype", "NotSupportedError", "int8"),
        ("fewer_tokens", "NotSupportedError", "2 tokens, the handle has 3"),
        ("fewer_rows", "NotSupportedError", "rows, the handle has"),
        ("experts", "NotSupportedError", "5 experts do not divide by the group's 2 ranks"),
    ],
)
def test_the_same_error_on_every_rank(case, name, words):
    for result in run_workers(2, error_of, case):
        assert result is not None and result[0] == name
        assert re.search(words, result[1]), result[1]


def test_ranks_that_differ_all_say_how():
    outcomes = run_workers_once(2, error_of, "hidden_differs")
    for outcome in outcomes:
        assert outcome.value[0] == "MismatchError", outcome
        assert "hidden=16" in outcome.value[1] and "hidden=24" in outcome.value[1]


def test_ranks_that_pad_otherwise_all_say_how():
    outcomes = run_workers_once(2, error_of, "padding_differs")
    for outcome in outcomes:
        assert outcome.value[0] == "MismatchError", outcome
        assert "row_capacity=60" in outcome.value[1] and "row_capacity=124" in outcome.value[1]


def test_a_rank_that_does_not_come_is_named():
    outcomes = run_workers_once(2, error_of, "missing_peer", env={"DITRON_TIMEOUT_S": "3"})
    assert outcomes[1].ok and outcomes[1].value is None
    assert outcomes[0].value[0] == "PeerTimeoutError" and "rank 0 waited 3 s for rank 1" in outcomes[0].value[1]


def test_nodes_that_are_no_blocks_of_ranks():
    assert all("equal blocks of neighbours" in text for text in run_workers(4, error_of_scattered_nodes))
