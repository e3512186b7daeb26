"""``dispatch_gemm`` on 2 and 4 processes in the interpreter, against dispatch and grouped GEMM one after the other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[1] / "ep"))
from bodies_ep import case_of, poisoned_memory  # noqa: E402

from ditron_train.ep import begin_layout, fused, get_ep_context, ops  # noqa: E402
from ditron_train.ep.group_gemm import group_gemm  # noqa: E402
from ditron_train.ep.launch import compiling  # noqa: E402
from ditron_train.ep.task_kernels import serve  # noqa: E402
from ditron_train.experimental.dispatch_gemm import dispatch_gemm  # noqa: E402
from ditron_train.experimental.dispatch_gemm_kernels import num_strips, strip_of  # noqa: E402
from tests.support.processes import run_workers  # noqa: E402


@poisoned_memory()
def _equals_its_parts(
    kind, tokens_by_rank, num_experts, topk, hidden, columns, dtype, zero_probs, capacity=None, expert_capacity=None
):
    world_size, rank, maps, x, probs = case_of(kind, tokens_by_rank, num_experts, topk, hidden, dtype, 5)
    context = get_ep_context(dist.group.WORLD, torch.device("cpu"), num_experts, topk)
    generator = torch.Generator().manual_seed(rank)
    weights, back = (
        [torch.randn(*shape, generator=generator).to(dtype) for _ in range(num_experts // world_size)]
        for shape in ((columns, hidden), (hidden, columns))
    )
    results = []
    for is_fused in (False, True):
        layout = begin_layout(
            maps[rank], probs, hidden, dtype, context, capacity_factor=capacity, expert_capacity=expert_capacity
        ).finish()
        if is_fused:
            y, rows, row_probs = dispatch_gemm(x, layout, context, weights, zero_probs=zero_probs)
            dy, again, none = dispatch_gemm(-x, layout, context, back, transpose=False)
        else:
            tiles = fused.layout_tiles(layout)
            rows, row_probs = ops.dispatch(x, layout, context, zero_probs=zero_probs)
            y = group_gemm(rows, weights, tiles)
            again, none = ops.dispatch(-x, layout, context)
            dy = group_gemm(again, back, tiles, transpose=False)
        assert none is None
        used = int(layout.expert_tokens.sum())
        results.append([part[:used] for part in (rows, row_probs, y, again, dy)])
        context.rows_buffer(1, 1, hidden, dtype).local.fill_(float("nan"))
    context.check()
    for name, a, b in zip(("rows", "row_probs", "y", "grad rows", "dy"), *results):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    "case",
    [
        ("random", (40, 55), 4, 2, 32, 48, torch.bfloat16, False),
        ("one_expert", (12, 0), 6, 3, 16, 24, torch.float32, True),
        ("dropped", (9, 4, 0, 17), 8, 3, 24, 16, torch.float16, False),
        ("random", (20, 20), 4, 2, 32, 48, torch.bfloat16, False, 1.8),
        ("padded", (20, 20), 6, 2, 32, 48, torch.bfloat16, False, None, 10),
    ],
    ids=["random", "one_expert", "dropped", "no_host_sync", "padded"],
)
def test_dispatch_gemm_equals_its_parts(case):
    run_workers(len(case[1]), _equals_its_parts, *case)


def _compiles_alone():
    """Inside ``compiling`` one rank calls what the other does not: nothing is launched, waited for or recorded."""
    world_size, rank, maps, x, probs = case_of("random", (9, 14), 6, 2, 16, torch.float32, 8)
    context = get_ep_context(dist.group.WORLD, torch.device("cpu"), 6, 2)
    layout = begin_layout(maps[rank], probs, 16, torch.float32, context).finish()
    before = context.dispatch_channel.tickets.clone()
    if rank == 0:
        with compiling(context):
            dispatch_gemm(x, layout, context, [torch.zeros(24, 16)] * (6 // world_size))
    assert torch.equal(before, context.dispatch_channel.tickets)
    context.check()


def test_compiling_launches_nothing():
    run_workers(2, _compiles_alone)


@triton.jit
def _mark_strip(ticket, seen, num_tiles, num_programs, STRIP: tl.constexpr):
    first, count = strip_of(ticket, num_tiles, num_programs, STRIP)
    for nth in range(count):
        tl.atomic_add(seen + first + nth * num_programs, 1)


@triton.jit
def _mark(seen, board, num_tiles, num_programs, STRIP: tl.constexpr):
    serve(board, num_strips(num_tiles, num_programs, STRIP), _mark_strip, (seen, num_tiles, num_programs, STRIP))


@pytest.mark.parametrize("strip", [1, 2, 4])
@pytest.mark.parametrize("num_tiles, num_programs", [(0, 3), (1, 3), (17, 3), (40, 3), (41, 5), (64, 1)])
def test_strips_hold_every_tile_once(num_tiles, num_programs, strip):
    seen, board = torch.zeros(100, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    _mark[(1,)](seen, board, num_tiles, num_programs, STRIP=strip)
    assert seen[:num_tiles].tolist() == [1] * num_tiles and int(seen.sum()) == num_tiles
