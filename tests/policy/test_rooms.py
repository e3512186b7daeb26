"""Wrong bits and a slow rank in every room that moves data: the policy catches them on CPU processes, too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.processes import run_workers

pytest.importorskip("megatron.core")
sys.path.insert(0, str(Path(__file__).parent))
from bodies_rooms import decision_on_cpu  # noqa: E402


@pytest.mark.parametrize("room", ["exchange", "message", "experts", "experts of the step's own tokens"])
def test_one_wrong_bit_on_one_rank_falls_back(tmp_path: Path, room: str) -> None:
    for fault in ("none", "wrong", *(() if room == "message" else ("wrong gradient",))):
        first, second = run_workers(2, decision_on_cpu, room, fault, "bits", tmp_path)
        assert first == second and first.bits_equal is first.use_ditron is (fault == "none")
        assert fault == "none" or "bits would not be" in first.reason


@pytest.mark.parametrize("room", ["exchange", "message", "experts"])
def test_a_slow_rank_falls_back(tmp_path: Path, room: str) -> None:
    first, second = run_workers(2, decision_on_cpu, room, "slow", "strict", tmp_path)
    assert first == second and first.bits_equal and not first.use_ditron and "not faster" in first.reason
    assert first.ditron_us > 5000
