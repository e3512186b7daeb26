"""Muon on a GPU: products, Newton-Schulz and whole steps have the bits of the published equations run by cuBLAS and
torch."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from ditron_train.optim import Muon, addmm, gram, graphs, newton_schulz, reference, scaled_square
from ditron_train.optim.graphs import Steps, make_graph
from ditron_train.optim.products import ProductPlan, addmm_choices, symmetric_choices
from ditron_train.policy import gate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def matrix(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, dtype=dtype, device="cuda", generator=generator)


@pytest.mark.parametrize(
    "m, n",
    [
        (512, 2048), (1024, 1024), (1024, 4096), (1536, 4096), (2048, 2048), (2048, 8192), (3072, 8192), (4096, 4096),
        (4096, 11008), (4096, 14336), (8192, 8192),
    ],
)  # fmt: skip
def test_products_have_the_bits_of_cublas(m, n):
    """By every choice of tiles that a plan may make."""
    x = matrix(m, n, dtype=torch.bfloat16) * (m * n) ** -0.5
    a = x @ x.mT
    tiles = symmetric_choices(m, n, x.dtype, x.device)
    assert all(torch.equal(gram(x, config=config), a) for config in tiles)
    for factor_a, factor_b, factor_c in reference.QUINTIC:
        b = torch.addmm(a, a, a, alpha=factor_c, beta=factor_b)
        assert all(torch.equal(scaled_square(a, factor_b, factor_c, config=config), b) for config in tiles)
        y = torch.addmm(x, b, x, alpha=1.0, beta=factor_a)
        for config in addmm_choices(m, n, m, x.dtype, x.device):
            assert torch.equal(addmm(x, b, x, alpha=1.0, beta=factor_a, config=config), y)


def equal_to_reference(shape, seed, mode="strict"):
    grad = matrix(*shape, seed=seed)
    x = newton_schulz(grad, mode=mode)
    x = x.mT if shape[0] > shape[1] else x
    return torch.equal(x.to(torch.float32), reference.reference_newton_schulz(grad))


@pytest.mark.parametrize(
    "shape", [(4096, 4096), (4096, 11008), (11008, 4096), (6144, 4096), (8192, 8192), (2048, 8192)]
)
def test_newton_schulz_by_our_products_alone(shape):
    assert equal_to_reference(shape, 1, "force")


@pytest.mark.timeout(600)
def test_newton_schulz_at_200_random_shapes():
    draw = random.Random(7)
    different = []
    for seed in range(200):
        align = draw.choice([128, 64, 16, 8, 1])
        largest = 4096 if seed % 10 == 0 else 2300
        shape = tuple(max(1, draw.randint(1, largest) // align * align) for _ in range(2))
        if not equal_to_reference(shape, seed):
            different.append(shape)
    assert not different


@pytest.mark.parametrize(
    "shape", [(1024, 1024), (2816, 1024), (2048, 2048), (512, 2048), (8, 4096), (4096, 8), (37, 53), (1, 9)]
)
def test_a_graph_of_small_steps_has_the_bits_of_single_launches(shape):
    m, n = sorted(shape)
    for uses in ((False, False, False), (True, True, True)):
        plan = ProductPlan(*uses, reason="chosen by the test")
        if any(uses) and m < 1024:
            continue
        is_view = shape[0] > shape[1] and not any(uses)
        device = torch.device("cuda", torch.cuda.current_device())
        graph = make_graph(Steps(m, n, torch.bfloat16, device, is_view, tuple(reference.QUINTIC), plan))
        assert graph is not None
    grads = [matrix(*shape, seed=seed) for seed in range(3)]
    results = [newton_schulz(grad) for grad in grads]  # kept: a later call must not overwrite them
    for grad, x in zip(grads, results):
        x = x.mT if shape[0] > shape[1] else x
        assert torch.equal(x.to(torch.float32), reference.reference_newton_schulz(grad))


def test_graphs_do_not_write_into_workspaces_that_were_let_go_of():
    """cuBLAS's, which torch gives back for ``mode="reduce-overhead"``: others have that memory then."""
    device = torch.device("cuda", torch.cuda.current_device())
    plan = ProductPlan(False, False, False, reason="chosen by the test")
    shapes, coefficients = ((64, 32768), (256, 16384), (512, 2048)), tuple(reference.QUINTIC)
    made = [make_graph(Steps(m, n, torch.bfloat16, device, False, coefficients, plan)) for m, n in shapes]
    expected = [graph.replay().clone() for graph in made]
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((2**18 * mib,), 7, dtype=torch.int32, device=device) for mib in (1, 2, 4, 8, 16, 32) * 6]
    for graph, result in zip(made, expected):
        assert torch.equal(graph.replay(), result)
    assert all(bool((other == 7).all()) for other in others)


