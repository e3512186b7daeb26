"""Exact CPU arithmetic: the exact sum rounded once, by torch and the interpreter; sums over ranks in ring order."""

import math
import pathlib
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from tests.support.exact import exact_sums
from tests.support.processes import run_workers

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tp"))

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@triton.jit
def _dot(a_ptr, b_ptr, c_ptr, K, B: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.arange(0, B)
    acc = tl.zeros((B, B), tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + rows[:, None] * K + k[None, :])
        b = tl.load(b_ptr + k[:, None] * B + rows[None, :])
        acc = tl.dot(a, b, acc, input_precision="ieee")
    tl.store(c_ptr + rows[:, None] * B + rows[None, :], acc.to(c_ptr.dtype.element_ty))


def _values(shape, dtype, seed):
    """Of magnitudes from 2**-4 to 2**4, so that an fp32 sum depends on its order."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return (values * torch.exp2(torch.randint(-4, 5, shape, generator=generator))).to(dtype)


def _rounded_once(a, b):
    """Products of 16 x 256 and 256 x 16, each the exact sum, rounded to fp32."""
    a, b = a.double(), b.double()
    exact = [[math.fsum((row * column).tolist()) for column in b.t()] for row in a]
    return torch.tensor(exact, dtype=torch.float64).float()


def _check_products(dtype):
    a, b, c = _values((16, 256), dtype, 1), _values((256, 16), dtype, 2), _values((16, 16), dtype, 3)
    before, create_dot = a @ b, triton.runtime.interpreter.InterpreterBuilder.create_dot
    with exact_sums():
        expected = _rounded_once(a, b)
        assert torch.equal(a @ b, expected.to(dtype))
        order = torch.randperm(256, generator=torch.Generator().manual_seed(4))
        assert torch.equal(a[:, order] @ b[order], a @ b)
        assert torch.equal(torch.nn.functional.linear(a[None], b.t())[0], a @ b)
        leaf = a.clone().requires_grad_()
        (leaf @ b).backward(c)
        assert torch.equal(leaf.grad, c @ b.t())
        for block in (16, 64):
            out = torch.empty_like(c)
            _dot[(1,)](a, b, out, 256, 16, block)
            assert torch.equal(out, a @ b), f"{dtype} in blocks of {block}"
        scaled = torch.tensor(-2.6875) * c.float()
        summed = (scaled.double() + expected.double() * 3.125).float().to(dtype)
        assert torch.equal(torch.addmm(c, a, b, beta=-2.6875, alpha=3.125), summed)
        assert torch.equal(torch.addmm(c[0], a, b, beta=0), a @ b)
    assert torch.equal(a @ b, before)
    assert triton.runtime.interpreter.InterpreterBuilder.create_dot is create_dot
    return not torch.equal(before, expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_rounded_once_in_any_order(dtype):
    (was_different,) = run_workers(1, _check_products, dtype)
    assert was_different or dtype != torch.float32, "these values do not show an order"


@exact_sums()
def _check_what_is_no_sum_of_floats():
    for dtype in (torch.int64, torch.float64):
        a, b = torch.arange(12).view(3, 4).to(dtype), torch.arange(8).view(4, 2).to(dtype)
        expected = torch.tensor([[28, 34], [76, 98], [124, 162]], dtype=dtype)
        assert torch.equal(a @ b, expected) and torch.equal(torch.addmm(expected, a, b, beta=2), 3 * expected)
    assert torch.equal(torch.empty(3, 0) @ torch.empty(0, 2), torch.zeros(3, 2))
    large = torch.tensor([[math.inf, 1.0, -math.inf, math.nan, 3e38]])
    product = (large.t() @ torch.tensor([[1.0, -2.0]])).numpy()
    expected = [[np.inf, -np.inf], [1, -2], [-np.inf, np.inf], [np.nan, np.nan], [np.float32(3e38), -np.inf]]
    assert np.array_equal(product, np.array(expected, dtype=np.float32), equal_nan=True)


def test_other_types_and_values():
    run_workers(1, _check_what_is_no_sum_of_floats)


def _runs(sums):
    """Where each run of elements ends, and its order; of the first two ranks no order can be seen."""
    orders = [sums.orders[index] for index in sums.order_of_run]
    return [(end, *sorted(order[:2]), *order[2:]) for end, order in zip(sums.ends, orders)]


@exact_sums()
def _check_sums_over_ranks(dtype):
    from bodies_tp import ring_reduce

    from ditron_train.policy.all_reduce_order import SumMap, probe_orders
    from ditron_train.policy.order import probe_order

    rank, world = dist.get_rank(), dist.get_world_size()
    values = _values((world, world, 1001), dtype, 5)  # [source, destination, element]
    out = torch.empty(1001, dtype=dtype)
    dist.reduce_scatter_tensor(out, values[rank])
    assert torch.equal(out, ring_reduce(list(values[:, rank]), rank))
    handle = dist.reduce_scatter_tensor(out.zero_(), values[rank], group=dist.group.WORLD, async_op=True)
    assert handle.wait() and torch.equal(out, ring_reduce(list(values[:, rank]), rank))
    total = values[rank].clone()
    dist.all_reduce(total)
    bounds = [world * 1001 * index // world for index in range(world + 1)]
    flat = values.view(world, -1)
    chunks = [ring_reduce(list(flat[:, bounds[i] : bounds[i + 1]]), i) for i in range(world)]
    assert torch.equal(total.view(-1), torch.cat(chunks))
    largest, count = values[rank].clone(), torch.tensor([rank])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.all_reduce(count)
    assert torch.equal(largest, values.amax(0)) and count.item() == world * (world - 1) // 2
    with dist._coalescing_manager(async_ops=True) as together:
        parts = [values[rank, 0].clone(), values[rank, 1].clone()]
        for part in parts:
            dist.all_reduce(part)
    together.wait()
    assert torch.allclose(parts[1].float(), values[:, 1].float().sum(0), atol=0.5)

    def seen(reveal, call, *sizes):
        return reveal(call, *sizes, group=dist.group.WORLD, device=torch.device("cpu"), dtype=dtype)

    if dtype == torch.bfloat16:
        assert _runs(seen(probe_orders, dist.all_reduce, 1000).sums) == _runs(SumMap.ring(1000, world))
    return seen(probe_order, lambda out, x: dist.reduce_scatter_tensor(out, x.view(-1))).name


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_over_ranks_are_in_ring_order(world_size, dtype):
    assert run_workers(world_size, _check_sums_over_ranks, dtype) == ["ring"] * world_size


def _names_by_value():
    import megatron.core.tensor_parallel.layers as layers
    import megatron.core.tensor_parallel.mappings as mappings

    before = dist.reduce_scatter_tensor, layers.dist_reduce_scatter_func, mappings.dist_reduce_scatter_func
    with exact_sums(), exact_sums():
        assert (
            len({dist.reduce_scatter_tensor, layers.dist_reduce_scatter_func, mappings.dist_reduce_scatter_func}) == 1
        )
        assert dist.reduce_scatter_tensor is not before[0]
    assert before == (dist.reduce_scatter_tensor, layers.dist_reduce_scatter_func, mappings.dist_reduce_scatter_func)


def test_megatrons_names_are_replaced_and_given_back():
    pytest.importorskip("megatron.core")
    run_workers(1, _names_by_value)
