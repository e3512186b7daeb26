"""A transformer layer under ``strict`` and under ``force``, which never probes: what ``strict`` costs then.

The two take turns, a few calls each, in an order that is reversed from round to round, so that drift of clocks hits
both alike; what counts is the ratio within each round. Native is timed after them, on its own: it leaves the GPU
cooler, and whoever runs after it is quicker for a while. Times are the host's, from a barrier to the end of the
device's work: what the host does counts, too.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ditron_train.policy import Gate
from ditron_train.runtime.settings import under_policy
from ditron_train.tools.session import BenchSession
from tests.support.decisions import swap_decisions

MODES = ("strict", "force")
Run = Callable[[int], object]


@dataclass(frozen=True)
class Ratio:
    """Median of the rounds' ratios, and the interval in which the true one is with 95 % confidence."""

    median: float
    low: float
    high: float


def compare_policies(
    session: BenchSession, fused: Run, native: Run, *, rounds: int, calls: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Times ``fused`` under every mode in turns, and then ``native`` (collective).

    Returns:
        us a call in every round by name (``native`` and ``MODES``), the maximum over ranks; and by mode, how many
        shapes it left to the native path.
    """
    gates: dict[str, Gate] = {mode: Gate() for mode in MODES}
    for mode in MODES:
        with under_policy(mode):
            swap_decisions(gates[mode])
            fused(0)  # every shape of the layer is decided on here
            swap_decisions(gates[mode])

    def under(mode: str) -> Run:
        def decided(index: int) -> None:
            swap_decisions(gates[mode])
            fused(index)
            swap_decisions(gates[mode])

        return decided

    times = _in_turns(session, {mode: under(mode) for mode in MODES}, rounds, calls)
    times.update(_in_turns(session, {"native": native}, -(-rounds // 4), calls))
    return times, {
        mode: sum(answer.context is None for answer in decided.answers()) for mode, decided in gates.items()
    }


def _in_turns(session: BenchSession, contenders: Mapping[str, Run], rounds: int, calls: int) -> dict[str, list[float]]:
    on_gpu = session.device.type == "cuda"
    measured = []
    for number in range(-1, rounds):  # the first warms up
        names = list(contenders) if number % 2 else list(contenders)[::-1]
        times = dict.fromkeys(contenders, 0.0)
        for name in names:
            dist.barrier()
            if on_gpu:
                torch.cuda.synchronize(session.device)
            start_s = time.perf_counter()
            for index in range(calls):
                contenders[name](index)
            if on_gpu:
                torch.cuda.synchronize(session.device)
            times[name] = (time.perf_counter() - start_s) / calls * 1e6
        if number >= 0:
            measured.append(list(times.values()))
    slowest = torch.tensor(measured, dtype=torch.float64, device=session.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(contenders, slowest.t().tolist()))


def ratio_of(times: Sequence[float], of: Sequence[float]) -> Ratio:
    """Ratio of two contenders that took turns, round by round; the interval is that of order statistics of the
    median."""
    ratios = sorted(mine / other for mine, other in zip(times, of, strict=True))
    first = max(math.floor((len(ratios) - 1.96 * math.sqrt(len(ratios))) / 2), 0)
    return Ratio(statistics.median(ratios), ratios[first], ratios[len(ratios) - 1 - first])
