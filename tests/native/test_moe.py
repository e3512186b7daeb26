"""Megatron's MoE layer on gloo, native and with ``--ditron ep``: forward and every gradient, bit for bit."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron.core")
sys.path.insert(0, str(Path(__file__).parent))
from ep_workers import (  # noqa: E402
    captured_calls,
    captured_numbers_of_tokens,
    combined_schedule,
    experts_wrapped_after_their_capacity,
    falls_back_when_memory_is_capped,
    groups_of_layers,
    inputs_of_shared_experts,
    layers_agree,
    layers_agree_over_two_nodes,
    memory_ends_between_two_forwards,
    native_over_two_nodes,
    policy_is_asked_once,
    routed_wider_than_topk,
    said_of,
    schedule_without_its_flag,
    sliced_layers_agree,
)

from ditron_train.runtime import logs  # noqa: E402
from ditron_train.runtime.settings import under_policy  # noqa: E402
from tests.support.processes import run_workers  # noqa: E402

PADDED = {"moe_expert_capacity_factor": 1.2, "moe_pad_expert_input_to_capacity": True}
CASES = {
    "plain": ({}, (16, 16), torch.float32),
    "bf16": ({}, (16, 16), torch.bfloat16),
    "uneven_tokens": ({"num_moe_experts": 8, "moe_router_topk": 3}, (9, 20), torch.bfloat16),
    "one_token": ({}, (1, 6), torch.float32),
    "router_fp32_aux_loss": (
        {"moe_router_dtype": "fp32", "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
        (16, 16),
        torch.bfloat16,
    ),
    "top1_probs_on_input": (
        {"moe_router_topk": 1, "moe_apply_probs_on_input": True, "moe_router_score_function": "sigmoid"},
        (12, 12),
        torch.float32,
    ),
    "drop": ({"moe_expert_capacity_factor": 0.6}, (16, 16), torch.bfloat16),
    "pad": ({**PADDED, "num_moe_experts": 8, "moe_router_topk": 3}, (16, 16), torch.bfloat16),
    "pad_bias_by_position": (
        {**PADDED, "moe_expert_capacity_factor": 2.0, "moe_token_drop_policy": "position", "add_bias_linear": True},
        (24, 24),
        torch.float32,
    ),
    "pad_for_quantization": (
        {"moe_router_padding_for_quantization": True, "num_moe_experts": 8, "moe_router_topk": 3},
        (40, 57),
        torch.bfloat16,
    ),
    "pad_for_quantization_of_few": ({"moe_router_padding_for_quantization": True}, (3, 20), torch.float32),
    "shared_experts": ({"moe_shared_expert_intermediate_size": 40}, (8, 8), torch.float32),
    "shared_experts_overlapped": (
        {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_overlap": True},
        (8, 8),
        torch.float32,
    ),
    "shared_experts_gated": (
        {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_overlap": True, "moe_shared_expert_gate": True},
        (8, 8),
        torch.bfloat16,
    ),
    "recompute": ({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, (8, 8), torch.bfloat16),
    "squared_relu_bias": (
        {"gated_linear_unit": False, "activation_func": torch.nn.functional.relu, "add_bias_linear": True},
        (8, 8),
        torch.float32,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_layer_equals_native(name):
    run_workers(2, layers_agree, *CASES[name], env={"DITRON_POLICY": "force"})


def test_four_ranks_through_a_spec():
    run_workers(4, layers_agree, {"num_moe_experts": 8, "moe_router_topk": 3}, (8, 5, 1, 9), torch.bfloat16, True)


def test_layers_have_the_callers_groups():
    for native, *fused in run_workers(2, groups_of_layers):
        assert native == ("MoELayer", True, 2) and fused == [("DitronMoELayer", True, 2)] * 2


def test_eight_ranks():
    run_workers(
        8, layers_agree, {"num_moe_experts": 16, "moe_router_topk": 4}, (3, 5, 1, 4, 2, 6, 3, 1), torch.bfloat16
    )


@pytest.mark.parametrize(
    "options",
    [
        {"expert_model_parallel_size": 2},
        {
            "expert_model_parallel_size": 4,
            "tensor_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
            "sequence_parallel": True,
        },
    ],
    ids=["ep2_dp2", "ep4_tp2"],
)
def test_groups_beside_data_and_tensor_parallelism(options):
    run_workers(4, layers_agree, {"num_moe_experts": 8, **options}, (6, 6, 6, 6), torch.bfloat16)


SLICED = {
    "expert_model_parallel_size": 2,
    "tensor_model_parallel_size": 2,
    "expert_tensor_parallel_size": 2,
    "sequence_parallel": True,
}


@pytest.mark.parametrize(
    "options",
    [{"num_moe_experts": 6, "moe_router_topk": 3}, {"num_moe_experts": 2, "moe_router_topk": 2}],
    ids=["several_experts", "one_expert"],
)
def test_experts_split_over_tensor_parallel_ranks(options):
    run_workers(4, sliced_layers_agree, {**SLICED, **options}, (8, 5, 1, 9), torch.bfloat16)


def test_routing_that_a_kernel_of_megatron_pads(monkeypatch):
    """Megatron's experimental kernel gives integers; the layout is made of bools."""
    from megatron.core.fusions.fused_pad_routing_map import fused_pad_routing_map
    from megatron.core.transformer.moe.moe_utils import pad_routing_map

    from ditron_train.megatron.compat.config import padded_routing

    monkeypatch.setattr("megatron.core.config.ENABLE_EXPERIMENTAL", True)
    names = dict(moe_permute_fusion=True, moe_router_padding_for_quantization=True, fp8="hybrid", fp4=None)
    config = SimpleNamespace(**names, fp8_recipe="delayed")
    routing = torch.rand(40, 8, generator=torch.Generator().manual_seed(1)) < 0.2
    with torch.compiler.set_stance("force_eager"):
        assert fused_pad_routing_map(routing, 16).dtype == torch.int32
        padded, most = padded_routing(config, routing)
    assert padded.dtype == torch.bool and torch.equal(padded, pad_routing_map(routing, 16))
    assert most == 8 * 15


