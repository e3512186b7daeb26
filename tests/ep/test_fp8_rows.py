"""Scales of experts' rows in FP8, against Transformer Engine's formula in NumPy."""

import numpy as np
import pytest
import torch

from ditron_train.cpu import interpreter
from ditron_train.ep.fp8_scales import write_scales
from ditron_train.runtime.errors import NotSupportedError

UNTOUCHED = 7.0


@pytest.fixture(autouse=True, scope="module")
def _repaired_interpreter():
    interpreter.install()


def numbers(count):
    return [torch.full((1,), UNTOUCHED) for _ in range(count)]


def expected(rows, max_fp8, epsilon, power_of_2):
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
@pytest.mark.parametrize("max_fp8, epsilon", [(448.0, 0.0), (57344.0, 0.0), (448.0, 0.25)])
@pytest.mark.parametrize("columns", [8, 300])
def test_every_expert_has_the_scale_of_its_own_rows(columns, max_fp8, epsilon, power_of_2):
    """Few rows and many, none, zeros, the smallest and the largest numbers, infinity and what is no number."""
    splits = [3, 0, 64, 1, 5, 2, 2, 2, 2, 33]
    generator = torch.Generator().manual_seed(columns)
    rows = torch.randn(sum(splits), columns, generator=generator).bfloat16()
    parts = rows.split(splits)
    parts[3].zero_()
    parts[4].fill_(1e-40)
    parts[5][1, 3] = float("inf")
    parts[6][0, 2] = float("nan")
    parts[7].fill_(float("nan"))
    parts[8][1, -1] = -torch.finfo(torch.bfloat16).max
    amaxes, scales = numbers(len(splits)), numbers(len(splits))
    write_scales(rows, splits, amaxes, scales, max_fp8=max_fp8, epsilon=epsilon, power_of_2=power_of_2)
    found = [(amax.item(), scale.item()) for amax, scale in zip(amaxes, scales)]
    assert found == [expected(part, max_fp8, epsilon, power_of_2) for part in parts]
    assert found[1] == (UNTOUCHED, UNTOUCHED) and found[5][1] == 1.0 and (epsilon or found[3] == (0.0, 1.0))


@pytest.mark.parametrize(
    "rows, splits, given",
    [
        (torch.zeros(4, 8), [3, 2], 2),
        (torch.zeros(4, 16)[:, ::2], [2, 2], 2),
        (torch.zeros(4, 8), [2, 2], 1),
        (torch.zeros(2, 2, 8), [2, 2], 2),
    ],
    ids=["rows", "strides", "numbers", "dimensions"],
)
def test_what_does_not_fit_is_refused(rows, splits, given):
    with pytest.raises(NotSupportedError, match="scales of rows"):
        write_scales(rows, splits, numbers(given), numbers(2), max_fp8=448.0, epsilon=0.0, power_of_2=False)


def test_numbers_of_another_type_are_refused():
    with pytest.raises(NotSupportedError, match="fp32"):
        write_scales(
            torch.zeros(2, 8), [2], [torch.zeros(1).half()], numbers(1), max_fp8=448.0, epsilon=0.0, power_of_2=False
        )
