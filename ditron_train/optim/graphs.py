"""Newton-Schulz of small matrices as CUDA graphs: their fifteen launches cost the host more time than the device.

A graph replays the kernels that the same plan launches one by one, cuBLAS's included, so the bits are the same; that is
checked on random data when a graph is made. Graphs read and write memory of their own; the intermediate results of all
graphs that one stream replays share a pool, since they run one after another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ditron_train.optim.products import ProductPlan, newton_schulz_step
from ditron_train.runtime.logs import log_once

__all__ = ["MAX_GRAPH_ELEMENTS", "StepGraph", "make_graph", "step_graph"]

MAX_GRAPH_ELEMENTS = 1 << 24
_MAX_TOTAL_ELEMENTS = 1 << 26  # of all graphs, which each keep two matrices

Coefficients = Sequence[tuple[float, float, float]]

_graphs: dict[tuple, StepGraph | None] = {}
_captures: dict[tuple[torch.device, int], tuple[torch.cuda.Stream, tuple[int, int]]] = {}
"""By device and stream of the replays: the stream and the memory pool of captures."""


def _steps(x: torch.Tensor, coefficients: Coefficients, plan: ProductPlan) -> torch.Tensor:
    for a, b, c in coefficients:
        x = newton_schulz_step(x, a, b, c, plan)
    return x


class StepGraph:
    """The steps of one shape, captured.

    Attributes:
        storage: Where the caller writes X before ``replay``: [m, n], or [n, m] where X is its transposed view.

    Args:
        m: Rows of X, at most ``n``.
        n: Columns.
        dtype: Of the products.
        device: A CUDA device.
        is_view: Whether X is a transposed view of ``storage``, as native's is for matrices with more rows than columns.
        coefficients: Of each step.
        plan: Which products run by our kernels.
        lasting: Whether it shares the stream's pool, which must not lose its last graph before it gets another.

    Raises:
        RuntimeError: The capture failed, or the graph's bits differ from those of single launches.
    """

    def __init__(
        self, m: int, n: int, dtype: torch.dtype, device: torch.device, is_view: bool, coefficients: Coefficients,
        plan: ProductPlan, lasting: bool = False,
    ) -> None:  # fmt: skip
        generator = torch.Generator(device=device).manual_seed(1)
        self.storage = torch.empty((n, m) if is_view else (m, n), dtype=dtype, device=device)
        self.storage.normal_(std=(m * n) ** -0.5, generator=generator)
        x = self.storage.t() if is_view else self.storage
        current = torch.cuda.current_stream(device)
        where = (device, current.cuda_stream)
        if where not in _captures:
            _captures[where] = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        side, pool = _captures[where]
        self._graph = torch.cuda.CUDAGraph()
        expected = _steps(x, coefficients, plan)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            corner = self.storage[: min(8, m), : min(8, m)]
            torch.addmm(corner, corner, corner)  # cuBLAS makes its workspace for this stream before the capture
            # other threads (NCCL's watchdog) may call CUDA meanwhile
            self._graph.capture_begin(pool=pool if lasting else None, capture_error_mode="thread_local")
            try:
                self._result = _steps(x, coefficients, plan)
            finally:
                self._graph.capture_end()
        current.wait_stream(side)
        if not torch.equal(self.replay(), expected):
            raise RuntimeError("the captured products have other bits")

    def replay(self) -> torch.Tensor:
        """Enqueues the steps on what ``storage`` holds; the next replay overwrites the result [m, n]."""
        self._graph.replay()
        return self._result


def make_graph(
    m: int, n: int, dtype: torch.dtype, device: torch.device, is_view: bool, coefficients: Coefficients, plan: ProductPlan,
    lasting: bool = False,
) -> StepGraph | None:
    """``StepGraph``, or None with one log line where it cannot be made."""
    try:
        with torch.cuda.device(device):
            return StepGraph(m, n, dtype, device, is_view, coefficients, plan, lasting)
    except RuntimeError as error:
        words = f"Newton-Schulz {m} x {n} runs without a CUDA graph: {error}"
        log_once(f"graph {m} {n} {dtype} {is_view}", words, name="ditron_train.optim")
        return None


def step_graph(
    m: int, n: int, dtype: torch.dtype, device: torch.device, is_view: bool, coefficients: Coefficients, plan: ProductPlan
) -> StepGraph | None:
    """The graph of a shape for the current stream, made at the first call; None where there can be none.

    Not while a CUDA graph is captured: its launches are the user's.
    """
    if torch.cuda.is_current_stream_capturing():
        return None
    stream = torch.cuda.current_stream(device).cuda_stream
    key = (m, n, dtype, device, is_view, tuple(coefficients), plan.uses, plan.configs, stream)
    if key not in _graphs:
        total = sum(graph.storage.numel() for graph in _graphs.values() if graph is not None)
        fits = total + m * n <= _MAX_TOTAL_ELEMENTS
        _graphs[key] = make_graph(m, n, dtype, device, is_view, coefficients, plan, lasting=True) if fits else None
    return _graphs[key]
