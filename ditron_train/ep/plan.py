"""What a layer of experts runs: the fused pairs of a dispatch or combine and a GEMM, the experts' native products, and
the minimum rows of an expert, measured, from which on our products are bitwise identical to the native ones.

cuBLAS splits the sum of a product with few tiles over several programs (split-K), and then adds up in another order
than our kernels. Up to how many rows it does so depends on the shape: sums of 28672 terms into 4096 columns were split
beyond 512 rows, sums of 2048 terms into 7168 columns not even for a few rows (docs/measurements/ep.md). So both
products are compared for every number of rows up to 512, and for every ninth number beyond, on order-probe inputs. The
calls have as many experts as the layer, so no other kernels are compiled for this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ditron_train.ep.grouped_gemm import group_gemm, group_wgrad, group_wgrad_into, row_tiles
from ditron_train.gemm.order_probe import order_probe_matrix
from ditron_train.gemm.transformer_engine import grouped_gemm
from ditron_train.runtime.groups import GroupCache

#: What can overlap: fc2's GEMM with the combine after it, as one kernel; the last combine with dW1. Then the products
#: of all experts that can be one kernel, which takes its tiles from the device, while natively each expert has its
#: own: both GEMMs (fc2's without the combine), both gradients of rows, those of all weights.
Pair = Literal["gemm_combine", "overlap_wgrad", "fc1_gemm", "fc2_gemm", "fc2_dgrad", "fc1_dgrad", "group_wgrad"]
PAIRS: tuple[Pair, ...] = (
    *("gemm_combine", "overlap_wgrad"),
    *("fc1_gemm", "fc2_gemm", "fc2_dgrad", "fc1_dgrad", "group_wgrad"),
)
# If cuBLAS has few tiles it may split K, and then sums in another order than our GEMMs: docs/measurements/ep.md.
_WAVE_TILES = 132
#: The largest part of all rows that may belong to such experts: their products run before the kernel, when no rows are
#: returned yet.
MOST_FEW = 0.25


def pairs_of_step(
    pairs: frozenset[Pair], expert_rows: np.ndarray | None, limits: Mapping[Pair, int]
) -> tuple[frozenset[Pair], dict[Pair, int]]:
    """The pairs of a step, and of those in which experts are multiplied natively the number of rows below which they
    are; the same on all ranks.

    Args:
        pairs: The pairs that were chosen for the layer.
        expert_rows: Rows of each expert of any rank; None if the host does not know them (a fixed capacity): all pairs
            stay, and the user is warned afterwards.
        limits: Rows that an expert must have for our GEMM of a pair to add up as the native one does; for
            ``group_wgrad``, whose sums are over rows, the most that an expert may have.
    """
    min_rows: dict[Pair, int] = {}
    if expert_rows is None:
        return pairs, min_rows
    for pair in pairs & limits.keys():
        few = expert_rows[expert_rows < limits[pair]]
        if pair == "group_wgrad":
            pairs -= {pair} if expert_rows.max() > limits[pair] else set()
        elif few.sum() > MOST_FEW * expert_rows.sum():
            pairs -= {pair}
        elif few.any():
            min_rows[pair] = limits[pair]
    return pairs, min_rows


def triton_wgrad_has_native_bits(rows: int, columns: int) -> bool:
    """Whether our gradient of a weight ``[rows, columns]`` adds up as the native one, for any rows of an expert."""
    return -(-rows // 128) * -(-columns // 256) >= _WAVE_TILES


Product = Literal["forward", "dgrad", "wgrad"]


def native_products(
    counts: list[int], n: int, k: int, dtype: torch.dtype, device: torch.device
) -> dict[Product, Callable]:
    """Forward, dgrad and wgrad of experts ``[n, k]`` as the native layer runs them: functions of (rows, gradient,
    weights) that write new outputs."""
    y, dx = (
        cache(lambda columns=columns: torch.empty(sum(counts), columns, dtype=dtype, device=device))
        for columns in (n, k)
    )
    dw = cache(lambda: [torch.empty(n, k, dtype=dtype, device=device) for _ in counts])
    if find_spec("transformer_engine") is None:
        return _loops(counts, y, dx, dw)

    def run(
        layout: str,
        grad: bool,
        a: Sequence[torch.Tensor],
        b: Sequence[torch.Tensor],
        out: list[torch.Tensor],
        single: bool,
    ) -> Any:
        grouped_gemm(a, b, out, dtype, layout=layout, m_splits=counts, grad=grad, single_output=single)

    return {
        "forward": lambda x, g, ws: (run("TN", False, ws, x.split(counts), [y()], True), y())[1],
        "dgrad": lambda x, g, ws: (run("NN", True, ws, g.split(counts), [dx()], True), dx())[1],
        "wgrad": lambda x, g, ws: (run("NT", True, x.split(counts), g.split(counts), dw(), False), dw())[1],
    }


def _loops(
    counts: list[int],
    y: Callable[[], torch.Tensor],
    dx: Callable[[], torch.Tensor],
    dw: Callable[[], list[torch.Tensor]],
) -> dict[Product, Callable]:
    def forward(x: torch.Tensor, g: torch.Tensor, ws: list[torch.Tensor]) -> torch.Tensor:
        for part, out, w in zip(x.split(counts), y().split(counts), ws):
            torch.matmul(part, w.t(), out=out)
        return y()

    def dgrad(x: torch.Tensor, g: torch.Tensor, ws: list[torch.Tensor]) -> torch.Tensor:
        for part, out, w in zip(g.split(counts), dx().split(counts), ws):
            torch.matmul(part, w, out=out)
        return dx()

    def wgrad(x: torch.Tensor, g: torch.Tensor, ws: list[torch.Tensor]) -> list[torch.Tensor]:
        for g_part, x_part, out in zip(g.split(counts), x.split(counts), dw()):
            torch.matmul(g_part.t(), x_part, out=out)
        return dw()

    return {"forward": forward, "dgrad": dgrad, "wgrad": wgrad}


#: More rows than any expert has: the products differ at all sizes that matter.
NEVER = 1 << 30
#: Why such products are not fused.
OTHER_BITS = "experts' products have other bits than Transformer Engine's, or cannot be compared here"
#: Rows of an expert up to which products are compared.
MOST_ROWS = 4096
_EACH_TO, _STEP_BEYOND = 512, 9
_TILE = 128
_ROWS_OF_A_CALL, _BYTES_OF_A_CALL = 16384, 1 << 28  # the latter of its largest tensor, if MOST_ROWS are not more
#: (rows of several experts [sum(splits), K], splits) -> their products with one weight [sum(splits), N]. The last
#: experts may have no rows.
SplitProduct = Callable[[torch.Tensor, list[int]], torch.Tensor]


class RowProduct(NamedTuple):
    """Rows of experts times their weights.

    Attributes:
        weight: Shape of a weight, as it is stored.
        num_experts: The layer's experts on this rank.
        transpose: Forward, ``rows @ weight.T``; else ``rows @ weight``, the gradients of rows.
    """

    weight: tuple[int, ...]
    num_experts: int
    transpose: bool


@cache
@torch.no_grad()
def min_rows_here(product: RowProduct, dtype: torch.dtype, device: torch.device) -> int:
    """``min_rows`` of our product and Megatron's on this device; measured once. ``NEVER`` if there is no memory to
    measure it."""
    (n, k), num_experts, transpose = product
    with giving_memory_back(device):
        try:
            return _measured(n, k, num_experts, transpose, dtype, device)
        except torch.OutOfMemoryError:
            return NEVER


@contextmanager
def giving_memory_back(device: torch.device) -> Iterator[None]:
    """A context for what is measured once: frees its tensors' memory, whose sizes training never needs again."""
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measured(n: int, k: int, num_experts: int, transpose: bool, dtype: torch.dtype, device: torch.device) -> int:
    weight = order_probe_matrix((n, k), dtype, device, seed=2, signed="columns")
    # The sum's index is signed in one operand alone.
    rows = order_probe_matrix(
        (MOST_ROWS, k if transpose else n), dtype, device, seed=1, signed="rows" if transpose else "columns"
    )

    def native(batch: torch.Tensor, splits: list[int]) -> torch.Tensor:
        products = native_products(splits, n, k, dtype, device)
        result: torch.Tensor = products["forward" if transpose else "dgrad"](batch, batch, [weight] * len(splits))
        return result

    def own(batch: torch.Tensor, splits: list[int]) -> torch.Tensor:
        tiles = row_tiles(torch.tensor(splits, device=device), len(batch))
        return group_gemm(batch, [weight] * len(splits), tiles, transpose=transpose)

    return min_rows(native, own, rows, tried_rows(), num_experts, most_rows_of_call(max(n, k) * dtype.itemsize))


