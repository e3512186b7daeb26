"""Two tensors have the same bits or they have not."""

from __future__ import annotations

import pytest
import torch

from ditron_train.policy.probe import same_bits
from ditron_train.runtime.values import have_same_bits
from ditron_train.tools.session import same_result

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
def test_not_a_number_has_bits_which_the_policy_leaves_open(dtype: torch.dtype) -> None:
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    nan = torch.tensor([float("nan"), 1.0, 0.0], dtype=dtype)
    other = nan.clone()
    other.view(words)[0] ^= 1
    assert bool(other[0].isnan()) and have_same_bits(nan, nan.clone()) and not have_same_bits(nan, other)
    assert same_bits([nan], [other]) and not same_bits([nan], [nan.flip(0)])
    negative = torch.tensor([float("nan"), 1.0, -0.0], dtype=dtype)
    assert not same_bits([nan], [negative]) and not same_bits([nan[1:]], [negative[1:]])
    assert not same_bits([nan], [nan.double() if dtype != torch.float64 else nan.float()])


def test_a_tool_wants_numbers_and_on_a_cpu_no_sign_of_zero() -> None:
    values = torch.tensor([0.0, 1.0])
    assert same_result(values, values.clone()) and same_result(values, -values * torch.tensor([1.0, -1.0]))
    assert not same_result(values, values + 1) and not same_result(values.log().sqrt(), values.log().sqrt())


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
    pairs = torch.view_as_complex(values.view(3, 2).contiguous())
    assert have_same_bits(pairs.conj(), pairs.conj().resolve_conj()) and have_same_bits(pairs.conj().imag, -pairs.imag)
