"""The last calls of every rank, kept where the death of the process cannot take them: for ``python -m ditron_train
postmortem``.

Each rank writes one record for each op it calls into a ring in a file that it has mapped: some 0.6 us, no system call.
What is written stays, whatever ends the process: an error, a signal, ``kill -9``. At a normal end a file in the
default folder is removed. See ``DITRON_POSTMORTEM``.
"""

from __future__ import annotations

import atexit
import errno
import itertools
import json
import mmap
import os
import re
import secrets
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ditron_train.runtime.errors import DitronError, PeerTimeoutError
from ditron_train.runtime.logs import get_logger, log_once
from ditron_train.runtime.settings import get_settings

CAPACITY = 1000
MAGIC = b"ditron_train records 1\n"
HEADER_BYTES = 1 << 15
FILE_PATTERN = "rank*.records"
#: Position in the whole run (from 1; 0: empty), number within the group among calls that are compared or among those
#: that are not (from 1), time in ns, group, compared, text.
SLOT = struct.Struct("<QQQHB133s")

_TEXT_BYTES = 133
_MAX_TEXTS = 4096
_MAX_GROUPS = 256  # their names, of at most as many characters as below, fit into the header beside an error
_NAME_CHARACTERS = 64
_ERROR_CHARACTERS = 4000
_OFF = "off"


class _Ring:
    """The file of this process."""

    def __init__(self, folder: Path, *, keep: bool) -> None:
        self.path = folder / f"rank{_rank()}.records"
        self._keep = keep
        folder.mkdir(parents=True, exist_ok=True)
        self._header: dict[str, Any] = {
            "rank": _rank(), "world_size": _world_size(), "host": socket.gethostname(), "pid": os.getpid(),
            "job": _job(), "started_s": time.time(), "state": "running", "error": None, "groups": [],
        }  # fmt: skip
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        partial.unlink(missing_ok=True)  # of a process of this number that was killed
        try:
            with open(partial, "x+b") as file:  # a new file: of an earlier run's, another process may hold a map
                # A full disk: here, not by SIGBUS later.
                os.posix_fallocate(file.fileno(), 0, HEADER_BYTES + CAPACITY * SLOT.size)
                self.memory = mmap.mmap(file.fileno(), 0)
            self._write_header()
            os.replace(partial, self.path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        self.positions = itertools.count(1)
        self._previous_hook = sys.excepthook
        sys.excepthook = self._uncaught
        atexit.register(self._end)

    def add_group(self, name: str, ranks: Sequence[int]) -> int | None:
        """The group's place in the header; None if that is full."""
        groups = self._header["groups"]
        if len(groups) >= _MAX_GROUPS:
            return None
        groups.append([name[:_NAME_CHARACTERS], _spans(ranks)])
        self._write_header()
        return len(groups) - 1

    def note(self, error: BaseException, group: str | None) -> None:
        if self._header["error"] is not None:
            return  # the first says most
        text = str(error)[:_ERROR_CHARACTERS]
        if len(json.dumps(text)) > 2 * _ERROR_CHARACTERS:  # what is not ASCII takes up to twelve times its length
            text = text[: _ERROR_CHARACTERS // 6]
        missing_rank, waited_s = (
            (error.missing_rank, error.timeout_s) if isinstance(error, PeerTimeoutError) else (None, None)
        )
        self._header["error"] = {
            "kind": type(error).__name__, "text": text, "time_ns": time.time_ns(), "group": group,
            "missing_rank": missing_rank, "waited_s": waited_s,
        }  # fmt: skip
        self._header["state"] = "raised"
        self._keep = True
        self._write_header()

    @contextmanager
    def noting(self, error: BaseException) -> Iterator[None]:
        """As ``note_unless_over``."""
        if self._header["error"] is not None:
            yield
            return
        before = {name: self._header[name] for name in ("error", "state")}, self._keep
        self.note(error, None)
        yield
        header, self._keep = before
        self._header.update(header)
        self._write_header()

    def _write_header(self) -> None:
        text = MAGIC + json.dumps(self._header).encode() + b"\n"
        if len(text) > HEADER_BYTES:
            self._header["groups"] = [[name, []] for name, _ in self._header["groups"]]
            text = MAGIC + json.dumps(self._header).encode() + b"\n"
        text = text[:HEADER_BYTES]
        self.memory[: len(text)] = text

    def _uncaught(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if os.getpid() == self._header["pid"]:  # not of a fork, which has its parent's file mapped
            self.note(error, error.group if isinstance(error, PeerTimeoutError) else None)
        self._previous_hook(kind, error, traceback)

    def _end(self) -> None:
        if os.getpid() != self._header["pid"]:
            return  # a fork of this process
        if self._header["state"] == "running":
            self._header["state"] = "ended"
            self._write_header()
        if not self._keep:
            self.path.unlink(missing_ok=True)
            for folder in (self.path.parent, self.path.parent.parent):  # the job's, and the user's
                with suppress(OSError):  # others write there
                    folder.rmdir()


class OpRecords:
    """Records of the ops of one process group, numbered in the order of their calls.

    Args:
        ring: The file, or None if nothing is to be recorded.
        group_id: The group's place in the file's header.
    """

    def __init__(self, ring: _Ring | None, group_id: int) -> None:
        self._ring = ring
        self._group_id = group_id
        # Own calls, of which ranks make different ones, and compared ones.
        self._numbers = (itertools.count(1), itertools.count(1))
        self._texts: dict[tuple[Hashable, ...], bytes] = {}

    def record(self, op: str, *details: Hashable) -> None:
        """One call: all ranks of the group make the same calls, of equal ``details``, in the same order."""
        self._write(1, (op, *details))

    def record_own(self, op: str, *details: Hashable) -> None:
        """One call of an op that each rank calls in its own way, such as the stages of a pipeline."""
        self._write(0, (op, *details))

    def _write(self, compared: int, call: tuple[Hashable, ...]) -> None:
        ring = self._ring
        if ring is None:
            return
        text = self._texts.get(call)
        if text is None:
            text = self._encode(call)
        position = next(ring.positions)
        SLOT.pack_into(
            ring.memory, HEADER_BYTES + position % CAPACITY * SLOT.size,
            position, next(self._numbers[compared]), time.time_ns(), self._group_id, compared, text,
        )  # fmt: skip

    def _encode(self, call: tuple[Hashable, ...]) -> bytes:
        if len(self._texts) >= _MAX_TEXTS:
            self._texts.clear()
        text = " ".join(_word(part) for part in call).encode()[:_TEXT_BYTES]
        self._texts[call] = text
        return text


def _word(part: Hashable) -> str:
    if isinstance(part, tuple):
        return "x".join(map(str, part)) or "()"
    return str(part).removeprefix("torch.")


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else int(os.environ.get("RANK", 0))


def _world_size() -> int:
    import torch.distributed as dist

    return (
        dist.get_world_size()
        if dist.is_available() and dist.is_initialized()
        else int(os.environ.get("WORLD_SIZE", 1))
    )


def _job() -> str:
    """A word that the ranks of this job share, and no other job's: files of both may be in one folder."""
    import torch.distributed as dist

    word = b""
    if dist.is_available() and dist.is_initialized():
        with suppress(RuntimeError):  # the store is gone: the file is what matters
            store = dist.distributed_c10d._get_default_store()
            word = store.compare_set("ditron_train job", "", secrets.token_hex(8))
    return word.decode()


def _spans(ranks: Sequence[int]) -> list[Any]:
    """``["range", start, stop, step]`` if that says it; else the ranks."""
    listed = list(ranks)
    if len(listed) > 1:
        step = listed[1] - listed[0]
        if step > 0 and listed == list(range(listed[0], listed[-1] + 1, step)):
            return ["range", listed[0], listed[-1] + 1, step]
    return listed


def _default_folder() -> Path:
    """A folder of this job in the temporary one.

    Raises:
        OSError: It cannot be made, or somebody else has made it: a file there could be a link to another one.
    """
    words = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "MASTER_PORT")]
    job = re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(word for word in words if word)).strip(".")[:200] or "alone"
    mine = Path(tempfile.gettempdir()) / f"ditron_postmortem-{os.getuid()}"
    mine.mkdir(mode=0o700, exist_ok=True)
    if mine.is_symlink() or mine.stat().st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "it belongs to somebody else", str(mine))
    return mine / job