def tried_rows() -> list[int]:
    """The numbers of rows that are compared."""
    return [*range(1, _EACH_TO + 1), *range(_EACH_TO + _STEP_BEYOND, MOST_ROWS + 1, _STEP_BEYOND)]


def most_rows_of_call(row_bytes: int) -> int:
    """The most rows of a call whose longest row has ``row_bytes`` bytes."""
    return max(MOST_ROWS, min(_ROWS_OF_A_CALL, _BYTES_OF_A_CALL // row_bytes))


def min_rows(
    native: SplitProduct, own: SplitProduct, rows: torch.Tensor, tried: Sequence[int], num_experts: int, most_rows: int
) -> int:
    """The number of rows of an expert from which on both products are equal; experts with fewer rows run natively.

    The last number of rows at which they differ is rounded up to whole tiles. ``NEVER`` if they differ at one of the
    upper half of the numbers: then nothing shows that they are equal for more rows.

    Args:
        native: Megatron's product.
        own: The fused path's product.
        rows: ``[MOST_ROWS, K]``, of which each expert gets the first ones.
        tried: Ascending numbers of rows.
        num_experts: Experts of a call; those without a number to try have no rows.
        most_rows: The most rows of a call.
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


class WgradProduct(NamedTuple):
    """Gradients of experts' weights.

    Attributes:
        weight: Shape of a weight.
        num_experts: The layer's experts on this rank.
        into: Type of the buffers that they are added to; None: they are new tensors.
    """

    weight: tuple[int, ...]
    num_experts: int
    into: torch.dtype | None


@cache
@torch.no_grad()
def most_rows_here(product: WgradProduct, dtype: torch.dtype, device: torch.device) -> int:
    """Up to how many rows of an expert our weight gradient and Megatron's are equal on this device; measured once. 0
    if there is no memory to measure it."""
    with giving_memory_back(device):
        try:
            for sizes in _batches(tried_rows(), product.num_experts, _ROWS_OF_A_CALL):
                differing = _differing_wgrads(product, sizes, dtype, device)
                if differing:
                    return min(differing) - 1
            return MOST_ROWS
        except torch.OutOfMemoryError:
            return 0


def _differing_wgrads(product: WgradProduct, sizes: list[int], dtype: torch.dtype, device: torch.device) -> list[int]:
    """Of these numbers of rows those at which an expert's weight gradients differ: written, or added."""
    (n, k), num_experts, into = product
    splits = sizes + [0] * (num_experts - len(sizes))
    grad = torch.cat([order_probe_matrix((size, n), dtype, device, seed=1, signed="rows") for size in sizes])
    rows = torch.cat([order_probe_matrix((size, k), dtype, device, seed=2, signed="columns") for size in sizes])
    tiles, differing = row_tiles(torch.tensor(splits, device=device), len(rows)), set()
    options: dict[str, Any] = dict(layout="NT", m_splits=splits, grad=True, use_split_accumulator=True)
    for accumulate in (False, True) if into is not None else (False,):
        native, own = ([torch.ones(n, k, dtype=into or dtype, device=device) for _ in splits] for _ in range(2))
        grouped_gemm(rows.split(splits), grad.split(splits), native, dtype, accumulate=accumulate, **options)
        if into is None:
            own = list(group_wgrad(grad, rows, tiles).unbind(0))
        else:
            group_wgrad_into(grad, rows, tiles, own, overwrites=not accumulate)
        differing |= {size for size, one, other in zip(splits, native, own) if not torch.equal(one, other)}
    return sorted(differing)


def _batches(tried: Sequence[int], most_sizes: int, most_rows: int) -> Iterator[list[int]]:
    batch: list[int] = []
    for size in tried:
        if batch and (len(batch) == most_sizes or sum(batch) + size > most_rows):
            yield batch
            batch = []
        batch.append(size)
    yield batch


_agreed: GroupCache[tuple[Any, ...], int] = GroupCache()


def products_of(num_experts: int, *weights: Any) -> frozenset[RowProduct]:
    """All products of rows with such weights of each expert, forward and for gradients."""
    shapes = [tuple(weight.shape) for weight in weights]
    return frozenset(RowProduct(shape, num_experts, transpose) for shape in shapes for transpose in (True, False))


def agreed_min_rows(
    products: frozenset[RowProduct], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> int:
    """The largest ``min_rows_here`` of several products and all ranks, so that all ranks choose alike (collective the
    first time)."""
    key = (products, dtype, device, group)
    if key not in _agreed:
        here = max(min_rows_here(product, dtype, device) for product in products)
        _agreed[key] = _largest(here, device, group)
    return _agreed[key]


def agreed_most_rows(
    products: frozenset[WgradProduct], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> int:
    """The smallest ``most_rows_here``, likewise."""
    key = (products, dtype, device, group)
    if key not in _agreed:
        here = min(most_rows_here(product, dtype, device) for product in products)
        _agreed[key] = -_largest(-here, device, group)
    return _agreed[key]


def _largest(here: int, device: torch.device, group: dist.ProcessGroup) -> int:
    most = torch.tensor([here], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return int(most)
