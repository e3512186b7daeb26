"""What the steps of a job gave (``ditron_train.megatron.plugin.record_steps``), and where two jobs differ."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ditron_train.megatron.plugin.arguments import WGRAD
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.files import parse_json, read_regular

#: The digest among a step's figures.
PARAMETERS = "parameters"
_NOTED = ("used_bytes", "clock_mhz", "joules", "reserved_bytes", "symmetric_bytes")  # fields, if the entry has them


@dataclass(frozen=True)
class Step:
    """One training step on one rank; floats as hexadecimal text, seconds and bytes as numbers.

    Attributes:
        number: From 1.
        figures: Losses by name, ``grad norm``, and `PARAMETERS`, the digest, if there is one.
        seconds: From the end of the step before; None of the first, and of one that is traced.
        used_bytes: Of the GPU, by anything, at its end; None without a GPU.
        clock_mhz: Of the GPU's multiprocessors at its end; None if nothing tells.
        joules: What the GPU took, if ``seconds`` are told; likewise.
        reserved_bytes: The most that torch's allocator had reserved on the GPU until its end; None without a GPU.
        symmetric_bytes: Of symmetric memory at its end, which the driver allocates outside of ``reserved_bytes``.
        fused_calls: Calls of the fused path by feature; notes of older versions have none.
    """

    number: int
    figures: dict[str, str]
    seconds: float | None
    used_bytes: int | None
    clock_mhz: int | None = None
    joules: float | None = None
    reserved_bytes: int | None = None
    symmetric_bytes: int | None = None
    fused_calls: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        header: ``world_size``, ``features``, ``dtype``, ``sizes``; ``trace``, the step and rank that is traced, or
            None; ``stamp``, of the machine that it ran on. Notes of older versions lack the last two.
        ranks: The steps of each rank; as many on each.
        plan: What ran by which path, and why; empty if the job ended early.
    """

    header: dict[str, Any]
    ranks: list[list[Step]]
    plan: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ranks[0])

    def step_ms(self, skip: int) -> float | None:
        """Median over the steps behind the first ``skip`` of the maximum over ranks; None if there are none."""
        steps = list(zip(*self.ranks))[skip:]
        kept = [max(step.seconds or 0.0 for step in ranks) for ranks in steps if ranks[0].seconds is not None]
        return statistics.median(kept) * 1e3 if kept else None

    def clock_mhz(self, skip: int) -> float | None:
        """Mean over the steps that are timed, and the ranks; None if nothing tells."""
        clocks = [step.clock_mhz for steps in self.ranks for step in steps[skip:] if step.clock_mhz is not None]
        return statistics.mean(clocks) if clocks else None

    def step_joules(self, skip: int) -> float | None:
        """What a GPU takes for a step: median over the steps that are timed of the mean over ranks; None if nothing
        tells."""
        steps = list(zip(*self.ranks))[skip:]
        joules = [[step.joules for step in ranks if step.joules is not None] for ranks in steps]
        return statistics.median(statistics.mean(joule) for joule in joules if joule) if any(joules) else None

    def power_w(self, skip: int) -> float | None:
        """What a GPU draws in the steps that are timed: mean over them and the ranks; None if nothing tells."""
        steps = [step for steps in self.ranks for step in steps[skip:] if step.joules is not None and step.seconds]
        return (
            sum(step.joules or 0.0 for step in steps) / sum(step.seconds or 0.0 for step in steps) if steps else None
        )

    @property
    def features(self) -> tuple[str, ...]:
        """What was switched on beside ``wgrad``, which Megatron's own path may have."""
        return tuple(name for name in self.header["features"] if name != WGRAD)

    def most(self, name: str) -> int | None:
        """The largest value that any step of any rank has of this attribute; None if none has it."""
        values = (getattr(step, name) for steps in self.ranks for step in steps)
        return max((value for value in values if value is not None), default=None)


