"""``Answer``: what the gate says about a call, and who observes the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ditron_train.policy.cpu_bound import CpuBound
from ditron_train.runtime.logs import log_once


class Observer(Protocol):
    """Times a call of the job, or computes it once more to compare bits."""

    def run(self, x: torch.Tensor, run: Callable[[], Any], multiplied: Callable[[], torch.Tensor]) -> Any:
        """What ``run()`` returns: the call's result, or a tuple whose first part is the result.

        Args:
            x: The input of the layer.
            run: The layer.
            multiplied: What the layer multiplies by its weight.
        """


@dataclass(frozen=True, slots=True)
class Answer:
    """What was decided for a key.

    Attributes:
        context: Of the fused path; None for an op without one, too.
        reason: Why the call runs natively; None if it does not.
        cpu_bound: Looks at calls whether the job is CPU-bound, where that can change the answer.
        observer: Observes this call, if anybody does.
    """

    context: Any
    reason: str | None = None
    cpu_bound: CpuBound | None = None
    observer: Observer | None = None

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
    """What ``run()`` returns, observed if the answer says so; ``multiplied``: by default ``x``."""
    if answer is None or answer.observer is None:
        return run()
    return answer.observer.run(x, run, multiplied or (lambda: x))


def log_native(name: str, reason: str) -> None:
    """One line, the first time that `name` runs natively for `reason`."""
    log_once(f"native {name} {reason}", f"{name}: native, {reason}")
