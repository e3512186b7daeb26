"""Megatron-core itself runs on gloo once shimmed, and the shim leaves nothing behind."""

import pytest
import torch

from tests.support.processes import run_workers

pytest.importorskip("megatron.core")


def _gpt_losses(sequence_parallel, dtype):
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    from ditron_train.cpu import megatron_shim as megatron_cpu

    with megatron_cpu.megatron_on_cpu():
        world_size = torch.distributed.get_world_size()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
        try:
            megatron_cpu.seed(1)
            config = TransformerConfig(
                num_layers=2,
                hidden_size=32,
                num_attention_heads=4,
                ffn_hidden_size=64,
                params_dtype=dtype,
                bf16=dtype == torch.bfloat16,
                add_bias_linear=False,
                attention_dropout=0.0,
                hidden_dropout=0.0,
                tensor_model_parallel_size=world_size,
                sequence_parallel=sequence_parallel and world_size > 1,
                **megatron_cpu.CPU_CONFIG,
            )
            spec = get_gpt_layer_local_spec(normalization="LayerNorm")
            model = GPTModel(config, spec, vocab_size=64, max_sequence_length=8, position_embedding_type="rope")
            tokens = torch.arange(16).view(2, 8)
            mask = torch.ones(8, 8).triu(1).bool()[None, None]
            loss = model(tokens, torch.arange(8)[None].expand(2, 8), mask, labels=tokens).float().mean()
            loss.backward()
            assert all(p.grad is not None for p in model.parameters())
            return loss.item()
        finally:
            parallel_state.destroy_model_parallel()


def _state_of_torch():
    names = ("current_device", "synchronize", "Stream", "Event", "current_stream", "get_rng_state")
    return [getattr(torch.cuda, name) for name in names] + [torch.Tensor.record_stream]


def _install_and_uninstall():
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from ditron_train.cpu import megatron_shim as megatron_cpu

    before = _state_of_torch(), WrappedTorchNorm.__new__
    megatron_cpu.install()
    megatron_cpu.install()
    assert megatron_cpu.is_installed()
    assert torch.empty(1, device="cuda").device.type == "cpu"
    megatron_cpu.uninstall()
    megatron_cpu.uninstall()
    assert not megatron_cpu.is_installed()
    assert (_state_of_torch(), WrappedTorchNorm.__new__) == before
    with pytest.raises((RuntimeError, AssertionError)):
        torch.empty(1, device="cuda")


def test_uninstall_restores_torch():
    run_workers(1, _install_and_uninstall)


def test_gpt_tensor_parallel_loss_is_that_of_one_process():
    (alone,) = run_workers(1, _gpt_losses, False, torch.float32)
    for sequence_parallel in (False, True):
        losses = run_workers(2, _gpt_losses, sequence_parallel, torch.float32)
        assert losses[0] == losses[1]
        assert abs(losses[0] - alone) < 1e-5


def test_gpt_bf16_runs():
    losses = run_workers(2, _gpt_losses, True, torch.bfloat16)
    assert losses[0] == losses[1] and 3.0 < losses[0] < 6.0
