"""Products whose bits do not depend on the CPU's BLAS, which may add up A B and (B^T A^T)^T in other orders."""

import numpy as np
import pytest


@pytest.fixture
def products_rounded_once(monkeypatch):
    """The interpreter's products are summed in fp64 and rounded once."""
    native = np.matmul

    def matmul(a, b, dtype=None):
        return native(a.astype(np.float64), b.astype(np.float64)).astype(dtype or np.result_type(a, b))

    monkeypatch.setattr(np, "matmul", matmul)
