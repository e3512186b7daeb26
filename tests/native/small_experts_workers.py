"""What the workers of the tests of many small experts run: a MoE layer with ``TEGroupedMLP``'s code on a stand-in for
Transformer Engine's grouped layers, native and fused, and what a forward and a backward ask of the host."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections import Counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ep_workers import BASE, assert_equal, build, groups, run_layer, sizes_of
from torch.utils._python_dispatch import TorchDispatchMode

from ditron_train.ep import layout
from ditron_train.ep.grouped_gemm import group_gemm, group_wgrad_into, row_tiles
from ditron_train.megatron.ep import experts as ep_experts
from ditron_train.runtime.launch import KernelLaunch


def grouped_gemm(a, b, out, dtype, *, layout, m_splits, grad=False, single_output=False, accumulate=False, **_):
    """``general_grouped_gemm``, by tiles of the same sizes as the fused path's: so every sum has the same order."""
    rows, tiles = torch.cat(list(b)), row_tiles(torch.tensor(m_splits), sum(m_splits))
    if layout == "NT":
        group_wgrad_into(rows, torch.cat(list(a)), tiles, out, overwrites=not accumulate)
    else:
        product = group_gemm(rows, [weight.detach() for weight in a], tiles, transpose=layout == "TN")
        for result, part in zip(out[0].split(m_splits) if single_output else out, product.split(m_splits)):
            result.copy_(part)


class _NativeProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, splits, linear, *weights):
        ctx.save_for_backward(x, *weights)
        ctx.splits, ctx.linear = splits, linear
        return ep_experts.TEGemm(splits)(x, weights, True)

    @staticmethod
    def backward(ctx, grad):
        x, *weights = ctx.saved_tensors
        dx = ep_experts.TEGemm(ctx.splits)(grad, weights, False)
        kind = ep_experts._MainGradWgrad if ctx.linear.fuse_wgrad_accumulation else None
        wgrad = kind(ctx.linear, ctx.splits) if kind else ep_experts.TEWgrad(ctx.splits)
        return dx, None, None, *wgrad(grad, x, weights)


class Grouped(torch.nn.Module):
    """A grouped linear layer as Transformer Engine's."""

    def __init__(self, weights, into_main_grad):
        super().__init__()
        self.num_gemms, self.te_quant_params, self.fuse_wgrad_accumulation = len(weights), None, into_main_grad
        self.disable_parameter_transpose_cache, self.is_first_microbatch = False, None
        for index, weight in enumerate(weights):
            parameter = torch.nn.Parameter(weight)
            if into_main_grad:
                parameter.main_grad = torch.zeros(weight.shape)
            self.register_parameter(f"weight{index}", parameter)

    def forward(self, x, splits):
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        return _NativeProducts.apply(x, splits, self, *weights), None

    forward.__module__ = "transformer_engine.pytorch.module.grouped_linear"


def with_grouped_experts(layer, dtype, into_main_grad):
    """The layer with ``TEGroupedMLP``'s code around ``Grouped``, of values that depend on the rank alone."""
    config, num = layer.config, layer.num_local_experts
    experts = ep_experts.DitronTEGroupedMLP.__new__(ep_experts.DitronTEGroupedMLP)
    torch.nn.Module.__init__(experts)
    experts.config, experts.activation_func, experts.num_local_experts = config, F.silu, num
    experts.offload_expert_fc1 = experts.offload_moe_act = experts.activation_recompute = False
    hidden, ffn = config.hidden_size, config.moe_ffn_hidden_size
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    for name, rows, columns in (("linear_fc1", 2 * ffn, hidden), ("linear_fc2", hidden, ffn)):
        weights = [torch.randn(rows, columns, generator=generator).to(dtype) for _ in range(num)]
        setattr(experts, name, Grouped(weights, into_main_grad))
    layer.experts = experts
    return layer


@contextlib.contextmanager
def small_experts(pairs, options, dtype, into_main_grad=False):
    """The layer, native and fused, with those pairs and products as one kernel each."""
    options = {**options, "params_dtype": dtype, "bf16": dtype == torch.bfloat16}
    torch.use_deterministic_algorithms(True)
    before, ep_experts.grouped_gemm = ep_experts.grouped_gemm, grouped_gemm
    try:
        with groups(**sizes_of(options)):
            layers = [with_grouped_experts(build(options, which), dtype, into_main_grad) for which in (False, True)]
            layers[1].token_dispatcher._pairs, layers[1].token_dispatcher._limits = frozenset(pairs), {}
            yield layers
    finally:
        ep_experts.grouped_gemm = before
        torch.use_deterministic_algorithms(False)


def _routing(kind, num_tokens, num_experts, topk, generator):
    """Random; all tokens to the same experts, so that most have none; or all experts of one rank."""
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    if kind == "the same experts":
        scores[:, 1 : topk + 1] += 2
    elif kind == "one rank":
        scores[:, : num_experts // dist.get_world_size()] += 2
    routed = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(topk, dim=1).indices, True)
    return scores * routed, routed