def test_without_cuda_bindings_small_steps_are_single_launches(monkeypatch):
    """A graph would be captured on one of torch's streams, which shares cuBLAS's workspace with whoever else has
    it."""
    monkeypatch.setattr(graphs, "has_driver", lambda: False)
    gate.forget("muon")
    monkeypatch.setattr(graphs, "_graphs", {})
    assert equal_to_reference((256, 512), 1) and equal_to_reference((512, 256), 2)
    assert (
        not any(answer.context and answer.context.use_graph for answer in gate.answers("muon")) and not graphs._graphs
    )


def test_small_steps_inside_a_captured_graph():
    grad = matrix(256, 512, seed=1)
    newton_schulz(grad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = newton_schulz(grad, borrow=True)
    grad.copy_(matrix(256, 512, seed=2))
    graph.replay()
    assert torch.equal(x.to(torch.float32), reference.reference_newton_schulz(grad))


def test_small_steps_on_two_streams_at_once():
    streams = [torch.cuda.Stream() for _ in range(2)]
    grads = [matrix(1024, 2816, seed=seed) for seed in range(2)]
    results = []
    torch.cuda.synchronize()
    for _ in range(5):
        for stream, grad in zip(streams, grads):
            with torch.cuda.stream(stream):
                results.append(newton_schulz(grad))
    torch.cuda.synchronize()
    expected = [reference.reference_newton_schulz(grad) for grad in grads]
    assert all(torch.equal(x.to(torch.float32), expected[index % 2]) for index, x in enumerate(results))


@pytest.mark.parametrize("shape", [(1024, 2816), (2816, 1024), (640, 640), (37, 53), (2048, 5632)])
@pytest.mark.parametrize("decay", ["decoupled", "independent", "l2"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_equal_the_equations(shape, decay, nesterov):
    param = torch.nn.Parameter(matrix(*shape, seed=1))
    expected, momentum = param.detach().clone(), torch.zeros(shape, device="cuda")
    optimizer = Muon(
        [param], lr=0.013, momentum_beta=0.93, use_nesterov=nesterov, weight_decay=0.17, weight_decay_method=decay,
        extra_scale_factor=0.2,
    )  # fmt: skip
    for seed in range(3):
        param.grad = matrix(*shape, seed=seed + 10)
        reference.reference_step(
            expected, momentum, param.grad.clone(), lr=0.013, momentum_beta=0.93, nesterov=nesterov, weight_decay=0.17,
            decay=decay, extra=0.2,
        )  # fmt: skip
        optimizer.step()
        assert torch.equal(optimizer.state[param]["momentum_buffer"], momentum)
        assert torch.equal(param, expected)


@pytest.mark.parametrize("beta", [0.3, 0.5, 0.95])
def test_both_forms_of_lerp(beta):
    param = torch.nn.Parameter(matrix(300, 500, seed=1))
    expected, momentum = param.detach().clone(), torch.zeros(300, 500, device="cuda")
    optimizer = Muon([param], lr=0.013, momentum_beta=beta)
    for seed in range(3):
        param.grad = matrix(300, 500, seed=seed + 10)
        reference.reference_step(expected, momentum, param.grad.clone(), lr=0.013, momentum_beta=beta)
        optimizer.step()
        assert torch.equal(param, expected)


def test_qkv_components_of_a_grouped_query_weight():
    qkv = (512, 128, 128)
    param = torch.nn.Parameter(matrix(8 * sum(qkv), 4096, seed=1))
    expected, momentum = param.detach().clone(), torch.zeros(param.shape, device="cuda")
    param.grad = matrix(*param.shape, seed=2)
    reference.reference_step(expected, momentum, param.grad.clone(), lr=0.02, qkv=qkv)
    Muon([param], lr=0.02, split_qkv=True, is_qkv_fn=lambda p: True, qkv_split_shapes=qkv).step()
    assert torch.equal(param, expected)


def test_nan_and_zero_gradients():
    zero, nan = torch.nn.Parameter(matrix(2048, 2048)), torch.nn.Parameter(matrix(2048, 2048))
    before = zero.detach().clone()
    zero.grad, nan.grad = torch.zeros_like(zero), torch.zeros_like(nan)
    nan.grad[5, 5] = float("nan")
    Muon([zero, nan], lr=0.1, weight_decay=0.0).step()
    assert torch.equal(zero, before) and bool(nan.isnan().all())


def peak_bytes(step):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_memory_stays_within_two_matrices_of_the_native_peak():
    shape = (4096, 11008)
    param = torch.nn.Parameter(matrix(*shape, seed=1))
    param.grad = matrix(*shape, seed=2)
    optimizer = Muon([param], lr=0.01)
    optimizer.step()  # measures the shape once
    fused = peak_bytes(optimizer.step)
    expected, momentum = param.detach().clone(), torch.zeros(shape, device="cuda")
    native = peak_bytes(lambda: reference.reference_step(expected, momentum, param.grad, lr=0.01))
    assert fused <= native + 2 * param.numel() * 4


@pytest.mark.parametrize("num_steps", [1, 3])
def test_sharded_steps_equal_whole_ones(device, all_equal, num_steps):
    shapes = [(1024, 2816), (4096, 4096), (2816, 1024), (640, 640), (4096, 1024), (1536,), (4096, 11008), (37, 53)]
    params = [torch.nn.Parameter(matrix(*shape, seed=i)) for i, shape in enumerate(shapes)]
    alone = [torch.nn.Parameter(param.detach().clone()) for param in params]
    sharded, whole = Muon(params, lr=0.02, shard_group=dist.group.WORLD), Muon(alone, lr=0.02)
    for step in range(num_steps):
        for index, (a, b) in enumerate(zip(params, alone)):
            a.grad = b.grad = matrix(*a.shape, seed=100 * step + index)
        sharded.step()
        whole.step()
        assert all([all_equal(a.detach(), b.detach()) for a, b in zip(params, alone)])


def test_sharded_memory_stays_within_two_matrices_of_the_native_peak(device):
    group = dist.group.WORLD
    shapes = [(1024, 2816), (2048, 5632), (5632, 2048), (640, 640)] * 4
    params = [torch.nn.Parameter(matrix(*shape, seed=i)) for i, shape in enumerate(shapes)]
    for index, param in enumerate(params):
        param.grad = matrix(*param.shape, seed=100 + index)
    optimizer = Muon(params, lr=0.02, shard_group=group)
    optimizer.step()  # measures the shapes once
    fused = peak_bytes(optimizer.step)
    copies, shards = (
        [param.detach().clone() for param in params],
        reference.reference_shards(params, dist.get_world_size()),
    )
    momenta = {index: torch.zeros_like(copies[index]) for index in shards[dist.get_rank()]}

    def native_one(index):
        reference.reference_step(copies[index], momenta[index], params[index].grad, lr=0.02)

    native = peak_bytes(lambda: reference.reference_layer_wise_step(copies, native_one, shards, group))
    assert fused <= native + 2 * max(param.numel() for param in params) * 4


@pytest.mark.parametrize("dim", [0, 1])
def test_duplicated_mode_gives_the_shard_of_the_whole_step(device, all_equal, dim):
    world_size, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.nn.Parameter(matrix(2048, 4096, seed=1))
    whole.grad = matrix(2048, 4096, seed=2)
    shard = torch.nn.Parameter(whole.detach().chunk(world_size, dim)[rank].clone())
    shard.grad, shard.partition_dim = whole.grad.chunk(world_size, dim)[rank].clone(), dim
    Muon([whole], lr=0.02).step()
    Muon([shard], lr=0.02, tp_mode="duplicated", tp_group_fn=lambda param: dist.group.WORLD).step()
    assert all_equal(shard.detach(), whole.detach().chunk(world_size, dim)[rank].contiguous())
