"""Variants of Newton-Schulz with other bits than native's: nothing here runs unless it was asked for by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ditron_train.optim.products import ProductPlan, gram, scaled_square, symmetric_addmm

_FIRST_STEPS = 2
_LATER_STEPS = 3


def has_gram_form(num_rows: int, num_columns: int) -> bool:
    """Whether the Gram form does less work: matrices at least twice as long as wide."""
    return max(num_rows, num_columns) >= 2 * min(num_rows, num_columns)


def gram_form(x: torch.Tensor, coefficients: Sequence[tuple[float, float, float]], plan: ProductPlan) -> torch.Tensor:
    """Newton-Schulz on the Gram matrix: the long matrix is touched a few times, not ten.

    A step is X <- P X with P = a I + b A + c A A and A = X X^T. All P are polynomials of the first A: they are
    symmetric and commute. So the steps can be taken on the small matrices alone,

        Z = b A + c A A,   A <- P A P,   Q <- P Q,

    and X <- Q X once at the end. Every product is symmetric: half of each is computed. The recurrence loses the small
    eigenvalues of A to rounding (a negative one would grow), so X and A are made anew after the first two steps and
    then after every three; and fp16 should be used, not bf16: all values stay below some hundreds, and its mantissa is
    longer.

    For m <= n five steps cost about 7 m^3 + 3 m^2 n multiply-adds, against 2.5 m^3 + 7.5 m^2 n by steps.

    Args:
        x: [m, n], m <= n, norm at most 1.
        coefficients: (a, b, c) of each step.
        plan: ``use_gram`` and ``use_square`` say whether our kernels or torch's products run.

    Returns:
        [m, n] of x's type.
    """
    first = 0
    while first < len(coefficients):
        last = first + (_FIRST_STEPS if first == 0 else _LATER_STEPS)
        x = _gram_steps(x, coefficients[first:last], plan)
        first = last
    return x


def _gram_steps(
    x: torch.Tensor, coefficients: Sequence[tuple[float, float, float]], plan: ProductPlan
) -> torch.Tensor:
    """Q X for the Q of these steps, from one Gram matrix of X."""

    def times(z: torch.Tensor, y: torch.Tensor, a: float) -> torch.Tensor:
        """(a I + Z) Y, symmetric."""
        if plan.use_square:
            return symmetric_addmm(y, z, y, alpha=1.0, beta=a)
        return torch.addmm(y, z, y, alpha=1.0, beta=a)

    a_matrix = gram(x) if plan.use_gram else x @ x.mT
    factor: torch.Tensor | None = None
    for index, (a, b, c) in enumerate(coefficients):
        if plan.use_square:
            z = scaled_square(a_matrix, b, c)
        else:
            z = torch.addmm(a_matrix, a_matrix, a_matrix, alpha=c, beta=b)
        if index + 1 < len(coefficients):
            a_matrix = times(z, times(z, a_matrix, a), a)
        if factor is None:
            z.diagonal().add_(a)
            factor = z
        else:
            factor = times(z, factor, a)
    assert factor is not None, "at least one step"
    return factor @ x


def newton_schulz_batched(
    grads: Sequence[torch.Tensor],
    coefficients: Sequence[tuple[float, float, float]],
    *,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``newton_schulz`` of several matrices of one shape, by batched products: few launches for many small matrices.

    Args:
        grads: fp32 [rows, columns] each, not empty.
        coefficients: (a, b, c) of each step.
        eps: Lower bound of each norm.
        dtype: Type of the products.

    Returns:
        [len(grads), min, max] of ``dtype``, transposed where there are more rows than columns.
    """
    x = torch.stack(tuple(grads))
    x = x.mT if x.shape[1] > x.shape[2] else x
    norm = torch.linalg.vector_norm(x, 2, dim=(-2, -1), keepdim=True).clamp_min(eps)
    x = (x / norm).to(dtype).contiguous()
    for a, b, c in coefficients:
        a_matrix = x @ x.mT
        b_matrix = torch.baddbmm(a_matrix, a_matrix, a_matrix, alpha=c, beta=b)
        x = torch.baddbmm(x, b_matrix, x, alpha=1.0, beta=a)
    return x
