"""Ulysses with linear layers in FP8 on Hopper GPUs under torchrun: the exchanges are fused, the projections native;
results, gradients and the state of scales are those of Transformer Engine's own attention."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
pytest.importorskip("megatron.core")
pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")
sys.path.insert(0, str(Path(__file__).parent))
from test_sp_megatron import assert_same_bits, build, num_routes, world  # noqa: E402, F401
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager  # noqa: E402

from ditron_train.tools.fp8.recipes import fp8_context, fp8_options  # noqa: E402

RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


@pytest.mark.parametrize("options", [{}, RECOMPUTE, {"add_qkv_bias": True}], ids=["plain", "recompute", "bias"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_attention_around_linear_layers_in_fp8(world, all_equal, recipe, options):  # noqa: F811
    import ditron_train.megatron as plugin
    from ditron_train.policy import gate

    gate.forget("sp")
    options = {**fp8_options(recipe), **options}
    native, fused = build(world, True, False, **options), build(world, True, True, **options)
    try:
        found = []
        for layer in (native, fused):
            FP8GlobalStateManager.reset()  # under delayed scaling a step updates the state of all layers that it knows
            steps = [_step(layer, world) for _ in range(3)]
            state = {name: decoded(value) for name, value in layer.state_dict().items() if "extra" in name}
            found.append((steps, state))
        for expected, seen in zip(found[0][0], found[1][0]):
            assert_same_bits(seen, expected)
        states = [state for _, state in found]
        assert states[0].keys() == states[1].keys() and len(states[0]) >= 3
        for name in states[0]:
            assert states[0][name].keys() == states[1][name].keys(), name
            for key, value in states[0][name].items():
                assert same(all_equal, value, states[1][name][key]), (name, key, value, states[1][name][key])
        # The first forward of what is recomputed has no backward, so it is decided about by itself.
        assert num_routes("exchange") == 1 + ("recompute_granularity" in options), "the exchanges are fused"
        assert num_routes("projections") == num_routes("output") == 0, "the projections are native"
    finally:
        plugin.restore()


def decoded(state):
    """Transformer Engine's state of a module, whose pickled bytes may differ where the state does not."""
    found = pickle.loads(state.cpu().numpy().tobytes()) if state.numel() else {}
    return {**found, **found.pop("extra_fp8_variables", {})}


def same(all_equal, first, second):
    if isinstance(first, torch.Tensor):
        return all_equal(first.cuda(), second.cuda())
    return repr(first) == repr(second)


def _step(layer, world_size):
    """Forward in the recipe's context, backward outside of it, as in training."""
    generator = torch.Generator(device="cuda").manual_seed(20 + dist.get_rank())
    shape = (2048 // world_size, 1, layer.config.hidden_size)
    x, grad = (torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(generator=generator) for _ in range(2))
    x.requires_grad_()
    with fp8_context(layer.config):
        out, bias = layer(x, attention_mask=None, rotary_pos_emb=None)
    out.backward(grad)
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    return out.detach(), x.grad, gradients, bias
