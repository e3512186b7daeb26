"""bf16 in the repaired interpreter equals torch's, bit for bit."""

import numpy as np
import torch
import triton
import triton.language as tl

from ditron_train.cpu.interpreter import bf16_bits_to_fp32, fp32_to_bf16_bits
from tests.support.processes import run_workers


@triton.jit
def _elementwise(x_ptr, y_ptr, sum_ptr, product_ptr, scaled_ptr, less_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x = tl.load(x_ptr + offsets)
    y = tl.load(y_ptr + offsets)
    tl.store(sum_ptr + offsets, x + y)
    tl.store(product_ptr + offsets, x * y)
    tl.store(scaled_ptr + offsets, (x.to(tl.float32) * 1.7).to(tl.bfloat16))
    tl.store(less_ptr + offsets, (x < y).to(tl.int32))


@triton.jit
def _casts(x_ptr, fp16_ptr, int_ptr, back_ptr, const_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x = tl.load(x_ptr + offsets)
    tl.store(fp16_ptr + offsets, x.to(tl.float16))
    as_int = x.to(tl.int32)
    tl.store(int_ptr + offsets, as_int)
    tl.store(back_ptr + offsets, as_int.to(tl.bfloat16))
    tl.store(const_ptr + offsets, tl.full((N,), 2.5, tl.bfloat16))


@triton.jit
def _dot(a_ptr, b_ptr, c_ptr, num_blocks, B: tl.constexpr):
    rows = tl.arange(0, B)
    acc = tl.zeros((B, B), tl.float32)
    for block in range(num_blocks):  # a run-time scalar: range() over it must work
        k = block * B + rows
        a = tl.load(a_ptr + rows[:, None] * (num_blocks * B) + k[None, :])
        b = tl.load(b_ptr + k[:, None] * B + rows[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + rows[:, None] * B + rows[None, :], acc.to(tl.bfloat16))


def _values(n, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, generator=generator) * torch.exp2(torch.randint(-20, 20, (n,), generator=generator))
    return values.bfloat16()


def _check_kernels():
    n = 1024
    x, y = _values(n, 0), _values(n, 1)
    total, product, scaled = (torch.empty_like(x) for _ in range(3))
    less = torch.empty(n, dtype=torch.int32)
    _elementwise[(1,)](x, y, total, product, scaled, less, n)
    assert torch.equal(total, x + y)
    assert torch.equal(product, x * y)
    assert torch.equal(scaled, (x.float() * torch.tensor(1.7)).bfloat16())
    assert torch.equal(less, (x < y).int())

    x = (torch.randn(n) * 500).bfloat16()
    half, as_int = torch.empty(n, dtype=torch.float16), torch.empty(n, dtype=torch.int32)
    back, const = torch.empty_like(x), torch.empty_like(x)
    _casts[(1,)](x, half, as_int, back, const, n)
    assert torch.equal(half, x.half())
    assert torch.equal(as_int, x.int())
    assert torch.equal(back, x.int().bfloat16())
    assert torch.equal(const, torch.full_like(x, 2.5))

    a = torch.randint(-8, 9, (16, 64)).bfloat16()
    b = torch.randint(-8, 9, (64, 16)).bfloat16()
    c = torch.empty(16, 16, dtype=torch.bfloat16)
    _dot[(1,)](a, b, c, 4, 16)
    assert torch.equal(c, (a.double() @ b.double()).bfloat16())


def test_kernels_on_bf16_equal_torch():
    run_workers(1, _check_kernels)


def test_rounding_to_nearest_even_on_every_kind_of_value():
    special = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, 3.4028235e38, -3.4028235e38, 1e-45, 1.00390625, 1.01171875],
        dtype=np.float32,
    )
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32)
    values = np.concatenate([special, bits.view(np.float32)])
    fused = torch.from_numpy(fp32_to_bf16_bits(values).view(np.int16)).view(torch.bfloat16)
    theirs = torch.from_numpy(values).bfloat16()
    finite = ~torch.isnan(theirs)
    assert torch.equal(torch.isnan(fused), torch.isnan(theirs))
    assert torch.equal(fused[finite].view(torch.int16), theirs[finite].view(torch.int16))


def test_widening_is_exact_for_all_bit_patterns():
    bits = np.arange(2**16, dtype=np.uint16)
    theirs = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(bf16_bits_to_fp32(bits).view(np.uint32), theirs.view(np.uint32))
