"""Rates of this machine from what was timed while tuning, for the cost model."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ditron_train.costs.products import gemm_us
from ditron_train.data.device_profiles import known_rates
from ditron_train.data.rates import MachineRates
from ditron_train.tp.choices import Machine, Problem, default_choice, wire_bytes

_RANKS_OF_A_NODE = 8


@dataclass(frozen=True)
class Observed:
    """Times of a problem's parts, in us; ``link_us`` of a gather by copy engines alone, None if it was not
    timed."""

    problem: Problem
    gemm_us: float
    comm_us: float
    link_us: float | None = None


def fit_rates(observed: Sequence[Observed], machine: Machine) -> MachineRates:
    """The rates that explain the times; what they say nothing about is as by default."""
    rates = known_rates(machine)
    if not observed:
        return rates
    rates = replace(rates, gemm_tflops=_rounded(_gemm_tflops(observed, machine, rates)))
    rates = _with_nccl(rates, observed)
    line = _line([(wire_bytes(seen.problem), seen.link_us) for seen in observed if seen.link_us is not None])
    if line is not None:
        rates = replace(rates, link_gbps=_rounded(line[1]))
    return rates


def _with_nccl(rates: MachineRates, observed: Sequence[Observed]) -> MachineRates:
    """The rate of NCCL's rings with as many ranks as were observed, and its latency."""
    line = _line([(wire_bytes(seen.problem), seen.comm_us) for seen in observed])
    if line is None:
        return rates
    ranks = observed[0].problem.world_size
    name = "nccl_pair_gbps" if ranks == 2 else "nccl_gbps" if ranks < _RANKS_OF_A_NODE else "nccl_node_gbps"
    latency_us = max(line[0] - rates.nccl_hop_us * (ranks - 2), 1.0)
    return replace(rates, nccl_latency_us=_rounded(latency_us), **{name: _rounded(line[1])})


def _gemm_tflops(observed: Sequence[Observed], machine: Machine, rates: MachineRates) -> float:
    """In steps: a long GEMM's time is not in proportion to the rate, since it is slowed down."""
    for _ in range(4):
        ratios = []
        for seen in observed:
            p = seen.problem
            expected = gemm_us(
                p.m, p.n, p.k, default_choice(p, machine).config, machine.num_sms, machine.num_sms, rates
            )
            ratios.append(expected / seen.gemm_us)
        rates = replace(rates, gemm_tflops=rates.gemm_tflops * statistics.median(ratios))
    return rates.gemm_tflops


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """(us at no bytes, GB/s) of the line through (bytes, us); None if the points do not make one."""
    if len({num_bytes for num_bytes, _ in points}) < 2:
        return None
    slope, intercept = statistics.linear_regression(*zip(*points))
    return (intercept, 1e-3 / slope) if slope > 0 else None
