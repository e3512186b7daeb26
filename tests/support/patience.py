"""How long tests wait for what they start."""

from __future__ import annotations

import threading
import time

#: Bounds a hang, and nothing else: what works is done in a fraction of it, also when ten other jobs run.
HANG_S = 1500.0

_PAUSE_S = 0.05


class Lateness:
    """By how much a busy machine was late to run this process, of the time in a ``with`` block.

    A thread sleeps again and again; what it oversleeps is time in which this process was ready and not run. A test of
    a deadline takes that off what it measured.

    Attributes:
        seconds: Overslept so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._is_over.is_set():
            begun_s = time.monotonic()
            self._is_over.wait(_PAUSE_S)
            self.seconds += max(0.0, time.monotonic() - begun_s - _PAUSE_S)

    def __enter__(self) -> Lateness:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over.set()
        self._thread.join()
