"""``Answer``: the gate's decision about a call, and ``Observer``, which watches the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ditron_train.policy.cpu_bound import CpuBound
from ditron_train.policy.job_times import StepTimes
from ditron_train.runtime.logs import log_once


class Observer(Protocol):
    """Times a call of the job, or computes it again to compare bits."""

    def run(self, x: torch.Tensor, run: Callable[[], Any], multiplied: Callable[[], torch.Tensor]) -> Any:
        """Runs and observes the call; returns what ``run()`` returns: its result, or a tuple that begins with it.

        Args:
            x: The input of the layer.
            run: Runs the layer.
            multiplied: Returns what the layer multiplies by its weight.
        """


@dataclass(frozen=True, slots=True)
class Answer:
    """What was decided for a key.

    Attributes:
        context: Context of the fused path; None if the call is native, or if the op has none.
        reason: Why the call runs natively; None if it runs fused.
        cpu_bound: Checks at calls whether the job is CPU-bound, if that can change the answer.
        observer: Observes this call, if set.
        steps: Times of both paths in the job's steps; the path of the step holds for the call.
    """

    context: Any
    reason: str | None = None
    cpu_bound: CpuBound | None = None
    observer: Observer | None = None
    steps: StepTimes | None = None

    @property
    def is_fused(self) -> bool:
        """Whether the fused path runs."""
        return self.reason is None


def observed(
    answer: Answer | None,
    x: torch.Tensor,
    run: Callable[[], Any],
    multiplied: Callable[[], torch.Tensor] | None = None,
) -> Any:
    """Returns what ``run()`` returns, and has the call observed if the answer has an observer. ``multiplied``: by
    default ``x``."""
    if answer is None or answer.observer is None:
        return run()
    return answer.observer.run(x, run, multiplied or (lambda: x))


def log_native(name: str, reason: str) -> None:
    """Logs one line the first time that ``name`` runs natively for ``reason``."""
    log_once(f"native {name} {reason}", f"{name}: native, {reason}")
