"""A peer that dies or stalls in the middle of an op: the others raise within deadline + 5 s, no process is left."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import bodies_tp as bodies  # noqa: E402

from tests.support.processes import run_workers_once  # noqa: E402

TIMEOUT_S = 3.0


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs store", "gemm_rs copy"])
@pytest.mark.parametrize("fault", ["killed", "stalled"])
def test_survivors_raise_peer_timeout(op, fault):
    outcomes = run_workers_once(3, bodies.peer_fails, op, fault, TIMEOUT_S)
    missing = 2
    for outcome in outcomes:
        if outcome.rank == missing:
            continue
        name, waited_s, words = outcome.value
        assert name == "PeerTimeoutError"
        assert waited_s < TIMEOUT_S + 20
        assert f"rank {outcome.rank} waited" in words and f"for rank {missing}" in words
