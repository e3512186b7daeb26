"""From how many rows on an expert's products have the bits of stock Megatron: what is measured on values that show
the order of sums holds on random values."""

from __future__ import annotations

import random

import pytest
import torch

from ditron_train.ep.grouped_gemm import group_gemm, group_wgrad, group_wgrad_into, row_tiles
from ditron_train.ep.plan import (
    MOST_ROWS,
    NEVER,
    RowProduct,
    WgradProduct,
    min_rows_here,
    most_rows_here,
    native_products,
)
from ditron_train.gemm.transformer_engine import grouped_gemm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

#: Of published models: facts.md's MoE layer, DeepSeek-V3, Mixtral, Qwen1.5-MoE, DeepSeek-MoE.
EXPERTS = 8
WEIGHTS = ((4096, 7168), (7168, 2048), (2048, 7168), (28672, 4096), (4096, 14336), (2816, 2048), (2048, 1408))


@pytest.mark.parametrize("weight", WEIGHTS, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("transpose", [True, False], ids=["forward", "dgrad"])
def test_random_rows_above_the_limit(weight, transpose):
    (n, k), device, dtype = weight, torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    min_rows = min_rows_here(RowProduct(weight, EXPERTS, transpose), dtype, device)
    if min_rows == NEVER:
        pytest.skip("products of all sizes have other bits here, and stay Megatron's")
    draw = random.Random(f"{weight} {transpose}")
    for seed in range(3):
        counts = [draw.randint(min_rows, min_rows + 512) for _ in range(EXPERTS - 1)] + [
            draw.randint(min_rows, MOST_ROWS)
        ]
        generator = torch.Generator(device).manual_seed(seed)
        rows = torch.randn(sum(counts), k if transpose else n, dtype=dtype, device=device, generator=generator)
        weights = [torch.randn(n, k, dtype=dtype, device=device, generator=generator) for _ in counts]
        product = native_products(counts, n, k, dtype, device)["forward" if transpose else "dgrad"]
        tiles = row_tiles(torch.tensor(counts, device=device), len(rows))
        fused, native = group_gemm(rows, weights, tiles, transpose=transpose), product(rows, rows, weights)
        differing = [count for count, same in zip(counts, _same(fused, native, counts)) if not same]
        assert not differing, (min_rows, differing)


def test_most_products_have_native_bits_and_some_not_of_min_rows():
    device = torch.device("cuda", torch.cuda.current_device())
    products = [RowProduct(weight, EXPERTS, transpose) for weight in WEIGHTS for transpose in (True, False)]
    found = {product: min_rows_here(product, torch.bfloat16, device) for product in products}
    assert sum(min_rows == NEVER for min_rows in found.values()) < len(found) / 2, found
    assert any(1 < min_rows < NEVER for min_rows in found.values()), found


@pytest.mark.parametrize("into", [None, torch.float32], ids=["new tensors", "main_grad"])
@pytest.mark.parametrize("weight", [(1536, 2048), (2048, 768), (2816, 2048), (2048, 1408)], ids=str)
def test_random_weight_gradients_below_the_limit(weight, into):
    pytest.importorskip("transformer_engine")
    (n, k), device, dtype = weight, torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    most = most_rows_here(WgradProduct(weight, EXPERTS, into), dtype, device)
    print(f"weight gradients {weight} into {into}: equal up to {most} rows")
    if most <= 0:
        pytest.skip("weight gradients of all sizes have other bits here, and stay Megatron's")
    draw = random.Random(f"{weight} {into}")
    for seed in range(3):
        counts = [draw.randint(0, most) for _ in range(EXPERTS - 2)] + [0, most]
        generator = torch.Generator(device).manual_seed(seed)
        grad, rows = (
            torch.randn(sum(counts), width, dtype=dtype, device=device, generator=generator) for width in weight
        )
        tiles = row_tiles(torch.tensor(counts, device=device), len(rows))
        start = torch.randn(n, k, dtype=into or dtype, device=device, generator=generator)
        for accumulate in (False, True) if into else (False,):
            native, fused = ([start.clone() for _ in counts] for _ in range(2))
            options = dict(layout="NT", m_splits=counts, grad=True, use_split_accumulator=True, accumulate=accumulate)
            grouped_gemm(rows.split(counts), grad.split(counts), native, dtype, **options)
            if into is None:
                fused = group_wgrad(grad, rows, tiles).unbind(0)
            else:
                group_wgrad_into(grad, rows, tiles, fused, overwrites=not accumulate)
            differing = [count for count, one, other in zip(counts, native, fused) if not torch.equal(one, other)]
            assert not differing, (most, accumulate, differing)


def _same(fused, native, counts):
    return [torch.equal(one, other) for one, other in zip(fused.split(counts), native.split(counts))]
