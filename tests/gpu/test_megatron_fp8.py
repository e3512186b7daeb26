"""Stacks of Transformer Engine's layers in FP8 under Megatron's contexts: steps, microbatches, recomputation, and what
a checkpoint holds behind them. One layer at a time is in ``test_megatron_tp``."""

from __future__ import annotations

import pickle

import pytest
import torch
from test_megatron_tp import (  # noqa: F401  (fixtures)
    _assert_same,
    _build,
    _config,
    _import_te,
    _normals,
    _num_ops,
    _wherever_bits_are_equal,
    tensor_parallel,
)

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)

HIDDEN, FFN, TOKENS = 512, 1024, 1024
STACK = (("te_norm_column", FFN, HIDDEN), ("te_row", HIDDEN, FFN), ("te_column", FFN, HIDDEN), ("te_row", HIDDEN, FFN))


def _saved(layer):
    """What a checkpoint holds of the state of FP8, as tensors."""
    state = pickle.loads(layer.get_extra_state().numpy().tobytes())
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _steps(index, config, world_size, how):
    """Results, gradients and state of five steps of two microbatches, whose inputs grow and shrink."""
    from megatron.core.extensions.transformer_engine import set_save_original_input, te_checkpoint
    from megatron.core.fp8_utils import get_fp8_context
    from megatron.core.parallel_state import get_tensor_model_parallel_group
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    layers = [_build(kind, index, n, k, config, False, True) for kind, n, k in STACK]
    for (kind, _, _), layer in zip(STACK, layers):
        if how == "input saved" and kind != "te_norm_column":
            set_save_original_input(layer)
        layer.weight.main_grad = torch.zeros(layer.weight.shape, device="cuda")
        layer.weight.grad_added_to_main_grad = False

    def run(x):
        for layer in layers:
            x, _ = layer(x)
        return x

    found = {}
    for step in range(5):
        for layer in layers:
            layer.is_first_microbatch = True
        for microbatch in range(2):
            seed = 10 * step + microbatch
            x = (_normals(TOKENS // world_size, 1, HIDDEN, seed=seed) * (1 + 3 * (step % 3))).requires_grad_()
            with get_fp8_context(config, 0):
                if how == "recomputed":
                    y = te_checkpoint(run, False, get_cuda_rng_tracker, get_tensor_model_parallel_group(), x)
                else:
                    y = run(x)
            y.backward(_normals(*y.shape, seed=seed + 5))
            found.update({f"y {seed}": y.detach(), f"dx {seed}": x.grad})
        for position, layer in enumerate(layers):
            found[f"main_grad {step} {position}"] = layer.weight.main_grad.clone()
            found.update({f"{name} {step} {position}": value for name, value in _saved(layer).items()})
            with torch.no_grad():
                layer.weight -= 1e-3 * layer.weight.main_grad
            layer.weight.main_grad.zero_()
    return found


@pytest.mark.parametrize("how", ["quantized input saved", "input saved", "recomputed"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_stacks_leave_the_state_of_the_native_path(tensor_parallel, all_equal, recipe, how):  # noqa: F811
    if (recipe, how) == ("delayed", "input saved"):
        pytest.skip("Transformer Engine refuses it")
    _import_te()
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    from ditron_train.policy import gate

    gate.forget()
    config = _config(
        HIDDEN, fp8="hybrid", fp8_recipe=recipe, fp8_amax_history_len=3, fp8_amax_compute_algo="max",
        gradient_accumulation_fusion=True,
    )  # fmt: skip
    found = []
    for index in (0, 1):
        FP8GlobalStateManager.reset()  # the other stack is not part of this one's reductions
        found.append(_steps(index, config, tensor_parallel, how))
    native, ours = ({name: value.cuda() for name, value in one.items()} for one in found)
    _assert_same(all_equal, native, ours, (recipe, how))
    assert any("amax_history" in name for name in native) == (recipe == "delayed")
    assert _num_ops() == len({(kind != "te_row", n, k) for kind, n, k in STACK})
