"""Megatron's MoE layer with the allgather dispatcher on gloo, native and with ``--ditron ep``: forward and every
gradient, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core")
sys.path.insert(0, str(Path(__file__).parent))
from ep_workers import gathered_layers_agree, slices_of_experts, slices_without_room  # noqa: E402
from gathered_workers import (  # noqa: E402
    a_gather_that_nobody_consumes,
    layers_are_exact,
    trial_of_an_evaluation,
    trials_beside_newer_permutations,
    trials_keep_no_memory,
    weight_grads_of_frozen_tokens,
)

from ditron_train.ep import grouped_gemm  # noqa: E402
from ditron_train.ep.gather import GatheredLayout, place, sum_to_tokens  # noqa: E402
from ditron_train.megatron.ep import gathered_dispatcher  # noqa: E402
from ditron_train.megatron.ep.gather import GatheredCall, given_up_on_error  # noqa: E402
from ditron_train.runtime.errors import NotSupportedError  # noqa: E402
from tests.support import quick_interpreter  # noqa: E402
from tests.support.processes import run_workers  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def _repaired_interpreter():
    quick_interpreter.install()


Dispatcher = gathered_dispatcher.DitronMoEAllGatherTokenDispatcher
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


@pytest.mark.parametrize("room", [20000, 40000], ids=["no_gather", "no_scatter"])
def test_without_memory_the_layer_goes_on_natively(room):
    env = {"DITRON_ARENA_BYTES": str(room), "DITRON_POLICY": "force"}
    found = run_workers(2, gathered_layers_agree, {"moe_router_dtype": "fp32"}, 64, torch.float32, env=env)
    assert all(moved == [False, False] and "DITRON_ARENA_BYTES" in reason for moved, reason in found)


@pytest.mark.parametrize("experts", [2, 8], ids=["one_expert", "several_experts"])
def test_slices_of_experts_travel_by_the_fused_path(experts):
    options = {**SPLIT, "num_moe_experts": experts, "moe_router_topk": 2, "moe_router_dtype": "fp32"}
    calls = run_workers(4, slices_of_experts, options, (8, 5, 70, 9))
    assert calls == [2] * 4  # steps


def test_slices_that_were_refused_are_not_asked_for_again():
    """Each step has other numbers of rows, and new slices."""
    options = {**SPLIT, "num_moe_experts": 8, "moe_router_topk": 2, "moe_router_dtype": "fp32"}
    (asked, lines), *others = run_workers(4, slices_without_room, options, (8, 5, 70, 9))
    assert asked == 1 and others == [(1, [])] * 3
    assert len(lines) == 1 and "no room for" in lines[0]


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (2, (5, 8, 8, 3, 0.5)),
        (2, (70, 40, 24, 2, 0.6)),
        (2, (6, 8, 8, 2, 0.0)),
        (3, (4, 16, 8, 1, 1.0)),
        (4, (9, 8, 8, 2, 0.1)),
    ],
    ids=["small", "several_tiles", "no_rows", "one_expert_each", "min_rows"],
)
def test_products_beside_the_movement_are_exact(ranks, sizes):
    """New routings on memory full of other values, each time with other ranks late, and sources in other groups."""
    assert run_workers(ranks, layers_are_exact, *sizes, 0.2) == [True] * ranks


@pytest.mark.parametrize("min_rows", [40, 1000], ids=["some", "all"])
def test_experts_of_min_rows_are_multiplied_by_themselves(min_rows):
    """Of 70 tokens with other routings in each call, an expert has about 35 rows of a rank."""
    sizes = (35, 40, 24, 3, 0.55)
    assert run_workers(2, layers_are_exact, *sizes, 0.1, 3, min_rows) == [True] * 2


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 60), st.booleans(), st.randoms(use_true_random=False))
def test_groups_of_sources_share_whole_tiles(sources, experts, min_rows, last, draw):
    """Each row of an expert of many rows once, in tiles from the expert's first row on; a tile is of the last group
    that has a row in it, or of the first."""
    likely = [draw.random() * draw.choice([0.1, 1.0]) for _ in range(experts)]
    local_map = torch.tensor([[draw.random() < one for one in likely] for _ in range(24 * sources)])
    layout = GatheredLayout(local_map, sources)
    rows, ends = layout.tokens_per_expert.tolist(), layout.tokens_per_expert.cumsum(0).tolist()
    assert layout.experts_below(min_rows) == [e for e, have in enumerate(rows) if 0 < have < min_rows]
    order, groups = draw.sample(range(sources), sources), []
    while order:
        number = draw.randint(1, len(order))
        groups.append(order[:number])
        order = order[number:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_gemm, "_LIST_BLOCK", 4)  # several blocks of tiles, as of many experts
        patch.setattr(torch, "empty", lambda *size, **options: torch.full(size, 77, **options))
        found = layout.tiles_of_groups(groups, last=last, min_rows=min_rows)
    assert len(found) == len(groups)
    covered = []
    for number, tiles in enumerate(found):
        table = tiles.tiles.tolist()
        behind = table[4 * (table[0] + 1) :][: grouped_gemm._SLACK_WORDS]
        assert not any(behind[::4]), "a loop that runs ahead finds an expert"
        for index in range(table[0]):
            expert, first, end = table[4 * (index + 1) :][:3]
            assert end == ends[expert] and (first - ends[expert] + rows[expert]) % tiles.block_m == 0
            within = range(first, min(end, first + tiles.block_m))
            covered += [(expert, row) for row in within]
            owners = torch.repeat_interleave(torch.arange(sources), layout.counts[:, expert])
            owners = {int(owners[row - ends[expert] + rows[expert]]) for row in within}
            of_owners = [at for at, group in enumerate(groups) if owners & set(group)]
            assert number == (max(of_owners) if last else min(of_owners))
    wanted = [(e, row) for e, have in enumerate(rows) for row in range(ends[e] - have, ends[e]) if have >= min_rows]
    assert sorted(covered) == wanted


@pytest.mark.parametrize(
    "rows, min_rows, expected",
    [((300, 300, 0), 257, 0), ((300, 600, 150), 257, 257), ((300, 100, 100), 257, None), ((0, 0, 0), 257, 0),
     ((600, 300, 1), 1 << 30, None)],
    ids=["many", "few", "too_many_of_few", "none", "never"],
)  # fmt: skip
def test_below_how_many_rows_products_are_native(monkeypatch, rows, min_rows, expected):
    """Where experts with few rows have a quarter of all at most."""
    monkeypatch.setattr(gathered_dispatcher, "unsupported_reason_called", lambda experts: None)
    monkeypatch.setattr(gathered_dispatcher, "_min_rows", lambda experts, like: min_rows)
    local_map = torch.stack([torch.arange(700) < have for have in rows], dim=1)
    layout = GatheredLayout(local_map, 1)
    assert gathered_dispatcher.min_rows_of_call(None, layout, torch.empty(0)) == expected
    monkeypatch.setattr(gathered_dispatcher, "unsupported_reason_called", lambda experts: "an adapter")
    assert gathered_dispatcher.min_rows_of_call(None, layout, torch.empty(0)) is None


def test_gathered_experts_are_tried_in_an_evaluation_before_training():
    assert run_workers(2, trial_of_an_evaluation) == [True] * 2


def test_ranks_with_and_without_gemms_beside_agree_on_tokens_without_gradient():
    """Of frozen layers: who alone scattered gradients would wait for the others."""
    assert run_workers(2, weight_grads_of_frozen_tokens, env={"DITRON_TIMEOUT_S": "20"}) == [True] * 2


@pytest.mark.parametrize("where", ["layout", "product"])
def test_a_gather_that_nobody_consumes_is_not_taken_for_the_next(where):
    assert run_workers(2, a_gather_that_nobody_consumes, where) == [True] * 2


class _Started:
    """A gather on its way that counts how often it is given up."""

    num_given_up = 0

    def abort(self):
        self.num_given_up += 1


def _dispatcher(started, **fields):
    """What the dispatcher's steps read, with a gather that has started."""
    made = SimpleNamespace(_started=started, _gathered_context=object(), _fuses=False, routing_map=None, **fields)
    made._take_started = lambda: Dispatcher._take_started(made)
    return made