def test_split_experts_padded_for_quantization():
    options = {"moe_router_padding_for_quantization": True, "num_moe_experts": 6, "moe_router_topk": 3}
    env = {"DITRON_POLICY": "force"}
    run_workers(4, sliced_layers_agree, {**SLICED, **options}, (24, 5, 17, 30), torch.bfloat16, env=env)


@pytest.mark.parametrize("split", [False, True], ids=["ep4", "ep2_tp2"])
def test_four_ranks_padded_to_capacity(split):
    options = {**PADDED, "num_moe_experts": 8, "moe_router_topk": 3, **(SLICED if split else {})}
    run_workers(4, sliced_layers_agree, options, (12, 12, 12, 12), torch.bfloat16, env={"DITRON_POLICY": "force"})


@pytest.mark.parametrize("options", [{}, PADDED], ids=["exact", "padded"])
@pytest.mark.parametrize("capped", [(0, 1, 2, 3), (1, 3)], ids=["all", "one_group"])
def test_split_experts_go_over_to_native_together(options, capped):
    """Ranks 1 and 3 hold the same slices of all experts: where they have no room, 0 and 2 must hear of it."""
    env = {"DITRON_ARENA_BYTES": "20000", "DITRON_POLICY": "force"}
    reasons = run_workers(4, falls_back_when_memory_is_capped, {**SLICED, **options}, capped, env=env)
    for rank, reason in enumerate(reasons):
        assert ("DITRON_ARENA_BYTES" if rank in capped else "another tensor parallel rank has no room") in reason, (
            reasons
        )


