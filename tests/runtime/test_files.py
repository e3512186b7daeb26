"""Files are replaced at once or not at all; what somebody else has put there is read or refused."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ditron_train.runtime.files import locked, parse_json, read_regular, replace_file


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


def test_a_name_as_long_as_names_can_be(tmp_path: Path) -> None:
    path = tmp_path / f"{'n' * 250}.json"
    replace_file(path, "text")
    assert list(tmp_path.iterdir()) == [path]


def test_only_files_are_read(tmp_path: Path) -> None:
    """A pipe that nobody writes to would be waited for; a device has no end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"content")
    assert read_regular(tmp_path / "file") == b"content"
    for path, words in ((tmp_path / "pipe", "no regular file"), (Path("/dev/zero"), "no regular file"),
                        (tmp_path, "a folder"), (tmp_path / "none", "No such file")):  # fmt: skip
        with pytest.raises(OSError, match=words):
            read_regular(path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "no JSON", b"\xff"])
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


_ADDS = """
import sys
from pathlib import Path
from ditron_train.runtime.files import locked
total, lock = Path(sys.argv[1]), Path(sys.argv[2])
for _ in range(200):
    with locked(lock):
        total.write_text(str(int(total.read_text()) + 1))
"""


def test_a_lock_holds_and_leaves_no_file(tmp_path: Path) -> None:
    total, lock = tmp_path / "total", tmp_path / ".lock"
    total.write_text("0")
    children = [subprocess.Popen([sys.executable, "-c", _ADDS, str(total), str(lock)]) for _ in range(4)]
    assert [child.wait(timeout=100) for child in children] == [0] * 4
    assert total.read_text() == "800" and list(tmp_path.iterdir()) == [total]


def test_a_lock_that_fails_inside_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), locked(tmp_path / ".lock"):
        1 / 0  # noqa: B018
    assert list(tmp_path.iterdir()) == []


def test_a_lock_follows_no_link(tmp_path: Path) -> None:
    """Where others write beside a plan, one of them could have put it there."""
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"), locked(tmp_path / ".lock"):
        pass
    assert not (tmp_path / "elsewhere").exists()
