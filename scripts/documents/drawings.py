"""SVG pictures of the documents, for light and dark pages: rows of results, training steps, timelines of ops, the
layers.

They are text made from rows, docstrings and the table of layers, so ``scripts/readme.py --check`` compares them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from ditron_train.tools.results import Row, Stamp

NATIVE, FUSED, MOVES, _LIMIT, _LAYER = "#8f98a3", "#4597e3", "#e08a1e", "#c0392b", "#cdb8ea"
_LIGHT = "text{font:12px system-ui,sans-serif;fill:#1f2328}.page{fill:#fff}text.in{fill:#0b0f14}"
_DARK = "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.page{fill:#0d1117}}"
_WIDTH = 800
_TIMELINE = re.compile(r"Timeline of ``(\w+)``[\s\S]*?\n\n((?: +(?:native|fused) .*\|\n)+)")
_LANE = re.compile(r"(native|fused) +(\w+) +(\|.*\|)")
_COLORS = {"waits": "none", **dict.fromkeys(("copies", "NCCL", "pulls", "pushes", "senders", "receivers"), MOVES)}
"""What the lanes of a fused path do if they do not compute."""


def _svg(height: int, title: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img">'
    page = f'<title>{title}</title><style>{_LIGHT}{_DARK}</style><rect class="page" width="100%" height="100%"/>'
    return "\n".join([head, page, *parts, "</svg>", ""])


def _text(x: float, y: float, words: str, anchor: str = "start", kind: str = "out") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def _box(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"/>'


def _legend(y: float, entries: Mapping[str, str], left: float) -> list[str]:
    places = [(left + 170 * i, name, color) for i, (name, color) in enumerate(entries.items())]
    return [part for x, name, color in places for part in (_box(x, y - 10, 12, 12, color), _text(x + 18, y, name))]


_Bar = tuple[str, float, float, float]
"""Label, speedup, the peer's speedup and the limit's; 0 for what is not known."""


def _panel(x: float, y: float, bars: Sequence[_Bar], width: float = 140, start: float = 0.0) -> list[str]:
    """Bars from ``start``, with a narrow one of the peer, a mark of the limit (at most at the edge), native's line.

    ``x`` is where the bars begin, with their labels at the left and their figures at the right.
    """
    scale = width / (max(1.0, *(max(speedup, peer) for _, speedup, peer, _ in bars)) - start)
    parts = []
    for i, (label, speedup, peer, limit) in enumerate(bars):
        top, length = y + 18 * i, scale * (speedup - start)
        parts += [
            _text(x - 8, top + 11, label, "end"),
            _text(x + width + 8, top + 11, f"{speedup:.{3 if start else 2}f}x"),
        ]
        parts.append(_box(x + min(length, 0), top, abs(length), 8 if peer else 13, FUSED))
        parts += [_box(x, top + 8, scale * peer, 5, MOVES)] if peer else []
        parts += [_box(x + min(scale * limit, width), top, 3, 13, _LIMIT)] if limit else []
    return [*parts, _box(x + scale * (1 - start) - 1, y - 3, 2, 18 * len(bars), NATIVE)]


def draw_steps(steps: Sequence[tuple[str, float]]) -> str:
    """Speedup of each training step as a bar from stock Megatron's 1.00x, which goes left if the step is slower."""
    bars = [(label, speedup, 0.0, 0.0) for label, speedup in steps]
    parts = _legend(20, {"fused": FUSED, "native, 1.000x": NATIVE}, 310) + _panel(310, 40, bars, 420, 1.0)
    return _svg(46 + 18 * len(steps), "Speedup of training steps over stock Megatron", parts)


