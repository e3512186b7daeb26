"""The comparison of Transformer Engine's products with torch's."""

from __future__ import annotations

import sys
import types

import pytest
import torch

pytest.importorskip("megatron.core")

from ditron_train.megatron.shared import te_products  # noqa: E402
from ditron_train.policy.probe import same_bits  # noqa: E402

ROWS, WEIGHT = 96, torch.empty(64, 128)


def _general_gemm(split_k: bool):
    """As Transformer Engine's, of whose arguments the first is the second operand of ``@``: at once, or in two
    parts."""

    def general_gemm(w, x, *, layout="TN", grad=False, out_dtype=None):
        w = w.t() if layout == "TN" else w
        assert grad == (layout == "NN") and out_dtype == x.dtype
        half = x.shape[1] // 2
        return (x[:, :half] @ w[:half] + x[:, half:] @ w[half:] if split_k else x @ w), None, None, None

    return general_gemm


@pytest.fixture
def verdict(monkeypatch):
    def of(split_k: bool) -> bool:
        module = types.SimpleNamespace(general_gemm=_general_gemm(split_k))
        monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", types.ModuleType("transformer_engine.pytorch"))
        monkeypatch.setattr(sys.modules["transformer_engine.pytorch"], "cpp_extensions", module, raising=False)
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.cpp_extensions", module)
        ((by_te, by_torch),) = te_products.product_pairs(ROWS, WEIGHT)
        first, second = by_te(), by_torch()
        assert [tuple(result.shape) for result in first] == [(ROWS, 64), (ROWS, 128)]
        return same_bits(first, second)

    monkeypatch.setattr(te_products, "HAVE_TE", True)
    return of


def test_the_same_products(verdict):
    assert verdict(split_k=False)


def test_products_that_split_k_are_told(verdict):
    assert not verdict(split_k=True)


def test_nothing_without_transformer_engine(monkeypatch):
    monkeypatch.setattr(te_products, "HAVE_TE", False)
    assert te_products.product_pairs(ROWS, WEIGHT) == []
