"""SVG pictures of the documents, for light and dark pages: rows of results, training steps, timelines of two ops,
the layers.

They are text made from rows, cost model, schedules and imports, so ``scripts/readme.py --check`` compares them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from ditron_train.costs.exchanges import copied_us, one_node, ring_us
from ditron_train.costs.products import cublas_us, pass_us
from ditron_train.data.device_profiles import profile_named
from ditron_train.schedule.orders import arrival_order, chunk_order
from ditron_train.tools.results import Row, Stamp

NATIVE, FUSED, SENDS, _LIMIT = "#8f98a3", "#2a7fd0", "#e08a1e", "#c0392b"
_LIGHT = "text{font:12px system-ui,sans-serif;fill:#1f2328}.page{fill:#fff}"
_DARK = "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.page{fill:#0d1117}}"
_WIDTH, _LEFT = 800, 310
_RANKS = 4
#: The ops that have a timeline: m, n and k of the GEMM on each rank.
CALLS = {"ag_gemm": (8192, 7168, 8192), "gemm_rs": (8192, 8192, 7168)}


def _svg(height: int, title: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img">'
    page = f'<title>{title}</title><style>{_LIGHT}{_DARK}</style><rect class="page" width="100%" height="100%"/>'
    return "\n".join([head, page, *parts, "</svg>", ""])


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _box(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"/>'


def _legend(y: float, entries: Mapping[str, str], left: float = _LEFT) -> list[str]:
    places = [(left + 170 * i, name, color) for i, (name, color) in enumerate(entries.items())]
    return [part for x, name, color in places for part in (_box(x, y - 10, 12, 12, color), _text(x + 18, y, name))]


def draw_steps(steps: Sequence[tuple[str, float]]) -> str:
    """Speedup of each training step as a bar from stock Megatron's 1.00x, which goes left where the step is slower."""
    scale = (_WIDTH - _LEFT - 110) / (max(speedup for _, speedup in steps) - 1)
    zero, bottom = _LEFT + 40, 44 + 18 * len(steps)
    parts = _legend(20, {"fused, over stock Megatron": FUSED})
    for i, (label, speedup) in enumerate(steps):
        y, length = 36 + 18 * i, scale * (speedup - 1)
        parts += [_text(_LEFT, y + 12, label, "end"), _box(zero + min(length, 0), y + 2, abs(length), 12, FUSED)]
        parts.append(_text(zero + max(length, 0) + 6, y + 12, f"{speedup:.3f}x"))
    parts += [_box(zero - 1, 32, 2, bottom - 32, NATIVE), _text(zero, bottom + 14, "native, 1.00x", "middle")]
    return _svg(bottom + 24, "Speedup of training steps over stock Megatron", parts)


def _panel(x: float, y: float, title: str, rows: Sequence[Row]) -> list[str]:
    """A bar for each row, with a narrow one of the peer, a mark of the limit (at most at the edge), native's line."""
    zero, width = x + 205, 140
    peers = [row.native_us / row.peer_us if row.peer_us else 0.0 for row in rows]
    scale = width / max(1.0, *peers, *(row.speedup for row in rows))
    parts = [_text(x + 8, y, title)]
    for i, (row, peer) in enumerate(zip(rows, peers)):
        top = y + 8 + 18 * i
        parts += [_text(zero - 6, top + 11, row.model, "end"), _text(zero + 148, top + 11, f"{row.speedup:.2f}x")]
        parts.append(_box(zero, top, scale * row.speedup, 8 if peer else 13, FUSED))
        parts += [_box(zero, top + 8, scale * peer, 5, SENDS)] if peer else []
        limit = min(scale * row.native_us / row.limit_us, width) if row.limit_us else 0.0
        parts += [_box(zero + limit, top, 3, 13, _LIMIT)] if limit else []
    return [*parts, _box(zero + scale - 1, y + 5, 2, 18 * len(rows), NATIVE)]


def draw_speedups(stamp: Stamp, rows: Sequence[Row]) -> str:
    """Speedup over native of a file's rows: a panel for each op and pass, in two columns."""
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(f"{row.title} {row.direction.replace('_', ' + ')}", []).append(row)
    peers = ", ".join(dict.fromkeys(row.peer for row in rows if row.peer))
    parts = [_text(8, 20, f"{stamp.count} x {stamp.device}, torch {stamp.torch}, {stamp.date}")]
    peer = {f"peer: {peers}": SENDS} if peers else {}
    parts += _legend(42, {"fused": FUSED, "native, 1.0x": NATIVE, "limit (edge: beyond)": _LIMIT, **peer}, 8)
    tops = [72, 72]
    for title, shown in panels.items():
        column = tops.index(min(tops))
        parts += _panel(400 * column, tops[column], title, shown)
        tops[column] += 40 + 18 * len(shown)
    return _svg(max(tops), "Speedup over native", parts)


