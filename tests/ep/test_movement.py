"""Layouts, dispatch and combine on 2 and 4 processes in the interpreter, against plain indexing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from bodies_ep import (  # noqa: E402
    changing_counts,
    fixed_capacity,
    late_rank,
    layout_and_movement,
    overflowing_capacity,
    refused_without_a_host_sync,
    uneven_columns,
    wide_token_ahead,
)

from tests.support.processes import run_workers  # noqa: E402

CASES = [
    # kind, tokens by rank, experts, topk, hidden, dtype, order
    ("random", (12, 12), 8, 2, 32, torch.bfloat16, "ascending_rounded"),
    ("random", (12, 9), 8, 3, 40, torch.bfloat16, "descending"),
    ("random", (7, 0), 6, 4, 24, torch.float32, "ascending_rounded"),
    ("random", (0, 0), 4, 2, 16, torch.float32, "ascending_rounded"),
    ("one_expert", (10, 5), 4, 1, 16, torch.bfloat16, "ascending_rounded"),
    ("empty_experts", (6, 11), 12, 3, 48, torch.float16, "descending"),
    ("dropped", (16, 13), 10, 4, 33, torch.bfloat16, "ascending"),
    ("random", (5, 6), 2, 2, 16, torch.float32, "descending"),
    ("random", (9, 6), 8, 5, 16, torch.float32, "descending"),  # as many rows a token that their order shows
    ("padded", (20, 20), 6, 2, 24, torch.bfloat16, "ascending_rounded"),
    ("padded", (7, 7), 10, 1, 40, torch.bfloat16, "descending"),
    ("random", (12, 9), 12, 8, 40, torch.bfloat16, "by_rank_descending"),  # shows the roundings
    ("random", (12, 9), 12, 8, 40, torch.float32, "by_rank_descending"),  # shows the order
    ("random", (12, 9), 12, 8, 40, torch.float32, "by_rank_ascending"),
    ("random", (9, 6), 12, 8, 33, torch.float16, "by_rank_ascending_rounded"),
    ("one_expert", (10, 5), 4, 1, 16, torch.bfloat16, "by_rank_descending"),
    ("one_expert", (10, 0), 8, 5, 16, torch.bfloat16, "by_rank_descending"),
    ("empty_experts", (6, 11), 12, 3, 48, torch.bfloat16, "by_rank_descending"),
    ("dropped", (16, 13), 10, 6, 33, torch.bfloat16, "by_rank_descending"),
    ("random", (0, 0), 4, 2, 16, torch.bfloat16, "by_rank_descending"),
    *(("random", (6, 3), 8, topk, 16, torch.bfloat16, "ascending_rounded") for topk in (5, 6, 7, 8)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-e{case[2]}k{case[3]}-{case[6]}")
def test_two_ranks(case):
    run_workers(2, layout_and_movement, *case, 3)


@pytest.mark.parametrize(
    "case",
    [
        ("random", (9, 4, 0, 17), 8, 3, 24, torch.bfloat16, "ascending_rounded"),
        ("one_expert", (3, 8, 5, 2), 8, 2, 16, torch.float32, "descending"),
        ("padded", (12, 12, 12, 12), 8, 3, 16, torch.bfloat16, "ascending"),
        ("dropped", (9, 4, 0, 17), 8, 6, 24, torch.bfloat16, "by_rank_descending"),
        ("random", (9, 4, 1, 17), 8, 6, 24, torch.float32, "by_rank_descending"),
    ],
    ids=lambda case: f"{case[0]}-{case[1]}",
)
def test_four_ranks(case):
    run_workers(4, layout_and_movement, *case, 4)


def test_a_map_that_is_not_padded_writes_nothing_beyond_its_buffers():
    run_workers(2, uneven_columns, 3)


def test_changing_counts_and_stragglers():
    run_workers(2, changing_counts, 30, 6, 3, 24)


def test_rows_that_arrive_late_are_waited_for():
    """If all ranks are in step, a missing wait is seen only by chance."""
    run_workers(2, late_rank, 0.1)


@pytest.mark.parametrize("factor", [1.9, 2.0, 50.0])
def test_a_fixed_capacity_gives_the_same_without_a_host_sync(factor):
    run_workers(2, fixed_capacity, 4, factor)


@pytest.mark.parametrize("topk, words", [(1, "16 rows for slot 1 of rank 1, room for 10"), (2, "32 rows for slot 0")])
def test_overflow_is_an_error_that_names_expert_rank_and_setting(topk, words):
    for text in run_workers(2, overflowing_capacity, topk):
        assert words in text and "DITRON_EP_CAPACITY" in text
    run_workers(2, changing_counts, 1, 10, 3, 8)  # the workers are still good


def test_of_a_token_wider_than_topk_nothing_is_sent_ahead():
    """Its entries are more than their list has places: what is behind would travel."""
    for words, came, is_right in run_workers(2, wide_token_ahead):
        assert "a token has 8 experts, top-k is 2" in words and came == 0 and is_right


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("wide", "experts of a token: 8 on rank 1, at most 3"),
        ("padded", "rows of all tokens: 40 on rank 1, at most 32"),
    ],
)
def test_what_no_list_holds_is_an_error_without_a_host_sync_too(case, words):
    """No row is written in the place of another token's, and nobody waits for one."""
    for came, error in run_workers(2, refused_without_a_host_sync, case):
        assert came == 0 and words in error
