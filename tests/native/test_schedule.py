"""The combined 1F1B schedule (overlap_moe_expert_parallel_comm) under ``strict``: paths alternate from step to step,
bits are native's in all of them, and the faster path stays, alike on all ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.processes import run_workers

pytest.importorskip("megatron.core")
sys.path.insert(0, str(Path(__file__).parent))
from schedule_workers import timed_steps  # noqa: E402

QUICK, SLOW = (100.0, 80.0), (100.0, 120.0)
#: A step of each path to warm up, then native, fused, fused, native.
ALTERNATING = [False, True, False, True, True, False]
STRICT = {"DITRON_POLICY": "strict"}


@pytest.mark.parametrize(
    "us_of_ranks, is_fused", [((QUICK, QUICK), True), ((SLOW, SLOW), False), ((QUICK, SLOW), False)]
)
def test_the_faster_path_stays_on_all_ranks(us_of_ranks, is_fused):
    """The slowest rank counts."""
    found = run_workers(2, timed_steps, us_of_ranks, env=STRICT)
    assert [one[:4] for one in found] == [([], [*ALTERNATING, is_fused], True, 0)] * 2
    begun, line = found[0][4]
    assert "torch.bfloat16: the job's first steps alternate between native and fused" in begun
    assert "top-2 of 4, torch.bfloat16: " in line and ", native 12" in line
    assert ("fused, faster in the job's steps (10" if is_fused else "native, ep movement in pieces 16 tokens") in line
    assert is_fused or "it is not faster in the job's steps by more than these differ (15" in line


def test_weight_gradients_that_are_delayed_on_ranks_that_are_late():
    options = {"delay_wgrad_compute": True}
    found = run_workers(2, timed_steps, (QUICK, QUICK), 7, True, None, options, env=STRICT)
    assert [one[:2] for one in found] == [([], [*ALTERNATING, True])] * 2
    assert all(one[3] > 200 for one in found)


@pytest.mark.parametrize("policy, is_fused", [("bits", True), ("force", True), ("fast", None)])
def test_other_policies(policy, is_fused):
    """Without times, or without bits."""
    found = run_workers(2, timed_steps, (SLOW, SLOW), 3, env={"DITRON_POLICY": policy})
    assert [one[:3] for one in found] == [([], ALTERNATING[:3] if is_fused is None else [True] * 3, True)] * 2


@pytest.mark.parametrize("fails_at", [4, 18], ids=["in_the_first_step", "in_a_step_that_is_timed"])
def test_a_step_that_ends_in_an_error_is_left_out(fails_at):
    """Five dispatches are a step. The next step has the other path, and the decision is the same."""
    found = run_workers(2, timed_steps, (QUICK, QUICK), 11, False, fails_at, env=STRICT)
    for wrong, paths, is_equal, *_ in found:
        assert not wrong and is_equal and paths[:6] == ALTERNATING and paths[-1] is True
    assert sum("fused, faster" in line for line in found[0][4]) == 1
