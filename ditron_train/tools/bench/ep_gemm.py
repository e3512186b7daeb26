"""Rows ``group_gemm`` of ``bench ep``: the GEMMs of a rank's experts, against Transformer Engine's or one cuBLAS
product each.

They are timed with the host ahead: for 15 experts a call cost the host 250-400 us natively, 110-190 us with ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, Literal

import torch

from ditron_train.ep.expert_functions import PAIRS, own_wgrad_has_native_bits, pairs_of_native_bits
from ditron_train.ep.group_gemm import group_gemm, group_wgrad, row_tiles
from ditron_train.runtime.transformer_engine import grouped_gemm
from ditron_train.tools.results import Pass, Row
from ditron_train.tools.session import BenchSession

__all__ = ["Product", "group_gemm_rows", "products_of_native_bits"]

Product = Literal["forward", "dgrad", "wgrad"]
_NAMES: dict[Product, str] = {"forward": "group_gemm", "dgrad": "group_dgrad", "wgrad": "group_wgrad"}


def products_of_native_bits(fewest_rows: int | None, n: int, k: int) -> tuple[Product, ...]:
    """Those products of experts ``[n, k]`` that a layer leaves to ours where its smallest expert has ``fewest_rows``.

    The gate is the layer's own, ``pairs_of_native_bits``; None: sums are exact in any order.
    """
    if pairs_of_native_bits(frozenset(PAIRS), fewest_rows):
        return tuple(_NAMES)
    return ("wgrad",) if own_wgrad_has_native_bits(n, k) else ()


def _native_products(
    counts: list[int], n: int, k: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Callable]:
    """Forward, dgrad and wgrad as the native layer runs them, written into outputs of their own."""
    rows = sum(counts)
    y, dx = (torch.empty(rows, columns, dtype=dtype, device=device) for columns in (n, k))
    dw = [torch.empty(n, k, dtype=dtype, device=device) for _ in counts]
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
        "forward": lambda x, g, ws: (run("TN", False, ws, x.split(counts), [y], True), y)[1],
        "dgrad": lambda x, g, ws: (run("NN", True, ws, g.split(counts), [dx], True), dx)[1],
        "wgrad": lambda x, g, ws: (run("NT", True, x.split(counts), g.split(counts), dw, False), dw)[1],
    }


def _loops(counts: list[int], y: torch.Tensor, dx: torch.Tensor, dw: list[torch.Tensor]) -> dict[str, Callable]:
    def forward(x: torch.Tensor, g: torch.Tensor, ws: list[torch.Tensor]) -> torch.Tensor:
        for part, out, w in zip(x.split(counts), y.split(counts), ws):
            torch.matmul(part, w.t(), out=out)
        return y

    def dgrad(x: torch.Tensor, g: torch.Tensor, ws: list[torch.Tensor]) -> torch.Tensor:
        for part, out, w in zip(g.split(counts), dx.split(counts), ws):
            torch.matmul(part, w, out=out)
        return dx

    def wgrad(x: torch.Tensor, g: torch.Tensor, ws: list[torch.Tensor]) -> list[torch.Tensor]:
        for g_part, x_part, out in zip(g.split(counts), x.split(counts), dw):
            torch.matmul(g_part.t(), x_part, out=out)
        return dw

    return {"forward": forward, "dgrad": dgrad, "wgrad": wgrad}


def group_gemm_rows(
    session: BenchSession,
    *,
    model: str,
    shape: dict[str, int],
    counts: list[int],
    products: tuple[Product, ...],
    n: int,
    k: int,
) -> Iterator[Row]:
    """Rows ``group_gemm``, ``group_dgrad`` and ``group_wgrad`` for experts [n, k] with ``counts`` rows each.

    Args:
        session: Of the benchmark.
        model: For the rows.
        shape: For the rows.
        counts: Rows of each local expert.
        products: Which of the three.
        n: Output columns.
        k: Input columns.
    """
    device, dtype, num_rows = session.device, session.dtype, sum(counts)
    generator = torch.Generator(device).manual_seed(session.rank)

    def values(*size: int) -> torch.Tensor:
        if device.type == "cpu":  # small integers: exact in every order of a sum
            return torch.randint(-3, 4, size, generator=generator).to(dtype)
        return torch.empty(size, dtype=dtype, device=device).normal_(generator=generator)

    x, g, weights = values(num_rows, k), values(num_rows, n), [values(n, k) for _ in counts]
    tokens_per_expert = torch.tensor(counts, device=device)
    native = _native_products(counts, n, k, dtype, device)
    ours: dict[Product, Callable] = {
        "forward": lambda tiles: group_gemm(x, weights, tiles),
        "dgrad": lambda tiles: group_gemm(g, weights, tiles, transpose=False),
        "wgrad": lambda tiles: group_wgrad(g, x, tiles).unbind(),
    }
    for product in products:
        contenders = {
            "native": lambda index, p=product: native[p](x, g, weights),
            "ditron": lambda index, p=product: ours[p](row_tiles(tokens_per_expert, num_rows)),
        }
        results = [contenders[name](0) for name in ("ditron", "native")]
        equal = session.equal(*(result if product == "wgrad" else [result] for result in results))
        del results
        timings = session.measure(contenders)
        direction: Pass = "forward" if product == "forward" else "backward"
        yield session.row(_NAMES[product], direction, model, {**shape, "n": n, "k": k}, timings, equal)
