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
        bodies.lookup,
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


@pytest.mark.parametrize("step", [1, 7])
def test_adam(step: int) -> None:
    from ditron_train.optim.adam import AdamOptions, AdamPlan, Shard, results_of

    generator = torch.Generator().manual_seed(step)
    values = [torch.randn(5000, generator=generator) for _ in range(4)]
    shards = [Shard(*(one.clone() for one in values[:3]), values[3].abs(), torch.zeros(5000).bfloat16()) for _ in "12"]
    numbers = 1e-3, (0.9, 0.95), 1e-8, 0.1, step
    AdamPlan().run([shards[0]], AdamOptions(*numbers), 0.37, 2)
    bodies.plain_code("adam.md")["plain_adam"](*shards[1], 0.37, *numbers)
    for found, wanted in zip(map(results_of, shards[:1]), map(results_of, shards[1:])):
        torch.testing.assert_close(found, wanted)
