"""The flex dispatcher on GPUs under torchrun: ``torch.equal`` with megatron-core's flex dispatcher and MoE layer, with
DeepEP if it can be imported, else by torch and NCCL in DeepEP's order."""

from __future__ import annotations

import os
import random

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")
pytest.importorskip("megatron.core")

from test_ep import (  # noqa: E402, F401
    FUSED,
    NEEDS_TE,
    assert_equal_passes,
    config,
    deterministic,
    normals,
    run_layer,
    steps_of_equal_layers,
    world,
)

from ditron_train.megatron.ep.flex_dispatcher import has_deepep  # noqa: E402
from ditron_train.policy import gate  # noqa: E402
from ditron_train.tools.bench.megatron_ep import layer_pair  # noqa: E402
from ditron_train.tools.cases.ep_layers import zipf_routing  # noqa: E402
from ditron_train.tools.cases.ep_moves import DispatcherPair  # noqa: E402

FLEX = {"moe_token_dispatcher_type": "flex"}


# DeepEP takes whole 512 bytes of bf16.
@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("local, topk, hidden", [(16, 8, 7168), (4, 3, 512), (1, 1, 2048)])
def test_dispatch_and_combine_of_random_routings(local, topk, hidden, fused):
    draw = random.Random(3)
    experts = local * dist.get_world_size()
    pair = DispatcherPair(config(experts, topk, hidden, fused=fused, **FLEX))
    for index in range(6):
        tokens = [draw.choice([1, 17, 400, 900, 3000]) for _ in range(dist.get_world_size())][dist.get_rank()]
        seed = 10 * index + 1000 * dist.get_rank()
        routed, probs = zipf_routing(tokens, experts, topk, exponent=index % 4, device="cuda", seed=seed)
        x, grad = (normals(tokens, hidden, dtype=torch.bfloat16, seed=seed + i) for i in range(2))
        assert_equal_passes(pair, x, routed, probs, grad)


def test_probabilities_of_zero_pick_the_same_experts():
    experts, topk, hidden, tokens = 8 * dist.get_world_size(), 6, 512, 700
    pair = DispatcherPair(config(experts, topk, hidden, **FLEX))
    routed, probs = zipf_routing(tokens, experts, 2, exponent=1.2, device="cuda", seed=dist.get_rank())
    x, grad = (normals(tokens, hidden, dtype=torch.bfloat16, seed=i) for i in range(2))
    assert_equal_passes(pair, x, routed, probs, grad)


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("local, topk, hidden, tokens", [(4, 2, 512, 1024), (16, 6, 2048, 700)])
def test_layers_have_the_bits_of_deepeps_order(device, local, topk, hidden, tokens, fused):
    layers = layer_pair(config(local * dist.get_world_size(), topk, hidden, fused=fused, **FLEX), device)
    for context in steps_of_equal_layers(layers, tokens, hidden):
        context.buffers.rows(1, 1, hidden, torch.bfloat16).local.fill_(float("nan"))


@NEEDS_TE
@pytest.mark.skipif(not has_deepep(), reason="needs DeepEP")
def test_the_policy_compares_with_deepep(device, monkeypatch):
    """Bits are equal, so only times decide."""
    monkeypatch.setitem(os.environ, "DITRON_POLICY", "bits")
    gate.forget("ep")
    layers = layer_pair(config(8 * dist.get_world_size(), 4, 1024, fused=True, **FLEX), device)
    x, grad = (normals(2048, 1, 1024, dtype=torch.bfloat16, seed=dist.get_rank() + i) for i in range(2))
    run_layer(layers["fused"], x, grad)
    assert layers["fused"].token_dispatcher.ep_context is not None, [answer.reason for answer in gate.answers("ep")]
