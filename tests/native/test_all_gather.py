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

TRANSFORMER_ENGINE = os.environ.get("TRANSFORMER_ENGINE")


def run(ranks, body, *arguments):
    outcomes = run_workers_once(ranks, body, *arguments)
    for outcome in outcomes:
        assert outcome.ok, outcome.traceback
    return [outcome.value for outcome in outcomes]


@pytest.mark.skipif(not TRANSFORMER_ENGINE, reason="TRANSFORMER_ENGINE names no checkout of Transformer Engine")
@pytest.mark.parametrize("ranks", [2, 4])
def test_bits_and_calls_of_kernels_are_those_of_transformer_engines_own_code(ranks):
    assert min(run(ranks, workers.compare, TRANSFORMER_ENGINE, ranks, 12)) >= 10
