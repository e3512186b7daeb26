"""Fits a profile to measured rows: the rates of the device that bring the model closest to them.

One row has no rate of its own: what is fitted are the fields of `MachineRates` alone. Half of the rows of each op is
fitted to; the other half judges.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace

from ditron_train.costs import Estimate
from ditron_train.runtime.profiles import LEAST_RATE, MOST_RATE, Profile
from ditron_train.runtime.rates import MachineRates
from ditron_train.tools.results import TRAINING_STEP, Row

_MOST = 0.25  # an error counts no more: what the model cannot say shall not bend what it can
_STEPS = (1.3, 1.1, 1.03, 1.01)
_STEPS_OF_JOBS = _STEPS[1:]  # 1.3 leaps to a GPU whose power limits no step, from where no small step leads back
_ROUNDS = 3
_DIGITS = 3
# Where NCCL changes its ways is no rate; of the others no row is measured, or too few: traces showed them.
_NEVER = (
    "p2p_large_bytes", "attention_deterministic", "host_collective_us", "host_graph_us", "host_microbatch_us",
    "host_step_us",
)  # fmt: skip
_OF_JOBS = ("gemm_power", "host_layer_us", "host_grouped_us")
# With a transfer beside it: there the exchange alone is timed by copy engine.
_OTHER_EXCHANGE = ("gemm_beside", "gemm_and")
_FARTHEST = 1.5  # from where the search starts: what few rows show is not to become absurd

Estimator = Callable[[Row, Profile], Estimate | None]


def halves(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """The rows that a profile is fitted to, and those that judge it: of each op in turns 1, 2, 2, 1, so that neither
    half has one pass or one size alone."""
    fitted: list[Row] = []
    judged: list[Row] = []
    count: Counter[str] = Counter()
    for row in rows:
        op = row.op.split()[0]
        place = count[op]
        (judged if (place + place // 2) % 2 else fitted).append(row)
        count[op] += 1
    return fitted, judged


def row_errors(row: Row, estimate: Estimate) -> tuple[float, float]:
    """By how much of the measured time natively and with ours is estimated too long."""
    return estimate.native_us / row.native_us - 1, estimate.ditron_us / row.ditron_us - 1


@dataclass
class _Fit:
    rows: Sequence[Row]
    estimator: Estimator
    start: MachineRates
    farthest: float

    def losses(self, profile: Profile, which: Sequence[int]) -> dict[int, float]:
        """Of each row; the logarithm makes twice and half count alike."""
        found = {}
        most = _MOST if math.isfinite(self.farthest) else math.inf
        for index in which:
            row = self.rows[index]
            seen = self.estimator(row, profile)
            if seen is None:
                continue
            pairs = [(seen.native_us, row.native_us), (seen.ditron_us, row.ditron_us)]
            if row.gemm_us and row.comm_us and not row.op.startswith(_OTHER_EXCHANGE):
                pairs += [(seen.compute_us, row.gemm_us), (seen.exchange_us, row.comm_us)]
            found[index] = sum(min(abs(math.log(model / measured)), most) ** 2 for model, measured in pairs)
        return found


def _with(profile: Profile, name: str, factor: float) -> Profile:
    value = float(f"{getattr(profile.rates, name) * factor:.{_DIGITS}g}")
    return replace(profile, rates=replace(profile.rates, **{name: value}))


def fit_profile(
    profile: Profile, rows: Sequence[Row], estimator: Estimator, *, farthest: float = _FARTHEST
) -> Profile:
    """``profile`` with the rates that explain ``rows`` best: those of ops from the rows of ops, then those that only
    whole jobs show from the steps.

    Args:
        profile: Where the search starts.
        rows: Measured.
        estimator: What the model says of a row.
        farthest: By what factor a rate may move from where it starts. Where that is any, every error counts as it is.
    """
    steps = [row for row in rows if row.op.startswith(TRAINING_STEP)]
    ops = [row for row in rows if not row.op.startswith(TRAINING_STEP)]
    names = [one.name for one in fields(MachineRates) if one.name not in (*_NEVER, *_OF_JOBS)]
    profile = _fitted(profile, _Fit(ops, estimator, profile.rates, farthest), names)
    return _fitted(profile, _Fit(steps, estimator, profile.rates, farthest), _OF_JOBS, _STEPS_OF_JOBS)


def _fitted(profile: Profile, fit: _Fit, names: Sequence[str], factors: Sequence[float] = _STEPS) -> Profile:
    """One rate after another, and again, in ever smaller steps; three digits each."""
    losses = fit.losses(profile, range(len(fit.rows)))
    touched = {}
    for name in names:
        moved = fit.losses(_with(profile, name, 1.05), list(losses))
        touched[name] = [index for index in losses if moved[index] != losses[index]]
    for factor in factors:
        for _ in range(_ROUNDS):
            before = sum(losses.values())
            for name in names:
                profile = _improve(fit, profile, name, factor, touched[name], losses)
            if sum(losses.values()) == before:
                break
    return profile


def _improve(
    fit: _Fit, profile: Profile, name: str, factor: float, touched: Sequence[int], losses: dict[int, float]
) -> Profile:
    """``profile`` with one rate moved by ``factor`` up or down as long as that helps; ``losses`` follow."""
    for step in (factor, 1 / factor):
        while touched:
            tried = _with(profile, name, step)
            rate = getattr(tried.rates, name)
            if not LEAST_RATE <= rate <= MOST_RATE:  # rows may show that it is fast, not how fast
                break
            moved = fit.losses(tried, touched)
            if (
                not 1 / fit.farthest < rate / getattr(fit.start, name) < fit.farthest
                or sum(moved.values()) >= sum(losses[index] for index in touched) - 1e-9
            ):
                break
            profile = tried
            losses.update(moved)
    return profile
