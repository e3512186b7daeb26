"""Layers whose forward the fused path stands in for: their hooks run, and what adapters and quantizers have put there
is called."""

from __future__ import annotations

import functools
import pathlib
import sys
import types

import pytest
import torch

from tests.support.processes import run_workers, run_workers_once

pytest.importorskip("megatron.core")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import sp_workers  # noqa: E402

HIDDEN, FFN, EXPERTS = 8, 12, 2
ADAPTED = {"both": ("linear_qkv", "linear_proj"), "output": ("linear_proj",), "attention": ("core_attention",)}


class _Grouped(torch.nn.Module):
    """A grouped linear layer whose weights arrive late, as those of a distributed optimizer do."""

    def __init__(self, rows, columns, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.num_gemms, self.te_quant_params, self.fuse_wgrad_accumulation = EXPERTS, None, False
        self.disable_parameter_transpose_cache, self.is_first_microbatch = False, None
        self.late = [torch.randn(rows, columns, generator=generator) for _ in range(EXPERTS)]
        for index in range(EXPERTS):
            self.register_parameter(f"weight{index}", torch.nn.Parameter(torch.full((rows, columns), float("nan"))))
        self.register_forward_pre_hook(_gather)

    def forward(self, x, splits):
        raise AssertionError("the fused path stands in for it")

    forward.__module__ = "transformer_engine.pytorch.module.grouped_linear"


def _gather(module, args):
    for weight, late in zip(module.parameters(), module.late):
        weight.data.copy_(late)


_gather.__module__ = "megatron.core.distributed.param_and_grad_buffer"  # which has such hooks


def _experts(**options):
    from ditron_train.megatron.ep.experts import DitronTEGroupedMLP

    experts = DitronTEGroupedMLP.__new__(DitronTEGroupedMLP)
    torch.nn.Module.__init__(experts)
    experts.config = types.SimpleNamespace(
        use_te_activation_func=False,
        bias_activation_fusion=False,
        gated_linear_unit=True,
        activation_func_clamp_value=None,
        activation_func=torch.nn.functional.silu,
        glu_linear_offset=0.0,
        **options,
    )
    experts.activation_func = torch.nn.functional.silu
    experts.linear_fc1, experts.linear_fc2 = _Grouped(2 * FFN, HIDDEN, 1), _Grouped(HIDDEN, FFN, 2)
    return experts


def test_fused_experts_read_their_weights_behind_the_hooks_of_their_layers(monkeypatch):
    from ditron_train.ep import ExpertCall
    from ditron_train.megatron.ep import experts as ep_experts

    def grouped(x, weights):
        return torch.cat([part @ weight.t() for part, weight in zip(x.chunk(EXPERTS), weights)])

    monkeypatch.setattr(ep_experts, "dispatch_linear", lambda x, probs, weights, call: (grouped(x, weights), probs))
    monkeypatch.setattr(ep_experts, "linear_combine", lambda h, weights, call: grouped(h, weights))
    experts, x, probs = _experts(), torch.randn(6, HIDDEN), torch.rand(6)
    out, bias = experts(x, ExpertCall(None, None, "descending"), probs)
    gate, linear = grouped(x, experts.linear_fc1.late).chunk(2, dim=-1)
    expected = grouped(torch.nn.functional.silu(gate) * linear * probs[:, None], experts.linear_fc2.late)
    assert torch.equal(out, expected) and bias is None
    out.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in experts.parameters())
    assert not any("forward" in vars(module) for module in experts.modules())


def test_gradients_of_fused_experts_go_where_megatron_fsdp_makes_room_for_them(monkeypatch):
    """A buffer exists from when backward asks for it, and is let go of when it is reduced: ``main_grad`` is None by
    then."""
    from ditron_train.megatron.ep import experts as ep_experts

    written = []
    monkeypatch.setattr(
        ep_experts, "_grouped_gemm", lambda *args, **options: written.append((args[2], options["accumulate"]))
    )
    linear = _Grouped(FFN, HIDDEN, 1)
    linear.fuse_wgrad_accumulation, linear.disable_parameter_transpose_cache, linear.is_first_microbatch = (
        True,
        True,
        False,
    )
    buffers = [torch.zeros(FFN, HIDDEN) for _ in range(EXPERTS)]
    for weight, buffer in zip(linear.parameters(), buffers):
        weight.__fsdp_param__, weight.overwrite_main_grad, weight.grad_added_to_main_grad = True, True, False
        weight.main_grad, weight.get_main_grad = None, lambda buffer=buffer: buffer
    layout = types.SimpleNamespace(tokens_per_expert=torch.tensor([1, 2]))
    call = ep_experts.ExpertCall(layout, None, "descending", frozenset(), gemm=lambda *_: None)
    call = ep_experts._call_of(linear, call)
    grads = call.wgrad(torch.ones(3, FFN), torch.ones(3, HIDDEN), list(linear.parameters()))
    assert [grad.shape for grad in grads] == [buffer.shape for buffer in buffers]
    ((into, accumulates),) = written
    assert not accumulates
    for weight, given, buffer in zip(linear.parameters(), into, buffers):
        assert weight.main_grad is given is buffer and weight.grad_added_to_main_grad


