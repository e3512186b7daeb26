"""Files that others may be reading."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

__all__ = ["replace_file"]


def replace_file(path: Path, text: str) -> None:
    """Puts ``text`` where ``path`` is, at once: no reader sees half of it, and where it fails, what was there stays.

    Raises:
        OSError: The folder cannot be written, or the disk is full; nothing is left behind.
    """
    partial = path.with_name(
        f".{path.name}.{secrets.token_hex(8)}"
    )  # a process on another node may have this one's number
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
