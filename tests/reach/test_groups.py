"""Groups that are wrapped, destroyed and made again; memory that goes back while a trainer sleeps; decisions that
survive both, and are others for calls without gradients."""

from __future__ import annotations

import pytest

from tests.reach import bodies_groups as bodies
from tests.reach.models import LOSS_BOUND
from tests.support.processes import run_workers_once

pytest.importorskip("megatron.core")


def _values(body, *args, env=None):
    outcomes = run_workers_once(2, body, *args, env=env)
    assert all(outcome.ok for outcome in outcomes), [outcome.traceback for outcome in outcomes]
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize("name", ["group", "inner_group"])
def test_a_wrapped_group_is_taken_for_the_one_inside(name):
    for found in _values(bodies.doors, name):
        assert found["context wrapped"] is True and found["exchange wrapped"] == [0, 1]
        assert found["is_destroyed wrapped"] is False and found["is_destroyed empty"] is True
        for door in ("context", "exchange"):
            assert found[f"{door} empty"].startswith("NotSupportedError: torch.distributed does not know the process")


def test_wrapped_groups_that_are_destroyed_at_every_rollout():
    for found in _values(bodies.slime_like, 3):
        assert max(abs(a - b) for a, b in zip(found["losses"], found["native"])) <= LOSS_BOUND
        assert found["trials"][0] > 0 and found["trials"][1:] == [0, 0], "decided once, remembered for new groups"
        assert min(found["fused"]) > 0 and len(set(found["fused"])) == 1
        assert all(before > 0 and after == 0 for before, after in found["held"])
        assert not [line for line in found["lines"] if "cannot run" in line]


def test_offloaded_parameters_and_groups_made_again():
    (native, _), (fused, _) = _values(bodies.offloaded_and_remade, False), _values(bodies.offloaded_and_remade, True)
    for name in ("losses", "again"):
        assert max(abs(a - b) for a, b in zip(native[name], fused[name])) <= LOSS_BOUND
    assert fused["again"] == fused["first"], "of the same parameters and tokens, bit for bit"
    assert fused["first trials"] > 0 and fused["again trials"] == 0
    assert fused["held"] == 0 and fused["fused"] > 0


def test_release_and_wake_ten_times():
    for found in _values(bodies.released, 10):
        assert len(set(found["losses"])) == 1 and len(set(found["held"])) == 1 and found["trials"] == 0
        assert found["kept"] == found["held"][0], "what a CUDA graph may use stays"
        assert found["lines"] in ([], ["symmetric memory of 1 groups stays: captured CUDA graphs may use it"])


def test_ranks_that_do_not_remember_the_same_decide_again():
    for counts in _values(bodies.remembered_by_some):
        assert len(set(counts)) == 1 and counts[0] > 0


def test_calls_without_gradients_are_decided_about_by_themselves():
    for rank, found in enumerate(_values(bodies.decided_by_mode)):
        for counts, _ in found.values():
            first, second, again = counts
            assert first == second > 0 and again == 0
        lines = found["evaluation first"][1] if rank == 0 else []  # which alone logs
        without = [line for line in lines if ", no backward on 2 ranks" in line]
        assert len(lines) == 2 * len(without) == (0 if rank else 2 * first)
