"""Schedules as a table for the terminal and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ditron_train.tools.tables import terminal
from ditron_train.tools.trace.schedule import RankSchedule, ScheduleRequest


def _title(request: ScheduleRequest) -> str:
    config = request.config
    nodes = request.world_size // (request.ranks_per_node or request.world_size)
    where = f"{request.world_size} ranks on {nodes} node{'s' if nodes > 1 else ''}"
    tiles = f"tiles of {config.block_m} x {config.block_n}, {request.num_sms} SMs"
    return f"{request.op} {request.m} x {request.n} x {request.k}, {where}, {tiles}"


def show_schedules(
    request: ScheduleRequest, schedules: Sequence[RankSchedule], console: Console | None = None
) -> None:
    """Prints one line for each rank to ``console`` (default: the terminal)."""
    gathers = request.op == "ag_gemm"
    table = Table(title=_title(request), title_justify="left")
    table.add_column("rank", justify="right")
    table.add_column("waves", justify="right")
    table.add_column(
        "chunks arrive from (first wave that needs them)" if gathers else "chunks leave for (complete after wave)"
    )
    table.add_column("row tiles of two ranks", justify="right")
    for schedule in schedules:
        waves = schedule.first_wave if gathers else schedule.last_wave
        chunks = "  ".join(
            f"{rank} ({waves[rank]})" if rank in waves else f"{rank} (no rows)" for rank in schedule.chunks
        )
        table.add_row(str(schedule.rank), str(schedule.num_waves), chunks, str(schedule.num_straddling))
    (console or terminal()).print(table)


def draw_schedules(request: ScheduleRequest, schedules: Sequence[RankSchedule], path: Path) -> None:
    """Writes one picture with a panel for each rank: every tile of the output, coloured by the wave in which it runs.

    Needs matplotlib (extra ``bench``). White lines part the rows of different ranks; at the left of each part stands
    the rank that owns it and the place of its chunk in the order of arrival or departure.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(4, len(schedules))
    lines = -(-len(schedules) // columns)
    figure = Figure(figsize=(3.4 * columns + 1, 3.6 * lines + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False)
    last_wave = max(schedule.num_waves for schedule in schedules) - 1
    for axis, schedule in zip(axes.flat, schedules):
        image = _draw_rank(axis, request, schedule, last_wave)
    for axis in axes.flat[len(schedules) :]:
        axis.set_axis_off()
    figure.colorbar(image, ax=axes, label="wave", shrink=0.8)
    figure.suptitle(_title(request), fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw_rank(axis: Any, request: ScheduleRequest, schedule: RankSchedule, last_wave: int) -> object:
    image = axis.imshow(
        schedule.wave, aspect="auto", cmap="viridis", vmin=0, vmax=max(last_wave, 1), interpolation="nearest"
    )
    borders = request.row_starts / request.config.block_m
    for border in borders[1:-1]:
        axis.axhline(border - 0.5, color="white", linewidth=1.2)
    word = "arrives" if request.op == "ag_gemm" else "leaves"
    places = {rank: f"{rank}, {word} {place + 1}." for place, rank in enumerate(schedule.chunks)}
    places[schedule.rank] = f"{schedule.rank}, own"
    owners = [rank for rank in range(request.world_size) if borders[rank + 1] > borders[rank]]
    middles = [(borders[rank] + borders[rank + 1]) / 2 - 0.5 for rank in owners]
    axis.set_yticks(middles, [places[rank] for rank in owners], fontsize="x-small")
    axis.set_xticks([])
    axis.set_xlabel("columns of the output", fontsize="x-small")
    axis.set_title(f"rank {schedule.rank}", fontsize="small")
    return image
