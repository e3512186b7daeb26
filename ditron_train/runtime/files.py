"""Files that others may be reading, or may have put there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.logs import get_logger


def read_regular(path: Path) -> bytes:
    """What a file holds; a pipe, which could be waited for for ever, or a device is refused.

    Raises:
        OSError: It cannot be read, or is no file; ``strerror`` says why.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer does not block
    try:
        kind = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(kind):
            raise OSError(errno.EINVAL, "it is a folder" if stat.S_ISDIR(kind) else "it is no regular file", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def parse_json(content: str | bytes) -> Any:
    """``json.loads`` of what somebody else may have written.

    Raises:
        ValueError: No JSON, or deeper than any that this package writes.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("JSON in too many brackets") from None


def replace_file(path: Path, text: str) -> None:
    """Puts ``text`` where ``path`` is, at once: no reader sees half of it, and if it fails, what was there stays.

    Raises:
        OSError: The folder cannot be written, or the disk is full; nothing is left behind.
    """
    # A process on another node may have this one's number; the name is cut, since it may be as long as names can be.
    partial = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):  # a folder that cannot be written says so of what is not there, too
            partial.unlink(missing_ok=True)
        raise


def save_text(path: Path, text: str, what: str) -> None:
    """``replace_file`` of a file that a user named; ``what`` it is, in words.

    Raises:
        SettingError: The path cannot be written.
    """
    try:
        replace_file(path, text)
    except OSError as error:
        raise SettingError(f"cannot write {what} {path}: {error.strerror}") from None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Only one process at a time, by a file ``path`` that is there meanwhile and gone afterwards.

    Raises:
        OSError: It cannot be made, or is a link, which somebody else may have put there.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not _is_still(descriptor, path):  # who had it has removed it meanwhile: others lock a new one
                continue
            try:
                yield
            finally:
                with suppress(OSError):
                    os.unlink(path)
            return
        finally:
            os.close(descriptor)


def _is_still(descriptor: int, path: Path) -> bool:
    """Whether ``path`` is the name of what was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def export_trace(profiler: Any, path: Path) -> None:
    """Writes a Chrome trace, whole or not at all; if it cannot be, training goes on, with one log line.

    torch writes it beside ``path`` first. It raises nothing if the disk is full, and leaves what it has written.
    """
    path.unlink(missing_ok=True)  # an older one would pass for this one
    try:
        profiler.export_chrome_trace(str(path))
    finally:
        Path(f"{path}.tmp").unlink(missing_ok=True)
    if not path.is_file():
        get_logger("trace").warning("no trace %s: torch could not write it whole; is the disk full?", path)
