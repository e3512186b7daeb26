"""Grouped GEMMs in the interpreter: exact on small integers, any rows an expert, weights anywhere in memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ditron_train.ep import grouped_gemm as module
from ditron_train.ep.dispatcher import group_linear
from ditron_train.ep.grouped_gemm import group_gemm, group_wgrad, group_wgrad_into, row_tiles
from ditron_train.gemm.configs import GemmConfig
from ditron_train.runtime.device import is_interpreter
from ditron_train.runtime.errors import NotSupportedError
from tests.support import quick_interpreter

pytestmark = pytest.mark.skipif(not is_interpreter(), reason="runs in Triton's interpreter")


@pytest.fixture(autouse=True, scope="module")
def _repaired_interpreter():
    quick_interpreter.install()


def integers(*shape, dtype, seed):
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


COUNTS = st.lists(st.sampled_from([0, 0, 1, 5, 31, 32, 33, 70]), min_size=1, max_size=7)


@given(
    COUNTS,
    st.sampled_from([8, 40, 136]),
    st.sampled_from([8, 72, 128]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=25, deadline=None)
def test_forward_and_all_gradients_are_exact(counts, n, k, dtype):
    rows = sum(counts)
    weights = [integers(n, k, dtype=dtype, seed=i).requires_grad_() for i in range(len(counts))]
    x = integers(rows, k, dtype=dtype, seed=99).requires_grad_()
    tiles = row_tiles(torch.tensor(counts), rows)
    y = group_linear(x, weights, tiles)
    assert y.storage_offset() == 0 and y.is_contiguous() and y.untyped_storage().nbytes() == y.numel() * y.itemsize
    grad = integers(rows, n, dtype=dtype, seed=98)
    y.backward(grad)
    for weight, part, x_part, dx_part, g_part in zip(
        weights, *(t.split(counts) for t in (y.detach(), x.detach(), x.grad, grad))
    ):
        w = weight.detach().float()
        assert torch.equal(part, (x_part.float() @ w.t()).to(dtype))
        assert torch.equal(dx_part, (g_part.float() @ w).to(dtype))
        assert torch.equal(weight.grad, (g_part.float().t() @ x_part.float()).to(dtype))


@pytest.mark.parametrize(
    "counts, room", [([0, 80], 50), ([40, 0, 3, 60], 41), ([300, 5], 64), ([5, 9], 0), ([1, 2], 3)]
)
def test_rows_for_which_there_is_no_room_are_left_out(counts, room):
    """A fixed capacity that was too small is an error, which others raise; by then nothing was written outside the
    result."""
    x, block_m = integers(room, 24, dtype=torch.float32, seed=9), row_tiles(torch.tensor(counts), room).block_m
    weights = [integers(40, 24, dtype=torch.float32, seed=i) for i in range(len(counts))]
    behind, empty = [], torch.empty

    def guarded(*size, **options):
        if size != (block_m + room, 40):
            return empty(*size, **options)
        memory = empty(size[0] + 4 * block_m, size[1], **options).fill_(7.0)
        behind.append(memory[size[0] :])
        return memory[: size[0]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", guarded)
        y = group_gemm(x, weights, row_tiles(torch.tensor(counts), room))
    assert len(behind) == 1 and bool((behind[0] == 7.0).all())
    kept = [min(sum(counts[: e + 1]), room) - min(sum(counts[:e]), room) for e in range(len(counts))]
    assert torch.equal(y, torch.cat([part @ weight.t() for weight, part in zip(weights, x.split(kept))]))


@pytest.mark.parametrize("num_programs", [1, 3, 7, 20])
@given(st.lists(st.sampled_from([0, 1, 31, 32, 33, 70]), min_size=1, max_size=6), st.sampled_from([40, 136, 520]))
@settings(max_examples=15, deadline=None)
def test_a_last_wave_in_halves(num_programs, counts, n):
    rows, k = sum(counts), 24
    x = integers(rows, k, dtype=torch.float32, seed=9)
    weights = [integers(n, k, dtype=torch.float32, seed=i) for i in range(len(counts))]
    tiles = row_tiles(torch.tensor(counts), rows)
    wide = GemmConfig(tiles.block_m, 256, 16, num_warps=4, num_stages=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "num_sms", lambda device: num_programs)
        patch.setattr(module, "choose_group_config", lambda *arguments: wide)
        y = group_gemm(x, weights, tiles)
        dx = group_gemm(y, weights, tiles, transpose=False)
    for weight, part, y_part, dx_part in zip(weights, *(t.split(counts) for t in (x, y, dx))):
        assert torch.equal(y_part, part @ weight.t()) and torch.equal(dx_part, y_part @ weight)


def test_a_row_that_is_not_a_number_stays_with_its_expert():
    counts, n, k = [3, 2, 40], 16, 32
    x, grad = integers(45, k, dtype=torch.float32, seed=1), integers(45, n, dtype=torch.float32, seed=2)
    x[3], grad[3] = float("nan"), float("inf")
    weights = [integers(n, k, dtype=torch.float32, seed=i) for i in range(3)]
    tiles = row_tiles(torch.tensor(counts), 45)
    y, dw = group_gemm(x, weights, tiles), group_wgrad(grad, x, tiles)
    assert torch.equal(y[:3], x[:3] @ weights[0].t()) and torch.equal(y[5:], x[5:] @ weights[2].t())
    assert torch.equal(dw[0], grad[:3].t() @ x[:3]) and torch.equal(dw[2], grad[5:].t() @ x[5:])


def test_fewer_rows_than_room():
    counts, room = [4, 0, 7], 30
    x = integers(room, 16, dtype=torch.float32, seed=1)
    weights = [integers(24, 16, dtype=torch.float32, seed=i) for i in range(3)]
    tiles = row_tiles(torch.tensor(counts), room)
    assert torch.equal(group_gemm(x, weights, tiles)[4:11], x[4:11] @ weights[2].t())
    assert torch.equal(group_wgrad(x, x, tiles)[2], x[4:11].t() @ x[4:11])


@pytest.mark.parametrize(
    "x, weights, word",
    [
        (torch.zeros(4, 8), [torch.zeros(8, 8)], "1 weights for 2"),
        (torch.zeros(4, 8), [torch.zeros(8, 8), torch.zeros(4, 8)], "alike"),
        (torch.zeros(4, 12), [torch.zeros(8, 8)] * 2, "rows of"),
        (torch.zeros(5, 8), [torch.zeros(8, 8)] * 2, "needs"),
        (torch.zeros(4, 7), [torch.zeros(8, 7)] * 2, "16 bytes"),
    ],
)
def test_bad_input(x, weights, word):
    with pytest.raises(NotSupportedError, match=word):
        group_gemm(x, weights, row_tiles(torch.tensor([1, 3]), 4))


def test_weights_that_no_descriptor_spans_are_copied():
    memory = integers(2 * 24 * 16 + 8, dtype=torch.float32, seed=3)
    weights = [memory[offset : offset + 24 * 16].view(24, 16) for offset in (0, 24 * 16 + 1)]  # 4 bytes off
    x, tiles = integers(9, 16, dtype=torch.float32, seed=4), row_tiles(torch.tensor([4, 5]), 9)
    y = group_gemm(x, weights, tiles)
    assert torch.equal(y, torch.cat([x[:4] @ weights[0].t(), x[4:] @ weights[1].t()]))


@pytest.mark.parametrize("wide", [True, False], ids=["fp32", "bf16"])
@pytest.mark.parametrize("overwrites", [False, True], ids=["added", "written"])
@pytest.mark.parametrize("counts", [[33, 0, 5, 70], [0, 0, 0, 0], [1, 2, 0, 40]], ids=str)
def test_weight_gradients_into_buffers_anywhere(counts, overwrites, wide):
    """Three calls, exact in any order; nothing around the buffers changes."""
    rows, n, k, dtype = sum(counts), 40, 72, torch.bfloat16
    grad, x = integers(rows, n, dtype=dtype, seed=1), integers(rows, k, dtype=dtype, seed=2)
    memory = torch.full((len(counts), n * k + 8), 7.0, dtype=torch.float32 if wide else dtype)
    buffers = [memory[place, : n * k].view(n, k) for place in (2, 0, 3, 1)]
    tiles = row_tiles(torch.tensor(counts), rows)
    for _ in range(3):
        group_wgrad_into(grad, x, tiles, buffers, overwrites=overwrites)
    for buffer, g, part in zip(buffers, grad.split(counts), x.split(counts)):
        expected = torch.full((n, k), 0.0 if overwrites else 7.0, dtype=memory.dtype)
        for _ in range(1 if overwrites else 3):
            expected = (expected.float() + g.float().t() @ part.float()).to(memory.dtype)
        assert torch.equal(buffer, expected)
    assert torch.equal(memory[:, n * k :], torch.full((4, 8), 7.0, dtype=memory.dtype))


def test_buffers_that_cannot_be_added_to():
    x, tiles = integers(4, 8, dtype=torch.bfloat16, seed=1), row_tiles(torch.tensor([4]), 4)
    for buffers in (
        [torch.zeros(8, 8)] * 2,
        [torch.zeros(8, 16)],
        [torch.zeros(16, 8)[::2].t()[:, ::1]],
        [torch.zeros(8, 16)[:, ::2]],
    ):
        with pytest.raises(NotSupportedError, match="needs 1 contiguous"):
            group_wgrad_into(x, x, tiles, buffers)
    with pytest.raises(NotSupportedError, match="buffers of torch.float16"):
        group_wgrad_into(x, x, tiles, [torch.zeros(8, 8, dtype=torch.float16)])
