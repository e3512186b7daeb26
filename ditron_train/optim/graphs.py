"""Newton-Schulz of small matrices as CUDA graphs: their fifteen launches cost the host more time than the device.

A graph replays the kernels that the same plan launches one by one, cuBLAS's included, so the bits are the same; that
is checked on random data when a graph is made. Graphs read and write memory of their own; the intermediate results of
all graphs that one stream replays share a pool, since they run one after another.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import torch

from ditron_train.optim.products import ProductPlan, newton_schulz_step
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.logs import log_once
from ditron_train.runtime.values import have_same_bits
from ditron_train.runtime.versions import pip_command
from ditron_train.stream.driver import has_driver
from ditron_train.stream.events import own_stream

MAX_GRAPH_ELEMENTS = 1 << 24
_MAX_TOTAL_ELEMENTS = 1 << 26  # of all graphs, which each keep two matrices

_graphs: dict[tuple, StepGraph | None] = {}
_captures: dict[tuple[torch.device, int], _Captures] = {}
"""By device and stream of the replays."""


class _Captures:
    """Where the graphs that one stream replays are captured: a stream and a pool of memory of their own.

    A product of cuBLAS may use a workspace, which a graph goes on using at its replays. torch keeps one for each
    stream until somebody has it let go of them all, as ``torch.compile`` with ``mode="reduce-overhead"`` does, and
    hands its own streams out again and again. So captures have a stream that nobody else gets, and the first of them,
    which is kept, has the workspace made of the pool's memory, which it keeps, too: let go of, that is had again by
    later captures alone. With workspaces made outside, replays write into other tensors
    (``docs/measurements/muon.md``).
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = own_stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        matrix = torch.zeros(8, 8, dtype=torch.bfloat16, device=device)
        torch.mm(matrix, matrix)  # cuBLAS itself cannot be made in a capture
        self._first = self.capture(lambda: torch.mm(matrix, matrix))

    def capture(self, function: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """What ``function`` launches, and what it returns; behind what the current stream has."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # other threads (NCCL's watchdog) may call CUDA meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = function()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph, result


class Steps(NamedTuple):
    """All steps of one matrix.

    Attributes:
        m: Rows of X, at most ``n``.
        n: Columns.
        dtype: Of the products.
        device: A CUDA device.
        is_view: Whether X is a transposed view of what is stored, as native's is for matrices with more rows than
            columns.
        coefficients: Of each step.
        plan: Which products run by our kernels.
    """

    m: int
    n: int
    dtype: torch.dtype
    device: torch.device
    is_view: bool
    coefficients: tuple[tuple[float, float, float], ...]
    plan: ProductPlan

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Enqueues them."""
        for a, b, c in self.coefficients:
            x = newton_schulz_step(x, a, b, c, self.plan)
        return x


class StepGraph:
    """The steps of one shape, captured.

    Attributes:
        storage: Where the caller writes X before ``replay``: [m, n], or [n, m] if X is its transposed view.

    Raises:
        RuntimeError: The capture failed, or the graph's bits differ from those of single launches.
    """

    def __init__(self, steps: Steps) -> None:
        m, n, dtype, device, is_view, *_ = steps
        generator = torch.Generator(device=device).manual_seed(1)
        self.storage = torch.empty((n, m) if is_view else (m, n), dtype=dtype, device=device)
        self.storage.normal_(std=(m * n) ** -0.5, generator=generator)
        x = self.storage.t() if is_view else self.storage
        where = (device, torch.cuda.current_stream(device).cuda_stream)
        if where not in _captures:
            _captures[where] = _Captures(device)
        expected = steps(x)
        self._graph, self._result = _captures[where].capture(lambda: steps(x))
        if not have_same_bits(self.replay(), expected):
            raise RuntimeError("the captured products have other bits")

    def replay(self) -> torch.Tensor:
        """Enqueues the steps on what ``storage`` holds. The next replay on this stream overwrites the result [m, n],
        whatever its shape: what another graph needs meanwhile may be there."""
        self._graph.replay()
        return self._result


def make_graph(steps: Steps) -> StepGraph | None:
    """``StepGraph``, or None with one log line if it cannot be made."""
    try:
        if not has_driver():  # a stream of torch's has other users, and with them one workspace of cuBLAS
            raise NotSupportedError(f"a stream of its own needs cuda-bindings: {pip_command('cuda-bindings')}")
        if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
            raise NotSupportedError("with PYTORCH_NO_CUDA_MEMORY_CACHING nothing can be allocated in a capture")
        with torch.cuda.device(steps.device):
            return StepGraph(steps)
    except RuntimeError as error:
        words = f"Newton-Schulz {steps.m} x {steps.n} runs without a CUDA graph: {error}"
        log_once(f"graph {steps.m} {steps.n} {steps.dtype} {steps.is_view}", words, name="ditron_train.optim")
        return None


def step_graph(steps: Steps) -> StepGraph | None:
    """The graph of a shape for the current stream, made at the first call; None if there can be none.

    Not while a CUDA graph is captured: its launches are the user's.
    """
    if torch.cuda.is_current_stream_capturing():
        return None
    stream = torch.cuda.current_stream(steps.device).cuda_stream
    key = (*steps[:-1], steps.plan.uses, steps.plan.configs, stream)
    if key not in _graphs:
        total = sum(graph.storage.numel() for graph in _graphs.values() if graph is not None)
        fits = total + steps.m * steps.n <= _MAX_TOTAL_ELEMENTS
        _graphs[key] = make_graph(steps) if fits else None
    return _graphs[key]
