"""When Newton-Schulz may run as CUDA graphs; the graphs themselves: tests/gpu."""

from __future__ import annotations

import logging

import pytest
import torch

from ditron_train.optim import graphs
from ditron_train.optim.products import ProductPlan


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
