"""Products of FP8 operands in the interpreter: exact on data that is exact in any order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ditron_train.gemm.operands import FP8_DTYPES, TensorScales
from ditron_train.runtime.device import is_interpreter
from ditron_train.runtime.errors import NotSupportedError
from tests.support import quick_interpreter
from tests.support.matmul_fp8 import matmul_fp8

pytestmark = pytest.mark.skipif(not is_interpreter(), reason="runs in Triton's interpreter")

E4M3, E5M2 = FP8_DTYPES
ONE = torch.ones(1)


@pytest.fixture(autouse=True, scope="module")
def _repaired_interpreter():
    quick_interpreter.install()


def integers(*shape, dtype, seed):
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float().to(dtype)


@given(st.sampled_from(FP8_DTYPES), st.integers(1, 140), st.integers(1, 140), st.integers(1, 200), st.booleans())
@settings(max_examples=25, deadline=None)
def test_any_shape_is_scaled_once_and_rounded_once(dtype, m, n, k, split_accumulator):
    x, weight = integers(m, k, dtype=dtype, seed=m), integers(n, k, dtype=E4M3, seed=n)
    scales = TensorScales(torch.tensor(0.0173), torch.tensor([0.931]))
    product = (x.float() @ weight.float().t()) * (scales.a * scales.b)
    assert torch.equal(matmul_fp8(x, weight, scales, split_accumulator=split_accumulator), product.bfloat16())


@pytest.mark.parametrize("dtype", FP8_DTYPES)
def test_every_value_of_fp8_is_multiplied_as_what_it_stands_for(dtype):
    values = torch.arange(256, dtype=torch.uint8).view(dtype)
    x = torch.zeros(256, 16).to(dtype)
    x[:, 0] = values
    found = matmul_fp8(x, torch.eye(16).to(E4M3), TensorScales(ONE, ONE))[:, 0].float()
    expected = values.float()
    finite = expected.isfinite()
    assert torch.equal(found[finite], expected[finite]) and not found[~finite].isfinite().any()


def test_rows_of_any_stride_and_no_rows():
    wide, weight = integers(20, 70, dtype=E5M2, seed=1), integers(30, 33, dtype=E4M3, seed=2)
    x = wide[:, 3:36]
    scales = TensorScales(ONE, ONE)
    assert torch.equal(matmul_fp8(x, weight, scales), matmul_fp8(x.contiguous(), weight, scales))
    assert matmul_fp8(x[:0], weight, scales).shape == (0, 30)
    assert torch.equal(matmul_fp8(x[:, :0], weight[:, :0], scales), torch.zeros(20, 30, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "x, weight, scales, words",
    [
        (torch.ones(4, 16), torch.ones(4, 16).to(E4M3), (ONE, ONE), "both have to be FP8"),
        (torch.ones(4, 16).to(E4M3), torch.ones(4, 8).to(E4M3), (ONE, ONE), "do not fit"),
        (torch.ones(4, 16).to(E4M3), torch.ones(4, 16).to(E4M3), (ONE, torch.ones(2)), "a scale (2,)"),
        (torch.ones(4, 16).to(E4M3), torch.ones(4, 16).to(E4M3), (ONE.double(), ONE), "float64"),
    ],
)
def test_what_does_not_fit_is_refused(x, weight, scales, words):
    with pytest.raises(NotSupportedError) as caught:
        matmul_fp8(x, weight, TensorScales(*scales))
    assert words in str(caught.value)