@dataclass(frozen=True)
class Runs:
    """The jobs of a comparison, in the order in which they ran: at least one of each kind."""

    native: list[Job]
    fused: list[Job]

    def times_ms(self, skip: int) -> tuple[list[float], list[float]] | None:
        """`Job.step_ms` of each job, natively and fused; None if a kind has none."""
        native, fused = ([ms for job in jobs if (ms := job.step_ms(skip)) is not None] for jobs in self)
        return (native, fused) if native and fused else None

    @property
    def fused_calls(self) -> dict[str, int]:
        """Calls of the fused path on all ranks by feature that was switched on, in the job that has the fewest."""
        noted = [[step.fused_calls for steps in job.ranks for step in steps] for job in self.fused]
        names = self.fused[0].features
        return {name: min(sum(calls.get(name, 0) for calls in of_job) for of_job in noted) for name in names}

    def __iter__(self) -> Iterator[list[Job]]:
        return iter((self.native, self.fused))


@dataclass(frozen=True)
class Difference:
    """The first figure that differs.

    Attributes:
        step: Its step.
        rank: Its rank, the lowest of those.
        name: As in ``Step.figures``.
        values: In the two jobs, hexadecimal.
    """

    step: int
    rank: int
    name: str
    values: tuple[str | None, str | None]


def _parse(path: Path) -> tuple[dict[str, Any], list[Step], list[str]]:
    # The last line of a job that was killed may be half written.
    whole = read_regular(path).decode("utf-8").split("\n")[:-1]
    if not whole:
        raise ValueError(f"{path.name} is empty")
    header, *entries = [parse_json(line) for line in whole]
    if any(name not in header for name in ("world_size", "features", "dtype", "sizes")):
        raise ValueError(f"{path.name} begins with {header}")
    steps = []
    for entry in entries:
        figures = {**entry["losses"], "grad norm": entry["grad_norm"], PARAMETERS: entry.get("digest")}
        known = {name: value for name, value in figures.items() if value is not None}
        noted = {name: entry.get(name) for name in _NOTED}
        calls = {name: int(count) for name, count in (entry.get("fused_calls") or {}).items()}
        steps.append(Step(entry["step"], known, entry["seconds"], **noted, fused_calls=calls))
    plan = entries[-1].get("plan", []) if entries else []
    if not isinstance(plan, list) or not all(isinstance(line, str) for line in plan):
        raise ValueError(f"{path.name} has a plan that is no list of lines")
    return header, steps, plan


def read_job(folder: Path) -> Job:
    """Reads the files of all ranks.

    Raises:
        SettingError: There are none, ranks are missing, or they are not such files.
    """
    paths = sorted(
        (path for path in folder.glob("rank*.jsonl") if path.stem[4:].isdigit()), key=lambda path: int(path.stem[4:])
    )
    if not paths:
        raise SettingError(f"no rank noted a step in {folder}: did the script reach Megatron-LM's training loop?")
    try:
        parsed = [_parse(path) for path in paths]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingError(f"{folder} does not hold the notes of a job: {error!r}") from None
    header = parsed[0][0]
    if len(parsed) != header["world_size"]:
        raise SettingError(f"{folder} has the notes of {len(parsed)} of {header['world_size']} ranks")
    shortest = min(len(steps) for _, steps, _ in parsed)
    if shortest == 0:
        raise SettingError(f"a rank in {folder} finished no step")
    plan = dict.fromkeys(line for _, _, lines in parsed for line in lines)
    return Job(header, [steps[:shortest] for _, steps, _ in parsed], list(plan))


def differing_values(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Name and both values of each entry that differs, in words; a dash for what is missing."""
    names = [name for name in dict.fromkeys([*one, *other]) if one.get(name) != other.get(name)]
    return "; ".join(f"{name} {one.get(name, '-')}, {other.get(name, '-')}" for name in names)


def _pairs(one: Job, other: Job) -> Iterator[tuple[int, Step, Step]]:
    for steps in zip(zip(*one.ranks), zip(*other.ranks)):
        for rank, (a, b) in enumerate(zip(*steps)):
            yield rank, a, b


def differences(one: Job, other: Job) -> list[Difference]:
    """Every figure that differs, by step and rank; a figure that one of them lacks differs, too."""
    found = []
    for rank, a, b in _pairs(one, other):
        for name in dict.fromkeys([*a.figures, *b.figures]):
            values = (a.figures.get(name), b.figures.get(name))
            if values[0] != values[1]:
                found.append(Difference(a.number, rank, name, values))
    return found


def count_figures(jobs: Sequence[Job]) -> int:
    """How many figures the jobs' common steps have, over all ranks."""
    return sum(len(a.figures) for _, a, _ in _pairs(*jobs))
