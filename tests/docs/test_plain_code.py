"""The plain PyTorch code of each op's page gives what the op gives."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import bodies_docs as bodies  # noqa: E402

from tests.support.processes import run_workers  # noqa: E402


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    "body",
    [
        bodies.tensor_parallel,
        bodies.ring_order,
        bodies.ulysses,
        bodies.experts,
        bodies.gathered_experts,
        bodies.pipeline,
        bodies.cross_entropy,
    ],
)
def test_the_op_gives_the_same(body, world_size: int) -> None:
    run_workers(world_size, body)


def test_grouped_gemm() -> None:
    from ditron_train.ep.grouped_gemm import group_gemm, group_wgrad, row_tiles

    code = bodies.plain_code("grouped_gemm.md")
    counts = [5, 0, 40, 3]
    x, grad = bodies.integers(48, 16, seed=1), bodies.integers(48, 24, seed=2)
    weights = [bodies.integers(24, 16, seed=3 + expert) for expert in range(len(counts))]
    tiles = row_tiles(torch.tensor(counts), 48)
    assert torch.equal(group_gemm(x, weights, tiles), code["plain_group_gemm"](x, weights, counts))
    assert torch.equal(group_wgrad(grad, x, tiles), code["plain_group_wgrad"](grad, x, counts))


@pytest.mark.parametrize("shape", [(48, 80), (80, 48)])
def test_newton_schulz(shape: tuple[int, int]) -> None:
    from ditron_train.optim import newton_schulz

    grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    plain = bodies.plain_code("muon.md")["plain_newton_schulz"](grad)
    assert torch.equal(newton_schulz(grad, mode="native"), plain)
