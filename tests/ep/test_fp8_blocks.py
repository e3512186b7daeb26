"""Rows of experts in FP8 by blocks, against Transformer Engine's rules in NumPy and PyTorch's casts."""

import numpy as np
import pytest
import torch

from ditron_train.cpu import interpreter
from ditron_train.ep.fp8_blocks import quantised_blocks
from ditron_train.runtime.errors import NotSupportedError

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
MOST = np.float32(torch.finfo(torch.bfloat16).max)


@pytest.fixture(autouse=True, scope="module")
def _repaired_interpreter():
    interpreter.install()


def expected_factors(blocks, max_fp8, epsilon, power_of_2):
    """Of ``blocks`` [..., at most 128 numbers], each its own factor."""
    sizes = np.nan_to_num(blocks.float().abs().numpy(), nan=0.0, posinf=np.inf)
    bounded = np.maximum(sizes.max(-1, initial=0.0), np.float32(epsilon))
    is_usual = (bounded > 0) & np.isfinite(bounded)
    with np.errstate(over="ignore"):
        factors = np.float32(max_fp8) / np.where(is_usual, bounded, 1)
    factors = np.where(np.isinf(factors), MOST, factors)
    if power_of_2:
        factors = (factors.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    return np.where(is_usual, factors, np.float32(1))


def expected(part, dtype, epsilon, power_of_2):
    """Bytes and inverse factors of one side: of rows in blocks of 128, or what is left at their end."""
    columns = part.split(128, dim=1)
    factors = [expected_factors(block, LARGEST[dtype], epsilon, power_of_2) for block in columns]
    values = [(block.float() * torch.from_numpy(one)[:, None]).to(dtype) for block, one in zip(columns, factors)]
    return torch.cat([one.view(torch.uint8) for one in values], 1), np.float32(1) / np.stack(factors)


@pytest.mark.parametrize("power_of_2", [True, False])
@pytest.mark.parametrize(
    "dtype, epsilon", [(torch.float8_e4m3fn, 0.0), (torch.float8_e5m2, 0.0), (torch.float8_e4m3fn, 0.25)]
)
@pytest.mark.parametrize("columns", [128, 384])
def test_every_block_has_a_scale_of_its_own(columns, dtype, epsilon, power_of_2):
    """Few rows and many, none, zeros, the smallest and the largest numbers, infinity and what is no number."""
    splits = [16, 0, 272, 128, 16, 144]
    generator = torch.Generator().manual_seed(columns)
    rows = torch.randn(sum(splits), columns, generator=generator).bfloat16()
    rows *= torch.exp(torch.randn(sum(splits), 1, generator=generator)).bfloat16()
    parts = rows.split(splits)
    parts[2][:3] = torch.tensor([0.0, 1e-40, -torch.finfo(torch.bfloat16).max]).bfloat16()[:, None]
    parts[3].zero_()
    parts[4].fill_(1e-40)
    parts[5][1, 3], parts[5][140, 2] = float("inf"), float("nan")
    parts[5][7].fill_(float("nan"))
    made = quantised_blocks(rows, splits, dtype, epsilon=epsilon, power_of_2=power_of_2)
    for part, data, scales, transpose, transposed_scales in zip(parts, *made, strict=True):
        for values, found, factors in ((part, data, scales), (part.t(), transpose, transposed_scales)):
            assert found.shape == values.shape and found.is_contiguous() and factors.is_contiguous()
            if not len(part):
                continue
            wanted, inverses = expected(values, dtype, epsilon, power_of_2)
            is_finite = values.isfinite()
            assert torch.equal(found[is_finite], wanted[is_finite])
            assert found.view(dtype).float()[values.isnan()].isnan().all()
            assert torch.equal(factors, torch.from_numpy(inverses))
        assert scales.shape == (columns // 128, len(part)) and transposed_scales.shape == (
            -(-len(part) // 128),
            columns,
        )
        assert all(one.data_ptr() % 16 == 0 for one in (data, scales, transpose, transposed_scales)), "as cuBLAS asks"


def test_rows_and_transposes_have_memory_of_their_own():
    """A layer drops the rows behind its product, and keeps the transposes for backward."""
    made = quantised_blocks(torch.ones(48, 128).bfloat16(), [16, 32], torch.float8_e4m3fn)
    kept = [{one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in side} for side in made]
    assert [list(one.values()) for one in kept] == [[48 * 128], [48 * 4], [48 * 128], [2 * 128 * 4]]
    assert len(set().union(*kept)) == 4 and all(part._base is None for side in made for part in side)


def test_without_rows_nothing_is_launched():
    made = quantised_blocks(torch.zeros(0, 128).bfloat16(), [0, 0], torch.float8_e4m3fn)
    assert [[tuple(one.shape) for one in side] for side in made] == [
        [(0, 128)] * 2,
        [(1, 0)] * 2,
        [(128, 0)] * 2,
        [(0, 128)] * 2,
    ]


@pytest.mark.parametrize(
    "rows, splits, dtype, words",
    [
        (torch.zeros(64, 128), [48, 32], torch.float8_e4m3fn, "for 80 rows"),
        (torch.zeros(64, 256).bfloat16()[:, ::2], [32, 32], torch.float8_e4m3fn, "for 64 rows"),
        (torch.zeros(64, 128), [32, 32], torch.bfloat16, "no format"),
        (torch.zeros(64, 128), [24, 40], torch.float8_e4m3fn, "rows are no multiple of 16"),
        (torch.zeros(64, 192), [32, 32], torch.float8_e4m3fn, "192 columns are no multiple of 128"),
    ],
    ids=["rows", "strides", "format", "few_rows", "columns"],
)
def test_what_does_not_fit_is_refused(rows, splits, dtype, words):
    with pytest.raises(NotSupportedError, match=words):
        quantised_blocks(rows, splits, dtype)


@pytest.mark.parametrize("dtype", LARGEST, ids=["e4m3", "e5m2"])
def test_powers_of_two_of_every_bf16_number_are_those_of_a_division(dtype):
    """Each number is the largest of a block once: both signs, subnormal ones, infinity and what is no number."""
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    rows = torch.zeros(len(numbers), 128, dtype=torch.bfloat16)
    rows[:, 5] = numbers
    made = quantised_blocks(rows, [len(numbers)], dtype)
    assert torch.equal(made.scales[0][0], torch.from_numpy(expected(rows, dtype, 0.0, True)[1])[0])