_ring: _Ring | None = None
_ring_failed = False
_records: dict[tuple[str, tuple[int, ...]], OpRecords] = {}  # a name may come again, for other ranks


def _make_ring(named: str | None) -> _Ring:
    return _Ring(Path(named) if named else _default_folder(), keep=named is not None)


def _open_ring() -> _Ring | None:
    """The ring of this process; None if it is switched off or its folder cannot be written (one log line)."""
    global _ring, _ring_failed
    if _ring is not None or _ring_failed:
        return _ring
    named = get_settings().postmortem
    if named == _OFF:
        return None
    try:
        try:
            _ring = _make_ring(named)
        except FileNotFoundError:  # a rank that ended has removed the folder meanwhile
            _ring = _make_ring(named)
    except OSError as error:
        _ring_failed = True
        where = error.filename or named or tempfile.gettempdir()
        get_logger("records").warning("no records of the last ops: cannot write %s: %s", where, error.strerror)
    return _ring


def records_of(group_name: str, ranks: Sequence[int]) -> OpRecords:
    """The records of a group; one object for all subpackages, so that its calls are numbered through.

    Args:
        group_name: The same on all of its ranks.
        ranks: Global ranks in the order of group ranks.
    """
    key = (group_name, tuple(ranks))
    found = _records.get(key)
    if found is None:
        ring = _open_ring()
        group_id = ring.add_group(group_name, ranks) if ring is not None else None
        if ring is not None and group_id is None:
            log_once("many groups", f"records hold the calls of this job's first {_MAX_GROUPS} groups", name="records")
        found = _records[key] = OpRecords(ring if group_id is not None else None, group_id or 0)
    return found


@contextmanager
def note_unless_over(error: BaseException) -> Iterator[None]:
    """``error`` is in this rank's file from now on, unless the block ends as it should: of what may concern all ranks,
    while they are asked. What is raised inside comes behind it."""
    with _ring.noting(error) if _ring is not None else nullcontext():
        yield


def note_error(error: DitronError, group_name: str) -> None:
    """Puts what an op has raised into this rank's file, and says once where it is."""
    ring = _ring
    if ring is None:
        return
    ring.note(error, group_name)
    get_logger("records").error(
        "the last calls of this rank are in %s: python -m ditron_train postmortem %s", ring.path, ring.path.parent
    )
