"""What stands in for an attention's norms of heads while the policy compares."""

import pytest
import torch

pytest.importorskip("megatron.core")

from ditron_train.megatron.sp.norms import key_of, twins_of, unsupported_reason_norms, words_of


@pytest.mark.parametrize("kind", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_twins_compute_the_same_and_leave_the_layers_own_alone(kind):
    norm, called = kind(8), []
    norm.weight.data.normal_()
    norm.register_forward_pre_hook(lambda *given: called.append(given))
    norm.register_full_backward_hook(lambda *given: called.append(given))
    norm.weight.register_hook(called.append)
    (twin, frozen, none), x = twins_of((norm, kind(8).requires_grad_(False), None)), torch.randn(4, 3, 8)
    out = twin(x)
    out.sum().backward()
    assert not called and norm.weight.grad is None and twin.weight.grad is not None
    assert none is None and not frozen.weight.requires_grad
    assert torch.equal(out, norm(x)) and len(called) == 1
    assert key_of((twin, None, None)) == key_of((norm, None, None)) != key_of((frozen, None, None))


class _Adapted(torch.nn.RMSNorm):
    pass


def test_norms_that_fused_do_not_know_are_native():
    assert unsupported_reason_norms(()) is None and unsupported_reason_norms((torch.nn.RMSNorm(8), None, None)) is None
    changed = torch.nn.RMSNorm(8)
    changed.forward = lambda x: x
    for norm, word in ((_Adapted(8), "_Adapted"), (changed, "RMSNorm"), (torch.nn.RMSNorm([2, 8]), "several heads")):
        assert word in unsupported_reason_norms((None, norm, None))


def test_a_plan_tells_norms_of_heads_apart():
    """What a plan's key does not say, another norm's decision would be taken for."""
    frozen = torch.nn.RMSNorm(16)
    frozen.requires_grad_(False)
    kinds = [torch.nn.LayerNorm(16), torch.nn.RMSNorm(16), frozen, torch.nn.RMSNorm(16, dtype=torch.bfloat16), None]
    found = [(key_of((norm, norm, None)), words_of((norm, norm, None))) for norm in kinds]
    assert len({key for key, _ in found}) == len({words for _, words in found}) == len(kinds)
    assert words_of((torch.nn.RMSNorm(16), frozen, None)) == "torch.RMSNorm float32/torch.RMSNorm float32 frozen/none"
