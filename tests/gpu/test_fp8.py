"""FP8 products on a Hopper GPU against cuBLASLt, through torch, and what is made of them against NCCL: equal bits.

Transformer Engine's layers in FP8 are in ``test_megatron_tp``.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from ditron_train.gemm.operands import FP8_DTYPES, TensorScales
from ditron_train.gemm.order_probe import order_probe_matrix
from ditron_train.tp import GatherPlan, ag_gemm, choices, gemm_rs, get_tp_context, start_all_gather
from ditron_train.tp import context as tp_context
from ditron_train.tp.ag_gemm import LibraryAgGemmPlan
from tests.support.matmul_fp8 import matmul_fp8

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
    pytest.mark.usefixtures("own_gpus"),
]

E4M3, _ = FP8_DTYPES


def operands(m, n, k, dtype, *, is_order_probe, seed):
    """x, weight and their scales; ``is_order_probe``: pairs of values that cancel, so that the order of sums shows."""
    device = torch.device("cuda")
    if is_order_probe:
        x = order_probe_matrix((m, k), torch.bfloat16, device, seed=seed, signed="rows")
        weight = order_probe_matrix((n, k), torch.bfloat16, device, seed=seed + 1, signed="columns")
    else:
        generator = torch.Generator("cuda").manual_seed(seed)
        x, weight = (torch.randn(size, k, device=device, generator=generator).bfloat16() for size in (m, n))
    limits = [torch.finfo(dtype).max / x.abs().max().float(), 448 / weight.abs().max().float()]
    scaled = [(x.float() * limits[0]).to(dtype), (weight.float() * limits[1]).to(E4M3)]
    return *scaled, TensorScales(*(1 / limit for limit in limits))


def by_cublas(x, weight, scales, split):
    return torch._scaled_mm(
        x, weight.t(), scale_a=scales.a, scale_b=scales.b, out_dtype=torch.bfloat16, use_fast_accum=not split
    )


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", FP8_DTYPES)
def test_products_have_the_bits_of_cublas_at_random_shapes(dtype, split):
    draw = random.Random(8)
    for index in range(24):
        m, n, k = 16 * draw.randint(64, 512), 16 * draw.randint(128, 512), 16 * draw.randint(16, 512)
        for is_order_probe in (False, True):
            x, weight, scales = operands(m, n, k, dtype, is_order_probe=is_order_probe, seed=3 * index)
            found = matmul_fp8(x, weight, scales, split_accumulator=split)
            assert torch.equal(found, by_cublas(x, weight, scales, split)), (m, n, k, is_order_probe)


@pytest.mark.parametrize("by_library", [False, True])
def test_gathers_and_scatters_have_the_bits_of_nccl_and_cublas(device, all_equal, monkeypatch, by_library):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    context, draw = get_tp_context(dist.new_group(), device), random.Random(9)

    def chosen(problem, machine):
        given = choices.choose(problem, machine)
        return choices.with_library(given) if by_library else given

    monkeypatch.setattr(tp_context, "choose", chosen)
    for index in range(12):
        rows, n, k = 16 * draw.randint(4, 160), 16 * draw.randint(16, 256), 16 * draw.randint(16, 256)
        x, weight, scales = operands(rows, n, k, E4M3, is_order_probe=index % 2 == 1, seed=100 * index + rank)
        total = torch.empty(rows * world_size, k, dtype=torch.uint8, device=device)
        dist.all_gather_into_tensor(total, x.view(torch.uint8))
        expected = by_cublas(total.view(E4M3), weight, scales, False)
        for plan in (None, GatherPlan("copy", num_chunks=2), GatherPlan("push", push_programs=8)):
            y, gathered = ag_gemm(x, weight, context=context, scales=scales, plan=plan, return_gathered=True)
            assert all_equal(y, expected) and all_equal(gathered.view(torch.uint8), total), (index, plan)
        seen = torch.zeros_like(total)
        start_all_gather(x.view(torch.uint8), context=context, flags_each_rank=True).consume(seen.__setitem__)
        assert all_equal(seen, total), index

        owned = torch.empty(rows, n, dtype=torch.bfloat16, device=device)
        dist.reduce_scatter_tensor(owned, expected)
        for scatter in (None, "store", "copy"):
            found = gemm_rs(total.view(E4M3), weight, context=context, scales=scales, scatter=scatter)
            assert all_equal(found, owned), (index, scatter)
    context.synchronize()
    assert any(isinstance(plan, LibraryAgGemmPlan) for plan in context.prepared.values()) is by_library
