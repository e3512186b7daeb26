"""One call of Transformer Engine's grouped GEMM for all supported versions of it."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from ditron_train.gemm.transformer_engine import grouped_gemm


def _of_2_10(A, B, out, out_dtype, layout="TN", m_splits=None, grad=False, accumulate=False):
    return out_dtype, layout, m_splits, None


def _of_2_11(A, B, out, quantization_params, out_dtype, layout="TN", m_splits=None, grad=False, accumulate=False):
    return out_dtype, layout, m_splits, quantization_params


@pytest.mark.parametrize("function, quantizers", [(_of_2_10, None), (_of_2_11, [None, None])])
def test_grouped_gemm_of_each_version(monkeypatch: pytest.MonkeyPatch, function, quantizers) -> None:
    seen = []
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.cpp_extensions"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))

    def general_grouped_gemm(*arguments, **options):
        seen.append(function(*arguments, **options))

    general_grouped_gemm.__wrapped__ = function  # what a signature is taken from
    sys.modules["transformer_engine.pytorch.cpp_extensions"].general_grouped_gemm = general_grouped_gemm
    rows = torch.zeros(4, 8)
    grouped_gemm([rows, rows], rows.split([1, 3]), [rows], torch.bfloat16, layout="NN", m_splits=[1, 3])
    assert seen == [(torch.bfloat16, "NN", [1, 3], quantizers)]
