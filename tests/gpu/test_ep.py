"""Expert parallelism on GPUs under torchrun: ``torch.equal`` with megatron-core's alltoall dispatcher and MoE
layer."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")
pytest.importorskip("megatron.core")

from megatron.core.activations import squared_relu  # noqa: E402

from ditron_train.ep.plan import triton_wgrad_has_native_bits  # noqa: E402
from ditron_train.megatron.ep.dispatcher import _expert_capacity  # noqa: E402
from ditron_train.tools.bench.megatron_ep import HAVE_TE, expert_parallel_world, layer_pair  # noqa: E402
from ditron_train.tools.cases.ep_layers import zipf_routing  # noqa: E402
from ditron_train.tools.cases.ep_moves import DispatcherPair, moe_config  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))
from child_job import found_by  # noqa: E402
from ep_workers import COMBINED, combined_steps, gpt, with_and_without_plans  # noqa: E402

import ditron_train.megatron as plugin  # noqa: E402
from ditron_train.ep import (  # noqa: E402
    begin_layout,
    combine,
    combine_rows,
    dispatch,
    dispatch_ahead,
    dispatch_tokens,
    min_rows_before,
)
from ditron_train.symm import close_all_arenas  # noqa: E402

NEEDS_TE = pytest.mark.skipif(not HAVE_TE, reason="needs Transformer Engine")
FUSED = [False, pytest.param(True, marks=NEEDS_TE)]


@pytest.fixture(scope="module", autouse=True)
def world(device):
    if dist.get_world_size() == 1:
        pytest.skip("needs at least two GPUs")
    with expert_parallel_world():
        yield device
        torch.cuda.synchronize()
        dist.barrier()


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    monkeypatch.setenv("DITRON_POLICY", "force")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.use_deterministic_algorithms(False)


def normals(*shape, dtype, seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.empty(shape, dtype=dtype, device="cuda").normal_(generator=generator)


def config(num_experts, topk, hidden=1024, dtype=torch.bfloat16, fused=False, ffn_hidden=256, **others):
    return moe_config(
        hidden=hidden, ffn_hidden=ffn_hidden, num_experts=num_experts, topk=topk, dtype=dtype, fused=fused, **others
    )


def pass_through(pair, name, x, routed, probs, grad):
    """Dispatch, a stand-in for experts that mixes in the probabilities, combine; everything that comes out."""
    x, probs = x.detach().requires_grad_(), probs.detach().requires_grad_()
    rows, tokens_per_expert, row_probs = pair.dispatch(name, x, routed, probs)
    out = pair.combine(name, (rows * 1.5 * row_probs[:, None]).to(rows.dtype))
    out.backward(grad)
    return [rows.detach(), row_probs.detach(), tokens_per_expert.cpu(), out.detach(), x.grad, probs.grad]


def run_layer(layer, x, grad):
    leaf = x.detach().requires_grad_()
    out, _ = layer(leaf)
    named = dict(layer.named_parameters())
    return {"out": out.detach()} | dict(
        zip(["x", *named], torch.autograd.grad(out, [leaf, *named.values()], grad, allow_unused=True))
    )


def steps_of_equal_layers(layers, tokens, hidden):
    """Runs both layers of a pair four times, ranks one after the other, and compares them; yields the fused one's
    context after each, when nothing runs."""
    draw = random.Random(dist.get_rank())
    for step in range(4):
        seed = 100 * step + dist.get_rank()
        x, grad = (normals(tokens, 1, hidden, dtype=torch.bfloat16, seed=seed + i) for i in range(2))
        time.sleep(0.02 * draw.random())
        native, found = (run_layer(layers[name], x, grad) for name in ("native", "fused"))
        dispatcher = layers["fused"].token_dispatcher
        assert dispatcher.ep_context is not None, dispatcher._native_because
        dispatcher.ep_context.synchronize()
        for name, value in native.items():
            assert (value is None and found[name] is None) or torch.equal(value, found[name]), (step, name)
        yield dispatcher.ep_context


def assert_equal_passes(pair, x, routed, probs, grad):
    native = pass_through(pair, "native", x, routed, probs, grad)
    fused = pass_through(pair, "fused", x, routed, probs, grad)
    assert pair.fused.ep_context is not None
    pair.fused.ep_context.check()
    for name, a, b in zip(("rows", "row_probs", "tokens_per_expert", "out", "dx", "dprobs"), native, fused):
        assert a.shape == b.shape and torch.equal(a, b), name


# experts of a rank, top-k, hidden, type, fused: each is a set of kernels to compile (fused: and of TE's to tune, by
# hidden), 5 s and more, so other tests use those of the first two
SHAPES = [
    (16, 8, 512, torch.bfloat16, False),
    (1, 1, 64, torch.bfloat16, False),
    (5, 4, 1000, torch.bfloat16, False),
    (2, 3, 9000, torch.bfloat16, False),
    (3, 3, 512, torch.float16, False),
    (2, 2, 512, torch.float32, False),
    pytest.param(16, 8, 512, torch.bfloat16, True, marks=NEEDS_TE),
]


@pytest.mark.parametrize("local, topk, hidden, dtype, fused", SHAPES)
def test_dispatch_and_combine_of_random_routings(local, topk, hidden, dtype, fused):
    draw = random.Random(3)
    experts = local * dist.get_world_size()
    pair = DispatcherPair(config(experts, topk, hidden, dtype, fused))
    for index in range(6):
        tokens = [draw.choice([1, 17, 400, 900, 3000]) for _ in range(dist.get_world_size())][dist.get_rank()]
        seed = 10 * index + 1000 * dist.get_rank()
        routed, probs = zipf_routing(tokens, experts, topk, exponent=index % 4, device="cuda", seed=seed)
        x, grad = (normals(tokens, hidden, dtype=dtype, seed=seed + i) for i in range(2))
        assert_equal_passes(pair, x, routed, probs, grad)


def test_one_expert_gets_everything_and_others_nothing():
    experts, tokens = dist.get_world_size(), 300
    pair = DispatcherPair(config(experts, 1, 64))
    routed = torch.zeros(tokens, experts, dtype=torch.bool, device="cuda")
    routed[:, experts - 2] = True
    x, grad = (normals(tokens, 64, dtype=torch.bfloat16, seed=i) for i in range(2))
    assert_equal_passes(pair, x, routed, routed.float() * 0.5, grad)


@pytest.mark.parametrize("fused", FUSED)
def test_padded_to_capacity(fused):
    """Every expert gets as many tokens of each rank, some of them of probability 0; one token has nearly all
    experts."""
    experts, topk, hidden = 16 * dist.get_world_size(), 8, 512
    options = dict(moe_expert_capacity_factor=1.5, moe_pad_expert_input_to_capacity=True)
    pair = DispatcherPair(config(experts, topk, hidden, fused=fused, **options))
    for tokens in (64, 1000, 333):
        seed = tokens + 1000 * dist.get_rank()
        _, probs = zipf_routing(tokens, experts, topk, exponent=2, device="cuda", seed=seed)
        capacity = _expert_capacity(pair.fused, tokens)
        chosen = probs.topk(capacity, dim=0).indices
        routed = torch.zeros_like(probs, dtype=torch.bool).scatter_(0, chosen, True)
        assert routed.sum(1).max() > topk and bool((routed & (probs == 0)).any())
        x, grad = (normals(tokens, hidden, dtype=torch.bfloat16, seed=seed + i) for i in range(2))
        assert_equal_passes(pair, x, routed, probs * routed, grad)


def test_published_shape():
    pair = DispatcherPair(config(128, 8, 7168))
    routed, probs = zipf_routing(8192, 128, 8, exponent=0, device="cuda", seed=dist.get_rank())
    x, grad = (normals(8192, 7168, dtype=torch.bfloat16, seed=i + 10 * dist.get_rank()) for i in range(2))
    assert_equal_passes(pair, x, routed, probs, grad)


def test_changing_counts_stragglers_and_poisoned_buffers():
    rank, world_size, topk, hidden = dist.get_rank(), dist.get_world_size(), 8, 512
    experts = 16 * world_size
    pair = DispatcherPair(config(experts, topk, hidden))
    first = zipf_routing(8, experts, topk, exponent=0, device="cuda", seed=rank)
    pair.dispatch("fused", normals(8, hidden, dtype=torch.bfloat16, seed=0), *first)
    context = pair.fused.ep_context
    for step in range(int(os.environ.get("DITRON_TEST_STEPS", "100"))):  # 1000 once, by hand
        tokens = random.Random(step * 100 + rank).choice([0, 1, 50, 333, 700])
        routed, probs = zipf_routing(tokens, experts, topk, exponent=step % 3, device="cuda", seed=1000 * rank + step)
        x = torch.randint(-4, 5, (tokens, hidden), device="cuda").bfloat16()
        if random.Random(step).randrange(world_size) == rank:
            torch.cuda._sleep(2_000_000)
        pending = begin_layout(routed, probs, hidden, torch.bfloat16, context)
        if step % 3:
            dispatch_ahead(x, pending)
        layout = pending.finish()
        rows, row_probs = dispatch(x, layout, context)
        back, grads = combine(rows, layout, context, order="ascending", row_grads=row_probs)
        assert torch.equal(back, x * topk) and torch.equal(grads, probs), step
        context.buffers.rows(1, 1, hidden, torch.bfloat16).local.fill_(float("nan"))
    context.check()


def test_min_rows_are_seen_without_a_host_sync():
    experts, hidden, expected = 16 * dist.get_world_size(), 512, None
    pair = DispatcherPair(config(experts, 8, hidden))
    routed, probs = zipf_routing(300, experts, 8, exponent=2, device="cuda", seed=dist.get_rank())
    pair.dispatch("fused", normals(300, hidden, dtype=torch.bfloat16, seed=0), routed, probs)
    context = pair.fused.ep_context
    context.counts_on_their_way = None
    for exponent in (3, 0, 1):
        routed, probs = zipf_routing(300, experts, 8, exponent=exponent, device="cuda", seed=dist.get_rank())
        begin_layout(routed, probs, hidden, torch.bfloat16, context, capacity_factor=16.0).finish()
        assert min_rows_before(context) == expected
        counts = routed.sum(0)
        dist.all_reduce(counts)
        torch.cuda.synchronize()
        expected = int(counts[counts > 0].min())
    context.check()


def test_gradients_of_no_tokens_are_empty():
    tokens, experts, hidden = 0 if dist.get_rank() == 0 else 5, 16 * dist.get_world_size(), 512
    pair = DispatcherPair(config(experts, 8, hidden))
    routed, probs = zipf_routing(8, experts, 8, exponent=0, device="cuda", seed=dist.get_rank())
    pair.dispatch("fused", normals(8, hidden, dtype=torch.bfloat16, seed=0), routed, probs)
    context = pair.fused.ep_context
    x = normals(tokens, hidden, dtype=torch.bfloat16, seed=1).requires_grad_()
    probs = probs[:tokens].detach().requires_grad_()
    layout = begin_layout(routed[:tokens], probs, hidden, torch.bfloat16, context).finish()
    rows, row_probs = dispatch_tokens(x, probs, layout, context, "ascending")
    out = combine_rows(rows, layout, context, "ascending")
    (out.sum() + row_probs.sum()).backward()
    assert x.grad.shape == x.shape and torch.equal(probs.grad, routed[:tokens].float())


LAYERS = {
    "plain": {},
    "drop": {"moe_expert_capacity_factor": 0.6},
    "pad": {"moe_expert_capacity_factor": 1.2, "moe_pad_expert_input_to_capacity": True},
    "pad_by_position": {
        "moe_expert_capacity_factor": 1.5,
        "moe_pad_expert_input_to_capacity": True,
        "moe_token_drop_policy": "position",
    },
    "aux_loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
    "shared_experts_overlapped": {"moe_shared_expert_intermediate_size": 256, "moe_shared_expert_overlap": True},
    "recompute": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "recompute_activation": {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
    "main_grad": {"gradient_accumulation_fusion": True},
    "main_grad of small experts": {"gradient_accumulation_fusion": True},
    "squared_relu": {"gated_linear_unit": False, "activation_func": squared_relu, "bias_activation_fusion": False},
    "geglu": {"activation_func": torch.nn.functional.gelu, "bias_activation_fusion": False},
    "bias": {"add_bias_linear": True, "bias_activation_fusion": False},
    "probs_bf16": {"moe_router_dtype": None},
}


def one_step(layer, x, grad, main_grad):
    """Output and all gradients; with ``main_grad`` of two microbatches, added up there."""
    parameters = dict(layer.named_parameters())
    if main_grad:
        for parameter in parameters.values():
            parameter.main_grad = torch.full_like(parameter, 0.5, dtype=torch.float32)
            parameter.grad_added_to_main_grad = False
        for module in layer.modules():
            if hasattr(module, "is_first_microbatch"):
                module.is_first_microbatch = True
    seen = []
    for micro in range(2 if main_grad else 1):
        leaf = (x + micro).detach().requires_grad_()
        y, _ = layer(leaf)
        y.backward(grad)
        seen += [y.detach(), leaf.grad]
    grads = [getattr(p, "main_grad", None) if main_grad and "experts" in n else p.grad for n, p in parameters.items()]
    layer.zero_grad()
    return [*seen, *(grad.clone() for grad in grads)]


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("name", LAYERS)
def test_moe_layer(name, fused):
    if fused and name not in ("plain", "drop", "pad", "main_grad", "main_grad of small experts"):
        pytest.skip("the permutation does not depend on it")
    if "main_grad" in name and not HAVE_TE:
        pytest.skip("needs Transformer Engine")
    # Of small weights cuBLAS splits sums that are added into main_grad (seen of [512, 256]): too wide for that, and
    # not so deep that it splits those of the products (seen of [512, 8448]).
    hidden, ffn_hidden = (4096, 1280) if name == "main_grad" else (512, 256)
    if name == "main_grad of small experts":  # of Qwen3-30B-A3B: where sums are split, a step's are Megatron's
        hidden, ffn_hidden = 2048, 768
    assert name != "main_grad" or triton_wgrad_has_native_bits(hidden, ffn_hidden)
    options = config(4 * dist.get_world_size(), 3, hidden, fused=fused, ffn_hidden=ffn_hidden, **LAYERS[name])
    layers = layer_pair(options, torch.device("cuda"))
    x, grad = (normals(700, 1, hidden, dtype=torch.bfloat16, seed=i + 10 * dist.get_rank()) for i in range(2))
    results = [one_step(layers[kind], x, grad, "main_grad" in name) for kind in ("native", "native", "fused")]
    dispatcher = layers["fused"].token_dispatcher
    assert dispatcher.ep_context is not None, dispatcher._native_because
    if HAVE_TE and name not in ("recompute_activation", "bias") and torch.cuda.get_device_capability() >= (9, 0):
        assert dispatcher._pairs >= {"gemm_combine", "overlap_wgrad"}
    assert all(torch.equal(a, b) for a, b in zip(*results[:2])), "native does not repeat itself"
    wrong = [index for index, (a, b) in enumerate(zip(results[0], results[2])) if not torch.equal(a, b)]
    assert not wrong, wrong


@pytest.mark.parametrize("fused", FUSED)
def test_the_policy_finds_equal_bits(monkeypatch, fused):
    monkeypatch.setenv("DITRON_POLICY", "strict")
    torch.use_deterministic_algorithms(False)
    experts = 16 * dist.get_world_size()
    pair = DispatcherPair(config(experts, 8, 512, fused=fused))
    routed, probs = zipf_routing(2048, experts, 8, exponent=0, device="cuda", seed=dist.get_rank())
    pair.dispatch("fused", normals(2048, 512, dtype=torch.bfloat16, seed=1), routed, probs)
    reason = pair.fused._native_because
    assert reason is None or "not faster" in reason, reason


@NEEDS_TE
@pytest.mark.parametrize("capacity", ["4", ""], ids=["no_host_sync", "exact"])
def test_first_calls_in_poisoned_memory(monkeypatch, capacity):
    """The fused path first, with nothing known and everything that is not initialised full of NaN; then native; then
    the fused path again.

    With a fixed capacity the activation gets another number of rows than natively, and torch.compile's choice of how
    to add up depends on the sizes that it met before, of earlier tests too: there it is not compiled. Of weights [512,
    256] and 3072 rows cuBLAS splits the sums of the gradient, and the fused path (of "force") differ; of [512, 512]
    not.
    """
    if capacity:
        monkeypatch.setenv("DITRON_EP_CAPACITY", capacity)
    options = config(4 * dist.get_world_size(), 3, 512, fused=True, ffn_hidden=512)
    x, grad = (normals(4096, 1, 512, dtype=torch.bfloat16, seed=i + 10 * dist.get_rank()) for i in range(2))

    def passes(kind, tokens):
        torch.utils.deterministic.fill_uninitialized_memory = kind == "fused"
        leaf = x[:tokens].detach().requires_grad_()
        y, _ = layers[kind](leaf)
        grads = torch.autograd.grad(y, [leaf, *layers[kind].parameters()], grad[:tokens])
        torch.utils.deterministic.fill_uninitialized_memory = False
        return dict(zip(("y", "x", *(n for n, _ in layers[kind].named_parameters())), (y.detach(), *grads)))

    tokens = 4096
    for _ in range(2):
        close_all_arenas()
        layers = layer_pair(options, torch.device("cuda"))
        with torch.compiler.set_stance("force_eager" if capacity else "default"):
            seen = [(kind, passes(kind, tokens)) for kind in ("fused", "native", "fused", "native")]
        dispatcher = layers["fused"].token_dispatcher
        dispatcher.ep_context.check()
        assert (dispatcher._capacity.factor is not None) == bool(capacity)
        native = seen[-1][1]
        wrong = [
            (call, kind, part, int((result[part] != native[part]).sum()))
            for call, (kind, result) in enumerate(seen)
            for part in native
            if not torch.equal(result[part], native[part])
        ]
        assert not wrong, wrong


@NEEDS_TE
@pytest.mark.parametrize("name", ["plain", "pad"])
def test_the_compiled_activation_gets_what_it_gets_natively(monkeypatch, name):
    """Shapes, strides, offsets: of others torch.compile makes other code, whose sums may be others."""
    from megatron.core.fusions import fused_bias_swiglu

    seen = {}
    for function in ("weighted_swiglu", "weighted_swiglu_back"):
        compiled = getattr(fused_bias_swiglu, function)

        def recorded(*tensors, function=function, compiled=compiled):
            facts = [
                (t.shape, t.stride(), t.storage_offset(), t.dtype, t.requires_grad, t.data_ptr() % 16) for t in tensors
            ]
            seen.setdefault(kind, []).append((function, facts))
            return compiled(*tensors)

        monkeypatch.setattr(fused_bias_swiglu, function, recorded)
    layers = layer_pair(config(4 * dist.get_world_size(), 3, 512, fused=True, **LAYERS[name]), torch.device("cuda"))
    x, grad = (normals(700, 1, 512, dtype=torch.bfloat16, seed=i + 10 * dist.get_rank()) for i in range(2))
    for kind in ("native", "fused"):
        one_step(layers[kind], x, grad, False)
    assert [function for function, _ in seen["native"]] == ["weighted_swiglu", "weighted_swiglu_back"]
    assert seen["fused"] == seen["native"]


@NEEDS_TE
def test_moe_layer_in_a_graph(monkeypatch):
    """Router, dispatch, experts and combine captured once, replayed with other tokens: routed anew on the device. The
    buffers that it knows stay, though other calls make larger ones."""
    monkeypatch.setenv("DITRON_EP_CAPACITY", "4")
    options = config(4 * dist.get_world_size(), 3, 512, fused=True)
    layer = layer_pair(options, torch.device("cuda"))["fused"]
    x, grad = (normals(1024, 1, 512, dtype=torch.bfloat16, seed=i + 10 * dist.get_rank()) for i in range(2))
    x.requires_grad_()
    leaves = [x, *layer.parameters()]

    def step():
        y, _ = layer(x)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        captured = step()
    arena = layer.token_dispatcher.ep_context.arena
    for seed in range(4):
        if seed == 2:
            room = arena.capacity_bytes("ep/rows")
            layer(normals(8192, 1, 512, dtype=torch.bfloat16, seed=9 + dist.get_rank()))
            assert arena.capacity_bytes("ep/rows") > room
            spoiled = [torch.full((words,), -1, device="cuda") for words in (1, 8, 64) for _ in range(2000)]  # noqa: F841
        with torch.no_grad():
            x.copy_(normals(1024, 1, 512, dtype=torch.bfloat16, seed=100 * seed + dist.get_rank()))
        graph.replay()
        wrong = [index for index, (a, b) in enumerate(zip(captured, step())) if not torch.equal(a, b)]
        assert not wrong, (seed, wrong)
    layer.token_dispatcher.ep_context.check()


@NEEDS_TE
def test_peak_memory_is_not_above_native(monkeypatch):
    """Symmetric buffers, which all layers share and the log names, are not counted: they are not the allocator's."""
    options = config(4 * dist.get_world_size(), 3, 512, fused=True)
    layers = layer_pair(options, torch.device("cuda"))
    x, grad = (normals(16384, 1, 512, dtype=torch.bfloat16, seed=i + 10 * dist.get_rank()) for i in range(2))
    peaks = {}
    for name in ("native", "fused"):
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            leaf = x.detach().requires_grad_()
            y, _ = layers[name](leaf)
            grads = torch.autograd.grad(y, [leaf, *layers[name].parameters()], grad)
            peaks[name] = torch.cuda.max_memory_allocated() - before
            del y, leaf, grads
    assert peaks["fused"] <= peaks["native"], peaks


