"""Megatron's MoE layer with the flex dispatcher where DeepEP is missing, against DeepEP's order by torch: forward and
every gradient, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core")
sys.path.insert(0, str(Path(__file__).parent))
from flex_workers import layers_agree  # noqa: E402

from tests.support.processes import run_workers  # noqa: E402

CASES = {
    "plain": ({}, (16, 16), torch.bfloat16),
    "uneven_tokens": ({"num_moe_experts": 12, "moe_router_topk": 7}, (9, 20), torch.bfloat16),
}


@pytest.mark.parametrize("name", CASES)
def test_layer_equals_deepeps_order(name):
    assert run_workers(2, layers_agree, *CASES[name]) == [2, 2]
