"""The embedding in deterministic mode against PyTorch's and Megatron's, ``torch.equal``: words, sizes, layouts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")
pytest.importorskip("megatron.core")

from test_megatron_tp import tensor_parallel  # noqa: E402, F401

from ditron_train.embedding import lookup  # noqa: E402

NUM_WORDS = 3000
WORDS = {
    "none of this rank": lambda shape: torch.full(shape, -1),
    "one word": lambda shape: torch.full(shape, NUM_WORDS - 1),
    "of eight ranks": lambda shape: torch.randint(-4 * NUM_WORDS, 4 * NUM_WORDS, shape),
    "by Zipf's law": lambda shape: (NUM_WORDS ** torch.rand(shape)).long() - 1,
    "few": lambda shape: torch.randint(0, 5, shape),
}


@pytest.fixture(autouse=True)
def _deterministic():
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(dist.get_rank())
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("shape", [(1,), (4096, 1), (2, 3001), (3, 17)], ids=str)
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_rows_and_gradient_are_pytorchs(all_equal, words, shape):
    words = words(shape).cuda()
    is_elsewhere = (words < 0) | (words >= NUM_WORDS)
    index = words.masked_fill(is_elsewhere, 0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for hidden in (64, 513, 4096):
            weight = torch.randn(NUM_WORDS, hidden, device="cuda").to(dtype)
            grad = (torch.randn(*shape[::-1], hidden, device="cuda") * 3).to(dtype)
            grad = grad.transpose(0, 1) if len(shape) == 2 else grad
            found = []
            for path in (lambda x: x[index], lambda x: lookup(x, index, is_elsewhere)):
                leaf = weight.clone().requires_grad_()
                result = path(leaf) * 1
                result[is_elsewhere] = 0.0
                result.backward(grad)
                found.append((result.detach(), leaf.grad))
            assert all(all_equal(*pair) for pair in zip(*found)), (dtype, hidden)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_zeros_subnormals_and_infinities_keep_their_bits(dtype):
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    values = torch.tensor([-0.0, 0.0, smallest, -smallest, float("inf"), float("nan"), 1.0, -1.0], device="cuda")
    picks = torch.randint(0, len(values), (4096, 64), device="cuda")
    words = torch.randint(0, 900, (4096,), device="cuda")
    found = []
    for path in (lambda x: x[words], lambda x: lookup(x, words)):
        leaf = torch.zeros(900, 64, device="cuda", dtype=dtype, requires_grad=True)
        path(leaf).backward(values[picks].to(dtype))
        found.append(leaf.grad)
    assert torch.equal(*(one.isnan() for one in found))
    whole, own = (one.nan_to_num(7.0, 8.0, 9.0) for one in found)
    assert torch.equal(whole, own) and torch.equal(whole.signbit(), own.signbit())


@pytest.mark.parametrize("is_sequence_parallel", [False, True])
def test_megatrons_embedding_with_several_sequences(
    tensor_parallel,  # noqa: F811
    all_equal,
    own_gpus,
    monkeypatch,
    is_sequence_parallel,
):
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from ditron_train.megatron.det import embedding
    from ditron_train.policy import gate

    monkeypatch.setenv("DITRON_POLICY", "strict")
    model_parallel_cuda_manual_seed(7)
    world = dist.get_world_size()
    module = VocabParallelEmbedding(
        32000 * world,
        2048,
        init_method=torch.nn.init.normal_,
        reduce_scatter_embeddings=is_sequence_parallel,
        config=ModelParallelConfig(
            tensor_model_parallel_size=world,
            sequence_parallel=is_sequence_parallel,
            params_dtype=torch.bfloat16,
            deterministic_mode=True,
        ),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )
    tokens = torch.randint(0, 4000, (2, 2048), generator=torch.Generator().manual_seed(1)).cuda()
    taken, found = [], []
    route = embedding.route_embedding
    monkeypatch.setattr(embedding, "route_embedding", lambda call: taken.append(route(call)) or taken[-1])
    for start in (None, embedding.start):
        if start is not None:
            start()
        try:
            module.weight.grad = None
            result = module(tokens)
            result.backward(torch.randn(result.shape, generator=torch.Generator().manual_seed(2)).to(result))
            found.append((result.detach(), module.weight.grad))
        finally:
            embedding.stop()
    gate.forget("det")
    assert [answer.is_fused for answer in taken] == [True]  # all words are the first rank's, so it is much faster
    assert all(all_equal(*pair) for pair in zip(*found))
