"""Shows two jobs side by side, and keeps their times as a row of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.table import Table

from ditron_train.runtime.errors import SettingError
from ditron_train.tools.compare.steps import Difference, Job, Step, count_figures
from ditron_train.tools.results import TRAINING, TRAINING_STEP, Row, Stamp, read_results, result_path, write_results
from ditron_train.tools.tables import terminal

__all__ = ["show", "write_row"]

_SHOWN = 12


def show(
    native: Job, ours: Job, found: Sequence[Difference], own: Sequence[Difference], skip: int, again: Job | None = None
) -> bool:
    """Prints losses, times and the verdict.

    Args:
        native: What ours is compared with.
        ours: The other job.
        found: Where they differ.
        own: Where native differs from itself.
        skip: Steps that are not timed.
        again: Native behind ours, to be timed, too.

    Returns:
        Whether both have as many steps, and all is equal up to the one from which native does not repeat itself.
    """
    console = terminal()
    console.print(_table(native, ours))
    native_ms, ours_ms = (job.step_ms(skip) for job in (native, ours))
    if native_ms is not None and ours_ms is not None:
        console.print(
            f"time of a step, behind the first {skip}: natively {native_ms:.1f} ms, with ditron_train "
            f"{ours_ms:.1f} ms: "
            f"{native_ms / ours_ms:.3f}x",
            highlight=False,
        )
    else:
        console.print(f"no step behind the first {skip} was timed: train longer, or set --skip", highlight=False)
    later_ms = again.step_ms(skip) if again is not None else None
    if later_ms is not None and ours_ms is not None:
        console.print(
            f"natively once more, behind ours: {later_ms:.1f} ms: {later_ms / ours_ms:.3f}x", highlight=False
        )
    native_bytes, our_bytes = native.used_bytes, ours.used_bytes
    if native_bytes is not None and our_bytes is not None:
        console.print(
            f"memory in use on the fullest GPU: {native_bytes / 2**30:.2f} GiB, {our_bytes / 2**30:.2f} GiB",
            highlight=False,
        )
    first_own = min((difference.step for difference in own), default=None)
    counted = [difference for difference in found if first_own is None or difference.step < first_own]
    console.print(_verdict(native, ours, counted, own), highlight=False, markup=False)
    return not counted and len(native) == len(ours)


def _verdict(native: Job, ours: Job, counted: Sequence[Difference], own: Sequence[Difference]) -> str:
    if counted:
        more = f" and {len(counted) - 1} more" if len(counted) > 1 else ""
        return f"DIFFERENT: {_words(counted[0])}{more}"
    if len(native) != len(ours):
        return f"DIFFERENT: {len(native)} steps natively, {len(ours)} with ditron_train"
    if own:
        return (
            f"native does not repeat itself: {_words(own[0])}; all before that is equal. Its deterministic "
            "settings change "
            "that: NVTE_ALLOW_NONDETERMINISTIC_ALGO=0, NCCL_ALGO=Ring, CUBLAS_WORKSPACE_CONFIG=:4096:8"
        )
    return (
        f"equal: all {count_figures((native, ours))} figures of {len(native)} steps on {len(native.ranks)} "
        "ranks (losses, gradient "
        "norms, digests of the optimizer's parameters after the first and the last step)"
    )


def _words(difference: Difference) -> str:
    one, other = (_decimal(value) for value in difference.values)
    return f"{difference.name} of step {difference.step} on rank {difference.rank}: {one}, {other}"


def _decimal(text: str | None) -> str:
    """A hexadecimal float in decimal digits; a digest as it is."""
    if text is None:
        return "-"
    return f"{float.fromhex(text):.9g}" if not text.isalnum() or text in ("inf", "nan") else text


def _table(native: Job, ours: Job) -> Table:
    """Some of the steps, evenly spread, on the last rank: the one that has losses in a pipeline, too."""
    steps = list(zip(native.ranks[-1], ours.ranks[-1]))
    stride = -(-len(steps) // _SHOWN)
    kept = [pair for index, pair in enumerate(steps) if index % stride == 0 or index == len(steps) - 1]
    names = list(dict.fromkeys(name for a, _ in steps for name in a.figures if name != "parameters"))
    table = Table(title=f"{len(native.ranks)} ranks, {len(steps)} steps", title_justify="left")
    for column in (
        "step",
        *(f"{name}, {kind}" for name in names for kind in ("native", "ours")),
        "equal",
        "ms",
        "ms, ours",
    ):
        table.add_column(column, justify="right")
    for a, b in kept:
        figures = [_decimal(step.figures.get(name)) for name in names for step in (a, b)]
        table.add_row(str(a.number), *figures, "yes" if a.figures == b.figures else "NO", _ms(a), _ms(b))
    return table


def _ms(step: Step) -> str:
    return "-" if step.seconds is None else f"{step.seconds * 1e3:.1f}"


def _stamp_of(native: Job, ours: Job) -> Stamp:
    """Ours', which has the features' settings; of what both use, native's says the same."""
    try:
        stamps = [Stamp(**job.header["stamp"]) for job in (native, ours)]
    except (KeyError, TypeError):
        raise SettingError(
            "no row: the notes do not say on which machine they were made; older versions' do not"
        ) from None
    own = ("ditron_train", "commit", "date", "settings")
    said = [{name: value for name, value in asdict(stamp).items() if name not in own} for stamp in stamps]
    differing = [f"{name} {said[0][name]}, {said[1][name]}" for name in said[0] if said[0][name] != said[1][name]]
    if differing:
        raise SettingError(f"no row: the two jobs ran with {'; '.join(differing)}")
    return stamps[1]


def write_row(folder: Path, model: str, native: Job, ours: Job, skip: int, *, is_equal: bool) -> Path | None:
    """Adds the row ``training_step`` to ``training.json``; one of the same model and features is replaced, others keep
    their commit.

    Its stamp is of the machine that trained, which need not be this one.

    Returns:
        The file; None where no step was timed.

    Raises:
        SettingError: The notes do not say where they were made, or that the two jobs did not run on the same; or the
            file that is there cannot be read.
    """
    native_ms, ours_ms = (job.step_ms(skip) for job in (native, ours))
    if native_ms is None or ours_ms is None:
        return None
    stamp = _stamp_of(native, ours)
    row = Row(
        op=f"{TRAINING_STEP}{','.join(ours.header['features'])}", direction="forward_backward",
        model=model, world_size=native.header["world_size"],
        dtype=native.header["dtype"].removeprefix("torch."), shape=native.header["sizes"], native_us=native_ms * 1e3,
        ditron_us=ours_ms * 1e3, bitwise_equal=is_equal, comm_sms=0,
    )  # fmt: skip
    path = result_path(folder, stamp, TRAINING)
    kept: list[Row] = []
    if path.exists():
        try:
            old, rows = read_results(path)
        except ValueError as error:
            raise SettingError(str(error)) from None
        commits = ((r, r.commit or old.commit) for r in rows if (r.op, r.model) != (row.op, row.model))
        kept = [replace(r, commit=None if commit == stamp.commit else commit) for r, commit in commits]
    return write_results(folder, TRAINING, stamp, [*kept, row])