def _fail(*args, **options):
    raise torch.OutOfMemoryError("no room")


def test_a_layer_gives_up_what_it_cannot_wait_for(monkeypatch):
    """Whatever fails while tokens are on their way, and what a call before has left."""
    before, started = _Started(), _Started()
    monkeypatch.setattr(gathered_dispatcher, "start", lambda *args: started)
    made = _dispatcher(before, _context_for=lambda *args: object(), _gather_routing=_fail)
    with pytest.raises(torch.OutOfMemoryError):
        Dispatcher.token_dispatch(made, torch.zeros(2, 4), torch.zeros(2, 2))
    assert (before.num_given_up, started.num_given_up, made._started) == (1, 1, None)
    started = _Started()
    made = _dispatcher(started, _local=_fail)
    with pytest.raises(torch.OutOfMemoryError):
        Dispatcher.dispatch_postprocess(made, torch.zeros(2, 4), torch.zeros(2, 2))
    assert started.num_given_up == 1 and made._started is None


def test_a_gather_is_given_up_once(monkeypatch):
    """By the first that has it; what has been taken is its taker's."""
    started = _Started()
    call = GatheredCall(None, None, "ascending", torch.float32, started)
    with pytest.raises(torch.OutOfMemoryError):
        with given_up_on_error(call.take_started):
            with given_up_on_error(call.take_started):
                _fail()
    assert started.num_given_up == 1
    call.started = started
    with pytest.raises(torch.OutOfMemoryError):
        with given_up_on_error(call.take_started):
            call.take_started()
            _fail()
    assert started.num_given_up == 1