@pytest.mark.parametrize("counts_microbatches", [True, False])
@pytest.mark.parametrize("odd", [0, 1], ids=["whole", "odd-addresses"])
def test_our_grouped_gemm_adds_to_main_grad_as_the_layer_would(counts_microbatches, odd):
    """Three microbatches of exact sums; the first is written over what is there, where the layer counts them."""
    from ditron_train.ep.grouped_gemm import row_tiles
    from ditron_train.megatron.ep.experts import triton_wgrad_into
    from ditron_train.runtime.device import is_interpreter
    from tests.support import quick_interpreter

    if not is_interpreter():
        pytest.skip("runs in Triton's interpreter")
    quick_interpreter.install()
    linear = _Grouped(24, 40, 1)
    assert triton_wgrad_into(linear) is None  # without fusion: tensors of their own
    linear.fuse_wgrad_accumulation, linear.disable_parameter_transpose_cache = True, not counts_microbatches
    linear.is_first_microbatch = True
    memory = torch.full((EXPERTS, 24 * 40 + 4), 5.0)
    for weight, row in zip(linear.parameters(), memory):
        weight.main_grad, weight.grad_added_to_main_grad = row[odd : odd + 24 * 40].view(24, 40), False
    expected = [torch.full((24, 40), 0.0 if counts_microbatches else 5.0) for _ in range(EXPERTS)]
    tiles, generator = row_tiles(torch.tensor([3, 4]), 7), torch.Generator().manual_seed(1)
    for _ in range(3):
        grad, rows = (torch.randint(-4, 5, (7, width), generator=generator).bfloat16() for width in (24, 40))
        dummies = triton_wgrad_into(linear)(grad, rows, tiles)
        for total, g, part in zip(expected, grad.split([3, 4]), rows.split([3, 4])):
            total += g.float().t() @ part.float()
    for weight, total, dummy in zip(linear.parameters(), expected, dummies):
        assert torch.equal(weight.main_grad, total) and weight.grad_added_to_main_grad
        assert dummy.shape == weight.shape
    assert (memory[:, 24 * 40 + odd :] == 5.0).all() and not linear.is_first_microbatch


def test_experts_with_adapters_are_not_fused():
    from ditron_train.megatron.ep.experts import unsupported_reason_fused

    cpu = torch.device("cpu")
    assert unsupported_reason_fused(_experts(), cpu).startswith("measured on Hopper")
    for name in ("linear_fc1", "linear_fc2"):
        wrapped, replaced = _experts(), _experts()
        setattr(wrapped, name, torch.nn.Sequential(getattr(wrapped, name)))
        assert unsupported_reason_fused(wrapped, cpu) == "Sequential has a forward of its own"
        getattr(replaced, name).forward = lambda x: x
        assert unsupported_reason_fused(replaced, cpu) == "_Grouped has a forward of its own"
    experts = _experts()
    experts.forward = lambda *args: None
    assert unsupported_reason_fused(experts, cpu) == "DitronTEGroupedMLP has a forward of its own"


@pytest.mark.parametrize("rows, min_rows", [((257, 300), 0), ((20, 4000), 257), ((200, 300), None)])
def test_experts_of_min_rows_keep_their_native_product_alone(monkeypatch, rows, min_rows):
    """``rows`` of this rank's two experts; None: more than a quarter of them are too few, so no pair is one kernel."""
    from ditron_train.megatron.ep import experts as ep_experts
    from ditron_train.megatron.ep.dispatcher import DitronMoEAlltoAllTokenDispatcher, FixedCapacity

    def multiplied(weights, parts, out, dtype, layout, m_splits, **options):
        for weight, part, into, count in zip(weights, parts, out, m_splits):
            assert len(part) == len(into) == count
            into.copy_(part @ (weight.t() if layout == "TN" else weight))

    monkeypatch.setattr(ep_experts, "grouped_gemm", multiplied)
    layer, dispatcher = torch.nn.Module(), DitronMoEAlltoAllTokenDispatcher.__new__(DitronMoEAlltoAllTokenDispatcher)
    layer.experts = _experts()
    dispatcher._layer_modules, dispatcher._slices, dispatcher._capacity = layer._modules, None, FixedCapacity()
    dispatcher._pairs, dispatcher._limits = frozenset({"gemm_combine"}), {"gemm_combine": 257}
    dispatcher.ep_context = dispatcher._order = None
    dispatcher._layout = types.SimpleNamespace(
        tokens_per_expert=torch.tensor(rows), expert_rows=torch.tensor(rows).numpy()
    )
    call = dispatcher._expert_call(torch.zeros(1))
    if min_rows is None:
        assert call is None
        return
    assert call.min_rows == ({"gemm_combine": min_rows} if min_rows else {}) and (call.few is None) == (min_rows == 0)
    x, weights = torch.randn(sum(rows), HIDDEN), [torch.randn(HIDDEN, HIDDEN) for _ in range(2)]
    out = torch.full_like(x, 7.0)
    if min_rows:
        for transpose in (True, False):
            call.few(x, weights, transpose, out, [0])
            weight = weights[0].t() if transpose else weights[0]
            assert torch.equal(out[: rows[0]], x[: rows[0]] @ weight) and bool((out[rows[0] :] == 7.0).all())
        call.few(x, weights, True, out.fill_(7.0), [])
        assert bool((out == 7.0).all())


