"""What a GPU's power makes of a step: the clock goes down, and the step takes no less than its energy."""

from __future__ import annotations

from collections.abc import Mapping

# Of the most that a GPU may draw for long: other computation; waits, whose multiprocessors poll at full clock; and
# where nothing runs, the host being late.
_COMPUTING, _WAITING, _IDLE = 0.8, 0.6, 0.3


def clock_us(times: Mapping[str, float], gemm_power: float, *, products_us: float = 0.0) -> float:
    """What a step takes longer than its parts alone: no less than its energy over the power that the GPU may draw.

    So a wait that is covered gains its energy alone where that is what a step takes.

    Args:
        times: Of the step by component, in us.
        gemm_power: Of a GEMM, as a multiple of what may be drawn for long.
        products_us: How much of the optimizer's time is GEMMs.
    """
    power = dict.fromkeys(("attention", "passes", "optimizer"), _COMPUTING) | {"GEMMs": gemm_power, "host": _IDLE}
    energy_us = sum(power.get(kind, _WAITING) * us for kind, us in times.items())
    energy_us += (gemm_power - _COMPUTING) * products_us
    return max(energy_us - sum(times.values()), 0.0)
