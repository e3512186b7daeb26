"""Files are replaced at once or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ditron_train.runtime.files import replace_file


def test_what_was_there_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for text in ("first", "sécond\n"):
        replace_file(path, text)
        assert path.read_text(encoding="utf-8") == text and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text("kept")

    def half(self: Path, text: str, **options: object) -> int:
        self.write_bytes(text[: len(text) // 2].encode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, "something longer")
    assert path.read_bytes() == b"kept" and list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "missing" / "plan.json", "text")
