"""Cross entropy over a divided vocabulary against Megatron's, ``torch.equal``: shapes, spreads, the gate's answer."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")
pytest.importorskip("megatron.core")

from test_megatron_tp import tensor_parallel  # noqa: E402, F401

from ditron_train.loss import cross_entropy  # noqa: E402

SHAPES = [
    (4096, 1, 65536),
    (2048, 2, 32064),
    (1000, 1, 75969),
    (64, 1, 64128),
    (1, 1, 5),
    (3, 3, 4097),
    (512, 1, 1003),
]


def _results(function, logits, grad):
    leaf = logits.detach().requires_grad_()
    loss = function(leaf)
    loss.backward(grad)
    return loss.detach(), leaf.grad


def _inputs(shape, spread, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    logits = (torch.randn(shape, device="cuda", generator=generator) * spread).to(dtype)
    shared = torch.Generator("cuda").manual_seed(99)
    words = shape[-1] * dist.get_world_size()
    target = torch.randint(0, words, shape[:2], device="cuda", generator=shared)
    return logits, target, torch.randn(shape[1::-1], device="cuda", generator=shared).t()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_loss_and_gradient_are_megatrons(tensor_parallel, all_equal, shape, is_deterministic):  # noqa: F811
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    group, first_word = dist.group.WORLD, dist.get_rank() * shape[-1]
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        for spread in (0.1, 4.0, 90.0):
            for dtype in (torch.bfloat16, torch.float16):
                logits, target, grad = _inputs(shape, spread, dtype)
                native = _results(lambda x, target=target: vocab_parallel_cross_entropy(x, target), logits, grad)
                fused = _results(
                    lambda x, target=target: cross_entropy(x, target, group, first_word=first_word), logits, grad
                )
                assert all(all_equal(*pair) for pair in zip(native, fused)), (shape, spread, dtype)
    finally:
        torch.use_deterministic_algorithms(False)


def test_every_exponential_is_torchs(device):
    """Of all fp32 numbers that are not above 0."""
    from ditron_train.loss.cross_entropy import _launch, exponentials_kernel

    nothing = torch.zeros(1, device="cuda")
    for high in range(0x8000, 0xFF81, 0x100):
        bits = torch.arange(high << 16, min((high + 0x100) << 16, 0xFF800001), device="cuda", dtype=torch.int64)
        values = (bits - (1 << 32)).to(torch.int32).view(torch.float32)
        found = torch.empty(1, len(values), device="cuda")
        _launch(exponentials_kernel, values[None], nothing, found)
        assert torch.equal(found[0].view(torch.int32), values.exp().view(torch.int32)), hex(high)


def test_the_gate_takes_it_where_it_is_faster(tensor_parallel, own_gpus, monkeypatch):  # noqa: F811
    from ditron_train.megatron.loss.cross_entropy import CROSS_ENTROPY, LossCall
    from ditron_train.policy import gate

    monkeypatch.setenv("DITRON_POLICY", "strict")
    gate.forget("loss")
    logits, target, _ = _inputs((4096, 1, 32768), 2.0)
    assert gate.is_fused(CROSS_ENTROPY, LossCall(logits, target, dist.group.WORLD))
    gate.forget("loss")
