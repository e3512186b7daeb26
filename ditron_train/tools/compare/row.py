"""Keeps what ``compare`` measured as a row of results: times, and all that is needed to measure them again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path, PurePath
from statistics import mean

from ditron_train.runtime.errors import SettingError
from ditron_train.tools.compare.memory import memory_gib
from ditron_train.tools.compare.side_by_side import means_of, spread_of
from ditron_train.tools.compare.steps import Job, Runs, differing_values
from ditron_train.tools.results import TRAINING, TRAINING_STEP, Row, Stamp, kept_rows, result_path, write_results

_VERSIONS = (
    "driver",
    "torch",
    "triton",
    "nccl",
    "nvshmem",
    "megatron_core",
    "transformer_engine",
    "ditron_train",
    "commit",
)


def _stamp_of(native: Job, fused: Job) -> Stamp:
    """The fused path', which has the features' settings; of what both use, native's says the same."""
    try:
        stamps = [Stamp(**job.header["stamp"]) for job in (native, fused)]
    except (KeyError, TypeError):
        raise SettingError(
            "no row: the notes do not say on which machine they were made; older versions' do not"
        ) from None
    own = ("ditron_train", "commit", "date", "settings")
    common = ({name: value for name, value in asdict(stamp).items() if name not in own} for stamp in stamps)
    if differing := differing_values(*common):
        raise SettingError(f"no row: the two jobs ran with {differing}")
    return stamps[1]


def _without_places(words: Sequence[str]) -> str:
    """A command without the folders of this machine: of every absolute path its last part."""
    shown = []
    for word in words:
        option, equals, value = word.rpartition("=")
        shown.append(option + equals + (PurePath(value).name if PurePath(value).is_absolute() else value))
    return shlex.join(shown)


def write_row(
    folder: Path,
    model: str,
    runs: Runs,
    skip: int,
    command: Sequence[str] | None = None,
    trace: dict[str, list[float | None]] | None = None,
    *,
    is_equal: bool,
    native_repeats: bool | None = None,
) -> Path | None:
    """Adds the row ``training_step`` to ``training.json``; one of the same model, features and recipe is replaced,
    others keep their stamp.

    Its stamp is of the machine that trained, which need not be this one. What the file's stamp says of a newer row's
    libraries does not hold for older ones, so each row has its own.

    Args:
        command: That was trained, without ``compare``'s own words.
        trace: See `trace_table`.

    Returns:
        The file; None if no step was timed.

    Raises:
        SettingError: The notes do not say where they were made, or that the two jobs did not run on the same; or the
            file that is there cannot be read.
    """
    times = runs.times_ms(skip)
    if times is None:
        return None
    native, fused = runs.native[0], runs.fused[0]
    stamp, clocks = _stamp_of(native, fused), means_of(runs, lambda job: job.clock_mhz(skip))
    joules = means_of(runs, lambda job: job.step_joules(skip))
    row = Row(
        op=f"{TRAINING_STEP}{','.join(fused.features)}", direction="forward_backward",
        model=model, world_size=native.header["world_size"],
        dtype=native.header["dtype"].removeprefix("torch."), shape=native.header["sizes"],
        native_us=mean(times[0]) * 1e3, ditron_us=mean(times[1]) * 1e3, bitwise_equal=is_equal, comm_sms=0,
        spread=max(map(spread_of, times)) if max(map(len, times)) > 1 else None,
        command=None if command is None else _without_places(command), plan=fused.plan or None,
        versions={name: getattr(stamp, name) for name in _VERSIONS}, trace=trace,
        jobs_ms={kind: [round(ms, 2) for ms in jobs] for kind, jobs in zip(("native", "ditron"), times)},
        clocks_mhz=None if clocks is None else dict(zip(("native", "ditron"), (round(mhz, 1) for mhz in clocks))),
        joules=None if joules is None else dict(zip(("native", "ditron"), (round(joule, 1) for joule in joules))),
        native_repeats=native_repeats, fused_calls=runs.fused_calls, memory_gib=memory_gib(runs),
    )  # fmt: skip
    path = result_path(folder, stamp, TRAINING)
    try:
        kept = kept_rows(path, stamp, lambda old: (old.title, old.model) == (row.title, row.model))
    except ValueError as error:
        raise SettingError(str(error)) from None
    return write_results(folder, TRAINING, stamp, [*kept, row])
