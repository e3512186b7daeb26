"""The table, the sentences and the files of ``verify``."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.table import Table

from ditron_train.tools.results import Row, Stamp, write_beside
from ditron_train.tools.session import BenchSession
from ditron_train.tools.stamp import collect_stamp
from ditron_train.tools.tables import terminal
from ditron_train.tools.verify.outcome import RESULTS, Outcome

_MOST_NAMED = 20  # random shapes that differ


class Report:
    """What ``verify`` found so far: named cases, random ones, rows of the other subpackages' benchmarks.

    Named cases and rows are in ``verify.json`` from the moment they are added, so that a run that is cut short leaves
    what it has compared.

    Attributes:
        outcomes: Of the named cases.
        rows: Of the other subpackages.
        random: Of random shapes.
        compared: How many shapes were compared, by kind of layer and by subpackage; 0 if all of them ran natively.
    """

    def __init__(self, session: BenchSession, arguments: argparse.Namespace) -> None:
        self._session, self._arguments = session, arguments
        self.outcomes: list[Outcome] = []
        self.rows: list[Row] = []
        self._row_comparisons = 0
        self.random: list[Outcome] = []
        self.compared: Counter[str] = Counter()

    @property
    def is_equal(self) -> bool:
        """Whether no bit differed anywhere."""
        outcomes = (*self.outcomes, *self.random)
        return all(outcome.equal for outcome in outcomes) and all(row.bitwise_equal for row in self.rows)

    def add_outcome(self, outcome: Outcome) -> None:
        """One more named case."""
        self.outcomes.append(outcome)
        self.compared[f"tp {outcome.case.kind}"] += outcome.is_fused
        self._write_rows()

    def add_row(self, row: Row, num_comparisons: int) -> None:
        """One more row of a subpackage's benchmark, and how often its op was compared."""
        self.rows.append(row)
        self._row_comparisons += num_comparisons
        self._write_rows()

    def finish(self) -> None:
        """Rank 0 shows everything."""
        if self._session.rank != 0:
            return
        if self.outcomes or self.rows:
            _show(self._session, self.outcomes, self.rows, self._arguments.repeat)
        for line in self._sentences():
            _print_line(line)
        if self.random:
            _print_line(f"random: {_summary(self.random, self._arguments.repeat)}")
        for outcome in [one for one in self.random if not one.equal][:_MOST_NAMED]:
            _print_line(f"DIFFERENT: {outcome.case} {outcome.num_different}")
        path = self._write_rows()
        if path is not None:
            _print_line(f"written: {path}")

    def _sentences(self) -> list[str]:
        named = [_summary(self.outcomes, self._arguments.repeat)] if self.outcomes else []
        return named + ([_summary_of_rows(self.rows, self._row_comparisons)] if self.rows else [])

    def _write_rows(self) -> Path | None:
        folder: Path | None = self._arguments.output
        rows = [*(_row(self._session, outcome) for outcome in self.outcomes if outcome.timings), *self.rows]
        if self._session.rank != 0 or folder is None or not rows:
            return None
        settings = {**self._stamp.settings, "summary": ". ".join(self._sentences())}
        return write_beside(folder, "verify", replace(self._stamp, settings=settings), rows)

    @cached_property
    def _stamp(self) -> Stamp:
        names = (
            "packages",
            "fp8",
            "repeat",
            "straggler_ms",
            "poison",
            "random",
            "largest",
            "seed",
            "repetitions",
            "warmup",
        )
        settings = {name: getattr(self._arguments, name) for name in names}
        return collect_stamp(self._session.device, self._session.world_size, **settings)


def _print_line(text: str) -> None:
    terminal().print(text, highlight=False)


def _show(session: BenchSession, outcomes: Sequence[Outcome], rows: Sequence[Row], repeat: int) -> None:
    """One line a case and one for each of the other subpackages' ``rows``, on rank 0."""
    title = _count(session.world_size, "rank") + (
        f", {_count(repeat, 'comparison')} of each layer" if outcomes else ""
    )
    table = Table(title=title, title_justify="left")
    for name in ("layer", "op", "shape", "dtype", *RESULTS, "native ms", "fused ms", "verdict"):
        table.add_column(name)
    for outcome in outcomes:
        case = outcome.case
        bits = [_bits(outcome, result) for result in RESULTS]
        sizes, dtype = f"{case.m}x{case.n}x{case.k}", str(case.dtype).removeprefix("torch.")
        style = None if outcome.equal else "bold red"
        times = _times(*outcome.times_us)
        table.add_row(
            case.name,
            case.kind + ("" if case.sequence_parallel else " ar"),
            sizes,
            dtype,
            *bits,
            *times,
            outcome.verdict,
            style=style,
        )
    for row in rows:
        bits = [
            ("equal" if row.bitwise_equal else "DIFFERENT") if result in _results_of(row) else "" for result in RESULTS
        ]
        slower = "fused, slower" if row.ditron_us > row.native_us else "fused"
        style = None if row.bitwise_equal else "bold red"
        times = _times(row.native_us, row.ditron_us)
        sizes = "x".join(map(str, row.shape.values()))
        verdict = slower if row.bitwise_equal else "DIFFERENT"
        table.add_row(row.model, row.op, sizes, row.dtype, *bits, *times, verdict, style=style)
    terminal().print(table)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _times(*times_us: float) -> list[str]:
    return [f"{time_us / 1e3:.3f}" for time_us in times_us] or ["", ""]


def _results_of(row: Row) -> Sequence[str]:
    """Which of ``RESULTS`` a row compares; an op of one gradient alone says which by its name."""
    if row.direction == "backward":
        return [result for result in RESULTS[1:] if row.op.endswith(result)] or RESULTS[1:]
    return RESULTS if row.direction == "forward_backward" else RESULTS[:1]


def _bits(outcome: Outcome, result: str) -> str:
    if not outcome.is_fused:
        return "native"
    count = outcome.num_different[result]
    return "equal" if count == 0 else f"{count} DIFFERENT"


def _summary_of_rows(rows: Sequence[Row], num_comparisons: int) -> str:
    """One sentence over the other subpackages' rows."""
    different = sum(not row.bitwise_equal for row in rows)
    text = f"{_count(len(rows), 'row')} of other ops ({_count(num_comparisons, 'comparison')})"
    return f"{text}; {f'{different} different' if different else 'every bit is equal'}"


def _summary(outcomes: Sequence[Outcome], repeat: int) -> str:
    """One sentence over all cases."""
    fused = [outcome for outcome in outcomes if outcome.is_fused]
    different = [outcome for outcome in outcomes if not outcome.equal]
    compared = len(fused) * repeat
    text = (
        f"{_count(len(outcomes), 'shape')}: {len(fused)} fused ({_count(compared, 'comparison')}), "
        f"{len(outcomes) - len(fused)} natively"
    )
    verdict = "every bit is equal" if fused else "nothing was compared"
    return f"{text}; {f'{len(different)} different' if different else verdict}"


def _row(session: BenchSession, outcome: Outcome) -> Row:
    case = outcome.case
    op = f"{case.kind}_linear{'' if case.sequence_parallel else '_ar'}"
    shape = {"m": case.m, "n": case.n, "k": case.k}
    options: dict[str, Any] = dict(dtype=case.dtype, spread=None)
    return session.row(op, "forward_backward", case.name, shape, outcome.timings, outcome.equal, **options)
