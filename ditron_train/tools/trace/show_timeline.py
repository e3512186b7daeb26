"""Timelines of native and fused as one picture: a lane for each stream and copy engine, what is not hidden in red."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ditron_train.tools.trace.timeline import Interval, computation_us, exposed, total_us

_LABELLED = 24  # exposed spans, the longest

_COLOURS = {"compute": "#2a6fb0", "communication": "#e0a030"}


def summary(name: str, intervals: Sequence[Interval], computation_us: float | None = None) -> str:
    """One sentence: how long it took, how much communication was exposed, and how much longer than computation it
    was.

    ``computation_us``: what the native run's computation takes, which shows what is lost inside fused kernels, too.
    """
    if not intervals:
        return f"{name}: nothing was recorded"
    length = max(interval.end_us for interval in intervals)
    text = (
        f"{name}: {length:.0f} us, of which {total_us(exposed(intervals)):.0f} us are communication that is not hidden"
    )
    if computation_us:
        text += f"; {length - computation_us:.0f} us above the {computation_us:.0f} us of native's computation"
    return text


def draw_timelines(title: str, timelines: Mapping[str, Sequence[Interval]], path: Path) -> None:
    """Writes the picture; needs matplotlib (extra ``bench``). All panels share the time axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = {name: list(dict.fromkeys(interval.lane for interval in found)) for name, found in timelines.items()}
    heights = [max(len(found), 1) + 1 for found in lanes.values()]
    figure = Figure(figsize=(11, 1.2 + 0.45 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    computation = computation_us(timelines.get("native", ()))
    for axis, (name, intervals) in zip(axes, timelines.items()):
        for kind, colour in _COLOURS.items():
            for row, lane in enumerate(lanes[name]):
                spans = [(i.start_us, i.end_us - i.start_us) for i in intervals if i.lane == lane and i.kind == kind]
                axis.broken_barh(spans, (row - 0.4, 0.8), color=colour)
        _mark_exposed(axis, exposed(intervals))
        axis.set_yticks(range(len(lanes[name])), lanes[name], fontsize="x-small")
        axis.invert_yaxis()
        axis.set_title(summary(name, intervals, computation), fontsize="small", loc="left")
    axes[-1].set_xlabel("us")
    marks = [Patch(color=colour, label=kind) for kind, colour in _COLOURS.items()]
    figure.legend(
        handles=[*marks, Patch(color="#c0392b", alpha=0.25, label="not hidden")], loc="outside lower center", ncols=3
    )
    figure.suptitle(title, fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _mark_exposed(axis: Any, spans: Sequence[tuple[float, float]]) -> None:
    """Red over all lanes, with the microseconds of the longest."""
    for start, end in spans:
        axis.axvspan(start, end, color="#c0392b", alpha=0.25, linewidth=0)
    labels: list[list[float]] = []  # middle, us: spans that are so close that their numbers would overlap share one
    for start, end in spans:
        if labels and (start + end) / 2 - labels[-1][0] < 0.025 * spans[-1][1]:
            labels[-1][1] += end - start
        else:
            labels.append([(start + end) / 2, end - start])
    place = dict(
        transform=axis.get_xaxis_transform(), ha="center", va="top", fontsize=6, color="#7b241c", clip_on=True
    )
    for middle, length in sorted(labels, key=lambda label: -label[1])[:_LABELLED]:
        axis.text(middle, 0.99, f"{length:.0f}", **place)
