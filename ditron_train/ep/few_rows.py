"""From how many rows on an expert's product adds up as native's does, measured.

cuBLAS splits the sum of a product of few tiles over several programs, and then adds up in another order than our
kernels. From how many rows on it no longer does depends on the shape: sums of 28672 terms into 4096 columns were seen
to be split beyond 512 rows, those of 2048 terms into 7168 columns not even of few (docs/measurements/ep.md). So both
products are compared, for every number of rows up to 512 and every ninth beyond, on values that show the order of
sums, in calls of as many experts as a layer has: no other kernels are compiled for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from ditron_train.ep.group_gemm import group_gemm
from ditron_train.ep.native_products import native_products
from ditron_train.ep.row_tiles import row_tiles
from ditron_train.gemm.revealing import revealing_matrix

#: More rows than any expert has: the products have other bits at all sizes that count.
NEVER = 1 << 30
#: Why such products are not ours.
OTHER_BITS = "experts' products have other bits than Transformer Engine's, or cannot be compared here"
#: Rows of an expert up to which products are compared.
MOST_ROWS = 4096
_EACH_TO, _STEP_BEYOND = 512, 9
_TILE = 128
_ROWS_OF_A_CALL, _BYTES_OF_A_CALL = 16384, 1 << 28  # the latter of its largest tensor, if MOST_ROWS are not more

#: (rows of several experts [sum(splits), K], splits) -> their products with one weight [sum(splits), N]. The last ones
#: may have none.
SplitProduct = Callable[[torch.Tensor, list[int]], torch.Tensor]


class RowProduct(NamedTuple):
    """Rows of experts times their weights.

    Attributes:
        weight: Its shape, as it is stored.
        num_experts: Of the layer on this rank.
        transpose: Forward, ``rows @ weight.T``; else ``rows @ weight``, the gradients of rows.
    """

    weight: tuple[int, ...]
    num_experts: int
    transpose: bool


@cache
@torch.no_grad()
def fewest_rows_here(product: RowProduct, dtype: torch.dtype, device: torch.device) -> int:
    """``fewest_rows`` of our product and Megatron's on this device; measured once. ``NEVER`` where its memory is not
    there."""
    (n, k), num_experts, transpose = product
    with giving_memory_back(device):
        try:
            return _measured(n, k, num_experts, transpose, dtype, device)
        except torch.OutOfMemoryError:
            return NEVER


@contextmanager
def giving_memory_back(device: torch.device) -> Iterator[None]:
    """Around what is measured once: its tensors have sizes that training never asks for again."""
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measured(n: int, k: int, num_experts: int, transpose: bool, dtype: torch.dtype, device: torch.device) -> int:
    weight = revealing_matrix((n, k), dtype, device, seed=2, signed="columns")
    # The sum's index is signed in one operand alone.
    rows = revealing_matrix(
        (MOST_ROWS, k if transpose else n), dtype, device, seed=1, signed="rows" if transpose else "columns"
    )

    def native(batch: torch.Tensor, splits: list[int]) -> torch.Tensor:
        products = native_products(splits, n, k, dtype, device)
        result: torch.Tensor = products["forward" if transpose else "dgrad"](batch, batch, [weight] * len(splits))
        return result

    def own(batch: torch.Tensor, splits: list[int]) -> torch.Tensor:
        tiles = row_tiles(torch.tensor(splits, device=device), len(batch))
        return group_gemm(batch, [weight] * len(splits), tiles, transpose=transpose)

    return fewest_rows(native, own, rows, tried_rows(), num_experts, most_rows_of_call(max(n, k) * dtype.itemsize))


def tried_rows() -> list[int]:
    """The numbers of rows that are compared."""
    return [*range(1, _EACH_TO + 1), *range(_EACH_TO + _STEP_BEYOND, MOST_ROWS + 1, _STEP_BEYOND)]


def most_rows_of_call(row_bytes: int) -> int:
    """How many rows a call has at most, whose longest row has so many bytes."""
    return max(MOST_ROWS, min(_ROWS_OF_A_CALL, _BYTES_OF_A_CALL // row_bytes))


def fewest_rows(
    native: SplitProduct, own: SplitProduct, rows: torch.Tensor, tried: Sequence[int], num_experts: int, most_rows: int
) -> int:
    """The number of rows of an expert from which on both products are equal; those of less are native's.

    The last number of rows that differs is rounded up to whole tiles. ``NEVER`` where one of the upper half differs:
    nothing shows then that more rows do not.

    Args:
        native: Megatron's product.
        own: Ours.
        rows: ``[MOST_ROWS, K]``, of which each expert has the first ones.
        tried: Ascending numbers of rows.
        num_experts: Of a call; those behind the tried ones have no rows.
        most_rows: Of a call.
    """
    last = 0
    for sizes in _batches(tried, num_experts, most_rows):
        splits = sizes + [0] * (num_experts - len(sizes))
        batch = torch.cat([rows[:size] for size in sizes])
        differs = (native(batch, splits) != own(batch, splits)).any(1)
        found = np.logical_or.reduceat(differs.cpu().numpy(), np.cumsum([0, *sizes[:-1]]))
        last = max([last, *(size for size, is_different in zip(sizes, found) if is_different)])
    if last > MOST_ROWS // 2:
        return NEVER
    return -(-last // _TILE) * _TILE + 1


def _batches(tried: Sequence[int], most_sizes: int, most_rows: int) -> Iterator[list[int]]:
    batch: list[int] = []
    for size in tried:
        if batch and (len(batch) == most_sizes or sum(batch) + size > most_rows):
            yield batch
            batch = []
        batch.append(size)
    yield batch
