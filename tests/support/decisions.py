"""The policy's decisions: those of two gates exchanged, and those that simulated nodes make."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from ditron_train.policy import Gate, gate, probe


def swap_decisions(other: Gate) -> None:
    """Exchanges the decisions of the process's gate and another one: to compare policies in one process."""
    gate._answers, other._answers = other._answers, gate._answers
    gate._counts, other._counts = other._counts, gate._counts
    gate.lengths.families, other.lengths.families = other.lengths.families, gate.lengths.families


@contextlib.contextmanager
def comparing_on_cpu(repeats: int = probe._CPU_REPEATS) -> Iterator[None]:
    """Also compares and times what runs on the CPU, in the interpreter, by the host's clock, ``repeats`` times in each
    turn."""
    with mock.patch.multiple(probe, _on_cpu=True, _CPU_REPEATS=repeats):
        yield
