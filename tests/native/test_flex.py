"""Megatron's MoE layer with the flex dispatcher where DeepEP is missing, against DeepEP's order by torch: forward and
every gradient, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core")
sys.path.insert(0, str(Path(__file__).parent))
from flex_workers import (  # noqa: E402
    both_paths_of_the_trial,
    error_of,
    error_over_two_nodes,
    layers_agree,
    megatron_with_newer_deepep,
    native_where_deepep_is,
    policy_is_asked,
)

from tests.support.processes import run_workers  # noqa: E402

FP32 = {"params_dtype": torch.float32, "bf16": False}
MANY = {"num_moe_experts": 12, "moe_router_topk": 7}
FUSED = {"moe_permute_fusion": True}
CASES = {
    "plain": ({}, (16, 16)),
    "fused_permutation": ({**FUSED, **MANY}, (16, 16)),
    "uneven_tokens": ({**MANY, "add_bias_linear": True}, (9, 20)),
    "no_tokens_on_a_rank": ({**FUSED, **MANY}, (0, 5), "even"),  # which Megatron's router does not take
    "no_tokens": (MANY, (0, 0), "even"),
    "fp32": ({**FP32, **MANY}, (7, 6)),
    "fp32_fused_permutation": ({**FP32, **FUSED, **MANY}, (7, 6)),
    "probabilities_bf16": ({"moe_router_dtype": None}, (8, 8)),
    "probabilities_fp64": ({"moe_router_dtype": "fp64"}, (8, 8)),
    "top1_probs_on_input": (
        {"moe_router_topk": 1, "moe_apply_probs_on_input": True, "moe_router_score_function": "sigmoid"},
        (12, 12),
    ),
    "shared_experts": ({"moe_shared_expert_intermediate_size": 40}, (8, 8)),
    "recompute": ({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, (8, 8)),
    "zipf": (MANY, (16, 11), "zipf"),
    "zipf_fused_permutation": ({**FUSED, **MANY}, (16, 11), "zipf"),
    "one_expert_has_all": ({"num_moe_experts": 8, "moe_router_topk": 2}, (8, 9), "one"),
    "probabilities_of_zero": (MANY, (8, 9), "zeros"),
    "probabilities_of_zero_fused_permutation": ({**FUSED, **MANY}, (8, 9), "zeros"),
    "through_a_spec": ({}, (8, 8), None, True),
}


@pytest.mark.parametrize("name", CASES)
def test_layer_equals_deepeps_order(name):
    steps = 4 if name == "recompute" else 2  # there every forward comes twice
    assert run_workers(2, layers_agree, *CASES[name]) == [steps] * 2


@pytest.mark.parametrize("options", [MANY, {**FUSED, **MANY}], ids=["index_add", "fused_permutation"])
def test_stragglers_and_ever_new_numbers_of_tokens(options):
    assert run_workers(2, layers_agree, options, 10, "zipf") == [10] * 2


GROUPS = {
    "ep4": {},
    "ep2_dp2": {"expert_model_parallel_size": 2},
    "ep2_etp2": {
        "expert_model_parallel_size": 2,
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
        "sequence_parallel": True,
    },
    "etp4": {
        "expert_model_parallel_size": 1,
        "tensor_model_parallel_size": 4,
        "expert_tensor_parallel_size": 4,
        "sequence_parallel": True,
    },
}


@pytest.mark.parametrize("kind", ["zipf", "zeros"])
@pytest.mark.parametrize("name", GROUPS)
def test_groups_of_four_ranks(name, kind):
    """Flex dispatches over the tensor and expert parallel ranks of an expert together."""
    exact = FP32 if kind == "zipf" else {}  # of more than two addends in fp32, unrounded, the order shows
    options = {"num_moe_experts": 8, "moe_router_topk": 5, **GROUPS[name], **exact}
    assert run_workers(4, layers_agree, options, (8, 5, 1, 9), kind) == [2] * 4


@pytest.mark.parametrize(
    "options, words",
    [
        ({"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor is 1.0 with the flex dispatcher"),
        ({"moe_router_padding_for_quantization": True}, "moe_router_padding_for_quantization is True"),
        ({"overlap_moe_expert_parallel_comm": True}, "beside another microbatch"),
    ],
    ids=["drop", "pad", "overlap"],
)
def test_what_is_not_covered_is_one_sentence_without_deepep_and_native_with_it(options, words):
    for kind, text, _ in run_workers(2, error_of, options):
        assert kind == "NotSupportedError" and words in text and "DeepEP is missing" in text
    (is_native, lines), (also_native, _) = run_workers(2, native_where_deepep_is, options)
    assert is_native and also_native and sum(words in line for line in lines) == 1


@pytest.mark.parametrize(
    "options, words",
    [
        ({"moe_flex_dispatcher_backend": "hybridep"}, "HybridEP is not installed"),
        (
            {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
            "does not support moe_pad_expert_input_to_capacity",
        ),
        ({"with_ep": False}, "DeepEP is not installed"),
    ],
    ids=["hybridep", "padded_to_capacity", "without_ep"],
)
def test_errors_of_megatron_are_its_own(options, words):
    for kind, text, _ in run_workers(2, error_of, options):
        assert kind in ("ImportError", "ValueError") and words in text


@pytest.mark.parametrize("room", ["500", "20000"], ids=["context", "rows"])
def test_too_little_memory_is_the_same_sentence_on_all_ranks(room):
    first, second = run_workers(2, error_of, {}, 400, env={"DITRON_ARENA_BYTES": room})
    assert first[:2] == second[:2] and first[0] == "NotSupportedError"
    assert "DITRON_ARENA_BYTES" in first[1] and "DeepEP is missing" in first[1]


def test_groups_over_nodes_are_one_sentence_on_all_ranks():
    """There DeepEP rounds once more, at each node."""
    for kind, text, _ in run_workers(4, error_over_two_nodes, {"num_moe_experts": 8}):
        assert kind == "NotSupportedError" and "the group spans nodes" in text and "DeepEP is missing" in text


def test_too_little_memory_is_native_where_deepep_is():
    found = run_workers(2, native_where_deepep_is, {}, 400, env={"DITRON_ARENA_BYTES": "20000"})
    assert [is_native for is_native, _ in found] == [True] * 2
    assert sum("DITRON_ARENA_BYTES" in line for line in found[0][1]) == 1


@pytest.mark.parametrize("stub, words", [("is_capturing", "CUDA graph"), ("in_schedule_node", "schedule plan")])
def test_calls_that_cannot_run_say_so(stub, words):
    for kind, text, _ in run_workers(2, error_of, {}, 8, stub):
        assert kind == "NotSupportedError" and words in text and "DeepEP is missing" in text


def test_the_log_says_once_what_alltoall_is_expected_to_give():
    kind, _, lines = run_workers(2, error_of)[0]
    assert kind is None
    assert sum("--moe-token-dispatcher-type alltoall with ep is expected" in line for line in lines) == 1
    assert sum("DeepEP is missing" in line for line in lines) == 1


def test_the_policy_decides_where_deepep_is():
    """The interpreter compares nothing, so the answer is yes; it is kept for all layers of a kind."""
    assert run_workers(2, policy_is_asked) == [([None, None], [True])] * 2
    assert all(words.startswith("ep flex ") for words in run_workers(2, both_paths_of_the_trial))


def test_megatron_takes_a_newer_deepep_for_missing():
    """Then flex runs by this package's kernels."""
    assert run_workers(1, megatron_with_newer_deepep) == [False]
