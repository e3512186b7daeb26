"""The loss of Megatron's language models: taken from here, bitwise identical, and given back."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.support.processes import run_workers

pytest.importorskip("megatron.core")


def _loss(module, logits, labels):
    leaf = logits.clone().requires_grad_()
    loss = module.compute_language_model_loss(labels, leaf)
    loss.sum().backward()
    return loss.detach(), leaf.grad


def _losses(dtype, fuses, setting="on", is_compiling=False):
    """How many losses were taken from here, and whether loss and gradient have Megatron's bits."""
    import os

    from megatron.core import parallel_state
    from megatron.core.models.common.language_module.language_module import LanguageModule

    import ditron_train.megatron as plugin
    from ditron_train.megatron.loss import cross_entropy
    from ditron_train.policy import gate

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    logits = torch.randn(6, 2, 40, generator=torch.Generator().manual_seed(torch.distributed.get_rank())).to(dtype)
    labels = torch.randint(0, 80, (2, 6), generator=torch.Generator().manual_seed(9))
    module = LanguageModule.__new__(LanguageModule)
    torch.nn.Module.__init__(module)
    module.config = SimpleNamespace(cross_entropy_loss_fusion=fuses, cross_entropy_fusion_impl="native")
    module.pg_collection = SimpleNamespace(tp=parallel_state.get_tensor_model_parallel_group())
    before = LanguageModule.compute_language_model_loss
    native = _loss(module, logits, labels)
    covered = mock.patch.object(cross_entropy, "_DEVICES", ("cpu",))
    own = mock.Mock(side_effect=cross_entropy.cross_entropy)
    with (
        mock.patch.dict(os.environ, DITRON_LOSS=setting),
        covered,
        mock.patch.object(cross_entropy, "cross_entropy", own),
    ):
        plugin.apply(features="loss")
        try:
            with mock.patch.object(torch.compiler, "is_compiling", lambda: is_compiling):
                fused = _loss(module, logits, labels)
        finally:
            plugin.restore()
            gate.forget("loss")
    assert LanguageModule.compute_language_model_loss is before
    parallel_state.destroy_model_parallel()
    return own.call_count, [torch.equal(*pair) for pair in zip(native, fused)]


def test_language_models_take_their_loss_from_here():
    for count, equal in run_workers(2, _losses, torch.bfloat16, False):
        assert count >= 1 and equal == [True, True]


@pytest.mark.parametrize(
    "case",
    [
        (torch.float32, False),
        (torch.bfloat16, True),
        (torch.bfloat16, False, "off"),
        (torch.bfloat16, False, "on", True),
    ],
    ids=["fp32 logits", "fused by Megatron", "off", "compiled"],
)
def test_what_stays_native(case):
    assert run_workers(2, _losses, *case) == [(0, [True, True])] * 2