@pytest.mark.parametrize("wrapped", ["layer", "experts", "recipe", "hook", "hook of a layer", "debugging"])
def test_experts_that_are_wrapped_after_the_first_step_are_not_fused_any_more(wrapped):
    """What was decided for them stands: were it still followed, a wrapper would get tokens for rows and an ExpertCall
    for counts."""
    from ditron_train.ep import ExpertCall
    from ditron_train.megatron.ep.dispatcher import DitronMoEAlltoAllTokenDispatcher, FixedCapacity

    layer, dispatcher = torch.nn.Module(), DitronMoEAlltoAllTokenDispatcher.__new__(DitronMoEAlltoAllTokenDispatcher)
    layer.experts = _experts()
    dispatcher._layer_modules, dispatcher._slices, dispatcher._capacity = layer._modules, None, FixedCapacity(2.0)
    dispatcher._pairs, dispatcher._layout = frozenset({"gemm_combine"}), types.SimpleNamespace(expert_rows=None)
    dispatcher._limits = {"gemm_combine": 257}
    dispatcher.ep_context = dispatcher._order = None
    assert isinstance(dispatcher._expert_call(torch.zeros(1)), ExpertCall)
    dispatcher._capacity.look_at(dispatcher._experts)
    assert dispatcher._capacity.factor == 2.0
    if wrapped == "experts":
        layer.experts = torch.nn.Sequential(layer.experts)
    elif wrapped == "layer":
        layer.experts.linear_fc1 = torch.nn.Sequential(layer.experts.linear_fc1)
    elif wrapped == "hook":
        layer.experts.register_full_backward_hook(_of_megatron)
    elif wrapped == "hook of a layer":
        layer.experts.linear_fc2.register_forward_hook(functools.partial(_of_megatron))
    elif wrapped == "debugging":
        layer.experts.linear_fc1.is_debug_iter = lambda: True
    else:
        layer.experts.linear_fc2.te_quant_params = object()
    assert dispatcher._expert_call(torch.zeros(1)) is None
    dispatcher._capacity.look_at(dispatcher._experts)
    assert dispatcher._capacity.factor is None


def _of_megatron(*given):
    """A hook that Megatron registers, on all ranks and for a step."""


_of_megatron.__module__ = "megatron.training.activation_logging"


def test_experts_are_fused_again_behind_a_step_with_hooks(monkeypatch, caplog):
    """The capacity that a hook has ended does not come back, so limits of rows are measured then. A hook of somebody
    else, which one rank alone may have, changes nothing behind the first step."""
    from ditron_train.ep import ExpertCall
    from ditron_train.megatron.ep import dispatcher as module
    from ditron_train.megatron.ep.dispatcher import FixedCapacity
    from ditron_train.runtime import logs

    layer = torch.nn.Module()
    dispatcher = module.DitronMoEAlltoAllTokenDispatcher.__new__(module.DitronMoEAlltoAllTokenDispatcher)
    layer.experts, rows = _experts(), torch.tensor([3, 300])
    dispatcher._layer_modules, dispatcher._slices, dispatcher._capacity = layer._modules, None, FixedCapacity(2.0)
    dispatcher._pairs, dispatcher._limits, dispatcher.ep_group = frozenset({"gemm_combine"}), None, None
    dispatcher._layout = types.SimpleNamespace(tokens_per_expert=rows, expert_rows=rows.numpy())
    dispatcher.ep_context = dispatcher._order = None
    monkeypatch.setattr(module, "with_limits", lambda pairs, *given: (pairs, {"gemm_combine": 257}))
    monkeypatch.setattr(logs, "_seen", {})
    assert isinstance(dispatcher._expert_call(torch.zeros(1)), ExpertCall)
    handle = layer.experts.linear_fc1.register_forward_hook(_of_megatron)
    dispatcher._capacity.look_at(layer.experts)
    assert dispatcher._capacity.factor is None and dispatcher._expert_call(torch.zeros(1)) is None
    handle.remove()
    for _ in range(2):
        assert dispatcher._expert_call(torch.zeros(1)).min_rows == {"gemm_combine": 257}
        layer.experts.linear_fc1.register_forward_hook(lambda *given: None)
    assert [record.message for record in caplog.records if "see tokens" in record.message]


def _wrapped_on_one_rank():
    """What every rank says of experts that rank 1 alone has wrapped, and of a capacity that these refuse."""
    import torch.distributed as dist

    from ditron_train.megatron.ep import experts as ep_experts
    from ditron_train.megatron.ep.dispatcher import FixedCapacity

    experts, capacity = _experts(), FixedCapacity(2.0)
    ep_experts.unsupported_reason_fused = lambda experts, device: ep_experts.unsupported_reason_called(experts)
    logged = [ep_experts.unsupported_reason_fused_on_ranks(experts, torch.device("cpu"), dist.group.WORLD)]
    if dist.get_rank() == 1:
        experts.linear_fc1.register_forward_hook(print)
        capacity.look_at(experts)
    logged.append(ep_experts.unsupported_reason_fused_on_ranks(experts, torch.device("cpu"), dist.group.WORLD))
    capacity.measure(experts, torch.zeros(1), dist.group.WORLD)
    return logged, capacity.factor


def test_experts_that_one_rank_has_wrapped_are_fused_on_no_rank():
    """The messages of a fused movement are others: ranks that differ would end the job."""
    assert run_workers(2, _wrapped_on_one_rank) == [([None, "hooks on the experts look at their rows"], None)] * 2


