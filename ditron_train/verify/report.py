"""The table, the sentence and the files of ``verify``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from ditron_train.bench.rows import Row, Stamp, write_results
from ditron_train.bench.session import BenchSession
from ditron_train.bench.stamp import collect_stamp
from ditron_train.bench.tables import terminal
from ditron_train.verify.outcome import RESULTS, Outcome
from ditron_train.verify.soak import Soak, write_soak

__all__ = ["print_line", "show_outcomes", "summary", "summary_of_rows", "write_outcomes"]


def print_line(text: str) -> None:
    """One line on the terminal."""
    terminal().print(text, highlight=False)


def show_outcomes(session: BenchSession, outcomes: Sequence[Outcome], rows: Sequence[Row], repeat: int) -> None:
    """One line a case and one for each of the other rooms' ``rows``, on rank 0."""
    if session.rank != 0 or not (outcomes or rows):
        return
    title = f"{session.world_size} ranks" + (f", {repeat} comparisons of each layer" if outcomes else "")
    table = Table(title=title, title_justify="left")
    for name in ("layer", "op", "shape", "dtype", *RESULTS, "native ms", "ditron ms", "verdict"):
        table.add_column(name)
    for outcome in outcomes:
        case = outcome.case
        bits = [_bits(outcome, result) for result in RESULTS]
        sizes, dtype = f"{case.m}x{case.n}x{case.k}", str(case.dtype).removeprefix("torch.")
        style = None if outcome.equal else "bold red"
        times = _times(outcome.native_us, outcome.ditron_us)
        table.add_row(case.name, case.kind, sizes, dtype, *bits, *times, outcome.verdict, style=style)
    for row in rows:
        bits = [("equal" if row.bitwise_equal else "DIFFERENT") if result in _results_of(row) else "" for result in RESULTS]
        slower = "ours, slower" if row.ditron_us > row.native_us else "ours"
        style = None if row.bitwise_equal else "bold red"
        times = _times(row.native_us, row.ditron_us)
        sizes = "x".join(map(str, row.shape.values()))
        verdict = slower if row.bitwise_equal else "DIFFERENT"
        table.add_row(row.model, row.op, sizes, row.dtype, *bits, *times, verdict, style=style)
    terminal().print(table)


def _times(*times_us: float | None) -> list[str]:
    return ["" if time_us is None else f"{time_us / 1e3:.3f}" for time_us in times_us]


def _results_of(row: Row) -> Sequence[str]:
    """Which of ``RESULTS`` a row compares; an op of one gradient alone says which by its name."""
    if row.direction == "backward":
        return [result for result in RESULTS[1:] if row.op.endswith(result)] or RESULTS[1:]
    return RESULTS if row.direction == "forward_backward" else RESULTS[:1]


def _bits(outcome: Outcome, result: str) -> str:
    if not outcome.is_ours:
        return "native"
    count = outcome.num_different[result]
    return "equal" if count == 0 else f"{count} DIFFERENT"


def summary_of_rows(rows: Sequence[Row]) -> str:
    """One sentence over the other rooms' rows."""
    different = sum(not row.bitwise_equal for row in rows)
    return f"{len(rows)} comparisons of other ops; {f'{different} different' if different else 'every bit is equal'}"


def summary(outcomes: Sequence[Outcome], repeat: int) -> str:
    """One sentence over all cases."""
    ours = [outcome for outcome in outcomes if outcome.is_ours]
    different = [outcome for outcome in outcomes if not outcome.equal]
    compared = len(ours) * repeat
    text = f"{len(outcomes)} shapes: {len(ours)} run ours ({compared} comparisons), {len(outcomes) - len(ours)} natively"
    return f"{text}; {len(different)} different" if different else f"{text}; every bit is equal"


def _stamp(session: BenchSession, arguments: argparse.Namespace, **more: object) -> Stamp:
    names = ("repeat", "straggler_ms", "poison", "random", "largest", "ops", "seed")
    return collect_stamp(session.device, session.world_size, **more, **{name: getattr(arguments, name) for name in names})


def write_outcomes(
    session: BenchSession,
    outcomes: Sequence[Outcome],
    others: Sequence[Row],
    soaks: Sequence[Soak],
    arguments: argparse.Namespace,
) -> None:
    """Where ``--output`` names a folder: named cases and the other rooms' rows as rows of ``verify.json``, long runs as
    ``soak/<what>.json``."""
    folder: Path | None = arguments.output
    if session.rank != 0 or folder is None:
        return
    rows = [*(_row(session, outcome) for outcome in outcomes if outcome.native_us), *others]
    if rows:
        stamp = _stamp(session, arguments, summary=summary(outcomes, arguments.repeat))
        print_line(f"written: {write_results(folder, 'verify', stamp, rows)}")
    for soak in soaks:
        print_line(f"written: {write_soak(folder, _stamp(session, arguments), soak)}")


def _row(session: BenchSession, outcome: Outcome) -> Row:
    return Row(
        op=f"{outcome.case.kind}_linear",
        direction="forward_backward",
        model=outcome.case.name,
        world_size=session.world_size,
        dtype=str(outcome.case.dtype).removeprefix("torch."),
        shape={"m": outcome.case.m, "n": outcome.case.n, "k": outcome.case.k},
        native_us=outcome.native_us,
        ditron_us=outcome.ditron_us,
        bitwise_equal=outcome.equal,
        comm_sms=0,
    )