def test_min_rows_of_a_fixed_capacity_are_warned_of(monkeypatch, caplog):
    from ditron_train.megatron.ep import spec as ep_policy

    monkeypatch.setattr(logs, "_seen", {})
    seen = iter([None, 385, 384])
    monkeypatch.setattr(ep_policy, "min_rows_before", lambda context: next(seen))
    assert [ep_policy.warns_of_min_rows(None, 385) for _ in range(3)] == [False, False, True]
    (record,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert "an expert had 384 rows" in record.message and "DITRON_EP_CAPACITY" in record.message


def test_a_capacity_whose_products_never_have_native_bits(monkeypatch, caplog):
    """``strict`` and ``bits`` go back to exact sizes; ``fast`` and ``force`` keep it, and say so at once."""
    from ditron_train.ep.plan import NEVER
    from ditron_train.megatron.ep import dispatcher

    monkeypatch.setattr(logs, "_seen", {})
    monkeypatch.setattr(dispatcher, "min_rows_of_layer", lambda *_: NEVER)
    monkeypatch.setattr(dispatcher, "exchange", lambda group, mine: [mine])
    monkeypatch.setattr("ditron_train.megatron.ep.spec.min_rows_before", lambda context: None)
    caplog.set_level(logging.INFO, logger="ditron_train")
    for policy, factor in (("strict", None), ("bits", None), ("fast", 2.0), ("force", 2.0)):
        room = dispatcher.FixedCapacity(2.0)
        with under_policy(policy):
            room.measure(None, None, None)
        room.warn(None)
        assert room.factor == factor
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1 and "ep: the GEMMs of DITRON_EP_CAPACITY may add up in another order" in warned[0]
    assert any("exact sizes with a host sync" in record.message for record in caplog.records)


def _limits_of_pairs():
    """Of ranks that measured differently: of fc2's forward 100 and 300 rows, of fc1's never and 1."""
    from ditron_train.ep import plan
    from ditron_train.ep.plan import NEVER
    from ditron_train.megatron.ep import pair_spec

    rank, asked = torch.distributed.get_rank(), []

    def measured(product, dtype, device):
        asked.append(tuple(product))
        return (100, 300)[rank] if product.weight == (16, 24) else (NEVER, 1)[rank]

    plan.min_rows_here = measured
    layers = [SimpleNamespace(weight0=torch.empty(shape)) for shape in ((48, 16), (16, 24))]
    experts = SimpleNamespace(num_local_experts=2, linear_fc1=layers[0], linear_fc2=layers[1])
    like = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=torch.device("cpu"))
    pairs = frozenset(["gemm_combine", "overlap_wgrad"])
    found = [pair_spec.with_limits(pairs, experts, like, torch.distributed.group.WORLD) for _ in range(2)]
    assert found[0] == found[1] and asked == [((16, 24), 2, True)], "once"
    again = torch.distributed.new_group([0, 1])  # another group is asked anew
    assert pair_spec.min_rows_of_layer(experts, like, again) == NEVER and len(asked) == 5
    layer = layers[0]
    layers.reverse()  # whose product never adds up so, on one rank
    experts = SimpleNamespace(num_local_experts=2, linear_fc1=layers[0], linear_fc2=layers[1])
    never = pair_spec.with_limits(pairs | {"fc1_gemm"}, experts, like, torch.distributed.group.WORLD)
    plan.most_rows_here = lambda product, dtype, device: (700, 900)[rank] if product.into is None else 0
    wgrads = []
    for layer.fuse_wgrad_accumulation in (False, True):
        wgrads.append(pair_spec.with_limits(frozenset(["group_wgrad"]), experts, like, torch.distributed.group.WORLD))
    return found[0], never, wgrads


def test_ranks_agree_from_how_many_rows_on_products_are_fused():
    from ditron_train.ep.plan import NEVER

    for found, never, wgrads in run_workers(2, _limits_of_pairs):
        assert found == ({"gemm_combine", "overlap_wgrad"}, {"gemm_combine": 300})
        assert never == ({"overlap_wgrad", "fc1_gemm"}, {"gemm_combine": NEVER, "fc1_gemm": 300})
        assert wgrads == [({"group_wgrad"}, {"group_wgrad": 700}), (frozenset(), {"group_wgrad": 0})]


def test_rows_of_split_experts_in_the_places_of_native():
    """As they are where experts are split over more than two ranks: there sums may depend on the place."""
    options = {**SLICED, "num_moe_experts": 6, "moe_router_topk": 3}
    run_workers(4, sliced_layers_agree, options, (8, 5, 1, 9), torch.bfloat16, 1)


def test_experts_split_over_four_ranks():
    sizes = {
        "tensor_model_parallel_size": 4,
        "expert_tensor_parallel_size": 4,
        "num_moe_experts": 4,
        "moe_router_topk": 3,
    }
    run_workers(8, sliced_layers_agree, {**SLICED, **sizes}, (3, 5, 1, 4, 2, 6, 3, 1), torch.bfloat16)


def test_the_policy_is_asked_by_all_slices_together():
    assert run_workers(4, policy_is_asked_once, SLICED) == [([None, None], 1)] * 4


@pytest.mark.parametrize(
    "options, policy, words",
    [
        ({"moe_router_dtype": "fp64"}, "bits", "native dispatcher, torch.float64 is not covered"),
        ({"moe_token_dispatcher_type": "allgather"}, "bits", None),
        ({"moe_expert_capacity_factor": 5.0}, "strict", None),
        (PADDED, "strict", None),
        ({"overlap_moe_expert_parallel_comm": True}, "strict", None),
        ({"overlap_moe_expert_parallel_comm": True}, "bits", None),
        (
            {"overlap_moe_expert_parallel_comm": True, "context_parallel_size": 2},
            "force",
            "native dispatcher, overlap_moe_expert_parallel_comm runs it beside tensor or context parallel",
        ),
    ],
    ids=["fp64", "allgather", "drop", "pad", "overlap", "overlap_bits", "overlap_beside_others"],
)
def test_what_is_not_covered_runs_natively_and_says_so(options, policy, words):
    every = run_workers(2, said_of, options, env={"DITRON_POLICY": policy})[0]
    logged = [line for line in every if "native" in line or "fused" in line]
    assert not logged if words is None else len(logged) == 1 and logged[0].startswith(f"ep: {words}")


