"""Draws the rows of a benchmark as a PNG: speed over native, beside the peer and the limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ditron_train.tools.results import Row, Stamp


def draw_speedups(rows: Sequence[Row], stamp: Stamp, path: Path) -> None:
    """Writes one picture with a panel for each op and pass; needs matplotlib (extra ``bench``).

    Bars: native time over fused time, and over the peer's. Marks: what no overlap can beat, and what the cost
    model predicts. Line: native.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((row.title, row.direction) for row in rows))
    figure = Figure(figsize=(max(6.0, 2.0 + 4.5 * len(panels)), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, panel in zip(axes, panels):
        chosen = [row for row in rows if (row.title, row.direction) == panel]
        _draw_panel(axis, chosen)
        axis.set_title(f"{panel[0]} {panel[1].replace('_', ' + ')}")
    axes[0].set_ylabel("speed over native")
    entries: dict[str, Any] = {}  # of all panels: not every one has a peer and a limit
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        entries.update(zip(labels, handles))
    axes[-1].legend(entries.values(), entries.keys(), loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.suptitle(f"{stamp.count} x {stamp.device}, torch {stamp.torch}, {stamp.date}", fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _draw_panel(axis: Any, rows: Sequence[Row]) -> None:
    places = range(len(rows))
    peers = [row.native_us / row.peer_us if row.peer_us else 0.0 for row in rows]
    width = 0.4 if any(peers) else 0.6
    shift = width / 2 if any(peers) else 0.0
    axis.bar([x - shift for x in places], [row.speedup for row in rows], width, label="ditron_train", color="#2a6fb0")
    if any(peers):
        name = next(row.peer for row in rows if row.peer)
        axis.bar([x + shift for x in places], peers, width, label=name, color="#b8b8b8")
    limits = [(x, row.native_us / row.limit_us) for x, row in zip(places, rows) if row.limit_us]
    if limits:
        axis.scatter(*zip(*limits), marker="_", s=300, color="#c0392b", label="limit", zorder=3)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xticks(list(places), [row.model for row in rows], rotation=30, ha="right", fontsize="small")
