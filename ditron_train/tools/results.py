"""What a benchmark writes: rows of measurements under a stamp that says where they were taken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from ditron_train.runtime.files import parse_json, read_regular, replace_file

RESULTS = Path("benchmarks") / "results"
#: The file of ``compare``, and what the op of its rows begins with; the features stand behind it.
TRAINING = "training"
TRAINING_STEP = "training_step "
#: The file of Megatron-LM's own tests, whose rows are no measurements.
MEGATRON_TESTS = "megatron_tests"
#: What ``dtype`` of an FP8 row begins with; the recipe stands behind it.
FP8_PREFIX = "fp8_"
Pass = Literal["forward", "backward", "forward_backward"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One op at one shape. Every ``_us`` is the median over repetitions of the maximum over ranks.

    Attributes:
        op: What was measured, such as ``ag_gemm`` or ``transformer_layer``.
        direction: Forward, backward or both; ``pass`` in the file.
        model: Which model's shape it is.
        world_size: Ranks of the group.
        dtype: Of the activations, such as ``bfloat16``, or ``fp8_`` and the recipe.
        shape: Sizes by name (``m``, ``n``, ``k``, or the names of ``workloads.json``); global, before division over
            ranks.
        native_us: The path that Megatron runs.
        ditron_us: The fused path.
        bitwise_equal: Whether every output of this package has native's bits, on every rank.
        comm_sms: Multiprocessors that the fused path takes for communication alone.
        gemm_us: The computation alone.
        comm_us: The collective alone.
        limit_us: What no overlap can beat: the larger of ``gemm_us`` and the bytes on the wire at full link speed.
        fused_sends: How often one call of the fused path sends something, on rank 0.
        peer: Name of the best other implementation that runs here.
        peer_us: Its time.
        wire_gbps: Bytes that cross a link, per second of the fused path (10^9).
        logical_gbps: Bytes in the convention of the field's tables, if it differs from ``wire_gbps``.
        tflops: Operations of the whole algorithm (products that the fused path computes by half count whole), per
            second of the fused path (10^12).
        spread: Largest relative difference between the two measurements of one of the columns.
        commit: Of the working tree, if it is not the stamp's.
        stamp: What else of its own stamp is not the file's, by the names of `Stamp`; of ``settings`` those alone that
            differ (None: not set). None also of an older file's rows of another commit, which do not say.
        command: What was trained, as ``compare`` was told.
        plan: Which op ran by which path, and why, as the job logged it.
        versions: Of what it ran with, by the names of `Stamp`.
        trace: What the device did in one step, in words: milliseconds natively and fused (None: not told).
        jobs_ms: The time of a step in each job, ``native`` and ``ditron``.
        clocks_mhz: The clock of the GPUs' multiprocessors, likewise.
        joules: What a GPU takes for a step, likewise.
        native_repeats: False if the fused ones differ, but no earlier than two jobs natively, so that bits say
            nothing; None in all other cases.
        fused_calls: Calls of the fused path by feature, of the job that has the fewest.
        memory_gib: The most on any rank, in GiB: what torch has reserved (``native``, ``ditron``), what is in use of
            the GPU (``native_used``, ``ditron_used``), and symmetric memory (``native_symmetric``,
            ``ditron_symmetric``), which is in use, but not reserved. ``excess`` above 0: by so much the fused job
            breaks the rule of `ditron_train.tools.compare.memory`.
        fused_share: Of the calls.
        distinct_lengths: Numbers of tokens at which bits were proven.
        lengths: Of ``python -m tests.lengths``: ``differing_lengths`` that are native, ``first_speedup`` while
            everything is decided, ``fixed_gain`` at a fixed length and ``gain_share`` of it, ``proof_us`` of a new
            length, ``host_ratio`` of a new length to a known one, ``excess_gib`` of GPU memory in
            addition to ``symmetric_gib``.
        dispatcher: Megatron's token dispatcher of a MoE layer, unless alltoall; ``flex by torch`` if DeepEP is missing
            and torch runs the native path in its order.
    """

    op: str
    direction: Pass
    model: str
    world_size: int
    dtype: str
    shape: dict[str, int]
    native_us: float
    ditron_us: float
    bitwise_equal: bool
    comm_sms: int
    gemm_us: float | None = None
    comm_us: float | None = None
    limit_us: float | None = None
    fused_sends: int | None = None
    peer: str | None = None
    peer_us: float | None = None
    wire_gbps: float | None = None
    logical_gbps: float | None = None
    tflops: float | None = None
    spread: float | None = None
    commit: str | None = None
    stamp: dict[str, Any] | None = None
    command: str | None = None
    plan: list[str] | None = None
    versions: dict[str, str | None] | None = None
    trace: dict[str, list[float | None]] | None = None
    jobs_ms: dict[str, list[float]] | None = None
    clocks_mhz: dict[str, float] | None = None
    joules: dict[str, float] | None = None
    native_repeats: bool | None = None
    fused_calls: dict[str, int] | None = None
    memory_gib: dict[str, float] | None = None
    fused_share: float | None = None
    distinct_lengths: int | None = None
    lengths: dict[str, float] | None = None
    dispatcher: str | None = None

    @property
    def tells_all(self) -> bool:
        """Whether it says how the measurement can be repeated and what happened: only such rows stand in README."""
        return bool(self.command and self.plan and self.versions and self.trace)

    @property
    def bits_words(self) -> str:
        """``equal``, or what else bits say."""
        if self.native_repeats is False:
            return "Megatron's own differ"
        return "equal" if self.bitwise_equal else "**DIFFER**"

    @property
    def fp8(self) -> str | None:
        """The recipe of an FP8 row."""
        return self.dtype.removeprefix(FP8_PREFIX) if self.dtype.startswith(FP8_PREFIX) else None

    @property
    def title(self) -> str:
        """What rows that belong together have in common beside the pass: the op, a dispatcher, the recipe of an FP8
        row."""
        op = self.op if self.dispatcher is None else f"{self.op} {self.dispatcher}"
        return op if self.fp8 is None else f"{op} {self.dtype}"

    @property
    def key(self) -> tuple[object, ...]:
        """What was measured: a new row replaces those that have the same."""
        return self.title, self.direction, self.model, self.dtype, self.world_size, tuple(sorted(self.shape.items()))

    @property
    def speedup(self) -> float:
        """Native time over the fused one's."""
        return self.native_us / self.ditron_us

    @property
    def fraction_of_limit(self) -> float | None:
        """How much of the possible speed is reached, 1 being all of it."""
        return None if self.limit_us is None else self.limit_us / self.ditron_us

    @property
    def peer_speedup(self) -> float | None:
        """The peer's time over the fused one's; above 1 means that the fused path is faster."""
        return None if self.peer_us is None else self.peer_us / self.ditron_us

    def to_json(self) -> dict[str, Any]:
        """Returns the flat form of the file: ``pass``, the shape's fields, derived ratios, nothing that is unknown."""
        values: dict[str, Any] = {}
        for name, value in asdict(self).items():
            if name == "shape":
                values.update(value)
            else:
                values["pass" if name == "direction" else name] = value
            if name == "ditron_us":
                values["speedup"] = self.speedup
            elif name == "limit_us":
                values["fraction_of_limit"] = self.fraction_of_limit
            elif name == "peer_us":
                values["peer_speedup"] = self.peer_speedup
        return {name: _rounded(name, value) for name, value in values.items() if value is not None}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Row:
        """Inverse of ``to_json``; what is no field is part of the shape."""
        known = {f.name for f in fields(cls)} - {"shape", "direction"}
        derived = {"speedup", "fraction_of_limit", "peer_speedup", "pass"}
        shape = {name: value for name, value in values.items() if name not in known | derived}
        kept = {name: value for name, value in values.items() if name in known}
        return cls(direction=values["pass"], shape=shape, **kept)