def test_trials_of_gathered_experts_keep_no_memory():
    assert run_workers(2, trials_keep_no_memory) == [True] * 2


def test_gathered_experts_are_tried_beside_any_version_of_megatron():
    assert run_workers(2, trials_beside_newer_permutations) == [True] * 2


@pytest.mark.parametrize("order", ["ascending_rounded", "ascending", "descending"])
@pytest.mark.parametrize(
    "num_tokens, num_experts, hidden, share",
    [(12, 5, 24, 0.7), (26, 9, 1100, 0.2), (16, 1, 8, 1.0), (10, 33, 16, 0.05)],
)
def test_rows_are_added_up_in_the_order_that_is_asked_for(order, num_tokens, num_experts, hidden, share):
    """Tokens with all, a few and none of the experts; more columns than a tile has, and tokens that fill none."""
    generator = torch.Generator().manual_seed(3)
    local_map = torch.rand(num_tokens, num_experts, generator=generator) < share
    layout, of_source = GatheredLayout(local_map, 2), num_tokens // 2
    rows = torch.randn(layout.num_rows, hidden, generator=generator).bfloat16()
    tokens = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
    placed = torch.full_like(rows, float("nan"))
    for source in range(2):
        out = torch.full((of_source, hidden), float("nan"), dtype=torch.float32)
        place(tokens[layout.tokens_of(source)], placed, layout, source)
        sum_to_tokens(rows, out, layout, source, order)
        for token, found in enumerate(out):
            total, position = torch.zeros(hidden), of_source * source + token
            experts = local_map[position].nonzero()[:, 0].tolist()
            for expert in experts[:: -1 if order == "descending" else 1]:
                row = int(local_map[:, :expert].sum() + local_map[:position, expert].sum())
                total = total + rows[row].float()
                total = total.bfloat16().float() if order == "ascending_rounded" else total
            assert torch.equal(found, total.bfloat16().float())
    assert torch.equal(placed, torch.cat([tokens[local_map[:, expert]] for expert in range(num_experts)]))


def test_tokens_come_to_their_rows_and_nowhere_else():
    local_map = torch.tensor([[True, False], [True, True], [False, False], [False, True]])
    layout = GatheredLayout(local_map, 2)
    assert layout.counts.tolist() == [[2, 1], [0, 1]] and layout.tokens_per_expert.tolist() == [2, 2]
    tokens, rows = torch.arange(4.0)[:, None].expand(4, 8).contiguous(), torch.full((4, 8), -1.0)
    place(tokens[2:], rows, layout, 1)
    assert rows[:, 0].tolist() == [-1, -1, -1, 3]
    place(tokens[:2], rows, layout, 0)
    assert rows[:, 0].tolist() == [0, 1, 1, 3]


def test_rows_of_other_shapes_are_refused():
    layout = GatheredLayout(torch.ones(4, 1, dtype=torch.bool), 2)
    rows = torch.zeros(4, 8)
    with pytest.raises(NotSupportedError, match="place"):
        place(torch.zeros(3, 8), rows, layout, 0)
    with pytest.raises(NotSupportedError, match="sum_to_tokens"):
        sum_to_tokens(rows, torch.zeros(2, 7), layout, 0, "ascending")
    with pytest.raises(NotSupportedError, match="ranks"):
        GatheredLayout(torch.ones(5, 1, dtype=torch.bool), 2)