def _adapters(kind):
    """Attention with adapters in its layers: nothing stands in for them."""
    import torch.distributed as dist

    world = dist.get_world_size()
    with sp_workers.groups(world):
        model = sp_workers.build(world)
        plain = sp_workers.run(model, world, 16)[0]
        for index, layer in enumerate(model.decoder.layers):
            for name in ADAPTED[kind]:
                _adapt(getattr(layer.self_attention, name), by_class=index == 0)
        with sp_workers.without("projections", "output"):
            native = sp_workers.run(model, world, 16)
        fused = sp_workers.run(model, world, 16)
        sp_workers.assert_same_bits(fused, native)
        assert sp_workers.num_fused_shapes("exchange") > 0, "around layers with adapters the exchange is fused"
        assert not torch.equal(fused[0], plain)


def _hooks_of_the_attention(recompute):
    """Hooks of the attention between two fused projections are called, in recomputation, too, and what they return
    counts."""
    import torch.distributed as dist

    world = dist.get_world_size()
    options = dict(recompute_granularity="selective", recompute_modules=["core_attn"]) if recompute else {}
    with sp_workers.groups(world):
        model, calls = sp_workers.build(world, **options), []
        plain = sp_workers.run(model, world, 16)[0]
        for layer in model.decoder.layers:
            layer.self_attention.core_attention.register_forward_hook(
                lambda _, given, out: (calls.append(1), out * 1.5)[1]
            )
        with sp_workers.without("projections", "output"):
            native = sp_workers.run(model, world, 16)
        num_calls = len(calls)
        fused = sp_workers.run(model, world, 16)
        sp_workers.assert_same_bits(fused, native)
        assert not torch.equal(fused[0], plain)
        assert num_calls == (4 if recompute else 2) and len(calls) == 2 * num_calls
        assert sp_workers.num_fused_shapes("projections") == 1


@pytest.mark.parametrize("recompute", [False, True])
def test_hooks_of_an_attention_between_fused_projections_are_called(recompute):
    run_workers(2, _hooks_of_the_attention, recompute)


def _adapt(layer, by_class):
    inherited = type(layer)

    def forward(self, *args, **kwargs):
        out = inherited.forward(self, *args, **kwargs)
        return out * 1.5 if torch.is_tensor(out) else (out[0] * 1.5, out[1])

    if by_class:
        layer.__class__ = type(f"Adapted{inherited.__name__}", (inherited,), {"forward": forward})
    else:
        layer.forward = types.MethodType(forward, layer)


@pytest.mark.parametrize("kind", ADAPTED)
def test_adapted_layers_of_an_attention_are_called(kind):
    run_workers(2, _adapters, kind)


_TE_LAYER = """
import sys, types
from unittest.mock import MagicMock

import megatron.core.extensions.transformer_engine as native

for name in ("", ".pytorch", ".pytorch.cpp_extensions", ".pytorch.cpu_offload", ".pytorch.distributed",
             ".pytorch.export", ".pytorch.fp8",
             ".pytorch.module", ".pytorch.module._common", ".pytorch.module.base", ".pytorch.module.layernorm_linear"):
    sys.modules["transformer_engine" + name] = MagicMock()
for module, name in (("cpu_offload", "is_cpu_offload_enabled"), ("export", "is_in_onnx_export_mode")):
    setattr(sys.modules["transformer_engine.pytorch." + module], name, lambda: False)
states = sys.modules["transformer_engine.pytorch.fp8"].FP8GlobalStateManager
states.is_fp8_enabled = states.is_fp8_calibration = lambda: False


class Layer:
    sequence_parallel, tp_size, primary_weights_in_fp8, te_quant_params, parallel_mode = True, 2, False, None, "column"
    use_bias, apply_bias, gemm_bias_unfused_add, fsdp_group, tp_group = False, False, False, None, None
    weight = types.SimpleNamespace(requires_grad=True)
    symmetric_ar_type, wgrad_store = None, types.SimpleNamespace(delay_wgrad_compute=lambda: False)
    is_debug_iter = staticmethod(lambda: False)
    parameters = staticmethod(lambda: [])

    def forward(self, x):
        return (x, x + 1), None

    forward.__module__ = native.__name__


for name in (
    "TEColumnParallelLinear",
    "TELayerNormColumnParallelLinear",
    "TERowParallelLinear",
    "TEDotProductAttention",
    "TEColumnParallelGroupedLinear",
    "TERowParallelGroupedLinear",
):
    setattr(native, name, type(name, (Layer,), {}))
from ditron_train.megatron.tp import te_layers as tp_te
from ditron_train.megatron.tp import te_routes as routes

asked = []
tp_te.route = lambda *args, **kwargs: asked.append(args)
"""

_NORM_RETURNED = """
layer = tp_te.DitronTELayerNormColumnParallelLinear()
assert layer.forward(1) == ((1, 2), None) and len(asked) == 1
layer.return_layernorm_output = True
assert layer.forward(1) == ((1, 2), None) and len(asked) == 1, "the norm's output would not be returned"
"""

_COMMUNICATION_OF_ANOTHER = """
for kind in tp_te.class_map().values():
    layer = kind()
    assert layer.forward(1) == ((1, 2), None) and len(asked) == 1
    layer.parallel_mode = None  # as SharedExpertMLP has it; sequence_parallel stays True
    assert layer.forward(1) == ((1, 2), None) and len(asked) == 1, "it would be gathered and added up twice"
    asked.clear()
"""