def test_two_simulated_nodes(monkeypatch):
    """Half of the GPUs as another node: along rails by NCCL, inside by peer memory; forward and all gradients."""
    if dist.get_world_size() % 4:
        pytest.skip("needs four GPUs")
    monkeypatch.setenv("DITRON_EP_RAILS", "on")
    monkeypatch.setenv("NCCL_HOSTID", f"node{2 * dist.get_rank() // dist.get_world_size()}")
    layers = layer_pair(config(6 * dist.get_world_size(), 3, 512), torch.device("cuda"))
    tokens = (700, 1, 400, 900)[dist.get_rank() % 4]
    x, grad = (normals(tokens, 1, 512, dtype=torch.bfloat16, seed=i + 10 * dist.get_rank()) for i in range(2))
    results = [one_step(layers[kind], x, grad, False) for kind in ("native", "fused", "fused")]
    assert layers["fused"].token_dispatcher.ep_context.num_nodes == 2
    for fused in results[1:]:
        wrong = [index for index, (a, b) in enumerate(zip(results[0], fused)) if not torch.equal(a, b)]
        assert not wrong, wrong


@NEEDS_TE
def test_combined_schedule(monkeypatch):
    """overlap_moe_expert_parallel_comm: MoE layers in pieces on two streams, beside the backward pass of another
    microbatch."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    options = config(4 * dist.get_world_size(), 3, 512, fused=True, num_attention_heads=8, **COMBINED)
    native = gpt(options, te=True, vocabulary=512, sequence=1024).cuda().bfloat16()
    plugin.apply(features="ep")
    try:
        fused = gpt(options, te=True, vocabulary=512, sequence=1024).cuda().bfloat16()
    finally:
        plugin.restore()
    assert all(torch.equal(a, b) for a, b in zip(native.parameters(), fused.parameters()))
    results = [combined_steps(model, 6, device="cuda") for model in (native, native, fused, fused)]
    dispatchers = [layer.mlp.token_dispatcher for layer in fused.decoder.layers[1:]]
    assert all(dispatcher.ep_context is not None for dispatcher in dispatchers), dispatchers[0]._native_because
    dispatchers[0].ep_context.check()
    assert all(torch.equal(a, b) for a, b in zip(*results[:2])), "native does not repeat itself"
    for fused_result in results[2:]:
        wrong = [index for index, (a, b) in enumerate(zip(results[0], fused_result)) if not torch.equal(a, b)]
        assert not wrong, wrong


@NEEDS_TE
@pytest.mark.parametrize(
    "policy, delay, connections",
    [("strict", "off", "1"), ("strict", "on", "32"), ("bits", "on", "1"), ("bits", "off", "32")],
)
def test_combined_schedule_in_a_job_of_its_own(own_gpus, policy, delay, connections):
    """CUDA reads the number of connections when a process starts. Under ``strict`` paths alternate from step to step,
    until one is faster; bits are native's in all of them."""
    settings = dict(DITRON_POLICY=policy, DELAY=delay, CUDA_DEVICE_MAX_CONNECTIONS=connections)
    found = found_by("combined_program.py", NVTE_ALLOW_NONDETERMINISTIC_ALGO="0", **settings)
    assert not found["wrong"]
    alternating = [False, True, False, True, True, False] if policy == "strict" else [True] * 6
    assert found["fused"][:6] == alternating, found
    paths = [None] * dist.get_world_size()
    dist.all_gather_object(paths, found["fused"])
    assert all(path == paths[0] for path in paths)
    print(*found["lines"], sep="\n")


