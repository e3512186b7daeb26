"""Wrong bits and a slow rank in every subpackage that moves data: the policy catches them on CPU processes, too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.processes import run_workers

pytest.importorskip("megatron.core")
sys.path.insert(0, str(Path(__file__).parent))
from bodies_packages import contexts_beside_a_default_device, decision_beside_a_default_device, decision_on_cpu  # noqa: E402


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


def test_contexts_are_made_whatever_torch_s_default_device_is() -> None:
    assert run_workers(2, contexts_beside_a_default_device, "meta") == [4, 4]


@pytest.mark.parametrize("room", ["exchange", "message", "experts"])
def test_packages_compare_whatever_torch_s_default_device_is(tmp_path: Path, room: str) -> None:
    for entry in run_workers(2, decision_beside_a_default_device, room, tmp_path):
        assert entry.bits_equal and entry.use_ditron
