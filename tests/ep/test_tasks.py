"""The task level by itself: queues and dependencies between them."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from ditron_train.ep.gemm_combine import complete, need, serve
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
