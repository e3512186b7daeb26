"""Megatron's embedding in deterministic mode: its gradient is taken from here, bitwise identical, and given back."""

from __future__ import annotations

import contextlib
import os
from unittest import mock

import pytest
import torch

from tests.support.processes import run_workers

pytest.importorskip("megatron.core")


def _pass(module, tokens, grad):
    module.weight.grad = None
    result = module(tokens)
    if result.requires_grad:
        result.backward(grad)
    return [result.detach(), module.weight.grad]


def _embeddings(kind, tp, dtype):
    """How many were taken from here, and whether results and gradients have Megatron's bits."""
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

    import ditron_train.megatron as plugin
    from ditron_train.cpu.megatron_shim import megatron_on_cpu
    from ditron_train.megatron.det import embedding
    from ditron_train.policy import gate

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    config = ModelParallelConfig(
        tensor_model_parallel_size=tp,
        sequence_parallel=kind == "sequence parallel",
        params_dtype=dtype,
        use_cpu_initialization=True,
        deterministic_mode=kind != "default mode",
    )
    module = VocabParallelEmbedding(
        60,
        8,
        init_method=torch.nn.init.normal_,
        reduce_scatter_embeddings=kind == "sequence parallel",
        config=config,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )
    module.weight.requires_grad_(kind != "frozen")
    # One sequence, as CPUs (not GPUs) add gradients in the order of memory, in which these are [s, b, h].
    batch = 1 if kind == "sequence parallel" else 2
    tokens = torch.randint(0, 60, (batch, 40), generator=torch.Generator().manual_seed(9))
    sizes = (40 // tp, batch, 8) if kind == "sequence parallel" else (batch, 40, 8)
    grad = torch.randn(sizes, generator=torch.Generator().manual_seed(3)).to(dtype)
    before = VocabParallelEmbedding.forward
    own = mock.Mock(side_effect=embedding.lookup)
    torch.use_deterministic_algorithms(True)
    with megatron_on_cpu():
        native = _pass(module, tokens, grad)
    patches = [
        megatron_on_cpu(),
        mock.patch.dict(os.environ, DITRON_DET="off" if kind == "off" else "on", DITRON_POLICY="bits"),
        mock.patch.object(embedding, "_DEVICES", ("cpu",)),
        mock.patch.object(embedding, "lookup", own),
        mock.patch.object(torch.compiler, "is_compiling", lambda: kind == "compiled"),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        plugin.apply(features="det")
        try:
            with torch.no_grad() if kind == "evaluation" else contextlib.nullcontext():
                fused = _pass(module, tokens, grad)
            trials = own.call_count
            again = _pass(module, tokens, grad) if kind != "evaluation" else fused
        finally:
            plugin.restore()
            gate.forget("det")
            torch.use_deterministic_algorithms(False)
    assert VocabParallelEmbedding.forward is before
    parallel_state.destroy_model_parallel()
    if kind == "evaluation":
        native, again = native[:1], again[:1]
    equal = [
        one is other if one is None else torch.equal(one.view(torch.int8), other.view(torch.int8))
        for path in (fused, again)
        for one, other in zip(native, path)
    ]
    return own.call_count - trials, all(equal)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind, tp", [("sequence parallel", 2), ("tensor parallel", 2), ("one rank", 1)])
def test_embeddings_have_their_gradient_from_here(kind, tp, dtype):
    assert run_workers(2, _embeddings, kind, tp, dtype) == [(1, True)] * 2


@pytest.mark.parametrize("kind", ["default mode", "frozen", "evaluation", "off", "compiled"])
def test_what_stays_native(kind):
    assert run_workers(2, _embeddings, kind, 2, torch.bfloat16) == [(0, True)] * 2


def test_a_type_that_is_not_covered_stays_native():
    assert run_workers(2, _embeddings, "tensor parallel", 2, torch.float64) == [(0, True)] * 2
