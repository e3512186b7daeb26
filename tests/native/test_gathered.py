"""Megatron's MoE layer with the allgather dispatcher on gloo, native and with ``--ditron ep``: forward and every
gradient, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core")
sys.path.insert(0, str(Path(__file__).parent))
from ep_workers import gathered_layers_agree  # noqa: E402

from tests.support.processes import run_workers  # noqa: E402

SPLIT = {
    "expert_model_parallel_size": 2,
    "tensor_model_parallel_size": 2,
    "expert_tensor_parallel_size": 2,
    "sequence_parallel": True,
}


@pytest.mark.parametrize(
    ("ranks", "options", "num_tokens", "dtype"),
    [
        (2, {}, 16, torch.float32),
        (2, {"num_moe_experts": 8, "moe_router_topk": 3}, 9, torch.bfloat16),
        (2, {"moe_router_dtype": "fp32"}, 1, torch.bfloat16),
        (2, {"moe_expert_capacity_factor": 0.6}, 16, torch.bfloat16),
        (2, {"moe_shared_expert_intermediate_size": 40}, 8, torch.bfloat16),
        (2, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}, 8, torch.bfloat16),
        (2, {"num_moe_experts": 2, "moe_router_topk": 1, "moe_router_score_function": "sigmoid"}, 12, torch.bfloat16),
        (
            2,
            {"expert_model_parallel_size": 1, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2,
             "sequence_parallel": True},
            10, torch.bfloat16,
        ),
        (3, {"num_moe_experts": 6}, 7, torch.bfloat16),
        (4, {"num_moe_experts": 8, "moe_router_topk": 3, "expert_model_parallel_size": 2}, 6, torch.bfloat16),
    ],
    ids=["plain", "bf16", "one_token_fp32_probs", "drop", "shared_experts", "recompute", "one_expert", "slices",
         "three_ranks", "beside_data_parallelism"],
)  # fmt: skip
def test_layer_equals_native(ranks, options, num_tokens, dtype):
    found = run_workers(ranks, gathered_layers_agree, options, num_tokens, dtype, env={"DITRON_POLICY": "force"})
    assert found == [([True, True], None)] * ranks


def test_tokens_whose_rows_are_not_whole_are_native():
    """20 features of bf16 are 40 bytes."""
    options = {"hidden_size": 20, "num_attention_heads": 4}
    found = run_workers(2, gathered_layers_agree, options, 8, torch.bfloat16)
    assert all(moved == [False, False] and "not of whole 16 bytes" in reason for moved, reason in found)


def test_without_memory_the_layer_goes_on_natively():
    env = {"DITRON_ARENA_BYTES": "20000", "DITRON_POLICY": "force"}
    found = run_workers(2, gathered_layers_agree, {}, 64, torch.float32, env=env)
    assert all(moved == [False, False] and "DITRON_ARENA_BYTES" in reason for moved, reason in found)
