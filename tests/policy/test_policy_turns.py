"""``policy_turns``: modes take turns, each with its own decisions, and the ratio is that of the rounds."""

from __future__ import annotations

import argparse
import os

import pytest
import torch
import torch.distributed as dist

from tests.support.policy_turns import compare_policies, ratio_of
from tests.support.processes import run_workers

pytest.importorskip("megatron.core")


def test_the_ratio_is_that_of_the_rounds() -> None:
    drifting = [100.0 * 1.1**number for number in range(20)]
    ratio = ratio_of([1.5 * us for us in drifting], drifting)
    assert ratio.median == ratio.low == ratio.high == pytest.approx(1.5)
    ratio = ratio_of([float(us) for us in range(1, 41)], [10.0] * 40)
    assert (ratio.low, ratio.median, ratio.high) == (1.4, 2.05, 2.7)  # the 14th and 27th of 40
    single = ratio_of([3.0], [2.0])
    assert (single.low, single.median, single.high) == (1.5, 1.5, 1.5)


def _modes() -> tuple[dict[str, list[float]], dict[str, int], list[str], int, str | None]:
    from ditron_train.megatron.tp.routing import route
    from ditron_train.policy import gate
    from ditron_train.tools.session import BenchSession

    os.environ["DITRON_POLICY"] = "bits"
    gate.forget("tp")  # of other tests in this process
    session = BenchSession("policy", argparse.Namespace())
    x, weight = torch.randint(-3, 4, (16, 32)).float(), torch.randint(-3, 4, (16, 32)).float()
    seen: list[str] = []

    def fused(index: int) -> None:
        known = next((answer.context for answer in gate.answers("tp")), "nothing")
        context = route("column", x, weight, group=dist.group.WORLD, sequence_parallel=True).context
        seen.append("decides" if known == "nothing" else "knows" if known is context else "other")

    times, natively = compare_policies(session, fused, lambda index: None, rounds=3, calls=2)
    return times, natively, seen, len(gate.answers("tp")), os.environ.get("DITRON_POLICY")


def test_every_mode_decides_once_and_has_its_own_decisions() -> None:
    for times, natively, seen, left, mode in run_workers(2, _modes):
        assert sorted(times) == ["force", "native", "strict"] and {
            name: len(values) for name, values in times.items()
        } == {"strict": 3, "force": 3, "native": 1}
        assert natively == {"strict": 0, "force": 0}
        assert seen == ["decides"] * 2 + ["knows"] * (2 * 2 * 4)  # two modes, two calls, three rounds and a warm-up
        assert left == 0 and mode == "bits"
