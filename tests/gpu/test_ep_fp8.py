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

from ditron_train.megatron.ep.fp8_rows_spec import FP8_ROWS  # noqa: E402
from ditron_train.policy import gate  # noqa: E402
from ditron_train.tools.bench.megatron_ep import layer_pair  # noqa: E402
from ditron_train.tools.cases.ep_moves import moe_config  # noqa: E402
from ditron_train.tools.fp8.recipes import fp8_context, fp8_options  # noqa: E402

STEPS = 3
CASES = [
    ("tensorwise", "bits", {}),
    ("tensorwise", "bits", {"rows": "off"}),
    ("tensorwise", "force", {"padded": True, "main_grad": True}),
    ("tensorwise", "force", {"unusual": (float("nan"), float("inf"), 3e38)}),
    ("delayed", "bits", {"padded": True}),
    ("delayed", "bits", {"padded": True, "experimental": True}),
    ("delayed", "force", {"main_grad": True}),
    ("blockwise", "bits", {"padded": True, "main_grad": True}),
]


@pytest.fixture
def quantised(monkeypatch):
    """How many rows of all experts each call of this package quantised in layers."""
    from ditron_train.megatron.ep import te_quantise

    found, quantise = [], te_quantise.quantise

    def counted(rows, *args):
        results = quantise(rows, *args)
        found.append(len(rows))
        return results

    monkeypatch.setattr(te_quantise, "quantise", counted)
    return found


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


def steps_of(layer, config, unusual):
    """Everything that a few steps give, then the state; ``unusual``: a value of each step."""
    FP8GlobalStateManager.reset()  # under delayed scaling a step updates the state of all layers that it knows
    found = []
    if config.gradient_accumulation_fusion:
        for parameter in layer.experts.parameters():
            parameter.main_grad = torch.full(parameter.shape, 0.5, device="cuda")
    for step in range(STEPS):
        generator = torch.Generator("cuda").manual_seed(10 * step + dist.get_rank())
        tokens = (1517, 1300, 1256, 2000)[(step + dist.get_rank()) % 4]
        x, grad = (torch.randn(tokens, 1, 1024, device="cuda", generator=generator).bfloat16() for _ in range(2))
        if unusual and dist.get_rank() == 0:  # in a token of one rank
            x[-1, 0, -1] = unusual[step]
        x.requires_grad_()
        with fp8_context(config):
            y, _ = layer(x)
        y.backward(grad)
        found += [("y", y.detach()), ("dx", x.grad)]
        for name, parameter in layer.named_parameters():
            main_grad = getattr(parameter, "main_grad", None)
            found += [(name, parameter.grad), (f"{name} main_grad", None if main_grad is None else main_grad.clone())]
        layer.zero_grad()
        if step == 1:  # a new step begins: cached weights are quantised anew
            for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2):
                linear.is_first_microbatch = True
                for weight in linear.parameters():
                    weight.data.mul_(0.75)
    return [*found, *state_of(layer).items()]


@pytest.mark.parametrize("recipe, policy, options", CASES)
def test_layers_with_experts_in_fp8(all_equal, monkeypatch, quantised, recipe, policy, options):
    """Equal; under current scaling rows and gradients are quantised for all experts at once."""
    monkeypatch.setenv("DITRON_POLICY", policy)
    monkeypatch.setenv("DITRON_FP8_ROWS", options.get("rows", "on"))
    # Megatron's experimental functions pad the routing in a kernel.
    monkeypatch.setattr("megatron.core.config.ENABLE_EXPERIMENTAL", options.get("experimental", False))
    gate.forget(FP8_ROWS.name)
    config = moe_config(
        hidden=1024,
        ffn_hidden=512,
        num_experts=4 * dist.get_world_size(),
        topk=3,
        dtype=torch.bfloat16,
        gradient_accumulation_fusion=options.get("main_grad", False),
        moe_router_padding_for_quantization=options.get("padded", False),
        **fp8_options(recipe),
    )
    layers = layer_pair(config, torch.device("cuda", torch.cuda.current_device()))
    native = steps_of(layers["native"], config, options.get("unusual"))
    assert not quantised
    fused = steps_of(layers["fused"], config, options.get("unusual"))
    assert layers["fused"].token_dispatcher.ep_context is not None, "the movement is fused"
    assert len(native) == len(fused)
    different = [
        (index, name)
        for index, ((name, expected), (_, found)) in enumerate(zip(native, fused))
        if (expected is None) != (found is None)
        or (expected is not None and not torch.equal(bits(found), bits(expected)))
    ]
    assert all_equal(torch.tensor(len(different)), torch.tensor(0)), different
    of_rows, is_asked = gate.answers(FP8_ROWS.name), recipe == "tensorwise" and options.get("rows") != "off"
    assert bool(of_rows) == is_asked and all(answer.reason is None for answer in of_rows), of_rows
    assert len(quantised) == 4 * STEPS * is_asked, "inputs and gradients of both layers"
