"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table with a header; white space in cells becomes one space, and bars are escaped."""
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in (names, ["---"] * len(names), *cells))
