"""The experts' GEMMs as Megatron's path runs them: Transformer Engine's grouped ones, or one cuBLAS product each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch

from ditron_train.runtime.transformer_engine import grouped_gemm

Product = Literal["forward", "dgrad", "wgrad"]


def native_products(
    counts: list[int], n: int, k: int, dtype: torch.dtype, device: torch.device
) -> dict[Product, Callable]:
    """Forward, dgrad and wgrad of experts ``[n, k]`` as the native layer runs them: functions of (rows, gradient,
    weights), written into outputs of their own."""
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