@NEEDS_TE
@pytest.mark.parametrize("policy", ["strict", "bits", "force"])
def test_schedule_plans_without_their_flag(policy, monkeypatch):
    """Plans that are built with overlap_moe_expert_parallel_comm off, as Megatron's own tests do: their nodes free
    what the fused path would still send or keep."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    monkeypatch.setenv("DITRON_POLICY", policy)
    without = {**COMBINED, "overlap_moe_expert_parallel_comm": False}
    options = config(4 * dist.get_world_size(), 3, 512, fused=True, num_attention_heads=8, **without)
    native = gpt(options, te=True, vocabulary=512, sequence=1024).cuda().bfloat16()
    plugin.apply(features="ep")
    try:
        fused = gpt(options, te=True, vocabulary=512, sequence=1024).cuda().bfloat16()
    finally:
        plugin.restore()
    results = with_and_without_plans(native, fused, 6, device="cuda")
    torch.cuda.synchronize()
    assert [wrong for wrong, _ in results] == [[], [], []]
    assert results[1][1] == {False}
    if policy == "force":
        assert results[0][1] == results[2][1] == {True}


@contextlib.contextmanager
def groups_of(**sizes):
    """Other groups for the time of one test, on four GPUs."""
    from megatron.core import parallel_state

    if dist.get_world_size() != 4:
        pytest.skip("needs four GPUs")
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())


def assert_equal_layers(options):
    layers, tokens = layer_pair(options, torch.device("cuda")), (700, 1, 400, 900)[dist.get_rank()]
    x, grad = (normals(tokens, 1, 512, dtype=torch.bfloat16, seed=i + 10 * dist.get_rank()) for i in range(2))
    results = [one_step(layers[kind], x, grad, False) for kind in ("native", "native", "fused")]
    assert layers["fused"].token_dispatcher.ep_context is not None, layers["fused"].token_dispatcher._native_because
    assert all(torch.equal(a, b) for a, b in zip(*results[:2])), "native does not repeat itself"
    wrong = [index for index, (a, b) in enumerate(zip(results[0], results[2])) if not torch.equal(a, b)]
    assert not wrong, wrong


@pytest.mark.parametrize("in_any_place", [1, 2])
@pytest.mark.parametrize("fused", FUSED)
def test_experts_split_over_tensor_parallel_ranks(monkeypatch, fused, in_any_place):
    """Groups of 2 x 2: rows move over the expert parallel group by the fused path, over the tensor parallel one by
    copy engines, or by megatron-core where places matter."""
    from ditron_train.megatron.ep import gather

    monkeypatch.setattr(gather, "_RANKS_IN_ANY_PLACE", in_any_place)  # of more, rows are stored where native's do
    monkeypatch.setenv("DITRON_POLICY", "bits")
    sizes = dict(expert_model_parallel_size=2, tensor_model_parallel_size=2, expert_tensor_parallel_size=2)
    with groups_of(**sizes):
        assert_equal_layers(config(8, 3, 512, fused=fused, sequence_parallel=True, num_attention_heads=2, **sizes))


@pytest.mark.parametrize(
    "sizes",
    [
        dict(expert_model_parallel_size=2),
        dict(
            expert_model_parallel_size=4,
            tensor_model_parallel_size=2,
            expert_tensor_parallel_size=1,
            sequence_parallel=True,
        ),
    ],
    ids=["ep2_dp2", "ep4_tp2"],
)
def test_groups_beside_data_and_tensor_parallelism(monkeypatch, sizes):
    monkeypatch.setenv("DITRON_POLICY", "bits")
    with groups_of(**{name: size for name, size in sizes.items() if name != "sequence_parallel"}):
        assert_equal_layers(config(8, 3, 512, fused=HAVE_TE, num_attention_heads=2, **sizes))
