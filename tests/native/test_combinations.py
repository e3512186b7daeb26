"""Several features in one job, as real ones have them, against the same job natively: losses, gradients, norms,
evaluation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core")
sys.path.insert(0, str(Path(__file__).parent))
from combination_workers import Case, differences  # noqa: E402

from tests.support.processes import run_workers  # noqa: E402

RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
}
TP_EP = {"tensor_model_parallel": 2, "expert_model_parallel": 2, "expert_tensor_parallel": 1}

CASES = {
    "tp_ep_shared_experts_dropout_recompute": Case(
        "tp,ep",
        TP_EP,
        config={
            **EXPERTS,
            **RECOMPUTE,
            "moe_shared_expert_intermediate_size": 24,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
        },
    ),
    "tp_pp_ep": Case("tp,pp,ep", {**TP_EP, "pipeline_model_parallel": 2}, config={**EXPERTS, "add_bias_linear": True}),
    "tp_pp_mtp_tied_variable_lengths": Case(
        "tp,pp",
        {"tensor_model_parallel": 2, "pipeline_model_parallel": 2},
        config={"variable_seq_lengths": True},
        mtp=True,
        tied=True,
        variable=True,
    ),
    "tp_interleaved": Case(
        "tp,pp",
        {"tensor_model_parallel": 2, "pipeline_model_parallel": 2, "virtual_pipeline_model_parallel": 2},
        layers=4,
        fused={"overlap_p2p_comm": True},
    ),
    "sp_ep": Case("sp,ep", {"context_parallel": 2, "expert_model_parallel": 2}, config=EXPERTS, needed="sp"),
    "tp_fused_wgrad": Case(
        "tp,wgrad",
        {"tensor_model_parallel": 2},
        dtype=torch.float16,
        config={"gradient_accumulation_fusion": True},
        needed="wgrad",
    ),
    "tp_sharded_optimizer": Case("tp", {"tensor_model_parallel": 2}, sharded=True),
    "tp_fp16": Case("tp", {"tensor_model_parallel": 2}, dtype=torch.float16, config={"qk_layernorm": True}),
    "tp_fp16_overflow": Case("tp", {"tensor_model_parallel": 2}, dtype=torch.float16, loss_scale=2.0**24),
}


@pytest.mark.parametrize("name", CASES)
def test_as_natively(name):
    case = CASES[name]
    world_size = 4 if case.sharded else case.size("tensor_model") * case.size("pipeline_model") * case.size("context")
    results = run_workers(world_size, differences, case)
    for differ, lines, skipped in results:
        assert not differ and skipped == name.endswith("overflow")
        assert not [line for line in lines if ": native, " in line]
    assert any(": fused, " in line or "symmetric buffers" in line for line in results[0][1])
