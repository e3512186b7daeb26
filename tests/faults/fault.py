"""What can go wrong with one rank, and how it is drawn from a seed."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.faults.disks import fill_disks, make_disks_read_only

#: By kind: how often it is drawn.
KINDS: Mapping[str, int] = {
    "SIGKILL": 4, "SIGTERM": 2, "SIGINT": 2, "SIGSEGV": 2, "SIGSTOP": 3, "late": 3, "brief delay": 1, "error": 3,
    "exit": 2, "silent exit": 1, "skipped call": 2, "no memory": 2, "memory error": 1, "full disk": 1,
    "read-only disk": 1,
}  # fmt: skip
#: Those that a job may survive with right results: what was to be hit was not needed, or is caught on purpose.
HARMLESS = ("brief delay", "error", "exit", "no memory", "memory error", "full disk", "read-only disk")
_PHASES = ("start", "step", "step", "step")
_ON_DISKS = ("full disk", "read-only disk")
_LATE = 3.0  # deadlines
_BRIEF = 0.3


class SimulatedError(RuntimeError):
    """What a rank raises that goes wrong by itself."""


@dataclass(frozen=True)
class Fault:
    """One job in which one thing goes wrong.

    Attributes:
        seed: What all of this was drawn from.
        job: Name of the job (``faults.jobs``).
        phase: ``start`` (contexts are made, the first step) or ``step`` (a later one).
        kind: One of ``KINDS``, or ``none``.
        world_size, rank: Ranks of the job; the one at fault.
        at: From 0 to 1: after which part of the phase's function calls.
        timeout_s: ``DITRON_TIMEOUT_S``.
    """

    seed: int
    job: str
    phase: str
    kind: str
    world_size: int
    rank: int
    at: float
    timeout_s: float

    @property
    def may_be_survived(self) -> bool:
        """Whether the job may go on, with right results."""
        waits_for_longer = self.phase == "start" or self.job in ("probe", "quickstart", "muon")
        return self.kind in ("none", *HARMLESS) or (self.kind == "late" and waits_for_longer)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def draw(
    seed: int,
    jobs: Mapping[str, Sequence[int]],
    timeout_s: float,
    patience: Mapping[str, float],
    kinds: Sequence[str] = tuple(KINDS),
) -> Fault:
    """The fault of a seed.

    Args:
        jobs: By name, the numbers of ranks that it runs on.
        timeout_s: Deadline of a job that is not in ``patience``, which says how many of it others have.
        kinds: Those that are possible here.
    """
    chance = random.Random(seed)
    job = chance.choice(list(jobs))
    world_size = chance.choice(jobs[job])
    kinds = [kind for kind in kinds if kind != "skipped call" or job != "quickstart"]
    kind = chance.choices(kinds, [KINDS[one] for one in kinds])[0]
    phase = "start" if kind in _ON_DISKS else "step" if kind == "skipped call" else chance.choice(_PHASES)
    rank, at = chance.randrange(world_size), chance.random()
    return Fault(seed, job, phase, kind, world_size, rank, at, timeout_s * patience.get(job, 1.0))


def strike(fault: Fault) -> None:
    """Does to this process what the fault says."""
    if fault.kind.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, fault.kind))
        time.sleep(0.05)  # until it has come
    elif fault.kind in ("late", "brief delay"):
        time.sleep(fault.timeout_s * (_LATE if fault.kind == "late" else _BRIEF))
    elif fault.kind == "error":
        raise SimulatedError("an injected error of this rank")
    elif fault.kind == "exit":
        sys.exit(3)
    elif fault.kind == "silent exit":
        os._exit(0)
    elif fault.kind == "memory error":
        raise MemoryError("injected: no memory on this rank")
    elif fault.kind == "no memory":
        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped, mapped))
    elif fault.kind == "full disk":
        fill_disks()
    elif fault.kind == "read-only disk":
        make_disks_read_only()
