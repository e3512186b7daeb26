"""Cross entropy over a divided vocabulary against Megatron's own, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ditron_train.loss.cross_entropy import cross_entropy
from tests.support.processes import run_workers

pytest.importorskip("megatron.core")
WORDS = {"part of a block": 100, "a block and one word": 4097, "few": 3}


def _results(function, logits, grad):
    leaf = logits.clone().requires_grad_()
    loss = function(leaf * 1)
    loss.backward(grad)
    return loss.detach(), leaf.grad


def _compare(words, dtype, spread):
    from megatron.core.tensor_parallel import cross_entropy as of_megatron

    group, rank, world_size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    of_megatron.get_tensor_model_parallel_group = lambda: group
    of_megatron.get_tensor_model_parallel_rank = lambda: rank
    of_megatron.get_tensor_model_parallel_world_size = lambda: world_size
    shared, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2 + rank)
    target = torch.randint(0, words * world_size, (7, 2), generator=shared)
    target[0, 0], target[1, 1] = 0, words * world_size - 1
    grad = torch.randn(2, 7, generator=shared).t()  # as the transposed mean of a loss comes
    logits = (spread * torch.randn(7, 2, words, generator=own)).to(dtype)
    logits[3, 0, -1] = 1000.0  # the others' exponentials vanish
    native = _results(lambda x: of_megatron.vocab_parallel_cross_entropy(x, target), logits, grad)
    fused = _results(lambda x: cross_entropy(x, target, group, first_word=rank * words), logits, grad)
    assert fused[1].dtype == dtype and native[0].dtype == fused[0].dtype == torch.float32
    return [torch.equal(one.view(torch.int8), other.view(torch.int8)) for one, other in zip(native, fused)]


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world_size", [1, 2])
def test_loss_and_gradient_have_megatrons_bits(world_size, dtype, words):
    for spread in (1.0, 40.0):
        assert run_workers(world_size, _compare, words, dtype, spread) == [[True, True]] * world_size


def _nan():
    logits = torch.full((1, 1, 5), float("nan"), dtype=torch.bfloat16)
    return bool(cross_entropy(logits, torch.zeros(1, 1, dtype=torch.int64), dist.group.WORLD, first_word=0).isnan())


def test_what_is_no_number_stays_so():
    assert run_workers(1, _nan) == [True]
