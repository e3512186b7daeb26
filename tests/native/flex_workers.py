"""What the workers of the flex tests run: megatron-core's MoE layer with the flex dispatcher, natively by torch in
DeepEP's order and with ``ep``, the same weights and tokens."""

from __future__ import annotations

import contextlib
import importlib.util
import random
import sys
import time
from types import ModuleType
from unittest import mock

import torch
import torch.distributed as dist
from ep_workers import BASE, assert_equal, build, groups, lines_logged, run_layer, sizes_of, two_nodes

from ditron_train.tools.cases.ep_moves import deepep_by_torch

FLEX = {"moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32", "params_dtype": torch.bfloat16, "bf16": True}


@contextlib.contextmanager
def deterministic():
    """Sums repeat, and what is allocated and not initialised is full of NaN and of the largest integers."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def descending_sums(rows, routing_map):
    """Rows by expert, then token, to tokens: by descending expert in fp32, one rounding, as Transformer Engine's."""
    total, end = torch.zeros(len(routing_map), rows.shape[1]), len(rows)
    for expert in reversed(range(routing_map.shape[1])):
        tokens = routing_map[:, expert].nonzero()[:, 0]
        total[tokens] += rows[end - len(tokens) : end].float()
        end -= len(tokens)
    assert end == 0
    return total.to(rows.dtype)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, probs, routing_map):
        ctx.save_for_backward(routing_map)
        weights = probs.T[routing_map.T]
        rows = tokens[routing_map.T.nonzero()[:, 1]]
        return torch.where(weights[:, None] == 0, 0, rows), weights

    @staticmethod
    def backward(ctx, grad, grad_weights):
        (routing_map,) = ctx.saved_tensors
        grad_probs = torch.zeros(routing_map.shape[::-1]).masked_scatter(routing_map.T, grad_weights)
        return descending_sums(grad, routing_map), grad_probs.T, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, routing_map):
        ctx.save_for_backward(routing_map)
        return descending_sums(rows, routing_map)

    @staticmethod
    def backward(ctx, grad):
        (routing_map,) = ctx.saved_tensors
        return grad[routing_map.T.nonzero()[:, 1]], None


def fused_permutation():
    """Megatron's fused permutation, in torch."""

    def permute(tokens, probs, routing_map, num_out_tokens):
        rows, weights = _Permute.apply(tokens, probs, routing_map)
        assert len(rows) == num_out_tokens
        return rows, weights, routing_map

    def unpermute(rows, routing_map, merging_probs=None, restore_shape=None):
        assert merging_probs is None
        return _Unpermute.apply(rows, routing_map)

    values = dict(HAVE_TE=True, fused_permute_with_probs=permute, fused_unpermute=unpermute)
    return mock.patch.multiple("megatron.core.transformer.moe.moe_utils", create=True, **values)


def route_to(layer, kind):
    """Gives the layer a routing of its own, with probabilities that depend on its router's weights."""
    config, router = layer.config, layer.router
    experts, topk = config.num_moe_experts, config.moe_router_topk

    def route(hidden_states, *_, **__):
        num_tokens = hidden_states.shape[0] * hidden_states.shape[1]
        generator = torch.Generator().manual_seed(17 + dist.get_rank())
        scores = torch.rand(num_tokens, experts, generator=generator)
        if kind == "zipf":
            scores = scores.log() * (torch.arange(experts) + 1.0) ** 1.2
        elif kind == "one":  # has all tokens, with its neighbours; the first experts have none
            scores[:] = torch.arange(experts)
        routed = torch.zeros(num_tokens, experts, dtype=torch.bool)
        routed.scatter_(1, scores.topk(topk, dim=1).indices, True)
        logits = (
            router.weight.sum(1).float() + hidden_states.view(num_tokens, hidden_states.shape[-1]).float()[:, :experts]
        )
        probs = torch.sigmoid(logits)
        if kind == "zeros":  # every other token has one probability that is not 0: all other experts are as good
            kept = routed & (
                (torch.arange(experts) == scores.argmax(1)[:, None]) | (torch.arange(num_tokens) % 2 == 1)[:, None]
            )
            return torch.where(kept, probs, probs - probs.detach()), routed  # gradients show which were taken
        return probs * routed, routed

    layer.route = route


def pair_of(options, kind=None, through_spec=False):
    """The layer natively, by torch in DeepEP's order, and with ``ep``."""
    from ditron_train.megatron.ep.flex_dispatcher import DitronMoEFlexTokenDispatcher

    fused = build({**FLEX, **options}, True, through_spec)
    assert isinstance(fused.token_dispatcher, DitronMoEFlexTokenDispatcher)
    with deepep_by_torch():
        native = build({**FLEX, **options}, False)
    assert type(native.token_dispatcher).__name__ == "MoEFlexTokenDispatcher"
    assert not isinstance(native.token_dispatcher, DitronMoEFlexTokenDispatcher)
    assert all(torch.equal(a, b) for a, b in zip(native.parameters(), fused.parameters(), strict=True))
    for layer in (native, fused) if kind else ():
        route_to(layer, kind)
    return native, fused


