"""Models trained as Megatron-Bridge, NeMo-RL, verl, slime and ms-swift train them: their groups, packed lengths and
order of calls. Without sequence parallelism and of experts, losses are equal bit for bit on a CPU, too; with it the
products of the interpreter and of torch round differently there (GPU tests compare those bits)."""

from __future__ import annotations

import pytest

from tests.reach import bodies_frameworks as bodies
from tests.reach.models import LOSS_BOUND
from tests.support.processes import run_workers_once

pytest.importorskip("megatron.core")


def _values(body, *args):
    outcomes = run_workers_once(2, body, *args)
    assert all(outcome.ok for outcome in outcomes), [outcome.traceback for outcome in outcomes]
    return [outcome.value for outcome in outcomes]


_DENSE, _EXACT, _EXPERTS = {}, {"sequence_parallel": False}, {"experts": 4}


@pytest.mark.parametrize("name", bodies.FRAMEWORKS)
def test_dense_with_sequence_parallelism(name):
    for found in _values(bodies.trained, name, _DENSE, "tp"):
        assert found["calls"]["tp"] > 0
        assert max(abs(a - b) for a, b in zip(found["native"], found["fused"])) <= LOSS_BOUND


@pytest.mark.parametrize("name", ["verl", "ms-swift"])
@pytest.mark.parametrize("options, features", [(_EXACT, "tp"), (_EXPERTS, "ep")], ids=["without sp", "experts"])
def test_losses_bit_for_bit(name, options, features):
    for found in _values(bodies.trained, name, options, features):
        assert found["calls"][features] > 0 and found["native"] == found["fused"]


@pytest.mark.parametrize("options, features", [(_EXACT, "tp"), (_EXPERTS, "ep")], ids=["without sp", "experts"])
def test_checkpoints_in_both_directions(options, features, tmp_path):
    for found in _values(bodies.resumed, features, options, str(tmp_path)):
        expected = found["native on"]
        assert found["native before"] == found["fused before"]
        for name in ("fused on", "native to native", "native to fused", "fused to native", "fused to fused"):
            assert found[name] == expected, name
