"""The task level by itself: queues, dependencies between them, strips."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from ditron_train.ep.task_kernels import complete, need, num_strips, serve, strip_of
from ditron_train.runtime.device import is_interpreter
from ditron_train.symm.control import CONTROL_TIMEOUT_NS, CONTROL_WORDS

pytestmark = pytest.mark.skipif(not is_interpreter(), reason="runs in Triton's interpreter")

HEADS = tl.constexpr(64)


@triton.jit
def _square(task, x, y, board, BLOCK: tl.constexpr, TARGET: tl.constexpr):
    offsets = task * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets)
    tl.store(y + offsets, value * value)
    complete(board + HEADS + task // 2, 1, TARGET)


@triton.jit
def _sum_pair(task, y, z, order, board, control, BLOCK: tl.constexpr, TARGET: tl.constexpr):
    pair = tl.load(order + task)
    need(board + HEADS + pair, 2, control, pair, TARGET)
    first = y + pair * 2 * BLOCK + tl.arange(0, BLOCK)
    tl.store(z + pair * BLOCK + tl.arange(0, BLOCK), tl.load(first) + tl.load(first + BLOCK))


@triton.jit
def _two_queues(x, y, z, order, board, control, num_tasks, BLOCK: tl.constexpr, TARGET: tl.constexpr):
    serve(board, num_tasks, _square, (x, y, board, BLOCK, TARGET))
    serve(board + 32, num_tasks // 2, _sum_pair, (y, z, order, board, control, BLOCK, TARGET))


def test_a_queue_uses_what_the_one_before_has_made():
    x, y, z = torch.arange(64.0), torch.zeros(64), torch.zeros(32)
    board, control = torch.zeros(128, dtype=torch.int32), torch.zeros(CONTROL_WORDS, dtype=torch.int64)
    control[CONTROL_TIMEOUT_NS] = 10**9
    order = torch.tensor([3, 0, 2, 1], dtype=torch.int32)
    _two_queues[(1,)](x, y, z, order, board, control, 8, BLOCK=8, TARGET="interpreter")
    assert torch.equal(z, (x * x).view(4, 2, 8).sum(1).view(-1))
    assert board[64:68].tolist() == [2, 2, 2, 2]


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