def _rounded(name: str, value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return round(value, 2) if name.endswith(("_us", "_gbps")) else round(value, 4)


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """Where and with what a file of results was measured; None for what is not installed.

    Attributes:
        device: Name of the GPU, or ``CPU``.
        count: Number of ranks, one for each GPU.
        commit: Of the working tree, and ``+`` if files differed from it.
        settings: Environment variables and options that matter to speed or bits.
    """

    device: str
    count: int
    driver: str | None
    torch: str
    triton: str
    nccl: str | None
    nvshmem: str | None
    megatron_core: str | None
    transformer_engine: str | None
    ditron_train: str
    commit: str | None
    date: str
    settings: dict[str, str] = field(default_factory=dict)


def result_path(folder: Path, stamp: Stamp, bench: str) -> Path:
    """Returns ``<folder>/<device>x<count>/<bench>.json`` (``NVIDIA H200`` on 8 ranks: ``H200x8``)."""
    device = re.sub(r"[^A-Za-z0-9]+", "-", stamp.device.replace("NVIDIA", "")).strip("-")
    return folder / f"{device}x{stamp.count}" / f"{bench}.json"


def measurement_files(root: Path) -> list[Path]:
    """The committed files of measurements below ``root``."""
    return sorted(path for path in (root / RESULTS).glob("*/*.json") if path.stem != MEGATRON_TESTS)


def write_results(folder: Path, bench: str, stamp: Stamp, rows: Iterable[Row]) -> Path:
    """Writes one benchmark's file and returns its path; what was there is replaced.

    Raises:
        OSError: The folder cannot be made or written.
    """
    path = result_path(folder, stamp, bench)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n  ".join(json.dumps(row.to_json()) for row in rows)
    text = f'{{"stamp": {json.dumps(asdict(stamp), indent=1)},\n "rows": [\n  {lines}\n]}}\n'
    replace_file(path, text)
    return path


def read_results(path: Path) -> tuple[Stamp, list[Row]]:
    """Reads what ``write_results`` wrote.

    Raises:
        ValueError: The file is not one of this format; names the file and what is wrong.
    """
    try:
        values = parse_json(read_regular(path))
        return Stamp(**values["stamp"]), [Row.from_json(row) for row in values["rows"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no benchmark results: {error!r}") from error


def kept_rows(path: Path, stamp: Stamp, is_replaced: Callable[[Row], bool]) -> list[Row]:
    """The rows of a file that stay in it beside new ones of ``stamp``: each says where its own stamp is another.

    Raises:
        ValueError: As ``read_results``.
    """
    if not path.exists():
        return []
    old, rows = read_results(path)
    return [_under(stamp, old, row) for row in rows if not is_replaced(row)]


_CONDITIONS = (
    "driver", "torch", "triton", "nccl", "nvshmem", "megatron_core", "transformer_engine", "ditron_train", "date",
)  # fmt: skip


def _under(stamp: Stamp, old: Stamp, row: Row) -> Row:
    """A row of a file that was stamped ``old`` as it stands under ``stamp``."""
    own = row.stamp or {}
    if row.commit is not None and row.stamp is None:  # of an older file, which does not say under what it was measured
        return row
    commit = row.commit or (None if old.commit == stamp.commit else old.commit or "unknown")
    commit = None if commit == stamp.commit else commit
    announced = {name: own.get(name, getattr(old, name)) for name in _CONDITIONS if name not in (row.versions or {})}
    differing = {name: value for name, value in announced.items() if value != getattr(stamp, name)}
    settings = {**old.settings, **own.get("settings", {})}
    names = sorted({*settings, *stamp.settings} - {"summary"})  # which tells of one run's rows
    changed = {name: settings.get(name) for name in names if settings.get(name) != stamp.settings.get(name)}
    differing |= {"settings": changed} if changed else {}
    return replace(row, commit=commit, stamp=differing if differing or commit else None)


def write_beside(folder: Path, bench: str, stamp: Stamp, rows: Iterable[Row]) -> Path:
    """As ``write_results``, but what was not measured again stays in the file, unless it cannot be read. Rows in FP8
    stand behind all others.

    Raises:
        OSError: The folder cannot be made or written.
    """
    rows = list(rows)
    measured = {row.key for row in rows}
    try:
        kept = kept_rows(result_path(folder, stamp, bench), stamp, lambda old: old.key in measured)
    except ValueError:
        kept = []
    return write_results(folder, bench, stamp, sorted([*kept, *rows], key=lambda row: row.fp8 is not None))
