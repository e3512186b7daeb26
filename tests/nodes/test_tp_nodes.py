"""Tensor parallel linear layers over posed nodes: bits of megatron-core's, gathers by rails beside the products."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import bodies_nodes as bodies  # noqa: E402

from tests.support.nodes import run_on_nodes  # noqa: E402


@pytest.mark.parametrize(("nodes", "ranks", "batch"), [(2, 2, 3), (2, 1, 0), (4, 2, 1)])
def test_linear_layers(nodes, ranks, batch):
    # Forward of the column layer, backward of the row layer.
    wanted = ["NodesTPContext", 1, "NodesTPContext", 1]
    assert run_on_nodes(nodes, ranks, bodies.tp_linears, batch) == [wanted] * (nodes * ranks)
