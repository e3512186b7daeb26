"""Rows as a table for the terminal and as Markdown."""

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


def _signed(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.0f} %"


_DIVIDED = {"TP": "tensor_model", "CP": "context", "EP": "expert_model", "PP": "pipeline_model"}


def model_words(row: Row) -> str:
    """The sizes of a training step in words: the model, how it is divided, what a step takes; what is not known is
    left out."""

    def words(text: str, *names: str) -> list[str]:
        sizes = [row.shape.get(name) for name in names]
        return [] if None in sizes else [text.format(*sizes)]

    experts = words("{} experts of {}", "num_experts", "moe_ffn_hidden_size")
    experts += words("top-{}", "moe_router_topk") if experts else words("FFN {}", "ffn_hidden_size")
    model = [*words("{} layers", "num_layers"), *words("hidden {}", "hidden_size"), *experts]
    ranks = {short: row.shape.get(f"{name}_parallel_size", 1) for short, name in _DIVIDED.items()}
    divided = [f"{short} {number}" for short, number in ranks.items() if number > 1]
    batch = words("{} sequences of {} tokens a step", "global_batch_size", "seq_length") + words(
        "{} at a time", "micro_batch_size"
    )
    return "; ".join(", ".join(group) for group in (model, divided, batch) if group)


def _sizes(row: Row) -> str:
    return "x".join(str(size) for size in row.shape.values())


_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("op", lambda row: row.op),
    ("pass", lambda row: _PASS_NAMES[row.direction]),
    ("model", lambda row: row.model),
    ("shape", _sizes),
    ("FP8", lambda row: row.fp8 or ""),
    ("native ms", lambda row: _ms(row.native_us)),
    ("ditron ms", lambda row: _ms(row.ditron_us)),
    ("speedup", lambda row: _ratio(row.speedup)),
    ("bits", lambda row: "equal" if row.bitwise_equal else "DIFFER"),
    ("computation ms", lambda row: _ms(row.gemm_us)),
    ("communication ms", lambda row: _ms(row.comm_us)),
    ("of the limit", lambda row: _percent(row.fraction_of_limit)),
    ("peer ms", lambda row: _ms(row.peer_us)),
    ("against peer", lambda row: _ratio(row.peer_speedup)),
    ("GB/s", lambda row: "" if row.wire_gbps is None else f"{row.wire_gbps:.0f}"),
    ("TFLOP/s", lambda row: "" if row.tflops is None else f"{row.tflops:.0f}"),
    ("model native ms", lambda row: _ms(row.model_native_us)),
    ("error", lambda row: _signed(row.model_native_error)),
    ("model ditron ms", lambda row: _ms(row.model_us)),
    ("error ", lambda row: _signed(row.model_error)),
    ("SMs", lambda row: str(row.comm_sms)),
    ("spread", lambda row: _percent(row.spread)),
)


def _cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the columns in which any row has something."""
    columns = [(name, [cell(row) for row in rows]) for name, cell in _COLUMNS]
    columns = [(name, cells) for name, cells in columns if any(cells)]
    return [name for name, _ in columns], [list(line) for line in zip(*(cells for _, cells in columns))]


def terminal() -> Console:
    """Returns a console for tables: the terminal, or, into a file, one so wide that nothing is folded or dropped."""
    console = Console()
    return console if console.is_terminal else Console(width=240)


def show_rows(rows: Sequence[Row], stamp: Stamp, console: Console | None = None) -> None:
    """Prints a table to ``console`` (default: the terminal)."""
    header, lines = _cells(rows)
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


def markdown_table(rows: Sequence[Row]) -> str:
    """Returns the rows as a Markdown table."""
    header, lines = _cells(rows)
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *lines])
