"""Every error that this package raises on purpose.

A user's mistake raises the same class with the same words on every rank of the group, before anything is signalled
if one rank can see it alone, and with the result discarded if only the group can see it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

__all__ = [
    "ArenaError",
    "DitronError",
    "MismatchError",
    "NotSupportedError",
    "PeerTimeoutError",
    "SettingError",
    "VersionError",
    "say_error",
    "user_errors",
]


class DitronError(RuntimeError):
    """Base of all errors of ``ditron_train``."""


class SettingError(DitronError, ValueError):
    """A ``DITRON_*`` variable or a ``--ditron`` argument holds a value that is not one of those allowed."""


class VersionError(DitronError):
    """A library is outside the range that this version of the package supports."""


class NotSupportedError(DitronError, ValueError):
    """An op does not support the shape, dtype, device, layout or group of a call."""


class MismatchError(DitronError):
    """The ranks of a group called the same op with different shapes, dtypes or options; no result may be used."""


class ArenaError(DitronError, MemoryError):
    """Symmetric memory could not be had: too large for its cap, for the device, or the peers cannot reach each
    other."""


@dataclass(kw_only=True, eq=False, repr=False)
class PeerTimeoutError(DitronError):
    """A peer did not signal within the deadline.

    Attributes:
        op: Name of the op that waited.
        group: Name of its process group.
        waiting_rank: Group rank that waited.
        missing_rank: Group rank whose signal did not come.
        chunk: Index of the chunk (or tile) that was waited for.
        expected_epoch: Epoch that was waited for.
        seen_epoch: Epoch that the signal held when the deadline passed.
    """

    op: str
    group: str
    waiting_rank: int
    missing_rank: int
    chunk: int
    expected_epoch: int
    seen_epoch: int
    timeout_s: float

    def __post_init__(self) -> None:
        super().__init__(
            f"{self.op} on group {self.group}: rank {self.waiting_rank} waited {self.timeout_s:g} s for rank "
            f"{self.missing_rank}, chunk {self.chunk}: expected epoch {self.expected_epoch}, saw {self.seen_epoch}. "
            "The peer is dead, stalled or never called this op; the result of this call must not be used. "
            "DITRON_TIMEOUT_S sets the deadline."
        )

    # Keyword-only constructor: spell it out so that the error crosses process borders.
    def __reduce__(self) -> tuple[Any, ...]:
        return partial(PeerTimeoutError, **{field.name: getattr(self, field.name) for field in fields(self)}), ()


def say_error(error: object) -> None:
    """Writes one line on standard error, once on each machine: all ranks that torchrun started have the same error."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stderr.write(f"error: {error}\n")


@contextmanager
def user_errors(*, exits: bool = True) -> Iterator[None]:
    """For a script's ``main``: a user's mistake ends it with one line and exit status 2, not with a traceback.

    Args:
        exits: Whether ``SystemExit`` with a sentence is such a mistake, too. Not if a script of the user runs inside,
            which ends as it likes.
    """
    try:
        yield
    except (SettingError, VersionError) as error:
        say_error(error)
        raise SystemExit(2) from None
    except SystemExit as stopped:
        if not exits or not isinstance(stopped.code, str):
            raise
        say_error(stopped.code.removeprefix("error: "))
        raise SystemExit(2) from None
