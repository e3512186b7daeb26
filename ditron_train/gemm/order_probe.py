"""Matrices whose products show in which order their sums were taken.

Products of random values hide it: two orders differ in the last bits of an fp32 sum, and of those the rounding to 16
bits shows one in some ten thousand elements, so that small results often agree by chance. Here every term of a sum has
a partner elsewhere in it that cancels it exactly, so that what is left of the sum is nothing but its roundings, which
no two orders share.

Sums of at most ``HIDDEN_TERMS`` terms stay hidden: within one step of the tensor cores partners cancel in any order.
With row blocks the block counts, not the sum (``docs/measurements/tp.md``).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch

HIDDEN_TERMS = 32  # two steps of the tensor cores: one more than was seen

_SPREAD_LOG2 = 8  # of magnitudes: sums of few terms have to round, too


@lru_cache(maxsize=64)
def _partners(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For every index its pair's number and its sign in the pair. The same on all ranks.

    Of an odd length one index has sign 0, so that the others' sums still cancel; a single one stays, or nothing would
    be left.
    """
    if length == 1:
        return torch.zeros(1, dtype=torch.int64, device="cpu"), torch.ones(1, device="cpu")
    order = torch.randperm(length, device="cpu", generator=torch.Generator().manual_seed(length))
    pair, sign = torch.empty(length, dtype=torch.int64, device="cpu"), torch.zeros(length, device="cpu")
    pair[order] = torch.arange(length, device="cpu") // 2
    sign[order[0 : length - 1 : 2]], sign[order[1::2]] = 1.0, -1.0
    return pair, sign


def order_probe_matrix(
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    seed: int,
    signed: Literal["rows", "columns"] | None,
    row_block: int | None = None,
) -> torch.Tensor:
    """Values in pairs of equal rows and of equal columns, the partners of one dimension with opposite signs.

    A sum over a dimension cancels if that dimension is signed in one factor and not in the other. For ``y = x @
    w.T`` with x signed by rows, w by columns and the gradient of y by columns, that is so in the forward product and
    in both gradients.

    Args:
        shape: Rows, columns.
        dtype: Floating.
        device: Where.
        seed: Of the values; the pairs depend on lengths alone, so that factors of different ranks fit together.
        signed: Which partners have opposite signs.
        row_block: Rows that are paired among themselves, if a matrix has the rows of several ranks; all if None.
    """
    rows, columns = shape
    block = row_block or rows
    assert block == 0 or rows % block == 0
    num_blocks = rows // block if block else 0
    (row_pair, row_sign), (column_pair, column_sign) = _partners(block), _partners(columns)
    generator = torch.Generator(device).manual_seed(seed)
    base_shape = (num_blocks * ((block + 1) // 2), (columns + 1) // 2)
    base = torch.empty(base_shape, dtype=torch.float32, device=device).normal_(generator=generator)
    spread = torch.randint(-_SPREAD_LOG2, _SPREAD_LOG2 + 1, base_shape, device=device, generator=generator)
    base = torch.ldexp(base, spread).to(dtype)
    offsets = torch.arange(num_blocks, device="cpu")[:, None] * ((block + 1) // 2)
    matrix = base.index_select(0, (offsets + row_pair).flatten().to(device)).index_select(1, column_pair.to(device))
    if signed == "rows":
        matrix *= row_sign.repeat(num_blocks).to(device, dtype)[:, None]
    elif signed == "columns":
        matrix *= column_sign.to(device, dtype)
    return matrix
