"""Writing what torch's profiler has seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ditron_train.runtime.logs import get_logger


def export_trace(profiler: Any, path: Path) -> None:
    """Writes a Chrome trace, whole or not at all; where it cannot be, training goes on, with one log line.

    torch writes it beside ``path`` first. It raises nothing where the disk is full, and leaves what it has written.
    """
    path.unlink(missing_ok=True)  # an older one would pass for this one
    try:
        profiler.export_chrome_trace(str(path))
    finally:
        Path(f"{path}.tmp").unlink(missing_ok=True)
    if not path.is_file():
        get_logger("trace").warning("no trace %s: torch could not write it whole; is the disk full?", path)
