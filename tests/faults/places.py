"""Stops this process at the n-th call of a function of this package, kernels in Triton's interpreter included."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, FrameType

import ditron_train

_ROOT = str(Path(ditron_train.__file__).parent) + "/"
_NOT_HIT = ("tools/", "cpu/")


class Places:
    """Counts calls; ``act(place)`` is done in the ``target``-th, and where that never comes at the end of the phase.

    Attributes:
        count: How many there were.
        is_done: Whether it was done.
    """

    def __init__(self, target: int | None = None, act: Callable[[str], None] = lambda place: None) -> None:
        self.count = 0
        self.is_done = False
        self._target, self._act = target, act
        self._known: dict[CodeType, str | None] = {}

    @contextmanager
    def watched(self, after: str | None = None) -> Iterator[None]:
        """Calls in here count; from the first call of a function of this package on that is called ``after``."""
        sys.setprofile(self._see if after is None else partial(self._wait_for, after))
        try:
            yield
        finally:
            sys.setprofile(None)
        if self._target is not None and not self.is_done:
            self._do("behind the last call of this phase")

    def _wait_for(self, name: str, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_name == name and _place_of(frame.f_code) is not None:
            sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        place = self._known.get(code, "")
        if place == "":
            place = self._known[code] = _place_of(code)
        if place is None:
            return
        self.count += 1
        if self.count == self._target:
            self._do(f"{place}:{frame.f_lineno}")

    def _do(self, place: str) -> None:
        sys.setprofile(None)
        self.is_done = True
        self._act(place)


def _place_of(code: CodeType) -> str | None:
    if not code.co_filename.startswith(_ROOT):
        return None
    name = code.co_filename.removeprefix(_ROOT)
    return None if name.startswith(_NOT_HIT) else f"{name} {code.co_name}"