def test_the_policy_is_asked_once_whatever_tokens_the_ranks_hold():
    assert run_workers(2, policy_is_asked_once) == [([None, None], 1)] * 2


def test_too_little_memory_goes_over_to_native():
    reasons = run_workers(2, falls_back_when_memory_is_capped, env={"DITRON_ARENA_BYTES": "20000"})
    assert "DITRON_ARENA_BYTES" in reasons[0] and reasons[0] == reasons[1]


def test_tokens_of_more_experts_than_topk_go_over_to_native():
    reasons = run_workers(2, routed_wider_than_topk, env={"DITRON_POLICY": "force"})
    assert all("a token has 4 experts, top-k is 2" in reason for reason in reasons)


def test_experts_that_were_wrapped_after_their_capacity_get_exact_sizes():
    """Here they are megatron-core's own, which know no counts without a host, as little as an adapter does."""
    assert run_workers(2, experts_wrapped_after_their_capacity) == [([True, True], None)] * 2


def test_calls_in_a_capture_are_native_where_fused_would_sync():
    assert run_workers(2, captured_calls) == [[False, True, False]] * 2


def test_numbers_of_tokens_that_come_first_in_a_capture_are_native():
    """Padded to capacity no call needs the host; but buffers cannot grow."""
    assert run_workers(2, captured_numbers_of_tokens, PADDED) == [[True, True, True, False, True, True]] * 2


@pytest.mark.parametrize(
    "is_decided, is_sized, slices, words",
    [
        (False, True, 1, "first called"),
        (True, False, 1, "host sync"),
        (True, True, 2, "host sync"),
        (True, True, 1, None),
    ],
)
def test_what_can_be_captured(is_decided, is_sized, slices, words):
    from ditron_train.megatron.ep.coverage import unsupported_reason_captured

    reason = unsupported_reason_captured(is_decided=is_decided, is_sized=is_sized, slices=slices)
    assert reason is None if words is None else words in reason


def test_the_combined_schedule_runs_fused_method_by_method():
    """overlap_moe_expert_parallel_comm: a forward pass beside the backward pass of another microbatch; nothing is
    fused."""
    assert run_workers(2, combined_schedule, 3, env={"DITRON_POLICY": "bits"}) == [([], [(True, True)] * 2)] * 2


@pytest.mark.parametrize("policy", ["strict", "bits", "force"])
def test_a_schedule_plan_without_its_flag_runs_natively(policy):
    """Plans that are built with overlap_moe_expert_parallel_comm off: their nodes free what the fused path would still
    send or keep."""
    plain, in_pieces = ([], {True}), ([], {False})
    assert run_workers(2, schedule_without_its_flag, env={"DITRON_POLICY": policy}) == [[plain, in_pieces, plain]] * 2


def test_two_nodes():
    options = {"num_moe_experts": 8, "moe_router_topk": 3, "moe_expert_capacity_factor": 0.8}
    assert run_workers(4, layers_agree_over_two_nodes, options, (8, 5, 1, 9), torch.bfloat16) == [{2}] * 4


@pytest.mark.parametrize("cap, missing", [(500, "making a context"), (20000, "making room")], ids=["context", "rows"])
@pytest.mark.parametrize("capped", [(0, 1), (2, 3)], ids=["first_node", "last_node"])
def test_nodes_of_which_one_has_no_memory_go_over_to_native_together(capped, cap, missing):
    env = {"DITRON_ARENA_BYTES": str(cap), "DITRON_POLICY": "force"}
    arguments = (falls_back_when_memory_is_capped, {"num_moe_experts": 8}, capped)
    found = run_workers(4, native_over_two_nodes, *arguments, env=env)
    reasons = {reason for reason, _ in found}
    assert len(reasons) == 1
    (reason,) = reasons
    assert missing in reason and "failed on 2 of 4 ranks" in reason and f"DITRON_ARENA_BYTES={cap}" in reason
    assert [lines for _, lines in found] == [[f"ep: native dispatcher, {reason}"], [], [], []]


