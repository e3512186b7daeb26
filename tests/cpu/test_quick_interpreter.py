"""Operations that the interpreter remembers have the results, and the errors, that it finds itself."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.support.processes import run_workers


@triton.jit
def _many(x_ptr, y_ptr, found_ptr, whole_ptr, n, step, N: tl.constexpr, ROUNDS: tl.constexpr):
    """Promotions, broadcasts, constants, masks, casts, a loop, a branch and an atomic, again and again."""
    lanes = tl.arange(0, N)
    total = tl.zeros((N,), tl.float32)
    count = 0
    for turn in range(ROUNDS):
        mask = lanes + turn < n
        x = tl.load(x_ptr + lanes, mask=mask, other=-0.0)
        y = tl.load(y_ptr + lanes, mask=mask, other=0.0).to(tl.float32)
        total += tl.where(x < y, x * 1.5 + turn, y / 2) * (turn % 3 - 1)
        total = tl.maximum(total, -total) if turn == 2 else total
        count += (step // 3) * turn + step % 3
        tl.atomic_add(whole_ptr, count)
    total = total * total + total * x
    square = tl.trans(total[:, None] * (total[None, :] + 1))
    places = lanes[:, None] * N + lanes[None, :]
    tl.store(found_ptr + places, tl.dot(square.to(tl.bfloat16), square.to(tl.bfloat16)), mask=places % 5 != 1)
    tl.store(whole_ptr + 1 + lanes, (lanes.to(tl.uint8) * 2 + 250).to(tl.int32) ^ (total.to(tl.int32) >> 1))
    tl.store(whole_ptr + 1 + N + lanes, tl.sum(square, axis=1).to(tl.int64) & 0xFFFFFFFFFF)


@triton.jit
def _signs_of_zero(x_ptr):
    zero = tl.load(x_ptr)
    tl.store(x_ptr + 1, zero + 0.0)
    tl.store(x_ptr + 2, zero + -0.0)


@triton.jit
def _wrong(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) + -1)


def _run(kinds):
    found = []
    for kind in kinds:
        x = torch.randn(16, generator=torch.Generator().manual_seed(1)).to(kind)
        y = torch.randn(16, generator=torch.Generator().manual_seed(2)).to(kind)
        product, whole = torch.zeros(16, 16), torch.zeros(64, dtype=torch.int64)
        _many[(2,)](x, y, product, whole, 13, 8, 16, 5)
        found += [product.numpy().tobytes(), whole.numpy().tobytes()]
    zeros = -torch.zeros(3)
    _signs_of_zero[(1,)](zeros)
    found.append(np.signbit(zeros.numpy()).tolist())
    for _ in range(2):
        with pytest.raises(Exception, match="negative scalar|out of range"):
            _wrong[(1,)](torch.ones(1, dtype=torch.uint8))
    return found


def _results_and_decisions():
    """What kernels store and how often types are looked at: remembering nothing, for the first time, and again."""
    from triton.language.semantic import TritonSemantic

    from tests.support import quick_interpreter

    decisions = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("binary_op_type_checking_impl", "load", "store", "dot", "cast"):
            native = getattr(TritonSemantic, name)

            def counted(*args, native=native, **kwargs):
                decisions.append(native)
                return native(*args, **kwargs)

            patch.setattr(TritonSemantic, name, counted)
        patch.setattr(quick_interpreter, "_MOST", 0)
        quick_interpreter._plans.clear()
        for most in (0, 20_000, 20_000):
            patch.setattr(quick_interpreter, "_MOST", most)
            decisions.clear()
            yield _run((torch.float32, torch.bfloat16, torch.float16)), len(decisions)


def _as_list():
    return list(_results_and_decisions())


def test_what_is_remembered_has_the_bits_of_what_is_found():
    (slow, first, again) = run_workers(1, _as_list)[0]
    assert first[0] == again[0] == slow[0]
    assert again[1] * 10 < first[1] < slow[1]
