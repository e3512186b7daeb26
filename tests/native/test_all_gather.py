"""Transformer Engine's ``all_gather`` attention with fused exchanges, on CPUs."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest

from tests.support.processes import run_workers_once

pytest.importorskip("megatron.core")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import all_gather_workers as workers  # noqa: E402
import te_sources  # noqa: E402

TRANSFORMER_ENGINE = os.environ.get("TRANSFORMER_ENGINE")
_MINOR = te_sources._minor_of(TRANSFORMER_ENGINE) if TRANSFORMER_ENGINE else 0


def run(ranks, body, *arguments):
    outcomes = run_workers_once(ranks, body, *arguments)
    for outcome in outcomes:
        assert outcome.ok, outcome.traceback
    return [outcome.value for outcome in outcomes]


@pytest.mark.skipif(not TRANSFORMER_ENGINE, reason="TRANSFORMER_ENGINE names no checkout of Transformer Engine")
@pytest.mark.parametrize("ranks", [2, 4])
def test_bits_and_calls_of_kernels_are_those_of_transformer_engines_own_code(ranks):
    assert min(run(ranks, workers.compare, TRANSFORMER_ENGINE, ranks, 12)) >= 10


@pytest.mark.skipif(_MINOR < 18, reason="TRANSFORMER_ENGINE names no checkout of 2.18 or newer")
@pytest.mark.parametrize("ranks", [2, 4])
def test_packed_sequences_have_the_bits_and_calls_of_transformer_engines_own_code(ranks):
    assert min(run(ranks, workers.compare_packed, TRANSFORMER_ENGINE, ranks, 12)) > 0


@pytest.mark.skipif(_MINOR < 18, reason="TRANSFORMER_ENGINE names no checkout of 2.18 or newer")
def test_packed_sequences_of_ever_new_lengths_are_compared_once():
    """After two lengths, which are decided one by one."""
    assert run(2, workers.packed_of_ever_new_lengths, TRANSFORMER_ENGINE, 6) == [3, 3]


@pytest.mark.skipif(_MINOR < 10, reason="TRANSFORMER_ENGINE names no checkout of Transformer Engine")
def test_packed_sequences_that_are_not_covered_are_native_and_said():
    says = (
        "max_seqlen of packed sequences does not divide by 4" if _MINOR >= 18 else "the layout of the attention is thd"
    )
    for reasons in run(2, workers.packed_stays_native, TRANSFORMER_ENGINE, [10, 8, 6]):
        assert reasons[0] == says


@pytest.mark.parametrize("window", [None, (5, 0)])
def test_bits_of_the_attention_that_gathers_by_itself(window):
    run(2, workers.modules_agree, window)


@pytest.mark.parametrize(
    "kind, says",
    [
        ("dropout", "attention dropout is on"),
        ("module_dropout", "attention dropout is on"),
        ("logits", "the largest attention logits are collected"),
        ("mask", "the mask is padding"),
        ("bias", "the attention has a bias"),
        ("uneven", "q is (8, 1, 4, 8), k (8, 1, 2, 8), v (8, 1, 2, 8)"),
        ("fp8", "the attention itself computes in FP8"),
        ("packed", "the lengths of the packed sequences are not given"),
        ("dynamic", "the context parallel group changes from batch to batch"),
        ("version", "Transformer Engine gathers keys and values otherwise (2.10 to 2.18 are covered)"),
        ("group", "a batch before this one has changed the context parallel group"),
    ],
)
def test_what_is_not_covered_is_native_and_said(kind, says):
    assert run(2, workers.stays_native, kind) == [[says]] * 2