def draw_speedups(stamp: Stamp, rows: Sequence[Row]) -> str:
    """Speedup over native of a file's rows: a panel for each op and pass, in two columns."""
    panels: dict[str, list[_Bar]] = {}
    for row in rows:
        peer, limit = (row.native_us / time_us if time_us else 0.0 for time_us in (row.peer_us, row.limit_us))
        bars = panels.setdefault(f"{row.title} {row.direction.replace('_', ' + ')}", [])
        bars.append((row.model, row.speedup, peer, limit))
    peers = ", ".join(dict.fromkeys(row.peer for row in rows if row.peer))
    parts = [_text(8, 20, f"{stamp.count} x {stamp.device}, torch {stamp.torch}, {stamp.date}")]
    peer = {f"peer: {peers}": MOVES} if peers else {}
    parts += _legend(42, {"fused": FUSED, "native, 1.0x": NATIVE, "limit (edge: beyond)": _LIMIT, **peer}, 8)
    tops = [72, 72]
    for title, bars in panels.items():
        column = tops.index(min(tops))
        x, y = 400 * column, tops[column]
        parts += [_text(x + 8, y, title), *_panel(x + 205, y + 8, bars)]
        tops[column] += 40 + 18 * len(bars)
    return _svg(max(tops), "Speedup over native", parts)


def timelines(root: Path) -> dict[str, list[tuple[str, str, str]]]:
    """By op: path, name and spans of each lane of its timeline.

    They stand in the docstring of the op's module, or in a comment of its page, below "Timeline of ``op``", as
    ``fused  copies  | to r-1 |     | to r-2 |``: words between bars, nothing where nothing runs.
    """
    files = sorted([*(root / "ditron_train").rglob("*.py"), *(root / "docs" / "design" / "ops").glob("*.md")])
    found = [match for path in files for match in _TIMELINE.findall(path.read_text(encoding="utf-8"))]
    return {op: _LANE.findall(lanes) for op, lanes in found}


def draw_timeline(op: str, lanes: Sequence[tuple[str, str, str]]) -> str:
    """The lanes of both paths of an op, to the scale of their text, so that all words fit."""
    colors = [NATIVE if path == "native" else _COLORS.get(lane, FUSED) for path, lane, _ in lanes]
    drawn = [(f"{path}: {lane}", spans, color) for (path, lane, spans), color in zip(lanes, colors)]
    legend = _legend(20, {"native": NATIVE, "fused: compute": FUSED, "fused: data movement": MOVES}, 130)
    return _draw_lanes(f"Timeline of {op}, native and fused", drawn, [*legend, _text(792, 20, "not to scale", "end")])


def _draw_lanes(title: str, lanes: Sequence[tuple[str, str, str]], legend: Sequence[str]) -> str:
    """Name, spans and colour of each lane."""
    left, scale, parts = 130, (_WIDTH - 138) / max(len(spans) for _, spans, _ in lanes), [*legend]
    for i, (name, spans, color) in enumerate(lanes):
        y, kind = 38 + 30 * i, "out" if color == "none" else "in"
        parts.append(_text(8, y + 16, name))
        for span in re.finditer(r"\|([^|]*[^| ][^|]*)(?=\|)", spans):
            x = left + scale * span.start()
            parts.append(_box(x, y, scale * len(span[0]) - 2, 24, color))
            parts.append(_text(x + 4, y + 16, span[1].strip(), kind=kind))
    return _svg(44 + 30 * len(lanes), title, parts)


def draw_layers(root: Path) -> str:
    """The subpackages of each layer, the highest layer first."""
    table = (root / "docs" / "design" / "architecture.md").read_text(encoding="utf-8")
    layers: dict[str, list[str]] = {}
    for layer, name in re.findall(r"^\| (\d\.\d) \| `(\w+)` \|", table, re.MULTILINE)[::-1]:
        layers.setdefault(f"layer {layer}", []).append(name)
    spans = {layer: "|".join(name.center(77 // len(names)) for name in names) for layer, names in layers.items()}
    lanes = [(layer, f"|{names}|", _LAYER) for layer, names in spans.items()]
    return _draw_lanes("Subpackages by layer", lanes, [_text(130, 20, "each imports from lower layers only")])
