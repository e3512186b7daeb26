"""Grouped GEMMs of FP8 operands in the interpreter: exact on small integers and scales that are powers of two;
operands lie anywhere in memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ditron_train.cpu import interpreter
from ditron_train.ep import group_gemm_fp8 as host_side
from ditron_train.ep.group_gemm_fp8 import ExpertRows, group_gemm_fp8
from ditron_train.gemm.operands import FP8_DTYPES
from ditron_train.runtime.device import is_interpreter
from ditron_train.runtime.errors import NotSupportedError

pytestmark = pytest.mark.skipif(not is_interpreter(), reason="runs in Triton's interpreter")


@pytest.fixture(autouse=True, scope="module")
def _repaired_interpreter():
    interpreter.install()


def integers(*shape, seed, dtype=torch.float8_e4m3fn):
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def powers(*shape, seed):
    return 2.0 ** torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed))


COUNTS = st.lists(st.sampled_from([0, 0, 32, 33, 70, 130]), min_size=1, max_size=6)


@given(
    COUNTS, st.sampled_from([16, 48, 144]), st.sampled_from([16, 80, 256]), st.sampled_from(FP8_DTYPES), st.booleans()
)
@settings(max_examples=20, deadline=None)
def test_one_scale_each(counts, n, k, dtype, split_accumulator):
    x = [integers(count, k, seed=50 + i, dtype=dtype) for i, count in enumerate(counts)]
    weights = [integers(n, k, seed=i) for i in range(len(counts))]
    of_x, of_weights = ([powers(1, seed=seed + i) for i in range(len(counts))] for seed in (70, 90))
    sides = ExpertRows(x, of_x), ExpertRows(weights, of_weights)
    y = group_gemm_fp8(*sides, split_accumulator=split_accumulator)
    assert y.dtype == torch.bfloat16 and y.shape == (sum(counts), n)
    out = torch.full_like(y, 7)
    assert group_gemm_fp8(*sides, split_accumulator=split_accumulator, out=out) is out and torch.equal(out, y)
    as_bytes = [
        ExpertRows([one.view(torch.uint8) for one in side.data], side.scales, side.values_dtype) for side in sides
    ]
    assert torch.equal(group_gemm_fp8(*as_bytes, split_accumulator=split_accumulator), y)
    for part, rows, weight, a, b in zip(y.split(counts), x, weights, of_x, of_weights):
        assert torch.equal(part, (rows.float() @ weight.float().t() * (a * b)).bfloat16())


def test_operands_in_one_allocation_and_too_far_apart(monkeypatch):
    """Views of one tensor are read where they lie; what one descriptor cannot span is copied."""
    counts, ones = [40, 64], [torch.ones(1)] * 2
    x, weights = integers(104, 32, seed=1), integers(2, 48, 32, seed=2)
    expected = torch.cat([a.float() @ b.float().t() for a, b in zip(x.split(counts), weights)]).bfloat16()
    sides = ExpertRows(x.split(counts), ones), ExpertRows(weights.unbind(0), ones)
    reaches, reach_of = [], host_side.reach_of

    def first_is_none(addresses):
        reaches.append(len(addresses))
        return None if len(reaches) in (1, 3) else reach_of(addresses)

    assert torch.equal(group_gemm_fp8(*sides), expected)
    monkeypatch.setattr(host_side, "reach_of", first_is_none)
    assert torch.equal(group_gemm_fp8(*sides), expected)
    assert len(reaches) == 4


def test_what_cannot_be():
    ones, blocks = [torch.ones(1)] * 2, [torch.ones(1, 128)] * 2
    x, weights = [integers(32, 128, seed=i) for i in range(2)], [integers(128, 128, seed=i) for i in range(2)]
    good = ExpertRows(weights, ones)
    for words, rows, others, options in (
        ("of 1 experts, weights of 2", ExpertRows(x[:1], ones[:1]), good, {}),
        ("both have to be FP8", ExpertRows([one.float() for one in x], ones), good, {}),
        ("all need e4m3", ExpertRows(x, ones), ExpertRows([one.view(FP8_DTYPES[1]) for one in weights], ones), {}),
        ("all need 128 columns of", ExpertRows([x[0], x[1].view(FP8_DTYPES[1])], ones), good, {}),
        ("all need 128 columns of", ExpertRows([x[0], x[1].t().contiguous().t()], ones), good, {}),
        ("all need 128 columns of", ExpertRows([x[0], x[1][:, :64]], ones), good, {}),
        ("no bytes of FP8", ExpertRows([one.short() for one in x], ones, FP8_DTYPES[0]), good, {}),
        ("multiples of 16", ExpertRows(x, ones), ExpertRows([one[:120] for one in weights], ones), {}),
        ("scales", ExpertRows(x, [one.double() for one in ones]), good, {}),
        ("scales", ExpertRows(x, ones), ExpertRows(weights, blocks), {}),
        ("scales", ExpertRows(x, blocks), good, {}),
        ("fewer rows than a tile", ExpertRows([x[0], x[1][:16]], ones), good, {}),
        ("a result", ExpertRows(x, ones), good, {"out": torch.empty(64, 128)}),
        ("a result", ExpertRows(x, ones), good, {"out": torch.empty(128, 64, dtype=torch.bfloat16).t()}),
    ):
        with pytest.raises(NotSupportedError, match=words):
            group_gemm_fp8(rows, others, **options)
