"""Rows of experts in FP8, against Transformer Engine's rules in NumPy and PyTorch's casts."""

import gc

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ditron_train.ep.grouped_quantization import quantised_rows
from ditron_train.runtime.errors import NotSupportedError
from tests.support import quick_interpreter

UNTOUCHED = 7.0
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@pytest.fixture(autouse=True, scope="module")
def _repaired_interpreter():
    quick_interpreter.install()


def numbers(count):
    return [(torch.full((1,), UNTOUCHED), torch.full((1,), UNTOUCHED)) for _ in range(count)]


def expected_numbers(rows, max_fp8, epsilon, power_of_2):
    if not len(rows):
        return UNTOUCHED, UNTOUCHED
    amax = np.float32(np.nan_to_num(rows.float().abs().numpy(), nan=0.0, posinf=np.inf).max(initial=0.0))
    bounded = np.maximum(amax, np.float32(epsilon))
    if np.isinf(bounded) or bounded == 0:
        return float(amax), 1.0
    with np.errstate(over="ignore"):
        scale = np.minimum(np.float32(max_fp8) / bounded, np.finfo(np.float32).max)
    if power_of_2:
        scale = (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    return float(amax), float(scale)


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize(
    "dtype, epsilon", [(torch.float8_e4m3fn, 0.0), (torch.float8_e5m2, 0.0), (torch.float8_e4m3fn, 0.25)]
)
@pytest.mark.parametrize("columns", [16, 272])
def test_every_expert_has_the_scale_of_its_own_rows(columns, dtype, epsilon, power_of_2):
    """Few rows and many, none, zeros, the smallest and the largest numbers, infinity and what is no number."""
    splits = [16, 0, 80, 32, 16, 16, 16, 16, 16, 1168]
    generator = torch.Generator().manual_seed(columns)
    rows = torch.randn(sum(splits), columns, generator=generator).bfloat16()
    parts = rows.split(splits)
    parts[3].zero_()
    parts[4].fill_(1e-40)
    parts[5][1, 3] = float("inf")
    parts[6][0, 2] = float("nan")
    parts[7].fill_(float("nan"))
    parts[8][1, -1] = -torch.finfo(torch.bfloat16).max
    parts[9][1100, 7] = 96.0
    kept = numbers(len(splits))
    made = quantised_rows(rows, splits, kept, dtype, epsilon=epsilon, power_of_2=power_of_2)
    unkept = quantised_rows(rows, splits, None, dtype, epsilon=epsilon, power_of_2=power_of_2)
    pairs = (pair for side in zip(made[:2], unkept[:2]) for pair in zip(*side, strict=True))
    assert all(torch.equal(one, other) for one, other in pairs)
    found = [(amax.item(), scale.item()) for amax, scale in kept]
    assert found == [expected_numbers(part, LARGEST[dtype], epsilon, power_of_2) for part in parts]
    assert found[1] == (UNTOUCHED, UNTOUCHED) and found[5][1] == 1.0 and (epsilon or found[3] == (0.0, 1.0))
    for index, (part, data, transpose, inverse) in enumerate(zip(parts, *made, strict=True)):
        assert data.shape == part.shape and transpose.shape == part.shape[::-1] and inverse.shape == (1,)
        assert torch.equal(transpose, data.t()) and transpose.is_contiguous() and data.is_contiguous()
        is_finite = part.isfinite()
        values = (part.float() * kept[index][1]).to(dtype).view(torch.uint8)
        assert torch.equal(data[is_finite], values[is_finite])
        assert data.view(dtype).float()[part.isnan()].isnan().all()
        assert (inverse.data_ptr() - made.inverses[0].data_ptr()) == 256 * index, "cuBLAS wants scales aligned"
        if len(part):
            assert inverse.item() == np.float32(1.0) / np.float32(kept[index][1].item())


def test_rows_and_transposes_have_memory_of_their_own():
    """A layer drops the rows behind its product, and keeps the transposes for backward."""
    made = quantised_rows(torch.ones(48, 32).bfloat16(), [16, 32], numbers(2), torch.float8_e4m3fn)
    kept = [{one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in side} for side in made[:2]]
    assert [list(one.values()) for one in kept] == [[48 * 32]] * 2 and not kept[0].keys() & kept[1].keys()


def test_memory_goes_with_what_a_layer_puts_in_place_of_all_parts():
    """As Transformer Engine gives up what it has multiplied, whoever still knows the tensors."""
    made = quantised_rows(torch.ones(48, 32).bfloat16(), [16, 32], numbers(2), torch.float8_e4m3fn)
    gc.collect()  # the interpreter keeps its arguments in circles
    for side in made:
        memory = StorageWeakRef(side[0].untyped_storage())
        assert all(part._base is None for part in side)
        for part in side:
            part.data = torch.empty(0)
        assert memory.expired()


def test_without_rows_nothing_is_written():
    kept = numbers(2)
    made = quantised_rows(torch.zeros(0, 16).bfloat16(), [0, 0], kept, torch.float8_e4m3fn)
    assert [one.shape for one in made.data] == [(0, 16)] * 2 and [
        transpose.shape for transpose in made.transposes
    ] == [(16, 0)] * 2
    assert [one.item() for pair in kept for one in pair] == [UNTOUCHED] * 4


@pytest.mark.parametrize(
    "rows, splits, given, dtype, words",
    [
        (torch.zeros(64, 16), [48, 32], 2, torch.float8_e4m3fn, "for 80 rows"),
        (torch.zeros(64, 32)[:, ::2], [32, 32], 2, torch.float8_e4m3fn, "for 64 rows"),
        (torch.zeros(64, 16), [32, 32], 1, torch.float8_e4m3fn, "2 numbers for 2 experts"),
        (torch.zeros(64, 2, 16), [32, 32], 2, torch.float8_e4m3fn, "for 64 rows"),
        (torch.zeros(64, 16), [32, 32], 2, torch.bfloat16, "no format"),
        (torch.zeros(64, 16), [24, 40], 2, torch.float8_e4m3fn, "no multiple of 16"),
        (torch.zeros(64, 24), [32, 32], 2, torch.float8_e4m3fn, "24 columns are no multiple of 16"),
    ],
    ids=["rows", "strides", "numbers", "dimensions", "format", "min_rows", "columns"],
)
def test_what_does_not_fit_is_refused(rows, splits, given, dtype, words):
    with pytest.raises(NotSupportedError, match=words):
        quantised_rows(rows, splits, numbers(given), dtype)


def test_numbers_of_another_type_are_refused():
    with pytest.raises(NotSupportedError, match="fp32"):
        quantised_rows(torch.zeros(16, 16), [16], [(torch.zeros(1).half(), torch.zeros(1))], torch.float8_e4m3fn)
