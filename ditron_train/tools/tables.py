"""Rows as a table for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from ditron_train.tools.results import Row, Stamp

_PASS_NAMES = {"forward": "forward", "backward": "backward", "forward_backward": "forward + backward"}


def _ms(time_us: float | None) -> str:
    return "" if time_us is None else f"{time_us / 1e3:.3f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def _sizes(row: Row) -> str:
    return "x".join(str(size) for size in row.shape.values())


_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("op", lambda row: row.op),
    ("pass", lambda row: _PASS_NAMES[row.direction]),
    ("model", lambda row: row.model),
    ("shape", _sizes),
    ("FP8", lambda row: row.fp8 or ""),
    ("native ms", lambda row: _ms(row.native_us)),
    ("fused ms", lambda row: _ms(row.ditron_us)),
    ("speedup", lambda row: _ratio(row.speedup)),
    ("bits", lambda row: "equal" if row.bitwise_equal else "DIFFER"),
    ("computation ms", lambda row: _ms(row.gemm_us)),
    ("communication ms", lambda row: _ms(row.comm_us)),
    ("of the limit", lambda row: _percent(row.fraction_of_limit)),
    ("peer ms", lambda row: _ms(row.peer_us)),
    ("against peer", lambda row: _ratio(row.peer_speedup)),
    ("GB/s", lambda row: "" if row.wire_gbps is None else f"{row.wire_gbps:.0f}"),
    ("TFLOP/s", lambda row: "" if row.tflops is None else f"{row.tflops:.0f}"),
    ("SMs", lambda row: str(row.comm_sms)),
    ("spread", lambda row: _percent(row.spread)),
)


def cells_of(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the columns in which any row has something."""
    columns = [(name, [cell(row) for row in rows]) for name, cell in _COLUMNS]
    columns = [(name, cells) for name, cells in columns if any(cells)]
    return [name for name, _ in columns], [list(line) for line in zip(*(cells for _, cells in columns))]


def terminal() -> Console:
    """Returns a console for tables: the terminal, or, into a file, one so wide that nothing is wrapped or dropped."""
    console = Console()
    return console if console.is_terminal else Console(width=240)


def show_rows(rows: Sequence[Row], stamp: Stamp, console: Console | None = None) -> None:
    """Prints a table to ``console`` (default: the terminal)."""
    header, lines = cells_of(rows)
    versions = f"{stamp.count} x {stamp.device}, torch {stamp.torch}, triton {stamp.triton}"
    table = Table(title=versions, title_justify="left")
    for name in header:
        table.add_column(
            name, justify="left" if name in ("op", "pass", "model", "shape", "bits") else "right", no_wrap=True
        )
    for line in lines:
        style = "red" if "DIFFER" in line else None
        table.add_row(*line, style=style)
    (console or terminal()).print(table)
