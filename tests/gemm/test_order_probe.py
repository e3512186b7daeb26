"""Values that show the order of sums: they cancel along every contraction of a linear layer, and orders differ
everywhere."""

from __future__ import annotations

import pytest
import torch

from ditron_train.gemm.order_probe import order_probe_matrix

CPU = torch.device("cpu")


def _layer(m: int, n: int, k: int, dtype: torch.dtype, blocks: int = 1) -> tuple[torch.Tensor, ...]:
    """x of ``blocks`` ranks one after another, weight, gradient of y."""
    x = torch.cat([order_probe_matrix((m // blocks, k), dtype, CPU, seed=r, signed="rows") for r in range(blocks)])
    weight = order_probe_matrix((n, k), dtype, CPU, seed=50, signed="columns")
    return x, weight, order_probe_matrix((m, n), dtype, CPU, seed=60, signed="columns", row_block=m // blocks)


@pytest.mark.parametrize("sizes", [(6, 4, 8), (6, 5, 7), (12, 300, 200)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_sum_is_zero_but_for_its_roundings(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, weight, grad = (tensor.double() for tensor in _layer(*sizes, dtype, blocks=2))
    for product in (x @ weight.T, grad @ weight, grad.T @ x):
        assert product.abs().max() < 1e-6  # terms are up to a million; doubles round, too


@pytest.mark.parametrize("sizes", [(2, 3, 9), (4, 1, 9), (6, 7, 1), (2, 1, 1)])
def test_no_factor_vanishes_where_a_size_is_one(sizes: tuple[int, int, int]) -> None:
    """A rank with one row, or a layer with one feature: its other sums have to show their order all the same."""
    for tensor in _layer(*sizes, torch.bfloat16, blocks=2):
        assert tensor.any()


@pytest.mark.parametrize("k", [9, 64, 289])
def test_two_orders_differ_where_random_values_hide_it(k: int) -> None:
    def share_that_differs(x: torch.Tensor, weight: torch.Tensor) -> float:
        terms = x.float()[:, None] * weight.float()[None]
        ascending, descending = torch.zeros(terms.shape[:2]), torch.zeros(terms.shape[:2])
        for index in range(k):
            ascending = ascending + terms[..., index]
            descending = descending + terms[..., k - 1 - index]
        return (ascending.to(torch.bfloat16) != descending.to(torch.bfloat16)).float().mean().item()

    x, weight, _ = _layer(12, 30, k, torch.bfloat16)
    assert share_that_differs(x[:11], weight) > 0.2
    generator = torch.Generator().manual_seed(1)
    plain = [torch.randn(rows, k, generator=generator).bfloat16() for rows in (12, 30)]
    assert share_that_differs(*plain) < 0.05


def test_sign_free_values_and_empty_ones() -> None:
    assert order_probe_matrix((4, 6), torch.float32, CPU, seed=1, signed=None).unique().numel() <= 6
    assert order_probe_matrix((0, 6), torch.float32, CPU, seed=1, signed="rows").shape == (0, 6)