_SYMMETRIC = """
from ditron_train.megatron.sp.te_linears import TELinears

layer = native.TERowParallelLinear()
layer.sequence_parallel = False
assert TELinears().unsupported_reason_out(layer, 1) is None
layer.symmetric_ar_type = "two_shot"
assert TELinears().unsupported_reason_out(layer, 1).startswith("symmetric_ar_type is two_shot")
layer.tp_size = 1
assert TELinears().unsupported_reason_out(layer, 1) is None, "nothing is added up"
layer.tp_size, layer.sequence_parallel = 2, True
assert TELinears().unsupported_reason_out(layer, 1) is None, "a reduce-scatter adds up"
"""


_ONE_WEIGHT_OF_EXPERTS = """
import torch

tensor = ".pytorch.tensor"
tensors = (tensor, f"{tensor}.float8_tensor", f"{tensor}.float8_blockwise_tensor")
for name in ("_torch", *tensors, ".pytorch.module.grouped_linear"):
    sys.modules["transformer_engine" + name] = MagicMock()
grouped = sys.modules["transformer_engine.pytorch.module.grouped_linear"]
grouped.GroupedLinear = type("Layer", (), {"__module__": "simulated"})
from ditron_train.megatron.ep import te_experts
from ditron_train.runtime.logs import decisions

te_experts.experts_group = lambda: "a group"
layer = te_experts.DitronTEColumnParallelGroupedLinear()
layer.weight0, layer.single_grouped_weight = None, True  # as it leaves them, from 2.14 on
assert te_experts._grouped_kinds(layer, torch.zeros(4, 4)) == frozenset()
assert any(line.endswith("native, the experts share one grouped weight") for line in decisions()), decisions()
"""

_ROWS_OF_EXPERTS = f"""{_ONE_WEIGHT_OF_EXPERTS}
import os
from types import SimpleNamespace as Named

class Float8CurrentScaling:
    fp8_quant_fwd_inp = Named(power_2_scale=False, amax_epsilon=0.0)
    fp8_quant_bwd_grad = Named(power_2_scale=True, amax_epsilon=0.5)
    fp8_format = Named(name="HYBRID")

class DelayedScaling:
    fp8_format = Named(name="HYBRID")

x = torch.zeros(4, 4)
layer.weight0, layer.single_grouped_weight, layer.num_gemms = torch.zeros(6, 4), False, 2
states.fp8_graph_capturing, states.get_fp8_recipe = lambda: False, Float8CurrentScaling
te_experts.unsupported_reason_grouped_layer = lambda *args: None
te_experts.unsupported_reason_code = lambda: "they are quantised elsewhere"
assert te_experts._grouped_kinds(layer, x) == frozenset()
assert decisions()[-1] == "ep rows (FP8): native, they are quantised elsewhere"
te_experts.unsupported_reason_code = lambda: None
asked = []
te_experts.gate.is_fused = lambda op, call: asked.append(call) or not call.are_grads
kinds = te_experts.RowsKind(4, "E4M3", False, 0.0), te_experts.RowsKind(6, "E5M2", True, 0.5)
assert te_experts._grouped_kinds(layer, x) == {{kinds[0]}}, "the other one is not faster"
assert [(call.kind, call.width, call.are_grads, call.num_experts) for call in asked] == [
    (kinds[0], 6, False, 2),
    (kinds[1], 4, True, 2),
]
asked.clear()
os.environ["DITRON_FP8_ROWS"] = "off"
assert te_experts._grouped_kinds(layer, x) == frozenset(), "as set"
del os.environ["DITRON_FP8_ROWS"]
with torch.no_grad():
    assert te_experts._grouped_kinds(layer, x) == frozenset(), "no transposes are wanted"
before = len(decisions())
states.get_fp8_recipe = DelayedScaling
assert te_experts._grouped_kinds(layer, x) == frozenset() and not asked
assert decisions()[before:][0].endswith("the recipe is DelayedScaling")
"""

_CUSTOM_RECIPE = f"""{_ONE_WEIGHT_OF_EXPERTS}
class CustomRecipe:  # until 2.15 it has no fp8_format
    pass

layer.single_grouped_weight = False
states.fp8_graph_capturing = lambda: False
states.get_fp8_recipe = CustomRecipe
te_experts.unsupported_reason_grouped_layer = te_experts.unsupported_reason_code = lambda *args: None
assert te_experts._grouped_kinds(layer, torch.zeros(4, 4)) == frozenset()
words = "native, only tensorwise scaling has grouped quantization, the recipe is CustomRecipe"
assert any(line.endswith(words) for line in decisions()), decisions()
"""

