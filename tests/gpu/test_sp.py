"""Ulysses on GPUs under torchrun: ``torch.equal`` with cuBLAS, NCCL's all-to-all and the reorder, forward and all
gradients."""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
import random

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")

_path = pathlib.Path(__file__).parents[1] / "sp" / "bodies_sp.py"
_spec = importlib.util.spec_from_file_location("bodies_sp", _path)
bodies = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(bodies)


@pytest.fixture(scope="module")
def context(device):
    from ditron_train.sp import get_sp_context

    yield get_sp_context(dist.group.WORLD, device)
    torch.cuda.synchronize()
    dist.barrier()


def normals(*shape, dtype, seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.empty(shape, dtype=dtype, device="cuda").normal_(generator=generator)


def integers(*shape, dtype, seed):
    """Sums of these tests are exact in fp32 and in bf16's 8 bits round alike: one rounding of the same number."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator, device="cuda").to(dtype)


@contextlib.contextmanager
def compiling(context):
    """Inside, ops compile their kernels, several at a time, and run none: what they return is not to be used."""
    from ditron_train.runtime.launch import KernelLaunch, compiled_together

    with pytest.MonkeyPatch.context() as patch, compiled_together(context.device):
        patch.setattr(KernelLaunch, "__call__", lambda launch, *arguments, **options: launch.compile(*arguments))
        yield


def check(context, **case):
    bodies.check_projections(context.rank, context.world_size, context, device="cuda", **case)
    context.synchronize()


PUBLISHED = [
    dict(heads=64, groups=8, head_dim=128, length=32768, batch=1, hidden=8192),
    dict(heads=64, groups=64, head_dim=128, length=16384, batch=1, hidden=8192),
    dict(heads=32, groups=32, head_dim=128, length=32768, batch=1, hidden=4096),
    dict(heads=16, groups=16, head_dim=128, length=65536, batch=1, hidden=2048),
    dict(heads=32, groups=8, head_dim=128, length=8192, batch=2, hidden=4096),
]


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_published_shapes_on_real_data(context, case):
    with compiling(context):
        bodies.call_projections(context, **case, dtype=torch.bfloat16)
    check(context, **case, dtype=torch.bfloat16, make=normals)


def test_half_precision_on_real_data(context):
    with compiling(context):
        bodies.call_projections(context, **PUBLISHED[-1], dtype=torch.float16)
    check(context, **PUBLISHED[-1], dtype=torch.float16, make=normals)


def draw_length(draw, world, is_odd):
    """Of an odd number of rows a chunk, or of a multiple of 16: of one kind, so that a layout needs its kernels
    once."""
    return 2 * world * (2 * draw.randint(0, 150) + 1 if is_odd else 16 * draw.randint(1, 30))


@pytest.mark.parametrize("head_dim, is_odd", [(40, True), (96, False), (128, True)])
def test_random_layouts_on_exact_data(context, head_dim, is_odd):
    """Kernels are compiled for a layout; lengths, batches and hidden sizes are drawn for each."""
    draw = random.Random(head_dim)
    world = context.world_size
    groups = world * draw.choice([1, 2, 3])
    layout = dict(
        heads=groups * draw.choice([1, 2, 3, 5]),
        groups=groups,
        head_dim=head_dim,
        dtype=draw.choice([torch.bfloat16, torch.float16]),
    )
    cases = [
        layout
        | dict(
            length=draw_length(draw, world, is_odd), batch=draw.choice([1, 2, 3]), hidden=draw.choice([64, 136, 520])
        )
        for _ in range(5)
    ]
    with compiling(context):
        for case in cases:
            bodies.call_projections(context, **case)
    for index, case in enumerate(cases):
        check(context, **case, seed=1000 * index, make=integers)


@pytest.mark.parametrize(
    "head_dim, dtype, is_odd", [(8, torch.bfloat16, False), (20, torch.float16, True), (64, torch.float32, True)]
)
def test_random_exchanges_on_any_data(context, head_dim, dtype, is_odd):
    draw = random.Random(head_dim)
    world = context.world_size
    groups = world * draw.choice([1, 2, 3])
    layout = dict(heads=groups * draw.choice([1, 2, 3]), groups=groups, head_dim=head_dim, dtype=dtype)
    cases = [layout | dict(length=draw_length(draw, world, is_odd), batch=draw.choice([1, 2, 3])) for _ in range(5)]
    with compiling(context):
        for case in cases:
            bodies.call_exchanges(context, **case)
    for index, case in enumerate(cases):
        bodies.check_exchanges(context.rank, world, context, **case, seed=1000 * index, device="cuda")
        context.synchronize()


def _layer(context, seed):
    """One pair of projections: (x, weights) and a function of them."""
    from ditron_train.sp import a2a_gemm, gemm_a2a, output_layout, qkv_layout

    world, hidden, heads, groups, head_dim = (
        context.world_size,
        1024,
        8 * context.world_size,
        2 * context.world_size,
        64,
    )
    qkv, out = qkv_layout(heads, groups, head_dim, world), output_layout(heads, head_dim, world)
    x = normals(1024, 1, hidden, dtype=torch.bfloat16, seed=seed + context.rank)
    weight_qkv = normals(world * qkv.num_columns, hidden, dtype=torch.bfloat16, seed=seed + 50)
    weight_out = normals(hidden, heads * head_dim, dtype=torch.bfloat16, seed=seed + 51)

    def run():
        q, k, v = gemm_a2a(x, weight_qkv, context=context, layout=qkv)
        repeat = heads // groups
        mixed = q + k.repeat_interleave(repeat, dim=2) * v.repeat_interleave(repeat, dim=2)
        return a2a_gemm((mixed,), weight_out, context=context, layout=out)

    return x, run


def test_late_ranks_change_nothing(context):
    _, run = _layer(context, 1)
    expected = run()
    draw = random.Random(100 + context.rank)
    for _ in range(30):
        torch.cuda._sleep(draw.randint(0, 3_000_000))
        assert torch.equal(run(), expected)
    context.synchronize()


def test_poisoned_buffers_are_never_read_before_they_are_written(context):
    _, run = _layer(context, 2)
    expected = run()
    for _ in range(5):
        context.synchronize()
        dist.barrier()
        for name in ("sp.to_heads", "sp.to_sequence"):
            context.arena.tensor(name, (1024,), torch.bfloat16).local.fill_(float("nan"))
        torch.cuda.synchronize()
        dist.barrier()
        assert torch.equal(run(), expected)


def test_a_captured_graph_replays(context):
    x, run = _layer(context, 3)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed in range(4):
        if seed == 2:  # buffers move, and what kernels of the graph read by address must not
            for name in ("sp.to_heads", "sp.staged", "sp.to_sequence"):
                context.arena.tensor(name, (2 * context.arena.capacity_bytes(name),), torch.uint8)
            spoiled = [torch.full((words,), -1, device="cuda") for words in (1, 8, 64) for _ in range(2000)]  # noqa: F841
        x.copy_(normals(*x.shape, dtype=x.dtype, seed=70 + seed + context.rank))
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, run())
    context.synchronize()
