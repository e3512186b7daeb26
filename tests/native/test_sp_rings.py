"""``a2a+p2p``: exchanges over one level of the context parallel group by ops, rings over the other natively."""

from __future__ import annotations

import pathlib
import sys

import pytest

from tests.support.processes import run_workers_once

pytest.importorskip("megatron.core")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import sp_rings_workers  # noqa: E402


def run(ranks, body, *arguments):
    outcomes = run_workers_once(ranks, body, *arguments)
    for outcome in outcomes:
        assert outcome.ok, outcome.traceback
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize("projections_fused", [True, False], ids=["projections", "exchanges"])
@pytest.mark.parametrize("sizes", [(2, 2), (2, 1)])
def test_exchanges_around_a_ring_have_the_bits_of_the_attention_that_does_both(sizes, projections_fused):
    run(sizes[0] * sizes[1], sp_rings_workers.attends_in_rings, sizes, {}, projections_fused)


def test_a_ring_that_is_computed_again_in_backward():
    options = dict(recompute_granularity="selective", recompute_modules=["core_attn"], num_query_groups=8)
    run(4, sp_rings_workers.attends_in_rings, (2, 2), options, True)


def test_each_level_has_its_own_table_of_positions():
    run(4, sp_rings_workers.tables_of_levels)


@pytest.mark.parametrize(
    "sizes, says",
    [
        ((2, 1), "the attention is called with packed_seq_params"),
        ((1, 2), "each exchange of a2a+p2p is of one rank"),
        ((2, 1, 1), "a2a+p2p is over 3 levels of groups, not 2"),
    ],
)
def test_what_is_not_covered_is_native_and_said(sizes, says):
    assert run(2, sp_rings_workers.stays_native, sizes) == [[says]] * 2


@pytest.mark.parametrize("output_fused", [True, False], ids=["output", "exchanges"])
@pytest.mark.parametrize("q_lora_rank", [24, None])
@pytest.mark.parametrize("sizes, kind", [((2, 1), "a2a"), ((2, 2), "a2a+p2p")])
def test_multi_latent_attention_has_the_bits_of_the_attention_that_exchanges_itself(
    sizes, kind, q_lora_rank, output_fused
):
    run(sizes[0] * sizes[1], sp_rings_workers.latents_agree, sizes, kind, q_lora_rank, output_fused)