_RECIPES = pathlib.Path(__file__).with_name("te_recipes.json")  # their classes in each version of Transformer Engine
_RECIPES_OF_BLACKWELL = f"""{_ONE_WEIGHT_OF_EXPERTS}
import json
from pathlib import Path

from packaging.specifiers import SpecifierSet

from ditron_train.runtime.logs import forget_decisions
from ditron_train.runtime.versions import SUPPORTED

(supported,) = (SpecifierSet(one.specifier) for one in SUPPORTED if one.name == "transformer-engine")
recipes = json.loads(Path({str(_RECIPES)!r}).read_text())
assert all(supported.contains(version, prereleases=True) for version in recipes)
layer.single_grouped_weight = False
states.fp8_graph_capturing = lambda: False
states.is_fp8_enabled = lambda: True
te_experts.unsupported_reason_grouped_layer = te_experts.unsupported_reason_code = lambda *args: None
routes.unsupported_reason_code = lambda *args: None
column, x = tp_te.DitronTEColumnParallelLinear(), torch.zeros(4, 4)
column.weight = torch.nn.Parameter(torch.zeros(4, 4))
column._parameters = {{"weight": column.weight}}
num_refused = 0
for version, names in recipes.items():
    for name in {{*names}} - {{"DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"}}:
        for recipe in (type(name, (), {{}})(), type("Megatrons", (type(name, (), {{}}),), {{}})()):
            forget_decisions()
            states.get_fp8_recipe = lambda: recipe
            for _ in range(2):
                assert routes.answer_in_fp8(column, "column", x) is None, (version, name)
                assert te_experts._grouped_kinds(layer, x) == frozenset(), (version, name)
            (of_column, of_rows) = decisions()
            assert of_column == f"tp column (TE, FP8): native, FP8 by the recipe {{type(recipe).__name__}}", of_column
            assert of_rows.endswith(f"the recipe is {{type(recipe).__name__}}"), of_rows
            num_refused += 1
assert num_refused >= 2 * 2 * len(recipes) and "2.10.0" in recipes, "MXFP8 and NVFP4, and what Megatron derives"
"""

_STATE_OF_ANOTHER = f"""{_ONE_WEIGHT_OF_EXPERTS}
from ditron_train.megatron.sp import linears

words = "native, this version of Transformer Engine is built otherwise (TypeError: 'NoneType' object is not callable)"
layer.single_grouped_weight = False
native.TEColumnParallelGroupedLinear.forward = lambda self, x, splits: "Transformer Engine's"
states.is_fp8_enabled = states.is_fp8_calibration = states.fp8_graph_capturing = None  # called, it is a TypeError
assert layer.forward(torch.zeros(4, 4), [4]) == "Transformer Engine's"
assert sum(line.endswith(words) for line in decisions()) == 1, decisions()
column = tp_te.DitronTEColumnParallelLinear()
assert tp_te._run(column, "column", torch.zeros(4, 4), lambda x: "Transformer Engine's") == "Transformer Engine's"
assert sum(line.endswith(words) for line in decisions()) == 2, decisions()
linears.HAVE_TE = True
reason = linears.linears_of(column)._unsupported_reason_layer(column, torch.zeros(4, 4))
assert reason == words.removeprefix("native, ")
"""

_ULYSSES_IN_FP8 = """
import torch
from ditron_train.megatron.sp import linears

linears.HAVE_TE = True
states.is_fp8_enabled = lambda: True
column, x = tp_te.DitronTEColumnParallelLinear(), torch.zeros(4, 4)
assert linears.linears_of(column)._unsupported_reason_layer(column, x) == "the layer computes in FP8"
"""

_NORM_OF_ANOTHER = """
import torch

# As Megatron 0.19 does behind our import.
tp_te.te_layernorm_linear.apply_normalization = lambda x, *options: (2 * x, None, None)
layer.layer_norm_weight, layer.layer_norm_bias = torch.ones(4), None
layer.fwd_ln_sm_margin = layer.bwd_ln_sm_margin = layer.inf_ln_sm_margin = 0
layer.eps, layer.normalization, layer.zero_centered_gamma = 1e-5, "RMSNorm", False
with torch.no_grad():
    assert torch.equal(tp_te.normalised(layer, torch.ones(3, 4)), torch.full((3, 4), 2.0))
"""

_RENAMED = """
import torch

layer, x = tp_te.DitronTEColumnParallelLinear(), torch.zeros(4, 4)
assert routes.unsupported_reason_covered(layer, x) is None
states.is_fp8_calibration = None  # called, it is a TypeError
words = "this version of Transformer Engine is built otherwise (TypeError: 'NoneType' object is not callable)"
assert routes.unsupported_reason_covered(layer, x) == words
assert routes.answer_in_fp8(layer, "column", x) is None
"""

_FP8_IN_MEGATRONS_GRAPH = """
import torch

layer, x = tp_te.DitronTEColumnParallelLinear(), torch.zeros(4, 4)
states.fp8_graph_capturing = lambda: False  # of graphs that Transformer Engine makes; Megatron's own say nothing
routes.unsupported_reason_recipe = routes.unsupported_reason_code = lambda *args: None
assert routes.unsupported_reason_fp8(layer, x) is None
routes.is_capturing = lambda device: True
assert routes.unsupported_reason_fp8(layer, x) == "FP8 is calibrated or captured"
"""

