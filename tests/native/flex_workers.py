"""What the workers of the flex tests run: megatron-core's MoE layer with the flex dispatcher, natively by torch in
DeepEP's order and with ``ep``, the same weights and tokens."""

from __future__ import annotations

import contextlib
import random
import time

import torch
import torch.distributed as dist
from ep_workers import BASE, assert_equal, build, groups, run_layer, sizes_of

from ditron_train.tools.cases.ep_moves import deepep_by_torch

FLEX = {"moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32"}


@contextlib.contextmanager
def deterministic():
    """Sums repeat, and what is allocated and not initialised is full of NaN and of the largest integers."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def route_to(layer, kind):
    """Gives the layer a routing of its own, whose probabilities depend on the router's weights."""
    config, router = layer.config, layer.router
    experts, topk = config.num_moe_experts, config.moe_router_topk

    def route(hidden_states, *_):
        num_tokens = hidden_states.shape[0] * hidden_states.shape[1]
        generator = torch.Generator().manual_seed(17 + dist.get_rank())
        scores = torch.rand(num_tokens, experts, generator=generator)
        if kind == "zipf":
            scores = scores.log() * (torch.arange(experts) + 1.0) ** 1.2
        elif kind == "one":  # has all tokens, with its neighbours; some experts have none
            scores[:] = torch.arange(experts, dtype=torch.float32)
        routed = torch.zeros(num_tokens, experts, dtype=torch.bool)
        routed.scatter_(1, scores.topk(topk, dim=1).indices, True)
        if kind == "zeros":  # chosen, but of probability 0: as many as all other experts
            routed[::2] &= torch.arange(experts) == int(scores.argmax())
        logits = router.weight.sum(1).float()[None, :] + hidden_states.view(num_tokens, -1).float()[:, :experts]
        return torch.sigmoid(logits) * routed, routed

    layer.route = route


def layers_agree(options, tokens_by_rank, dtype=torch.bfloat16, kind=None, through_spec=False, stragglers=False):
    """Steps of both layers, bit for bit; how often the fused path moved tokens."""
    from ditron_train.megatron.ep.flex_dispatcher import DitronMoEFlexTokenDispatcher

    options, rank = {**FLEX, **options, "params_dtype": dtype, "bf16": dtype == torch.bfloat16}, dist.get_rank()
    calls = 0
    with deterministic(), groups(**sizes_of(options)):
        fused = build(options, True, through_spec)
        assert isinstance(fused.token_dispatcher, DitronMoEFlexTokenDispatcher)
        with deepep_by_torch():
            native = build(options, False)
        assert type(native.token_dispatcher) is not type(fused.token_dispatcher)
        assert all(torch.equal(a, b) for a, b in zip(native.parameters(), fused.parameters()))
        for layer in (native, fused) if kind else ():
            route_to(layer, kind)
        for step in range(8 if stragglers else 2):
            generator = torch.Generator().manual_seed(10 * step + rank)
            if stragglers:
                tokens_by_rank = [
                    random.Random(31 * step + r).choice([0, 1, 5, 12]) for r in range(dist.get_world_size())
                ]
                time.sleep(random.Random(7 * step + rank).random() * 0.05)
            shape = (tokens_by_rank[rank], 1, BASE["hidden_size"])
            x, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
            with deepep_by_torch():
                wanted = run_layer(native, x, grad)
            found = run_layer(fused, x, grad)
            assert_equal(wanted, found)
            assert not torch.isnan(found[0]).any() and (found[0].abs().sum() > 0 or not shape[0])
            calls += fused.token_dispatcher.ep_context is not None
    return calls
