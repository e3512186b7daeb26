"""Frameworks' subclasses of Megatron's layers: fused where they wrap what they inherit, else native by name."""

from __future__ import annotations

import pytest

from tests.reach import bodies_subclasses as bodies
from tests.support.processes import run_workers_once

pytest.importorskip("megatron.core")


def test_subclasses_of_layers():
    outcomes = run_workers_once(2, bodies.layers)
    assert all(outcome.ok for outcome in outcomes), [outcome.traceback for outcome in outcomes]
    for rank, found in enumerate(outcome.value for outcome in outcomes):
        assert all(found[name] for name in ("Plain", "ScaledHead", "TwiceScaled", "Mixed", "Later"))
        assert not any(found[name] for name in ("OwnForward", "OwnStep", "OwnMoE"))
        assert found["replaced"] == ["forward"] and found["restored"]
        if rank == 0:
            for name in ("ScaledHead", "Mixed"):
                words = f"{name}: on, as ColumnParallelLinear, whose methods it wraps"
                assert [line.endswith(words) for line in found["lines"]].count(True) == 1
            for name, native, methods in (
                ("OwnForward", "ColumnParallelLinear", "forward"),
                ("OwnStep", "RowParallelLinear", "_forward_impl"),
                ("OwnMoE", "MoELayer", "forward"),
            ):
                words = f"{name}: native, a subclass of {native} with its own {methods}"
                assert [line.endswith(words) for line in found["lines"]].count(True) == 1