def layers_agree(options, tokens_by_rank, kind=None, through_spec=False):
    """Steps of both layers, bit for bit; how often the fused path was counted. ``tokens_by_rank`` is a tuple, or a
    number of steps of ever new tokens, with stragglers."""
    from ditron_train.megatron.plugin.fused_calls import FUSED_CALLS

    rank, steps = dist.get_rank(), tokens_by_rank if isinstance(tokens_by_rank, int) else 2
    options = {**FLEX, **options}
    fuses = fused_permutation() if options.get("moe_permute_fusion") else contextlib.nullcontext()
    FUSED_CALLS.install(("ep",))
    FUSED_CALLS.take()
    with deterministic(), groups(**sizes_of(options)), fuses:
        native, fused = pair_of(options, kind, through_spec)
        for step in range(steps):
            tokens = tokens_by_rank
            if isinstance(tokens, int):
                tokens = [random.Random(31 * step + r).choice([0, 1, 5, 12]) for r in range(dist.get_world_size())]
                time.sleep(random.Random(7 * step + rank).random() * 0.05)
            generator = torch.Generator().manual_seed(10 * step + rank)
            shape = (tokens[rank], 1, BASE["hidden_size"])
            x, grad = (torch.randn(shape, generator=generator).to(options["params_dtype"]) for _ in range(2))
            with deepep_by_torch():
                wanted = run_layer(native, x, grad)
            found = run_layer(fused, x, grad)
            assert_equal(wanted, found)
            assert not torch.isnan(found[0]).any() and (found[0].abs().sum() > 0 or not tokens[rank])
            if fused.token_dispatcher.ep_context is not None:
                fused.token_dispatcher.ep_context.buffers.rows(1, 1, shape[-1], x.dtype).local.fill_(float("nan"))
    return FUSED_CALLS.take().get("ep", 0)


def error_of(options=None, tokens=8, stub=None):
    """What a layer with ``ep`` raises, where DeepEP is missing, when it is built or called; what rank 0 logged."""
    options = {**FLEX, **(options or {})}
    with groups(**sizes_of(options)), lines_logged() as lines:
        try:
            layer = build(options, options.pop("with_ep", True))
            if stub is not None:
                mock.patch(f"ditron_train.megatron.ep.flex_dispatcher.{stub}", return_value=True).start()
            for _ in range(2):  # a second step after the first has failed is as clear
                with contextlib.suppress(RuntimeError) if _ == 0 else contextlib.nullcontext():
                    run_layer(layer, *(torch.randn(tokens, 1, 32).to(options["params_dtype"]) for _ in range(2)))
        except (ImportError, RuntimeError, ValueError, AssertionError) as error:
            return type(error).__name__, str(error), lines
        finally:
            mock.patch.stopall()
    return None, "", lines


def error_over_two_nodes(options):
    """``error_of`` where half of the ranks pose as another node."""
    with two_nodes():
        return error_of(options)


def native_where_deepep_is(options, tokens=8, arena_bytes=None):
    """Where DeepEP is there (by torch), a layer that the fused path does not take: the same bits natively; the log."""
    options = {**FLEX, **options}
    with deterministic(), groups(**sizes_of(options)), lines_logged() as lines, deepep_by_torch():
        native, fused = pair_of(options)
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            x, grad = (torch.randn(tokens, 1, 32, generator=generator).bfloat16() for _ in range(2))
            assert_equal(run_layer(native, x, grad), run_layer(fused, x, grad))
        return fused.token_dispatcher.ep_context is None, lines


def policy_is_asked():
    """Where DeepEP is there (by torch): the policy's run of both dispatchers, once for each kind of layer."""
    from ditron_train.policy import gate

    options = dict(FLEX)
    with deterministic(), groups(**sizes_of(options)), deepep_by_torch():
        layer = build(options, True)
        probs = torch.rand(5 + dist.get_rank(), BASE["num_moe_experts"])
        given = torch.randn(len(probs), 1, 32).bfloat16(), probs
        found = [layer.token_dispatcher._ask_policy(*given) for _ in range(2)]
        kept = [answer.is_fused for answer in gate.answers("ep")]
        gate.forget("ep")
        return found, kept


def both_paths_of_the_trial():
    """What the policy would compare on a GPU, DeepEP by torch: rows, results and gradients of both dispatchers."""
    from ditron_train.megatron.ep import flex_dispatcher
    from ditron_train.megatron.ep.spec import FLEX as OP

    seen = []
    with deterministic(), groups(**sizes_of({})), deepep_by_torch():
        layer = build(dict(FLEX), True)
        probs = torch.rand(5 + dist.get_rank(), BASE["num_moe_experts"])
        with mock.patch.object(flex_dispatcher.gate, "answer_for", side_effect=lambda op, call: seen.append(call)):
            with contextlib.suppress(AttributeError):
                layer.token_dispatcher._ask_policy(torch.randn(len(probs), 1, 32).bfloat16(), probs)
        trial = OP.trial(seen[0], None)
        for native, fused in ((trial.native, trial.fused), *trial.extra_cases):
            pairs = list(zip(native(), fused(), strict=True))
            assert len(pairs) == 4 and all(torch.equal(a, b) for a, b in pairs)
    return trial.description


def megatron_with_newer_deepep():
    """Whether Megatron's module finds a DeepEP like 2.0's, which has no ``EventOverlap`` in ``utils``."""
    from megatron.core.transformer.moe import fused_a2a

    package, utils = ModuleType("deep_ep"), ModuleType("deep_ep.utils")
    package.Buffer, utils.EventHandle, package.utils = object, object, utils
    spec = importlib.util.spec_from_file_location("newer_fused_a2a", fused_a2a.__file__)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {"deep_ep": package, "deep_ep.utils": utils}):
        spec.loader.exec_module(module)
    return module.fused_dispatch is not None
