"""Ulysses in a GPT of the local spec: by ops, by all-to-alls of the process group, and whole on one rank."""

from __future__ import annotations

import pathlib
import sys

import pytest

from tests.support.processes import run_workers, run_workers_once

pytest.importorskip("megatron.core")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import sp_batch_groups_workers  # noqa: E402
import sp_workers  # noqa: E402

RECOMPUTE_ALL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
RECOMPUTE_ATTENTION = dict(recompute_granularity="selective", recompute_modules=["core_attn"])
NORMS = dict(qk_layernorm=True, normalization="LayerNorm")
OWN_NORMS = dict(NORMS, own_norms=True)


@pytest.mark.parametrize(
    "options, expect_fused",
    [
        ({}, True),
        ({"add_bias_linear": True, "add_qkv_bias": True}, True),
        ({"num_query_groups": 8, **RECOMPUTE_ATTENTION}, True),
        ({"num_query_groups": 2, **RECOMPUTE_ALL}, True),
        (NORMS, True),
        (OWN_NORMS, False),
    ],
    ids=["plain", "biases", "recompute_attention", "recompute_all", "norms", "own_norms"],
)
def test_gpt_on_two_ranks(options, expect_fused):
    losses_are_those_of_one_rank = run_workers(2, sp_workers.gpt_agrees, options, 16, expect_fused)
    assert all(losses_are_those_of_one_rank)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("options", [{}, {"add_qkv_bias": True, "num_query_groups": 8}, RECOMPUTE_ATTENTION])
def test_norms_of_heads_bit_for_bit(normalization, options):
    options = dict(options, qk_layernorm=True, normalization=normalization)
    run_workers(2, sp_workers.norms_of_heads_agree, options, 16)


def test_what_the_policy_compares_is_nothing_but_roundings():
    for options, expected in (({}, {"projections"}), (NORMS, {"projections"}), (OWN_NORMS, {"output"})):
        for asked in run_workers(2, sp_workers.largest_sums, options, 16):
            assert asked.keys() == expected and all(0.0 < ratio < 1e-5 for ratio in asked.values()), asked


def test_a_rewritten_spec():
    run_workers(2, sp_workers.gpt_agrees, {}, 24, True, 1, True)


def test_gpt_on_four_ranks():
    run_workers(4, sp_workers.gpt_agrees, {}, 24, True)


@pytest.mark.parametrize(
    "options",
    [{}, {"sequence_parallel": False, "add_bias_linear": True}, NORMS],
    ids=["sequence", "replicas", "norms"],
)
def test_inside_tensor_parallelism(options):
    run_workers(4, sp_workers.gpt_agrees, options, 16, True, 2)


def test_beside_overlapped_tensor_parallelism():
    run_workers(4, sp_workers.gpt_agrees, {}, 16, False, 2, False, 1, ("tp", "sp"))


def test_two_groups_beside_each_other():
    run_workers(4, sp_workers.gpt_agrees, {}, 16, True, 1, False, 2)


@pytest.mark.parametrize("options", [{}, RECOMPUTE_ATTENTION, NORMS], ids=["plain", "recompute", "norms"])
def test_packed_sequences(options):
    run_workers(2, sp_workers.packed_attention_agrees, [12, 4, 24, 8], options)


def test_rope_of_packed_sequences_is_told_the_longest():
    run_workers(2, sp_workers.packed_attention_agrees, [12, 4, 24, 8], {}, True)


@pytest.mark.parametrize("ranks_per_node", [2, 1])
def test_gpt_across_simulated_nodes(ranks_per_node):
    run_workers(2 * ranks_per_node, sp_workers.gpt_across_nodes, ranks_per_node, 24)


@pytest.mark.parametrize("capped", [(0, 1), (2, 3)], ids=["first_node", "last_node"])
def test_memory_that_one_node_lacks_leaves_every_node_native(capped):
    first, *others = run_workers(4, sp_workers.memory_missing_on_one_node, 2, capped)
    assert all(reasons == first for reasons in others)
    for reason, words in zip(
        first, ("making a context on every node", "exchanging 12 rows on every node"), strict=True
    ):
        assert (
            reason.startswith(f"{words} failed on 2 of 4 ranks: rank {capped[0]}: ArenaError: ")
            and "DITRON_ARENA_BYTES" in reason
        )


def test_batches_that_bring_their_own_groups_are_native():
    for outcome in run_workers_once(2, sp_batch_groups_workers.batches_of_other_groups, [(8, 12), (12,)]):
        assert outcome.ok, outcome.traceback


def test_values_that_are_padded_for_packed_sequences():
    for outcome in run_workers_once(2, sp_batch_groups_workers.padded_values_of_packed_sequences):
        assert outcome.ok, outcome.traceback


@pytest.mark.parametrize(
    "options, tensor_parallel",
    [
        ({"num_query_groups": 1}, 1),
        ({"num_attention_heads": 2, "num_query_groups": 1}, 1),
        ({"num_query_groups": 2}, 2),
        ({"num_attention_heads": 2, "num_query_groups": 2}, 2),
    ],
)
def test_what_native_refuses_is_refused_with_the_same_words_on_every_rank(options, tensor_parallel):
    errors = run_workers(2 * tensor_parallel, sp_workers.refuses, options, 16, tensor_parallel)
    assert len(set(errors)) == 1 and "number of attention heads needs to be divisible by CP size" in errors[0]


@pytest.mark.parametrize(
    "options", [{"cp_comm_type": "p2p"}, {"softmax_type": "learnable"}], ids=["kind", "trained offsets"]
)
def test_other_context_parallelism_of_the_local_attention_stays_native(options):
    errors = run_workers(2, sp_workers.native_without_ulysses, options)
    assert all("Context parallelism is only supported by TEDotProductAttention" in error for error in errors)


def test_calls_that_native_refuses_are_refused_with_the_same_words_on_every_rank():
    errors = run_workers(2, sp_workers.refused_calls)
    assert errors[0] == errors[1]
    words = {
        "odd": "Sequence length per GPU needs to be divisible by 2!",
        "bias": "AssertionError: Attention bias is not supported for DotProductAttention.",
        "packed": "AssertionError: Packed sequence is not supported by DotProductAttention.",
        "mask": "padding mask type is not supported for BSHD and SBHD!",
        "projected": "padding mask type is not supported for BSHD and SBHD!",
    }
    assert errors[0].keys() == words.keys() and all(text in errors[0][name] for name, text in words.items()), errors[0]


def test_native_exchanges_make_their_tables_once():
    assert run_workers(2, sp_workers.tables_of_native_exchanges) == [1, 1]


def test_layers_share_one_set_of_buffers():
    for one, three in run_workers(2, sp_workers.bytes_of_layers):
        assert len(one) == 1 and one == three


@pytest.mark.parametrize(
    "options, fused", [({}, (1, 0)), (NORMS, (1, 0)), (OWN_NORMS, (0, 1))], ids=["plain", "norms", "own_norms"]
)
def test_weights_made_in_inference_mode(options, fused):
    assert run_workers(2, sp_workers.made_in_inference_mode, options) == [fused] * 2
