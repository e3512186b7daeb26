"""Reads the records that ``runtime.records`` left behind."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.flight_recorder import CAPACITY, FILE_PATTERN, HEADER_BYTES, MAGIC, SLOT

__all__ = ["Call", "Group", "RankFile", "read_file", "read_folder"]


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


def read_folder(folder: Path) -> list[RankFile]:
    """All ranks' files in ``folder``, in the order of ranks.

    Raises:
        SettingError: No folder, no such files in it, a file that cannot be read, or files of different jobs.
    """
    if not folder.is_dir():
        raise SettingError(f"{folder} is not a folder")
    files = [read_file(path) for path in sorted(folder.glob(FILE_PATTERN))]
    if not files:
        raise SettingError(f"{folder} holds no records of ranks ({FILE_PATTERN})")
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
        content = path.read_bytes()
    except OSError as error:
        raise SettingError(f"cannot read {path}: {error.strerror}") from None
    if not content.startswith(MAGIC) or len(content) != HEADER_BYTES + CAPACITY * SLOT.size:
        raise SettingError(f"{path} holds no records of this version")
    try:
        header = json.loads(content[len(MAGIC) :].split(b"\n", 1)[0])
        groups = tuple(Group(name, _ranks(spans)) for name, spans in header["groups"])
        return RankFile(
            **{name: header[name] for name in ("rank", "world_size", "host", "pid", "state", "error")},
            calls=_calls(content[HEADER_BYTES:], groups),
            groups=groups,
        )
    except (ValueError, KeyError, TypeError, IndexError):
        raise SettingError(f"{path} is damaged") from None


def _ranks(spans: list[Any]) -> tuple[int, ...]:
    return tuple(range(*spans[1:])) if spans and spans[0] == "range" else tuple(spans)


def _calls(slots: bytes, groups: tuple[Group, ...]) -> tuple[Call, ...]:
    found = []
    for position, number, time_ns, group, compared, text in SLOT.iter_unpack(slots):
        if position:
            words = text.rstrip(b"\0").decode(errors="replace")
            found.append((position, Call(groups[group], number, time_ns, bool(compared), words)))
    return tuple(call for _, call in sorted(found, key=lambda item: item[0]))
