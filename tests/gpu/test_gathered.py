"""Gathered experts on GPUs under torchrun: ``torch.equal`` with megatron-core's allgather dispatcher and MoE layer; of
the GEMMs beside the movement with cuBLAS or Transformer Engine, gathered and scattered."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")
pytest.importorskip("megatron.core")

from test_ep import FUSED, HAVE_TE, NEEDS_TE, deterministic, normals, steps_of_equal_layers, world  # noqa: E402, F401

from ditron_train.megatron.ep import gather  # noqa: E402
from ditron_train.megatron.ep.gathered_spec import GATHERED_EXPERTS, GatheredExpertsOp  # noqa: E402
from ditron_train.policy import fused_results, native_results  # noqa: E402
from ditron_train.tools.bench.megatron_ep import layer_pair  # noqa: E402
from ditron_train.tools.cases import RunEnvironment  # noqa: E402
from ditron_train.tools.cases.ep_gathered import GatheredExpertsCase  # noqa: E402
from ditron_train.tools.cases.ep_layers import moe_layer  # noqa: E402
from ditron_train.tools.cases.ep_moves import moe_config, repeating  # noqa: E402

_CASE = GatheredExpertsCase(GATHERED_EXPERTS)


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """How many parts each product had: sources in groups that are drawn, other ones on each rank, since shapes of
    tests are too small to be multiplied in parts."""
    found, draw = [], random.Random(30 + dist.get_rank())

    def drawn(order, product_us, transfer_us, lost_us):
        ends = [place for place in range(1, len(order)) if draw.random() < 0.8]
        found.append(1 + len(ends))
        return [list(order[first:end]) for first, end in zip([0, *ends], [*ends, len(order)])]

    monkeypatch.setattr(gather, "groups_in_sequence", drawn)
    return found


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("local, topk, hidden, tokens", [(4, 2, 512, 1024), (1, 1, 64, 40), (16, 6, 256, 700)])
def test_layers_have_megatrons_bits(device, local, topk, hidden, tokens, fused):
    experts = local * dist.get_world_size()
    config = moe_config(
        hidden=hidden, ffn_hidden=256, num_experts=experts, topk=topk, dtype=torch.bfloat16, fused=fused,
        moe_token_dispatcher_type="allgather",
    )  # fmt: skip
    layers = layer_pair(config, device)
    for _ in steps_of_equal_layers(layers, tokens, hidden):
        pass
    if HAVE_TE and topk * tokens * dist.get_world_size() // experts > 400:
        assert layers["fused"].token_dispatcher._is_fused


@pytest.mark.parametrize("repeats", [True, pytest.param(False, marks=NEEDS_TE)])
@pytest.mark.parametrize("sizes", [(1024, 512, 512, 4, 2), (2048, 1024, 384, 2, 1), (640, 2048, 1024, 2, 2)])
def test_products_beside_the_movement_have_the_bits_of_both_one_after_the_other(
    device, all_equal, parts, sizes, repeats
):
    tokens, hidden, ffn, local, topk = sizes
    shape = moe_layer("test", tokens, hidden, ffn, local * dist.get_world_size(), topk)
    shape.options["deterministic"] = repeats
    place = RunEnvironment(dist.group.WORLD, device, torch.bfloat16)
    num_compared = 0
    with repeating(shape):
        for seed in range(3):
            call = _CASE.sample(shape, place, seed)
            if _CASE.no_row_reason(call) is not None:
                continue
            context = GATHERED_EXPERTS.make_context(call)
            context.gathered(tokens * dist.get_world_size(), hidden, torch.bfloat16).local.fill_(float("nan"))
            found, native = fused_results(GATHERED_EXPERTS, call, context), native_results(GATHERED_EXPERTS, call)
            context.synchronize()
            assert len(found) == len(native) == 2 + 2 * local
            wrong = [index for index, (a, b) in enumerate(zip(found, native)) if not all_equal(a, b)]
            assert not wrong, wrong
            num_compared += 1
    assert num_compared and max(parts) > 1


@NEEDS_TE
@pytest.mark.parametrize("seed", range(3))
def test_experts_of_min_rows_are_multiplied_natively(device, all_equal, monkeypatch, seed):
    """A skewed routing in which two or three of eight experts have fewer than 257 rows."""
    from ditron_train.megatron.ep.experts import TEGemm

    needed, some, asked = GatheredExpertsOp.min_rows, TEGemm.some, []
    monkeypatch.setattr(GatheredExpertsOp, "min_rows", lambda self, call: max(needed(self, call), 257))
    monkeypatch.setattr(TEGemm, "some", lambda self, *args: (asked.append(args[-1]), some(self, *args))[1])
    shape = moe_layer("test", 2048, 512, 512, 8 * dist.get_world_size(), 2)
    shape.options.update(zipf=1.0, deterministic=False)
    with repeating(shape):
        call = _CASE.sample(shape, RunEnvironment(dist.group.WORLD, device, torch.bfloat16), seed)
        if _CASE.no_row_reason(call) is not None:
            pytest.skip("too many experts are below the minimum rows")
        context = GATHERED_EXPERTS.make_context(call)
        found, native = fused_results(GATHERED_EXPERTS, call, context), native_results(GATHERED_EXPERTS, call)
        context.synchronize()
    assert [index for index, (a, b) in enumerate(zip(found, native, strict=True)) if not all_equal(a, b)] == []
    assert len(asked) == 4 and all(asked)


def test_the_same_call_gives_the_same_bits_again(device, all_equal, parts):
    shape = moe_layer("test", 512, 512, 256, 4 * dist.get_world_size(), 2)
    call = _CASE.sample(shape, RunEnvironment(dist.group.WORLD, device, torch.bfloat16), 5)
    context, draw = GATHERED_EXPERTS.make_context(call), random.Random(7 + dist.get_rank())
    first = [one.clone() for one in fused_results(GATHERED_EXPERTS, call, context)]
    for _ in range(8):
        time.sleep(0.01 * draw.random())
        again = fused_results(GATHERED_EXPERTS, call, context)
        assert all(all_equal(a, b) for a, b in zip(first, again))
    context.synchronize()
    assert min(parts) == 1 and max(parts) == dist.get_world_size(), "in parts and whole"
