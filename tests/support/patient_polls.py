"""Waits of the package poll the less often the longer they last: if ranks outnumber cores, a rank that looks every
tenth of a millisecond takes the core from the one that it waits for."""

from __future__ import annotations

import importlib
import threading
import time
from typing import Any

#: Modules that wait in sleeps of less than a millisecond.
_MODULES = ("lang.waits", "pp.channel", "pp.mailbox", "stream.waits")
_LONGEST_S, _GROWTH = 0.003, 1.25


class _Time(threading.local):
    """``time``, whose shortest sleeps grow as long as they follow one another, up to a quarter of the wait."""

    def __init__(self) -> None:
        self._ended_s, self._length_s = 0.0, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        """As ``time.sleep``, or longer."""
        is_next = time.monotonic() - self._ended_s < 0.0005
        self._length_s = min(self._length_s * _GROWTH, _LONGEST_S) if is_next else 0.0001
        time.sleep(max(seconds, self._length_s))
        self._ended_s = time.monotonic()


def install() -> None:
    """In this process, and in its forks."""
    patient = _Time()
    for name in _MODULES:
        vars(importlib.import_module(f"ditron_train.{name}"))["time"] = patient