def test_a_node_whose_memory_ends_leaves_what_is_under_way_as_it_is():
    found = run_workers(4, native_over_two_nodes, memory_ends_between_two_forwards, (2, 3))
    reason = found[0][0]
    assert "making room on every node failed on 2 of 4 ranks: rank 2: ArenaError: " in reason
    assert found == [(reason, [f"ep: native dispatcher, {reason}"])] + [(reason, [])] * 3


@pytest.mark.parametrize(
    "num_experts, first, width",
    [(4, 0, 4), (8, 5, 3), (8, 3, 5)],
    ids=["on_no_node_alone", "on_the_other_node", "on_one_of_both_nodes"],
)
def test_tokens_of_more_experts_than_topk_go_over_to_native_on_all_nodes(num_experts, first, width):
    """Experts of the first rank's token may be more than top-k together, or already on one node."""
    arguments = (routed_wider_than_topk, num_experts, first)
    found = run_workers(4, native_over_two_nodes, *arguments, env={"DITRON_POLICY": "force"})
    reason = f"expert parallel: a token has {width} experts, top-k is 2"
    assert found == [(reason, [f"ep: native dispatcher, {reason}"])] + [(reason, [])] * 3


def test_gradients_of_shared_experts_meet_those_of_the_routed_where_they_do_natively():
    """Sums of three or more gradients depend on who meets whom first: both paths take the same view of the tokens."""
    options = {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_overlap": True}
    for native, fused in run_workers(2, inputs_of_shared_experts, options):
        assert native == fused == ["ViewBackward0", "ViewBackward0"]


@pytest.mark.parametrize("over_nodes", [False, True], ids=["one_node", "rails"])
@pytest.mark.parametrize("num_sms", [108, 132, 148])
@pytest.mark.parametrize("overlaps, tensor_parallel", [(True, 2), (True, 1), (False, 2)])
def test_launches_beside_collectives_of_shared_experts_leave_room(
    monkeypatch, num_sms, overlaps, tensor_parallel, over_nodes
):
    """32 blocks of NCCL's and all programs that wait for peers are resident together, in a node of several, too."""
    from ditron_train.ep import RailContext
    from ditron_train.ep.context import EPContext, MoveConfig
    from ditron_train.megatron.ep import coverage

    inner = object.__new__(EPContext)
    inner.num_sms, inner.move = num_sms, MoveConfig(num_programs=num_sms)
    rails = RailContext(inner, None, 8, 2)
    monkeypatch.setenv("DITRON_EP_RAILS", "on" if over_nodes else "off")
    monkeypatch.setattr(coverage, "get_ep_context", lambda *arguments: inner)
    monkeypatch.setattr(coverage, "get_rail_context", lambda *arguments: rails)
    config = SimpleNamespace(
        **dict.fromkeys(coverage._NOT_OVER_NODES, False),
        moe_router_topk=2,
        moe_shared_expert_overlap=overlaps,
        tensor_model_parallel_size=tensor_parallel,
    )
    dispatcher = SimpleNamespace(config=config, ep_group=None, num_experts=8, tp_size=1)
    assert coverage.context_of_layer(dispatcher, torch.device("cpu")) is (rails if over_nodes else inner)
    left = num_sms - inner.move.num_programs
    assert left == (32 if overlaps and tensor_parallel > 1 else 0)
    assert inner.move.num_senders < inner.move.num_programs


@pytest.mark.parametrize("num_sms", [108, 132, 148])
def test_launches_beside_another_microbatch_leave_room(monkeypatch, num_sms):
    """To its layers, and so that they, an exchange of counts and two collectives of NCCL's are resident together."""
    from ditron_train.ep.context import EPContext, MoveConfig
    from ditron_train.megatron.ep import coverage

    context = object.__new__(EPContext)
    context.num_sms, context.move, context.tried_senders = num_sms, MoveConfig(num_programs=num_sms), 99
    monkeypatch.setattr(coverage, "get_ep_context", lambda *arguments: context)
    config = SimpleNamespace(
        overlap_moe_expert_parallel_comm=True, moe_router_topk=2, moe_shared_expert_overlap=False,
        tensor_model_parallel_size=1,
    )  # fmt: skip
    dispatcher = SimpleNamespace(config=config, ep_group=None, num_experts=8, tp_size=1)
    assert coverage.context_of_layer(dispatcher, torch.device("cpu")) is context
    assert context.move.num_programs + 1 + 2 * 32 <= num_sms
    assert 0 < context.senders("dispatch", 7168) < context.move.num_programs