_FP8_ASKED_ONCE = """
import torch

from ditron_train.policy import Answer

states.fp8_graph_capturing = lambda: False
layer, x, gated, kept = tp_te.DitronTEColumnParallelLinear(), torch.zeros(4, 4), [], {}
layer.weight = torch.nn.Parameter(torch.zeros(4, 4))
layer._parameters = {"weight": layer.weight, "bias": None}
reason, recipe = None, types.SimpleNamespace(fp8_format="HYBRID", backward_override=None)
states.get_fp8_recipe = lambda: recipe
routes.unsupported_reason_recipe = lambda *args: asked.append(args) or reason
routes.unsupported_reason_code = lambda *args: None


def route(layer, kind, x, state):
    gated.append(kind)
    key = (kind, x.shape)
    kept[key] = Answer("context")
    routes._known[layer] = state, key
    return kept[key]


routes._asked = lambda layer, kind, x: (kind, x)
routes._route, routes.gate = route, types.SimpleNamespace(recall=kept.get)
for one in (x, x, x + 1):
    assert routes.answer_in_fp8(layer, "column", one).context == "context"
assert len(asked) == len(gated) == 1, "what was answered is looked up"
kept["column", x.shape] = Answer(None, "the job is CPU-bound")
assert routes.answer_in_fp8(layer, "column", x) is None and len(asked) == 1
kept.clear()  # the gate has forgotten it, or a CPU-bound window may still change it
assert routes.answer_in_fp8(layer, "column", x).context == "context" and len(asked) == len(gated) == 2
changes = [
    lambda: setattr(recipe, "backward_override", "high_precision"),  # in place
    lambda: setattr(states, "get_fp8_recipe", lambda: types.SimpleNamespace(fp8_format="E4M3")),
    lambda: layer._parameters.update(bias=torch.zeros(4)),
    lambda: setattr(layer, "te_quant_params", object()),
    lambda: layer.weight.requires_grad_(False),
    lambda: setattr(layer, "weight", torch.nn.Parameter(torch.zeros(4, 4))),
    lambda: setattr(layer, "wgrad_store", types.SimpleNamespace(delay_wgrad_compute=lambda: None)),
    lambda: setattr(routes, "is_cpu_offload_enabled", lambda: True),
]
for number, change in enumerate(changes, 3):
    change()
    answer = routes.answer_in_fp8(layer, "column", x)
    assert len(asked) == number and (answer is None) is (number >= 6), "it depends on this, too"
routes.is_cpu_offload_enabled, layer.te_quant_params = lambda: False, None
assert routes.answer_in_fp8(layer, "column", x[:2]).context == "context" and len(asked) == 11
reason = "a reason"
for one in (x, x):
    assert routes.answer_in_fp8(layer, "column", one) is None
assert len(asked) == 12
routes.is_capturing = lambda device: True
assert routes.answer_in_fp8(layer, "column", x[:2]) is None, "whatever was answered before"
"""


@pytest.mark.parametrize(
    "body",
    [
        _NORM_RETURNED,
        _RENAMED,
        _COMMUNICATION_OF_ANOTHER,
        _SYMMETRIC,
        _ONE_WEIGHT_OF_EXPERTS,
        _ROWS_OF_EXPERTS,
        _CUSTOM_RECIPE,
        _RECIPES_OF_BLACKWELL,
        _STATE_OF_ANOTHER,
        _ULYSSES_IN_FP8,
        f"layer = Layer(){_NORM_OF_ANOTHER}",
        _FP8_IN_MEGATRONS_GRAPH,
        _FP8_ASKED_ONCE,
    ],
    ids=[
        "norm",
        "renamed",
        "shared_experts",
        "symmetric",
        "one_weight",
        "rows",
        "custom_recipe",
        "recipes_of_blackwell",
        "state_of_another",
        "ulysses_in_fp8",
        "norm_of_another",
        "fp8_in_a_graph",
        "fp8_once",
    ],
)
def test_what_transformer_engine_does_that_fused_do_not_runs_natively(body):
    """Of its layers, only what is asked here stands for them."""
    _run_beside_transformer_engine(body)


def _run_beside_transformer_engine(body):
    (outcome,) = run_workers_once(1, _execute, _TE_LAYER + body)  # what it puts into modules ends with its process
    assert outcome.ok, outcome.traceback


def _execute(source):
    exec(source, {})


_MAIN_GRAD = """
import torch

from ditron_train.megatron.shared import te_wgrad

given = []
te_wgrad.te_ops.general_gemm = lambda rows, of, **options: given.append(options) or (None, options["bias"])
weight = torch.nn.Parameter(torch.zeros(2, 3))
wgrad = te_wgrad.TELinearWgrad(weight, True, None)  # a model for evaluation has no main_grad, and none is asked for
weight.main_grad = torch.zeros(2, 3, dtype=torch.float64)
assert wgrad(torch.ones(4, 2), torch.ones(4, 3)) is None
assert given[-1]["out"] is weight.main_grad and given[-1]["out_dtype"] == torch.float64 and given[-1]["accumulate"]
buffer, weight.__fsdp_param__, weight.overwrite_main_grad, weight.main_grad = torch.zeros(2, 3), True, True, None
weight.get_main_grad, weight.grad_added_to_main_grad = lambda: buffer, False
assert wgrad(torch.ones(4, 2), torch.ones(4, 3)).shape == (2, 3) and weight.grad_added_to_main_grad
assert given[-1]["out"] is weight.main_grad is buffer and not given[-1]["accumulate"]
whole = []
te_wgrad.te_ops.general_gemm = lambda *both, **options: whole.extend(x.is_contiguous() for x in both) or (None, None)
te_wgrad.TELinearWgrad(weight, False, None)(torch.ones(4, 5)[:, :2], torch.ones(4, 7)[:, :3])
assert whole == [True, True], "it reads memory as if there were no strides"
grad = torch.ones(4, 5)[:, :2]
assert te_wgrad.TELinearWgrad(weight, False, None).operand(grad).is_contiguous() and not grad.is_contiguous()
grad = torch.ones(1, 4, 2).transpose(0, 1)  # which torch takes for whole, and multiplies sequence by sequence
assert grad.is_contiguous() and grad.stride() != (2, 2, 1)
assert te_wgrad.TELinearWgrad(weight, False, None).operand(grad).stride() == (2, 1)
"""


