"""GEMM-AR against cuBLAS and NCCL's all-reduce, ``torch.equal``: shapes from one token up, every way, stragglers,
poison, CUDA graphs, layers with all gradients; the orders of NCCL as they are read from values."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ditron_train.gemm import matmul_nn, matmul_nt
from ditron_train.policy.all_reduce_order import all_reduce_orders
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.tp import gemm_ar, get_tp_context
from ditron_train.tp.choices import Problem, default_choice, transfer_variants
from ditron_train.tp.linear import row_linear_ar

sys.path.insert(0, str(Path(__file__).parents[1] / "tp"))
from bodies_all_reduce import gathered, poison, ring_reduce  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")
SHAPES = [
    (1, 8192, 3584), (16, 8192, 3584), (64, 5120, 2560), (256, 8192, 3584), (100, 1000, 512),
    (1000, 4096, 1376), (8192, 4096, 1376), (8192, 8192, 3584), (4096, 5120, 12800), (333, 4104, 2048),
]  # fmt: skip


@pytest.fixture(scope="module")
def context(device):
    return get_tp_context(dist.group.WORLD, device)


def normals(*shape, seed):
    generator = torch.Generator(device="cuda").manual_seed(1000 * seed + dist.get_rank())
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)


def summed(partial):
    partial = partial.clone()
    dist.all_reduce(partial)
    return partial


def _ways(context, m, n, k, layout):
    problem = Problem("gemm_ar", m, n, k, layout, torch.bfloat16, context.world_size)
    default = default_choice(problem, context.machine)
    return [None, default, *transfer_variants(problem, context.machine, default)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_gemm_ar_has_the_bits_of_cublas_and_nccl(context, all_equal, shape):
    m, n, k = shape
    for layout, multiply in (("nt", matmul_nt), ("nn", matmul_nn)):
        for turn, way in enumerate(_ways(context, m, n, k, layout)):
            x = normals(m, k, seed=turn)
            weight = normals(*((n, k) if layout == "nt" else (k, n)), seed=50 + turn)
            try:
                y = gemm_ar(x, weight, context=context, layout=layout, choice=way)
            except NotSupportedError as error:
                assert n % 8 and "16 bytes" in str(error)
                continue
            product = torch.matmul(x, weight.t() if layout == "nt" else weight)
            # Where cuBLAS splits K, products of this package still show the movement and the order.
            is_native = all_equal(y, summed(product))
            assert is_native or all_equal(y, summed(multiply(x, weight))), (layout, way)
            assert is_native or m < 8192
    context.synchronize()


def test_stragglers_and_poison(context, all_equal):
    rng = random.Random(dist.get_rank())
    sizes = [(2, 512), (128, 1024), (64, 24), (2048, 4096)]
    for repeat in range(40):
        m, n = sizes[repeat * 7 % len(sizes)]
        x, weight = normals(m, 256, seed=repeat), normals(n, 256, seed=99)
        if repeat % 5 == 0:
            poison(context)
        if rng.random() < 0.3:
            torch.cuda._sleep(int(3e6))
        y = gemm_ar(x, weight, context=context)
        assert all_equal(y, summed(torch.matmul(x, weight.t()))), repeat
    context.synchronize()


@pytest.mark.parametrize("m", [4, 2048])
def test_captured_graphs_replay(context, all_equal, m):
    x, weight = normals(m, 512, seed=1), normals(2048, 512, seed=2)
    for _ in range(3):
        gemm_ar(x, weight, context=context)
    context.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = gemm_ar(x, weight, context=context)
    for repeat in range(6):
        x.copy_(normals(m, 512, seed=10 + repeat))
        graph.replay()
        assert all_equal(y, summed(torch.matmul(x, weight.t())))
        assert all_equal(gemm_ar(x, weight, context=context), y)
    context.synchronize()


def test_the_row_layer_and_its_gradients(context, all_equal):
    world = context.world_size
    x, weight = normals(1024, 1, 4096 // world, seed=4), normals(2048, 4096 // world, seed=5)
    grad = normals(1024, 1, 2048, seed=6)
    dist.broadcast(grad, 0)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = row_linear_ar(*leaves, context=context)
    y.backward(grad)
    grads = grad.view(-1, 2048)
    expected = [
        summed(torch.matmul(x, weight.t())), grad.matmul(weight), grads.t().matmul(x.view(-1, x.shape[-1]))
    ]  # fmt: skip
    assert all(all_equal(*pair) for pair in zip((y, leaves[0].grad, leaves[1].grad), expected))


@pytest.mark.parametrize("num_elements", [8192, 1 << 20, 3 * (1 << 22) + 8])
def test_nccls_orders_are_as_they_are_read(device, context, all_equal, num_elements):
    orders = all_reduce_orders(dist.group.WORLD, device, torch.bfloat16, num_elements)
    if orders.sums is None:
        pytest.skip(orders.reason)
    x = normals(num_elements, seed=8) * torch.exp2(normals(num_elements, seed=9).mul(4).round())
    assert all_equal(ring_reduce(gathered(x), orders.sums), summed(x))
