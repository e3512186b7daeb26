"""Two tensors have the same bits or they have not."""

from __future__ import annotations

import pytest
import torch

from ditron_train.runtime.values import have_same_bits

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", [*FLOATS, *FP8, torch.complex64], ids=str)
def test_a_sign_of_zero_counts(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, 1.5, -2.0]).to(dtype)
    negative = torch.tensor([-0.0, 1.5, -2.0]).to(dtype)
    assert have_same_bits(values, values.clone())
    assert not have_same_bits(values, negative)
    assert not have_same_bits(negative, values)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_not_a_number_is_one_whatever_its_bits(dtype: torch.dtype) -> None:
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    nan = torch.tensor([float("nan"), 1.0], dtype=dtype)
    other = nan.clone()
    other.view(words)[0] ^= 1
    assert not torch.equal(nan.view(words), other.view(words)) and bool(other[0].isnan())
    assert have_same_bits(nan, other)
    assert not have_same_bits(nan, nan.flip(0))
    assert not have_same_bits(nan, torch.tensor([float("nan"), -1.0], dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64], ids=str)
def test_whole_numbers(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 1]).to(dtype)
    assert have_same_bits(values, values.clone()) and not have_same_bits(values, values.flip(0))


def test_shapes_types_and_strides() -> None:
    values = torch.arange(6.0).view(2, 3)
    assert have_same_bits(values.t(), values.t().contiguous())
    assert have_same_bits(values[:, ::2], values[:, ::2].clone())
    assert have_same_bits(values.expand(4, 2, 3), values.repeat(4, 1, 1))
    assert have_same_bits(torch.tensor(1.0), torch.tensor(1.0)) and have_same_bits(values[:0], values[:0].clone())
    assert not have_same_bits(values, values.view(3, 2)) and not have_same_bits(values, values.double())
