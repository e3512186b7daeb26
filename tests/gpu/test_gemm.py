"""Tile GEMM on a GPU against cuBLAS: equal bits, at published shapes and at random ones."""

from __future__ import annotations

import random

import pytest
import torch

from ditron_train.ep.grouped_gemm import group_gemm, row_tiles
from ditron_train.gemm import GemmConfig, matmul_nn, matmul_nt

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("own_gpus"),
]

# (N, K) of column linears and of row linears, at TP 1; 8192 tokens
COLUMN = [(11008, 4096), (14336, 4096), (28672, 8192), (53248, 16384), (29568, 8192)]
ROW = [(4096, 11008), (4096, 14336), (8192, 28672), (16384, 53248), (8192, 29568)]
TOKENS = 8192


def layer_shapes():
    for world_size in (8, 4):
        for n, k in COLUMN:
            yield n // world_size, k
        for n, k in ROW:
            yield n, k // world_size


def matrix(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, dtype=dtype, device="cuda", generator=generator)


@pytest.mark.parametrize("n, k", sorted(set(layer_shapes())))
def test_forward_and_dgrad_of_published_layers_have_the_bits_of_cublas(n, k):
    x, weight = matrix(TOKENS, k, seed=1), matrix(n, k, seed=2)
    y = x @ weight.t()
    assert torch.equal(matmul_nt(x, weight), y)
    assert torch.equal(matmul_nn(y, weight), y @ weight)


def fills_a_wave(m, n):
    """Then cuBLAS does not split K (bf16; measured: ``docs/measurements/tp.md``)."""
    return -(-m // 128) * -(-n // 256) >= 132


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_fills_a_wave_is_equal_at_random_shapes(dtype):
    draw = random.Random(4)
    for index in range(40):
        m, n, k = 128 * draw.randint(16, 64), 8 * draw.randint(256, 800), 8 * draw.randint(32, 1000)
        x, weight = matrix(m, k, dtype=dtype, seed=index), matrix(n, k, dtype=dtype, seed=index + 100)
        if dtype == torch.float16 or fills_a_wave(m, n):
            assert torch.equal(matmul_nt(x, weight), x @ weight.t()), (m, n, k)
        if dtype == torch.float16 or fills_a_wave(m, k):
            grad = matrix(m, n, dtype=dtype, seed=index + 200)
            assert torch.equal(matmul_nn(grad, weight), grad @ weight), (m, n, k)


def test_tile_sizes_do_not_change_bits():
    x, weight = matrix(1000, 1024, seed=1), matrix(1500, 1024, seed=2)
    results = [
        matmul_nt(x, weight, config=config)
        for config in (
            GemmConfig(128, 256, 64, 8, 3),
            GemmConfig(128, 128, 64, 8, 4),
            GemmConfig(128, 128, 64, 4, 3, group_m=2),
            GemmConfig(64, 64, 128, 4, 2),
        )
    ]
    assert all(torch.equal(result, results[0]) for result in results[1:])


def test_odd_shapes_and_strides_agree_with_their_aligned_copies():
    draw = random.Random(5)
    for index in range(20):
        m, n, k = draw.randint(1, 700), draw.randint(1, 700), draw.randint(1, 700)
        a, b = matrix(m, k + 3, seed=index)[:, 1 : k + 1], matrix(k, n, seed=index + 50).t()
        whole = GemmConfig(128, 128, 64, 8, 4)
        # zeros beyond the edges change no sum: compare with the product of padded matrices
        a_padded, b_padded = matrix(m, 704).zero_(), matrix(n, 704).zero_()
        a_padded[:, :k], b_padded[:, :k] = a, b
        expected = matmul_nt(a_padded, b_padded, config=whole)
        assert torch.equal(matmul_nt(a, b), expected)
        assert torch.equal(matmul_nn(a, b.t()), expected)


def test_integer_data_is_exact():
    a, b = (
        torch.randint(-3, 4, (333, 217), device="cuda").bfloat16(),
        torch.randint(-3, 4, (129, 217), device="cuda").bfloat16(),
    )
    assert torch.equal(matmul_nt(a, b), (a.double() @ b.double().t()).bfloat16())


def test_a_captured_product_replays():
    x, weight, out = matrix(512, 512, seed=1), matrix(512, 512, seed=2), matrix(512, 512).zero_()
    matmul_nt(x, weight, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        matmul_nt(x, weight, out=out)
    x.copy_(matrix(512, 512, seed=3))
    graph.replay()
    assert torch.equal(out, matmul_nt(x, weight))


def test_every_device_of_a_process_has_its_own_code():
    """What was launched on one GPU is launched on another, and again on the first, whichever is the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    home, counts = torch.cuda.current_device(), [100, 0, 156]
    for device in (home, (home + 1) % torch.cuda.device_count()) * 2:
        x, weight = (torch.randint(-2, 3, (rows, 512), device=device).bfloat16() for rows in (256, 128))
        assert torch.equal(matmul_nt(x, weight), x @ weight.t())
        y = group_gemm(x, [weight] * 3, row_tiles(torch.tensor(counts, device=device), 256))
        assert torch.equal(y, x @ weight.t()) and torch.cuda.current_device() == home
