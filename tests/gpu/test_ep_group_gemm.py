"""Grouped GEMMs on a GPU against one cuBLAS product an expert: equal bits, forward, dgrad and wgrad."""

from __future__ import annotations

import random

import pytest
import torch

from ditron_train.ep import grouped_gemm as module
from ditron_train.ep.dispatcher import group_linear
from ditron_train.ep.grouped_gemm import group_gemm, group_wgrad, group_wgrad_into, row_tiles
from ditron_train.gemm.configs import GemmConfig

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("own_gpus"),
]


def normals(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.empty(shape, dtype=dtype, device="cuda").normal_(generator=generator)


def counts_of(num_experts, average, seed):
    draw = random.Random(seed)
    return [draw.choice([average // 2, average - 3, average, average + 100]) for _ in range(num_experts)]


@pytest.mark.parametrize("n, k", [(4096, 7168), (7168, 2048), (2816, 2048), (2048, 1408), (8192, 14336)])
def test_published_layers(n, k):
    counts = counts_of(8, 2048, n)
    rows = sum(counts)
    weights = [normals(n, k, seed=i).requires_grad_() for i in range(len(counts))]
    x = normals(rows, k, seed=50).requires_grad_()
    grad = normals(rows, n, seed=51)
    y = group_linear(x, weights, row_tiles(torch.tensor(counts, device="cuda"), rows))
    y.backward(grad)
    for index, (part, x_part, dx_part, g_part) in enumerate(
        zip(*(t.split(counts) for t in (y.detach(), x.detach(), x.grad, grad)))
    ):
        weight = weights[index].detach()
        assert torch.equal(part, x_part @ weight.t()), index
        assert torch.equal(dx_part, g_part @ weight), index
        assert torch.equal(weights[index].grad, g_part.t() @ x_part), index


@pytest.mark.parametrize("wide", [False, True], ids=["own_choice", "wide"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_any_counts_are_exact_on_integers(monkeypatch, dtype, wide):
    """With wide tiles, too, whose last wave is computed in halves."""
    if wide:
        if torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("such tiles are for Hopper and newer")
        monkeypatch.setattr(
            module, "choose_group_config", lambda *arguments: GemmConfig(128, 256, 64, num_warps=8, num_stages=4)
        )
    draw = random.Random(1)
    for index in range(25):
        counts = [draw.choice([0, 0, 1, 7, 63, 64, 65, 128, 129, 400]) for _ in range(draw.randint(1, 40))]
        rows, n, k = sum(counts), 8 * draw.randint(1, 80), 8 * draw.randint(1, 80)
        generator = torch.Generator(device="cuda").manual_seed(index)
        x, grad = (torch.randint(-2, 3, (rows, c), generator=generator, device="cuda").to(dtype) for c in (k, n))
        weights = [torch.randint(-2, 3, (n, k), generator=generator, device="cuda").to(dtype) for _ in counts]
        tiles = row_tiles(torch.tensor(counts, device="cuda"), rows)
        y, dx, dw = (
            group_gemm(x, weights, tiles),
            group_gemm(grad, weights, tiles, transpose=False),
            group_wgrad(grad, x, tiles),
        )
        for e, (part, x_part, dx_part, g_part) in enumerate(
            zip(*(t.double().split(counts) for t in (y, x, dx, grad)))
        ):
            weight = weights[e].double()
            assert torch.equal(part, (x_part @ weight.t()).to(dtype).double()), (index, e)
            assert torch.equal(dx_part, (g_part @ weight).to(dtype).double()), (index, e)
            assert torch.equal(dw[e], (g_part.t() @ x_part).to(dtype)), (index, e)


def test_min_rows_have_the_bits_of_cublas_too():
    counts, n, k = [20, 0, 30, 9, 200, 1], 4096, 7168  # the first experts end within one block of rows
    rows = sum(counts)
    x, grad = normals(rows, k, seed=1), normals(rows, n, seed=2)
    dw = group_wgrad(grad, x, row_tiles(torch.tensor(counts, device="cuda"), rows))
    for e, (g_part, x_part) in enumerate(zip(grad.split(counts), x.split(counts))):
        assert torch.equal(dw[e], g_part.t() @ x_part), e


def test_replays_in_a_graph_with_other_counts():
    counts = torch.tensor([100, 0, 300], device="cuda")
    x, weights = normals(512, 256, seed=1), [normals(128, 256, seed=i) for i in range(3)]

    def both():
        tiles = row_tiles(counts, 512)
        return group_gemm(x, weights, tiles), group_wgrad(x, x, tiles)

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dw = both()
    for split in ([100, 0, 300], [0, 512, 0], [200, 200, 112]):
        counts.copy_(torch.tensor(split))
        graph.replay()
        wanted, wanted_dw = both()
        assert torch.equal(y[: sum(split)], wanted[: sum(split)]) and torch.equal(dw, wanted_dw)


@pytest.mark.parametrize(
    "dtype, accumulates", [(torch.float32, True), (torch.float32, False), (torch.bfloat16, False)]
)
@pytest.mark.parametrize("is_order_probe", [False, True])
def test_weight_gradients_into_main_grad_have_transformer_engines_bits(dtype, accumulates, is_order_probe):
    """At weights that fill a wave of tiles, with experts of few, odd and no rows. Sums that are added to 16 bits have
    other bits (weights 4096 x 7168), and the pair is not taken there."""
    from ditron_train.gemm.order_probe import order_probe_matrix
    from ditron_train.gemm.transformer_engine import grouped_gemm

    pytest.importorskip("transformer_engine.pytorch")
    for n, k in ((4096, 7168), (7168, 2048)):
        for counts in ([512, 480, 300, 1000], [0, 129, 2000, 31]):
            rows, device = sum(counts), torch.device("cuda")
            if is_order_probe:
                x = order_probe_matrix((rows, k), torch.bfloat16, device, seed=1, signed="rows")
                grad = order_probe_matrix((rows, n), torch.bfloat16, device, seed=2, signed="columns")
            else:
                x, grad = (
                    torch.randn(rows, k, device=device).bfloat16(),
                    torch.randn(rows, n, device=device).bfloat16(),
                )
            before = [torch.randn(n, k, device=device).to(dtype) for _ in counts]
            fused, native = ([buffer.clone() for buffer in before] for _ in range(2))
            group_wgrad_into(
                grad, x, row_tiles(torch.tensor(counts, device=device), rows), fused, overwrites=not accumulates
            )
            grouped_gemm(
                x.split(counts), grad.split(counts), native, x.dtype, m_splits=counts, layout="NT", grad=True,
                accumulate=accumulates, use_split_accumulator=True,
            )  # fmt: skip
            assert all(map(torch.equal, fused, native)), (n, k, counts)
