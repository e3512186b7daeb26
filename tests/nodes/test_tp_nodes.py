"""Tensor parallel linear layers over posed nodes: bits of megatron-core's, gathers and sums by rails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import bodies_nodes as bodies  # noqa: E402

from tests.support.nodes import run_on_nodes  # noqa: E402


@pytest.mark.parametrize(
    ("nodes", "ranks", "batch", "dtype"),
    [(2, 2, 3, torch.float32), (2, 1, 0, torch.bfloat16), (4, 2, 1, torch.bfloat16)],
)
def test_linear_layers(nodes, ranks, batch, dtype):
    # A node begins the sums of all owners but its last: gloo's ring descends, to the first rank of a node.
    wanted = [nodes - (rank % 2 == 0) if rank % 2 < ranks else None for rank in range(2 * nodes)]
    assert run_on_nodes(nodes, 2, bodies.tp_linears, ranks, batch, dtype) == wanted
