"""Linear layers with a frozen weight keep no input for backward, as Megatron's do not."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from tests.support.processes import run_workers

pytest.importorskip("megatron.core")

TOKENS, BATCH, HIDDEN, FFN = 24, 2, 48, 96


def _layers(is_fused, sequence_parallel):
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig

    from ditron_train.cpu.megatron_shim import CPU_CONFIG
    from ditron_train.megatron.tp.layers import DitronColumnParallelLinear, DitronRowParallelLinear

    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, params_dtype=torch.float32,
        tensor_model_parallel_size=dist.get_world_size(),
        **{**CPU_CONFIG, "add_bias_linear": False, "sequence_parallel": sequence_parallel},
    )  # fmt: skip
    options = dict(config=config, init_method=torch.nn.init.zeros_, bias=False, skip_bias_add=False)
    column, row = (
        (DitronColumnParallelLinear, DitronRowParallelLinear)
        if is_fused
        else (ColumnParallelLinear, RowParallelLinear)
    )
    layers = column(HIDDEN, FFN, **options), row(FFN, HIDDEN, input_is_parallel=True, **options)
    for seed, layer in enumerate(layers):
        generator = torch.Generator().manual_seed(10 * dist.get_rank() + seed)
        layer.weight.data.copy_(torch.randint(-4, 5, layer.weight.shape, generator=generator).float())
        layer.weight.requires_grad_(False)
    return layers


def _forward(layers, leaf):
    """The result, and whether the inputs of both layers live behind it."""
    column, row = layers
    x = leaf + 0.0
    h = column(x)[0] + 0.0
    y, _ = row(h)
    inputs = weakref.ref(x), weakref.ref(h)
    del x, h
    gc.collect()
    return y, [one() is not None for one in inputs]


def _keeps(sequence_parallel):
    """Of native and fused: which inputs live behind forward; the gradients; the input's, written to behind forward."""
    from ditron_train.policy import gate
    from tests.support.model_parallel import model_parallel

    found, shards = [], dist.get_world_size() if sequence_parallel else 1
    with model_parallel(tensor_model_parallel_size=dist.get_world_size()):
        for is_fused in (False, True):
            layers = _layers(is_fused, sequence_parallel)
            generator = torch.Generator().manual_seed(7)
            values = torch.randint(-4, 5, (TOKENS // shards, BATCH, HIDDEN), generator=generator).float()
            leaf = values.clone().requires_grad_()
            y, alive = _forward(layers, leaf)
            y.backward(torch.ones_like(y))
            other = values.clone().requires_grad_()
            x = other + 0.0
            h, _ = layers[0](x)
            x.mul_(2.0)  # natively nobody needs it any more
            h.sum().backward()
            found.append((alive, leaf.grad.tolist(), other.grad.tolist()))
        ops = ("column", "row") if sequence_parallel else ("row ar",)  # the column layer is native without it
        assert all(gate.answers(f"tp {kind}")[0].context is not None for kind in ops)
    return found


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_frozen_layer_keeps_no_input(sequence_parallel):
    for native, is_fused in run_workers(2, _keeps, sequence_parallel):
        assert is_fused == native and is_fused[0] == [False, False]


def test_rows_of_frozen_experts_leave_their_memory():
    from ditron_train.runtime.derivatives import rows_to_save

    rows, weights = torch.ones(8, 4), [torch.ones(4, 4), torch.ones(4, 4)]
    kept = rows_to_save(rows, weights)
    assert kept.shape == (0, 4) and kept.untyped_storage().nbytes() == 0
    weights[1].requires_grad_()
    assert rows_to_save(rows, weights) is rows
