"""Tables as plain text, for commands that have to run without rich."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def show_text(text: str) -> None:
    """Prints what a command has found."""
    print(text)


def aligned(rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """``rows`` as lines whose cells begin, or in the columns ``right`` end, under each other."""
    lines = [list(row) for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*lines)]
    if len(widths) - 1 not in right:
        widths[-1:] = [0]
    found = []
    for line in lines:
        cells = [
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths))
        ]
        found.append("  ".join(cells).rstrip())
    return "\n".join(found)
