"""Backward of norms of heads whose modules and parameters have hooks, against autograd's through the norms."""

import pytest
import torch

from ditron_train.sp.head_norms import backward_of_norms, normalised, parameters_of
from ditron_train.sp.layouts import qkv_layout, split_by_heads

HEADS, GROUPS, DIM, ROWS = 4, 2, 8, 6


class _Norms(torch.autograd.Function):
    """As the QKV projection of one rank runs them."""

    @staticmethod
    def forward(ctx, mixed, norms, layout, *parameters):
        ctx.norms, ctx.layout = norms, layout
        ctx.save_for_backward(mixed)
        return normalised(split_by_heads(mixed, layout, 1), norms)

    @staticmethod
    def backward(ctx, *grads):
        (mixed,) = ctx.saved_tensors
        grad = torch.cat([grad.reshape(ROWS, 1, GROUPS, -1) for grad in grads], dim=3).view_as(mixed)
        grad_mixed, of_parameters = backward_of_norms(mixed, grad, ctx.norms, ctx.layout, 1)
        return grad_mixed, None, None, *of_parameters


def _plain(norm, log):
    pass


def _hook_of_weight(norm, log):
    norm.weight.register_hook(lambda grad: log.append("weight") or 2 * grad)


def _forward_hook(norm, log):
    norm.register_forward_hook(lambda module, given, out: 2 * out)


def _forward_pre_hook(norm, log):
    norm.register_forward_pre_hook(lambda module, given: 3 * given[0] + 1)


def _backward_hook(norm, log):
    norm.register_full_backward_hook(lambda module, of_input, of_output: log.append("norm") or (2 * of_input[0],))


def _backward_pre_hook(norm, log):
    norm.register_full_backward_pre_hook(lambda module, of_output: log.append("norm") or (2 * of_output[0],))


@pytest.mark.parametrize("kind", [torch.nn.LayerNorm, torch.nn.RMSNorm])
@pytest.mark.parametrize(
    "add_hook", [_plain, _hook_of_weight, _forward_hook, _forward_pre_hook, _backward_hook, _backward_pre_hook]
)
def test_hooks_have_a_part_in_gradients(kind, add_hook):
    torch.manual_seed(3)
    norms, layout, log = (kind(DIM), kind(DIM), None), qkv_layout(HEADS, GROUPS, DIM, 1), []
    norms[0].weight.data.normal_()
    norms[1].weight.requires_grad_(False)
    add_hook(norms[0], log)
    mixed = torch.randn(ROWS, 1, (HEADS + 2 * GROUPS) * DIM)
    found = []
    for fused in (False, True):
        x, own = mixed.clone().requires_grad_(), parameters_of(norms)
        outs = _Norms.apply(x, norms, layout, *own) if fused else normalised(split_by_heads(x, layout, 1), norms)
        torch.manual_seed(4)
        torch.autograd.backward(outs, [torch.randn_like(out) for out in outs])
        assert all(a is b for a, b in zip(parameters_of(norms), own, strict=True))
        found.append([*outs, x.grad, *(one.grad for one in own), *log])
        log.clear()
        for one in own:
            one.grad = None
    for native, of_fused in zip(*found, strict=True):
        assert torch.equal(native, of_fused) if torch.is_tensor(native) else native == of_fused
