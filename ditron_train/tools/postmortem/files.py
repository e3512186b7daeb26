"""Reads the records that ``runtime.flight_recorder`` left behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.files import parse_json, read_regular
from ditron_train.runtime.flight_recorder import CAPACITY, FILE_PATTERN, HEADER_BYTES, MAGIC, SLOT

_STATES = ("running", "raised", "ended")
_MOST_RANKS = 1 << 17  # more than any job has: lists of all of them must not take the memory of this machine
_MOST_MEMBERS = 1 << 22  # of all groups of a rank


@dataclass(frozen=True, order=True)
class Group:
    """A process group: its name in torch and its global ranks, in the order of group ranks."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One call of an op.

    Attributes:
        group: On which group.
        number: How many calls on this group this one makes, of those that are compared or of those that are not.
        time_ns: By the clock of its host.
        compared: Whether all ranks of the group make it alike.
        text: Op, shapes, type.
    """

    group: Group
    number: int
    time_ns: int
    compared: bool
    text: str


@dataclass(frozen=True)
class RankFile:
    """What one rank left.

    Attributes:
        rank: Global rank.
        world_size: Of its job.
        job: A word that the ranks of a job share; empty if they had no store.
        started_s: When its file was made, by the clock of its host.
        host, pid: Where it ran.
        state: ``running`` (still, or ended without a word), ``raised``, ``ended``.
        error: What it raised first: kind, text, time_ns, group, missing_rank.
        calls: The last ones, oldest first.
    """

    rank: int
    world_size: int
    host: str
    pid: int
    state: str
    error: dict[str, Any] | None
    calls: tuple[Call, ...]
    groups: tuple[Group, ...] = field(default=())
    job: str = ""
    started_s: float = 0.0


def read_folder(folder: Path) -> list[RankFile]:
    """All ranks' files of the newest job in ``folder``, in the order of ranks; earlier jobs may have left some, too.

    Raises:
        SettingError: No folder, no such files in it, a file that cannot be read, or files of jobs that cannot be told
            apart.
    """
    if not folder.is_dir():
        raise SettingError(f"{folder} is not a folder")
    files = [read_file(path) for path in sorted(folder.glob(FILE_PATTERN))]
    if not files:
        raise SettingError(f"{folder} holds no records of ranks ({FILE_PATTERN})")
    newest = max(files, key=lambda file: file.started_s).job
    files = [file for file in files if file.job == newest]
    sizes = sorted({file.world_size for file in files})
    if len(sizes) > 1:
        raise SettingError(f"{folder} holds records of different jobs, of {' and '.join(map(str, sizes))} ranks")
    return sorted(files, key=lambda file: file.rank)


def read_file(path: Path) -> RankFile:
    """One rank's file.

    Raises:
        SettingError: It cannot be read or is something else.
    """
    try:
        content = read_regular(path)
    except OSError as error:
        raise SettingError(f"cannot read {path}: {error.strerror}") from None
    if not content.startswith(MAGIC) or len(content) != HEADER_BYTES + CAPACITY * SLOT.size:
        raise SettingError(f"{path} holds no records of this version")
    try:
        header = parse_json(content[len(MAGIC) : HEADER_BYTES].split(b"\n", 1)[0])
        fields = _fields(header)
        groups = _groups(header["groups"])
        return RankFile(**fields, calls=_calls(content[HEADER_BYTES:], groups), groups=groups)
    except (ValueError, KeyError, TypeError, IndexError):
        raise SettingError(f"{path} is damaged") from None


def _fields(header: dict[str, Any]) -> dict[str, Any]:
    """What describes the rank.

    Raises:
        ValueError, KeyError, TypeError: Something is missing, or is nothing that a rank writes.
    """
    world_size, error = _whole(header["world_size"], 1, _MOST_RANKS), header["error"]
    if header["state"] not in _STATES:
        raise ValueError(header["state"])
    return {
        "rank": _whole(header["rank"], 0, world_size - 1),
        "world_size": world_size,
        "job": _text(header.get("job", "")),  # files of earlier versions name none
        "started_s": _seconds(header["started_s"]),
        "host": _text(header["host"]),
        "pid": _whole(header["pid"], 0, 2**63),
        "state": header["state"],
        "error": None if error is None else _error(error),
    }


def _error(error: dict[str, Any]) -> dict[str, Any]:
    group, missing_rank, waited_s = error["group"], error["missing_rank"], error.get("waited_s")
    return {
        "kind": _text(error["kind"]),
        "text": _text(error["text"]),
        "time_ns": _whole(error["time_ns"], 0, 2**63),
        "group": None if group is None else _text(group),
        "missing_rank": None if missing_rank is None else _whole(missing_rank, 0, _MOST_RANKS),
        "waited_s": None if waited_s is None else _seconds(waited_s),
    }


def _whole(value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(value)
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise ValueError(value)
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _groups(described: list[Any]) -> tuple[Group, ...]:
    found, num_members = [], 0
    for name, spans in described:
        ranks = _ranks(spans)
        num_members += len(ranks)
        if num_members > _MOST_MEMBERS:
            raise ValueError(num_members)
        found.append(Group(_text(name), tuple(ranks)))
    return tuple(found)


def _ranks(spans: list[Any]) -> Sequence[int]:
    if spans and spans[0] == "range":
        return range(*(_whole(edge, 0, _MOST_RANKS) for edge in spans[1:]))
    return [_whole(rank, 0, _MOST_RANKS) for rank in spans]


def _calls(slots: bytes, groups: tuple[Group, ...]) -> tuple[Call, ...]:
    found = []
    for position, number, time_ns, group, compared, text in SLOT.iter_unpack(slots):
        if position:
            words = text.rstrip(b"\0").decode(errors="replace")
            found.append((position, Call(groups[group], number, time_ns, bool(compared), words)))
    return tuple(call for _, call in sorted(found, key=lambda item: item[0]))
