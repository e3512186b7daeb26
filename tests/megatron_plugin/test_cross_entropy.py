"""The loss of Megatron's language models: taken from here, with Megatron's bits, and given back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.support.processes import run_workers

pytest.importorskip("megatron.core")


def _loss(module, logits, labels):
    leaf = logits.clone().requires_grad_()
    loss = module.compute_language_model_loss(labels, leaf)
    loss.sum().backward()
    return loss.detach(), leaf.grad


def _losses(dtype, fuses):
    from megatron.core import parallel_state
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.tensor_parallel import cross_entropy as of_megatron

    from ditron_train.megatron.det import cross_entropy
    from ditron_train.policy import gate

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    rank, calls = torch.distributed.get_rank(), []
    logits = torch.randn(6, 2, 40, generator=torch.Generator().manual_seed(rank)).to(dtype)
    labels = torch.randint(0, 80, (2, 6), generator=torch.Generator().manual_seed(9))
    module = LanguageModule.__new__(LanguageModule)
    torch.nn.Module.__init__(module)
    group = parallel_state.get_tensor_model_parallel_group()
    module.config = SimpleNamespace(cross_entropy_loss_fusion=fuses, cross_entropy_fusion_impl="native")
    module.pg_collection = SimpleNamespace(tp=group)
    native = _loss(module, logits, labels)
    own = cross_entropy.cross_entropy
    cross_entropy.cross_entropy = lambda *args, **options: calls.append(1) or own(*args, **options)
    cross_entropy.start()
    try:
        fused = _loss(module, logits, labels)
    finally:
        cross_entropy.stop()
        cross_entropy.cross_entropy = own
        gate.forget("det")
    assert LanguageModule.compute_language_model_loss is cross_entropy._native
    assert of_megatron.vocab_parallel_cross_entropy is cross_entropy.vocab_parallel_cross_entropy
    parallel_state.destroy_model_parallel()
    return len(calls) > 0, [torch.equal(*pair) for pair in zip(native, fused)]


def test_language_models_take_their_loss_from_here():
    assert run_workers(2, _losses, torch.bfloat16, False) == [(True, [True, True])] * 2


@pytest.mark.parametrize("dtype, fuses", [(torch.float32, False), (torch.bfloat16, True)])
def test_fp32_logits_and_megatrons_fused_loss_stay_native(dtype, fuses):
    assert run_workers(2, _losses, dtype, fuses) == [(False, [True, True])] * 2