def timeline_spans(op: str) -> list[tuple[int, str, float, float, str]]:
    """Lane, words, begin, end and colour of each span; times in us by the cost model, orders as of the op."""
    profile, ring, gathers = profile_named("h200"), one_node(_RANKS), op == "ag_gemm"
    m, n, k = CALLS[op]
    num_bytes = 2 * m * (k if gathers else n)
    gemm_us = cublas_us(m, n, k, profile.machine, profile.rates)
    nccl_us = ring_us(num_bytes, ring, profile.rates)
    send_us = copied_us(num_bytes, _RANKS, profile.rates) / (_RANKS - 1)
    gemm_at, nccl_at = (nccl_us, 0.0) if gathers else (0.0, gemm_us)
    spans = [(0, "GEMM", gemm_at, gemm_at + gemm_us, NATIVE), (1, "collective", nccl_at, nccl_at + nccl_us, NATIVE)]
    peers = chunk_order(0, _RANKS, "gather_push" if gathers else "sum_push").tolist()
    computed = copied = 0.0
    for i, owner in enumerate(arrival_order(0, _RANKS).tolist() if gathers else [*peers, 0]):
        begin = max(computed, copied) if gathers else computed  # copied: when the rows have arrived
        computed = begin + gemm_us / _RANKS
        spans.append((2, f"rows of {owner}", begin, computed, FUSED))
        if i < _RANKS - 1:
            sent = copied if gathers else max(copied, computed)
            copied = sent + send_us
            spans.append((3, f"to {peers[i]}", sent, copied, SENDS))
    if not gathers:
        begin, sum_us = max(computed, copied), pass_us(num_bytes * (_RANKS + 1) / _RANKS, profile.rates)
        spans.append((2, "sum", begin, begin + sum_us, FUSED))
    return spans


def draw_timeline(op: str) -> str:
    """What rank 0 of 4 computes and sends over time, by both paths."""
    spans, left = timeline_spans(op), 140
    ends = {color: max(span[3] for span in spans if span[4] == color) for color in (NATIVE, FUSED)}
    scale = (_WIDTH - left - 20) / ends[NATIVE]
    parts = _legend(20, {f"native {ends[NATIVE]:.0f} us": NATIVE, f"fused {ends[FUSED]:.0f} us": FUSED, "copy": SENDS})
    lanes = ("native: compute", "native: NCCL", "fused: compute", "fused: copy engines")
    parts += [_text(8, 60 + 34 * lane, words) for lane, words in enumerate(lanes)]
    for lane, words, begin, end, color in spans:
        x, y, width = left + scale * begin, 42 + 34 * lane, scale * (end - begin)
        parts += [_box(x, y, width - 1, 26, color), _text(x + 4, y + 17, words)]
    about = f"By the cost model: H200, bf16, rank 0 of {_RANKS}; m, n, k of its GEMM: {CALLS[op]}"
    return _svg(208, f"Timeline of {op}, native and fused", [*parts, _text(left, 196, about)])


def _imports(folder: Path) -> set[str]:
    """Which subpackages the code of a subpackage imports."""
    nodes = (node for path in folder.rglob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    lines = [ast.unparse(node) for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    return {name for line in lines for name in re.findall(r"ditron_train\.(\w+)", line)}


def draw_layers(root: Path) -> str:
    """A row a subpackage, the highest layer first, with a mark below each subpackage that its code imports."""
    table = (root / "docs" / "design" / "architecture.md").read_text(encoding="utf-8")
    layers = re.findall(r"^\| (\d\.\d) \| `(\w+)` \|", table, re.MULTILINE)[::-1]
    left, step, parts = 160, 36, _legend(20, {"imports": FUSED, "itself": NATIVE})
    for i, (layer, name) in enumerate(layers):
        x, y = left + step * (i + 0.5), 112 + 24 * i
        parts += [_text(8, y, f"layer {layer}"), _text(left - 12, y, name, "end")]
        parts.append(f'<g transform="translate({x:.1f},88) rotate(-55)">{_text(0, 0, name)}</g>')
        imported = _imports(root / "ditron_train" / name) - {name}
        colors = [FUSED if other in imported else NATIVE if other == name else "" for _, other in layers]
        parts += [_box(left + step * j + 8, y - 11, step - 16, 14, color) for j, color in enumerate(colors) if color]
    return _svg(112 + 24 * len(layers), "Which subpackage imports which", parts)
