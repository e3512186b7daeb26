"""Ulysses ops in the interpreter, on several processes, against GEMM, all-to-all and reorder."""

from __future__ import annotations

import pathlib
import random
import sys

import pytest
import torch

from ditron_train.testing.processes import run_workers

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import bodies_sp  # noqa: E402

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def random_case(draw: random.Random, world: int) -> dict:
    groups = world * draw.choice([1, 2])
    return dict(
        heads=groups * draw.choice([1, 2, 3]),
        groups=groups,
        head_dim=draw.choice([8, 16, 24, 5]),
        length=2 * world * draw.choice([1, 3, 8, 17]),
        batch=draw.choice([1, 2, 3]),
        dtype=draw.choice(DTYPES),
    )


@pytest.mark.parametrize("world", [2, 4])
def test_projections_have_the_bits_of_the_native_sequence(world):
    draw = random.Random(world)
    cases = [random_case(draw, world) | {"hidden": draw.choice([16, 40, 33])} for _ in range(5)]
    cases.append(cases[0] | {"value_dim": 16})
    run_workers(world, bodies_sp.run_projections, cases, timeout_s=240)


def test_epochs_wrap():
    case = dict(heads=4, groups=2, head_dim=8, length=16, batch=1, hidden=16, dtype=torch.bfloat16)
    run_workers(2, bodies_sp.run_projections, [case] * 3, 2**31 - 3, timeout_s=120)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_exchanges_move_any_bits(world):
    draw = random.Random(10 + world)
    run_workers(world, bodies_sp.run_exchanges, [random_case(draw, world) for _ in range(5)], timeout_s=240)
