"""Newton-Schulz against what the hardware allows: operations, bytes, and the picture of the committed rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ditron_train.tools.cases.muon import newton_schulz_flops, symmetry_ceiling
from ditron_train.tools.results import Row, Stamp

_MIN_SIDE = 512  # smaller matrices are bound by launches: far below all lines
_PEAKS = {"H100": (989.0, 3350.0), "H200": (989.0, 4800.0), "B200": (2250.0, 8000.0)}
"""Dense bf16 TFLOP/s and GB/s of memory, by the vendor's data sheets."""


def _intensity(rows: int, columns: int) -> float:
    """Operations of a step for each byte that its three products must read or write in bf16 (nothing read twice)."""
    m, n = min(rows, columns), max(rows, columns)
    elements = (m * n + m * m) + 2 * m * m + (m * m + 2 * m * n)
    return newton_schulz_flops(m, n, 1) / (2 * elements)


def has_roofline(rows: Sequence[Row]) -> bool:
    """Whether ``draw_roofline`` has something to draw."""
    return bool(_points(rows))


def _points(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.op == "newton_schulz" and row.tflops and row.shape["m"] >= _MIN_SIDE]


def draw_roofline(rows: Sequence[Row], stamp: Stamp, path: Path) -> None:
    """Writes the picture: TFLOP/s of the whole algorithm over its arithmetic intensity; needs matplotlib.

    Points: native and fused at each shape, joined. Marks: native's rate times the ceiling of symmetry, which may be
    above the tensor cores' peak, since half of each symmetric product is not computed. Lines: memory and tensor cores.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    chosen = _points(rows)
    figure = Figure(figsize=(8.5, 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    x = [_intensity(row.shape["m"], row.shape["n"]) for row in chosen]
    fused = [row.tflops for row in chosen if row.tflops]  # all, see _points
    native = [rate / row.speedup for rate, row in zip(fused, chosen)]
    ceilings = [rate * symmetry_ceiling(row.shape["m"], row.shape["n"]) for rate, row in zip(native, chosen)]
    for place, low, high in zip(x, native, fused):
        axis.plot([place, place], [low, high], color="#c9d6e4", linewidth=1.0, zorder=1)
    axis.scatter(
        x, ceilings, marker="_", s=140, color="#c0392b", label="native's rate x ceiling of symmetry", zorder=2
    )
    axis.scatter(x, native, s=26, color="#8a8a8a", label="native (cuBLAS)", zorder=3)
    axis.scatter(x, fused, s=26, color="#2a6fb0", label="ditron_train", zorder=4)
    labelled: list[float] = []
    for place, rate, row in sorted(zip(x, fused, chosen), key=lambda entry: entry[0]):
        if all(place > 1.12 * other for other in labelled):  # where there is room
            axis.annotate(f"{row.shape['m']}x{row.shape['n']}", (place, rate), fontsize="xx-small", rotation=35,
                          xytext=(2, 5), textcoords="offset points")  # fmt: skip
            labelled.append(place)
    _draw_roofs(axis, stamp.device, min(x), max(x))
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("operations for each byte of the three products (bf16)")
    axis.set_ylabel("TFLOP/s of the whole algorithm")
    axis.legend(loc="lower right", frameon=False, fontsize="small")
    axis.set_title(f"Newton-Schulz, {stamp.device}, torch {stamp.torch}, {stamp.date}", fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _draw_roofs(axis: Any, device: str, least: float, most: float) -> None:
    peaks = next((peak for name, peak in _PEAKS.items() if name in device), None)
    if peaks is None:
        return
    tflops, gbps = peaks
    ridge = 1e3 * tflops / gbps
    left, right = min(least, ridge) / 1.5, max(most, ridge) * 1.5
    axis.plot([left, ridge, right], [left * gbps / 1e3, tflops, tflops], color="black", linewidth=1.0,
              label=f"{gbps / 1e3:.1f} TB/s, {tflops:.0f} TFLOP/s dense bf16")  # fmt: skip
