"""When Newton-Schulz may run as CUDA graphs; the graphs themselves: tests/gpu."""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace

import pytest
import torch

from ditron_train.optim import graphs
from ditron_train.optim.products import ProductPlan


class _Graph:
    """As torch's is: ``capture_end`` ends the capture on the stream, but its books only where the driver agrees."""

    books: list[str] = []
    refused = 0  # so many captures are refused at their end
    is_capturing = False

    def capture_begin(self, **options: object) -> None:
        assert not _Graph.is_capturing
        _Graph.is_capturing = True
        self.books.append("under way")

    def capture_end(self) -> None:
        if not _Graph.is_capturing:
            raise RuntimeError("no capture")
        _Graph.is_capturing = False
        if _Graph.refused:
            _Graph.refused -= 1
            raise RuntimeError("invalidated")
        self.books.remove("under way")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> graphs._Captures:
    """On posed calls of torch's, behind its first capture."""

    def end(index: int, pool: object) -> None:
        if "under way" not in _Graph.books:
            raise RuntimeError("not currently recording")
        _Graph.books.remove("under way")

    for name, value in {"books": [], "refused": 0, "is_capturing": False}.items():
        monkeypatch.setattr(_Graph, name, value)
    stream = SimpleNamespace(device=torch.device("cuda", 0), wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *which: _Graph.books.append("released"), raising=False)
    monkeypatch.setattr(graphs, "own_stream", lambda device: stream)
    return graphs._Captures(torch.device("cpu"))


def test_a_capture_that_the_driver_refuses_is_over_for_torch(captures: graphs._Captures) -> None:
    """Else the process aborts when it ends (seen on an H200, under compute-sanitizer)."""
    _Graph.refused = 1
    with pytest.raises(RuntimeError, match="invalidated"):
        captures.capture(lambda: torch.zeros(1))
    assert _Graph.books == ["released"]
    assert captures.capture(lambda: torch.ones(1))[1].item() == 1 and _Graph.books == ["released"]


def test_an_error_inside_a_capture_ends_it(captures: graphs._Captures) -> None:
    with pytest.raises(ZeroDivisionError):
        captures.capture(lambda: torch.tensor(1 // 0))
    assert not _Graph.books and not _Graph.is_capturing


def test_none_are_made_where_nothing_can_be_allocated_in_a_capture(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(graphs, "has_driver", lambda: True)
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    plan = ProductPlan(False, False, False, reason="chosen by the test")
    with caplog.at_level(logging.INFO, logger="ditron_train.optim"):
        steps = graphs.Steps(8, 24, torch.bfloat16, torch.device("cuda", 0), False, ((1.0, 2.0, 3.0),), plan)
        assert graphs.make_graph(steps) is None
    assert "8 x 24 runs without a CUDA graph: with PYTORCH_NO_CUDA_MEMORY_CACHING" in caplog.text


def test_none_are_made_without_a_stream_of_their_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a stream of torch's, which others get, too, replays and they would use one workspace of cuBLAS at the same
    time."""
    monkeypatch.setattr(graphs, "has_driver", lambda: False)
    made: list[tuple] = []
    monkeypatch.setattr(graphs, "StepGraph", lambda *arguments: made.append(arguments))
    monkeypatch.setattr(torch.cuda, "device", lambda device: pytest.fail("asked for a GPU"))
    plan = ProductPlan(False, False, False, reason="chosen by the test")
    with caplog.at_level(logging.INFO, logger="ditron_train.optim"):
        steps = graphs.Steps(8, 16, torch.bfloat16, torch.device("cuda", 0), False, ((1.0, 2.0, 3.0),), plan)
        graph = graphs.make_graph(steps)
    assert graph is None and not made
    assert "Newton-Schulz 8 x 16 runs without a CUDA graph: a stream of its own needs cuda-bindings" in caplog.text
