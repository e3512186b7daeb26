"""Under torchrun: a wrong bit on one rank and a slow rank, in every subpackage that moves data, become native."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs"),
    pytest.mark.usefixtures("own_gpus"),
]
pytest.importorskip("megatron.core")

sys.path.insert(0, str(Path(__file__).parents[1] / "policy"))
from bodies_packages import PACKAGES, decision_with  # noqa: E402

SLOW_US = 2000.0


@pytest.mark.parametrize("room", PACKAGES)
def test_wrong_bits_fall_back(device, folder, room):
    for fault in ("none", "wrong", *(() if room == "message" else ("wrong gradient",))):
        decision = decision_with(room, fault, device, "bits", folder)
        assert decision.bits_equal is decision.use_ditron is (fault == "none"), fault
        assert fault == "none" or "bits would not be" in decision.reason


@pytest.mark.parametrize("room", list(PACKAGES)[:4])
def test_a_slow_rank_falls_back(device, folder, room):
    decision = decision_with(room, "slow", device, "strict", folder)
    assert decision.bits_equal and not decision.use_ditron and "not faster" in decision.reason
    assert decision.ditron_us > SLOW_US
