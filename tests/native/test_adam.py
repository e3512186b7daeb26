"""Training with Adam in one pass, against the same training natively: losses, norms, parameters, state."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core")
sys.path.insert(0, str(Path(__file__).parent))
import adam_workers as workers  # noqa: E402

from tests.support.processes import run_workers  # noqa: E402

EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
Case = workers.jobs.Case
FUSED = {
    "clipped, overlapped": (workers.BF16,),
    "not overlapped": (workers.BF16, {}, False),
    "not clipped": (workers.BF16, {"clip_grad": 0.0}),
    "clipped to more": (workers.BF16, {"clip_grad": 1e3}),
    "l2, no decay": (workers.BF16, {"decoupled_weight_decay": False, "weight_decay": 0.0}),
    "zeros are counted": (workers.BF16, {"log_num_zeros_in_grad": True}),
    "fp32": (Case("adam", {}, sharded=True),),
    "experts": (
        Case("adam", {"expert_model_parallel": 2}, dtype=torch.bfloat16, config=EXPERTS, sharded=True),
        {"clip_grad": 0.05},
    ),
}


@pytest.mark.parametrize("name", FUSED)
def test_as_natively(name):
    for differ, lines, count in run_workers(2, workers.compared, *FUSED[name]):
        assert not differ and count == (4 if name == "experts" else 2), (differ, lines, count)  # the first is native


def test_a_checkpoint_is_loaded_natively(tmp_path):
    assert run_workers(2, workers.loaded, tmp_path) == [[], []]