def small_experts_agree(pairs, options, tokens_by_rank, routing, dtype, into_main_grad=False, limits=None):
    """Steps of the layer, native and fused; how often the fused path launched each kernel, and asked for each kind of
    native product."""
    num_tokens, launched = tokens_by_rank[dist.get_rank()], Counter()
    with small_experts(pairs, options, dtype, into_main_grad) as (native, fused):
        fused.token_dispatcher._limits = limits or {}
        first = KernelLaunch._first

        def launch(self, key, arguments, stream):
            launched[_name(self)] += 1
            first(self, key, arguments, stream)

        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            sizes = options["num_moe_experts"], options["moe_router_topk"]
            probs, routed = _routing(routing, num_tokens, *sizes, generator)
            x, grad = (torch.randn(num_tokens, 1, BASE["hidden_size"], generator=generator).to(dtype) for _ in "xy")
            results = []
            for layer in (native, fused):
                layer.route = lambda hidden_states, padding_mask=None, given=(probs, routed): given
                layer.router.requires_grad_(False)
                if layer is fused:
                    KernelLaunch._first, ep_experts.grouped_gemm = launch, _counted(launched)
                try:
                    results.append(run_layer(layer, x, grad))
                finally:
                    KernelLaunch._first, ep_experts.grouped_gemm = first, grouped_gemm
            assert_equal(*results)
            assert fused.token_dispatcher.ep_context is not None
            for one, other in zip(native.experts.parameters(), fused.experts.parameters()):
                assert not into_main_grad or torch.equal(one.main_grad, other.main_grad)
    return dict(launched)


def _counted(launched):
    def counted(a, b, out, dtype, **options):
        launched[f"native {options['layout']}"] += 1
        before, ep_experts.grouped_gemm = ep_experts.grouped_gemm, grouped_gemm
        first, KernelLaunch._first = KernelLaunch._first, _FIRST
        try:
            grouped_gemm(a, b, out, dtype, **options)
        finally:
            ep_experts.grouped_gemm, KernelLaunch._first = before, first

    return counted


_FIRST = KernelLaunch._first
_SYNCS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.unique")
_ELSEWHERE = ("small_experts_workers", "ditron_train/runtime/", "megatron_shim", "/contextlib.py", "/torch/")


def _name(launch):
    kernel = launch._kernel
    return getattr(kernel, "fn", kernel).__name__


class Counting(TorchDispatchMode):
    """Counts torch ops, launches of kernels, native products, collectives and what makes the host wait, by the line of
    code that asks for them; and how many functions of Python are called meanwhile."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def note(self, kind, name):
        """One more of a kind."""
        self.seen[kind, name, _place()] += 1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        self.note("sync" if name.startswith(_SYNCS) else "collective" if name.startswith("c10d") else "op", name)
        return function(*args, **(kwargs or {}))


def _place():
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        code = frame.f_code
        if not any(one in code.co_filename for one in _ELSEWHERE):
            return f"{'/'.join(code.co_filename.split('/')[-3:])}:{frame.f_lineno} {code.co_name}"
    return "autograd"


@contextlib.contextmanager
def counting():
    """Inside, what is asked for is counted, and kernels and products do not run."""
    mode = Counting()

    def launch(self, key, arguments, stream):
        mode.note("launch", _name(self))

    def products(a, b, out, dtype, **options):
        mode.note("native product", options["layout"])

    def copied(tensor):
        mode.note("sync", "counts to the host")
        return tensor.clone(), None

    places = [
        (KernelLaunch, "_first", launch),
        (ep_experts, "grouped_gemm", products),
        (layout, "_copy_to_host", copied),
    ]
    before = [getattr(owner, name) for owner, name, _ in places]
    for owner, name, value in places:
        setattr(owner, name, value)
    try:
        with mode:
            yield mode.seen
    finally:
        for (owner, name, _), value in zip(places, before):
            setattr(owner, name, value)


def host_work(pairs, into_main_grad, num_tokens=16):
    """What a forward and a backward of the layer of Qwen3-30B-A3B's many experts ask for: natively, then fused."""
    found, options = [], {"num_moe_experts": 128, "moe_router_topk": 8}
    with small_experts(pairs, options, torch.float32, into_main_grad) as layers:
        generator = torch.Generator().manual_seed(dist.get_rank())
        x, grad = (torch.randn(num_tokens, 1, BASE["hidden_size"], generator=generator) for _ in "xy")
        for layer in layers:
            for _ in range(2):
                run_layer(layer, x, grad)
            leaf = x.clone().requires_grad_()
            with counting() as forward:
                output, _ = layer(leaf)
            with counting() as backward:
                output.backward(grad)
            found.append((dict(forward), dict(backward)))
    return found


def trials_agree(into_main_grad):
    """Whether what the policy compares is equal, of each pair or product, and the names of those that it takes; in
    the interpreter it runs the fused paths alone."""
    from ditron_train.ep import begin_layout
    from ditron_train.ep.plan import PAIRS
    from ditron_train.megatron.ep import pair_spec

    options, dtype = {"num_moe_experts": 8, "moe_router_topk": 2}, torch.bfloat16
    with small_experts(PAIRS, options, dtype, into_main_grad) as (_, layer):
        generator = torch.Generator().manual_seed(dist.get_rank())
        x, grad = (torch.randn(12, 1, BASE["hidden_size"], generator=generator).to(dtype) for _ in "xy")
        run_layer(layer, x, grad)
        dispatcher = layer.token_dispatcher
        context, group = dispatcher.ep_context, dispatcher.ep_group
        probs, routed = _routing("random", 12, 8, 2, generator)
        handle = begin_layout(routed, probs, x.shape[-1], dtype, context).finish()
        where = (layer.experts, handle, context, x[:, 0], "ascending")
        with torch.no_grad():
            runs = pair_spec._PairRuns(*where, group)
            for pair in PAIRS:
                native, fused = (runs.run(pair, frozenset(chosen)) for chosen in ((), (pair,)))
                assert len(native) == len(fused) > 0 and all(map(torch.equal, native, fused)), pair
                assert runs.wgrad_bytes > 0
        return pair_spec.fused_pairs_here(*where, group=group)