_BIAS_AND_DELAY = """
import queue
import torch

from ditron_train.megatron.shared import te_wgrad


class Store:  # as Transformer Engine's
    def __init__(self):
        self.kept = queue.Queue()

    def delay_wgrad_compute(self):
        return self.is_on

    def put(self, tensors, function):
        self.kept.put((tensors, function))


def general_gemm(rows, grads, **options):
    product = grads.t() @ rows
    if options["out"] is not None:
        product = options["out"].add_(product) if options["accumulate"] else options["out"].copy_(product)
    return product, None if options["bias"] is None else grads.sum(0), None, None


te_wgrad.te_ops.general_gemm = general_gemm
layer = native.TEColumnParallelLinear()
layer.weight, layer.bias, layer.wgrad_store = torch.nn.Parameter(torch.zeros(2, 3)), torch.ones(2), Store()
layer.disable_parameter_transpose_cache, layer.fuse_wgrad_accumulation = True, False
grads, rows = torch.arange(8.0).view(4, 2), torch.arange(12.0).view(4, 3)
expected = grads.t() @ rows
layer.use_bias = layer.apply_bias = True
layer.wgrad_store.is_on = False
assert te_wgrad.bias_in_product(layer) is layer.bias
wgrad = te_wgrad.wgrad_of(layer)
assert torch.equal(wgrad(grads, rows), expected) and torch.equal(wgrad.bias_gradient(grads), grads.sum(0))
assert te_wgrad.wgrad_of(layer).bias_gradient(grads) is None, "natively a frozen weight takes its bias along"
layer.wgrad_store.is_on = True
for fused in (False, True):
    layer.fuse_wgrad_accumulation, layer.weight.main_grad = fused, torch.ones(2, 3)
    for borrowed in ("input", "grad"):
        own = {"input": rows.clone(), "grad": grads.clone()}
        wgrad = te_wgrad.wgrad_of(layer, borrowed)
        assert wgrad(own["grad"], own["input"]) is None and wgrad.bias_gradient(grads) is None
        own[borrowed].fill_(float("nan"))  # the next gather writes there
        tensors, function = layer.wgrad_store.kept.get()
        gradient, bias_gradient = function(*tensors)
        assert torch.equal(bias_gradient, grads.sum(0))
        if not fused:
            assert torch.equal(gradient, expected)
if fused:
    assert torch.equal(layer.weight.main_grad, 1 + 2 * expected), "added to main_grad when asked for, not before"
layer.gemm_bias_unfused_add = True
assert te_wgrad.bias_in_product(layer) is None, "a row layer's is added behind the sum"
"""


def test_a_bias_inside_the_product_and_a_delayed_gradient():
    _run_beside_transformer_engine(_BIAS_AND_DELAY)


def test_main_grad_is_asked_for_in_backward():
    _run_beside_transformer_engine(_MAIN_GRAD)


def test_subclasses_whose_forwards_do_more_are_called():
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.heterogeneous.linear_replacements import ColumnParallelLinearGathered

    from ditron_train.megatron.shared.forward_override import unsupported_reason_stand_in
    from ditron_train.megatron.tp.layers import DitronColumnParallelLinear

    def forward(self, x):
        """As that of Transformer Engine's row parallel layer for inference, which only imports where that is
        installed."""

    forward.__module__ = "megatron.core.tensor_parallel.inference_layers"
    for kind in (ColumnParallelLinearGathered, type("ForInference", (ColumnParallelLinear,), {"forward": forward})):
        assert unsupported_reason_stand_in(kind.__new__(kind)) == f"{kind.__name__} has a forward of its own"
    for kind in (ColumnParallelLinear, DitronColumnParallelLinear):
        assert unsupported_reason_stand_in(kind.__new__(kind)) is None


def _qkv(**options):
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    layer = ColumnParallelLinear.__new__(ColumnParallelLinear)
    torch.nn.Module.__init__(layer)
    layer.weight, layer.bias = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((12, 8), (12,)))
    layer.tp_group, layer.sequence_parallel, layer.disable_grad_reduce = None, False, False
    layer.skip_bias_add, layer.gradient_accumulation_fusion = False, False
    vars(layer).update(options)
    return layer


def test_a_gradient_that_is_added_up_elsewhere_is_not_added_up():
    from ditron_train.megatron.sp.linears import LocalLinears

    asked = [
        LocalLinears().unsupported_reason(_qkv(disable_grad_reduce=flag), None, torch.zeros(1))
        for flag in (False, True)
    ]
    assert asked == [
        "the output projection is NoneType",
        "the gradient of their input is added up elsewhere (disable_grad_reduce)",
    ]


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_bias_of_a_frozen_projection_has_no_gradient(monkeypatch, is_frozen):
    from ditron_train.megatron.sp import projections
    from ditron_train.megatron.sp.linears import LocalLinears

    given = {}
    monkeypatch.setattr(projections, "qkv_projection", lambda x, weight, **options: given.update(options))
    layer, context = _qkv(), types.SimpleNamespace(world_size=1)
    layer.weight.requires_grad_(not is_frozen)
    LocalLinears().project_qkv(layer, torch.zeros(1), context, projections.AttentionShape(2, 1, 3, 3))
    assert given["bias"].requires_grad != is_frozen and torch.equal(given["bias"], layer.bias)
