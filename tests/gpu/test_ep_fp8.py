"""MoE layers with experts in FP8 on Hopper GPUs under torchrun: results, gradients and the state of scales are those
of megatron-core's dispatcher around Transformer Engine's experts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
pytest.importorskip("megatron.core")
pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")

from test_ep import world  # noqa: E402, F401
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager  # noqa: E402

from ditron_train.megatron.ep.movement_spec import moe_config  # noqa: E402
from ditron_train.policy import gate  # noqa: E402
from ditron_train.tools.bench.megatron_ep import layer_pair  # noqa: E402
from ditron_train.tools.fp8.recipes import fp8_context, fp8_options  # noqa: E402

STEPS = 4


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    monkeypatch.setenv("DITRON_POLICY", "bits")


def state_of(layer):
    """What Transformer Engine's quantizers of the experts keep, as far as a layer writes it: of inputs and weights, of
    gradients of results."""
    found = {}
    for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2):
        count = linear.num_gemms
        used = {
            "scaling_fwd": [3 * i + j for i in range(count) for j in (0, 1)],
            "scaling_bwd": range(0, 2 * count, 2),
        }
        for name, indices in used.items():
            for index in indices:
                for field in ("scale", "amax"):
                    value = getattr(linear.quantizers[name][index], field, None)
                    if value is not None:
                        found[f"{type(linear).__name__} {name} {index} {field}"] = value.clone()
            history = getattr(linear.fp8_meta[name], "amax_history", None)
            if history is not None:
                found[f"{type(linear).__name__} {name} history"] = history.clone()
    return found


def bits(tensor):
    """What a NaN equals, too."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def steps_of(layer, config, unusual=None):
    """Everything that a few steps give, then the state."""
    FP8GlobalStateManager.reset()  # under delayed scaling a step updates the state of all layers that it knows
    found = []
    for step in range(STEPS):
        generator = torch.Generator("cuda").manual_seed(10 * step + dist.get_rank())
        tokens = (1517, 1300, 1256, 2000)[(step + dist.get_rank()) % 4]
        x, grad = (torch.randn(tokens, 1, 1024, device="cuda", generator=generator).bfloat16() for _ in range(2))
        if step == STEPS - 1 and unusual is not None:  # in a token of one rank
            x[-1, 0, -1] = unusual if dist.get_rank() == 0 else 1.0
        x.requires_grad_()
        with fp8_context(config):
            y, _ = layer(x)
        y.backward(grad)
        found += [("y", y.detach()), ("dx", x.grad), *((name, p.grad) for name, p in layer.named_parameters())]
        layer.zero_grad()
    return [*found, *state_of(layer).items()]


CASES = [(recipe, padded, None) for recipe in ("tensorwise", "delayed", "blockwise") for padded in (False, True)]
CASES += [("tensorwise", False, value) for value in (float("nan"), float("inf"), 3e38)]


@pytest.mark.parametrize("recipe, padded, unusual", CASES)
def test_layers_with_experts_in_fp8(all_equal, monkeypatch, recipe, padded, unusual):
    from ditron_train.megatron.ep import te_experts

    monkeypatch.setattr(te_experts, "FP8_RECIPES", ("Float8CurrentScaling",))
    gate.forget("ep")
    options = {**fp8_options(recipe), "moe_router_padding_for_quantization": padded}
    config = moe_config(
        hidden=1024, ffn_hidden=512, num_experts=4 * dist.get_world_size(), topk=3, dtype=torch.bfloat16, **options
    )
    layers = layer_pair(config, torch.device("cuda", torch.cuda.current_device()))
    native, ours = (steps_of(layers[name], config, unusual) for name in ("native", "ditron"))
    assert layers["ditron"].token_dispatcher.ep_context is not None, "the movement is ours"
    assert bool(gate.answers("ep experts fp8")) == (recipe == "tensorwise"), "the policy was asked about products"
    assert len(native) == len(ours)
    for index, ((name, expected), (_, found)) in enumerate(zip(native, ours)):
        assert (expected is None) == (found is None), (recipe, index, name)
        assert expected is None or all_equal(bits(found), bits(expected)), (recipe, index, name)
