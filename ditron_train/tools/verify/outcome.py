"""What a comparison is asked for and what it says."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from ditron_train.tools.session import BenchSession
from ditron_train.tools.timing import Timing
from ditron_train.tools.verify.cases import Case

RESULTS = ("forward", "dgrad", "wgrad")


@dataclass(frozen=True)
class Stress:
    """What makes a race show.

    Attributes:
        repeat: Comparisons of each case, of a linear layer each on new data.
        straggler_ms: A random rank comes up to this late to every op.
        poison: The linear layers' symmetric buffers are filled with NaN before every op.
    """

    repeat: int = 1
    straggler_ms: float = 0.0
    poison: bool = False

    def delay(self, session: BenchSession, late: np.random.Generator) -> None:
        """Makes one rank late to what comes next; ``late`` is in the same state on every rank."""
        if not self.straggler_ms:
            return
        rank, delay_ms = int(late.integers(session.world_size)), late.uniform(0.0, self.straggler_ms)
        if rank != session.rank:
            return
        if session.device.type == "cuda":
            torch.cuda._sleep(int(delay_ms * 1.8e6))  # cycles at about 1.8 GHz
        else:
            time.sleep(delay_ms / 1e3)


@dataclass(frozen=True)
class Outcome:
    """What became of one case; the same on every rank.

    Attributes:
        case: Which.
        is_fused: Whether a training job would run our op at this shape; else it runs natively, so nothing can differ.
        num_different: By result: in how many comparisons a bit differed on any rank.
        timings: Forward and backward, ``native`` and ``fused``; empty if they were not timed.
    """

    case: Case
    is_fused: bool
    num_different: dict[str, int]
    timings: Mapping[str, Timing] = field(default_factory=dict)

    @property
    def times_us(self) -> list[float]:
        """Of the native and of the fused path, if they were timed."""
        return [self.timings[name].median_us for name in ("native", "fused")] if self.timings else []

    @property
    def equal(self) -> bool:
        """Whether no bit of any result differed."""
        return not any(self.num_different.values())

    @property
    def verdict(self) -> str:
        """One word or two for the table."""
        if not self.equal:
            return "DIFFERENT"
        if not self.is_fused:
            return "native"
        times_us = self.times_us
        return "fused, slower" if times_us and times_us[1] > times_us[0] else "fused"
