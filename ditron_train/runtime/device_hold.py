"""Keeps the device waiting in front of what is timed, until the host has launched all of it.

In training the host is ahead of the device. A timing in which it is not measures the host
(``docs/measurements/runtime.md``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch

_SHORTEST_US = 200.0
_LONGEST_US = 3000.0  # a first call compiles, and one that waits for the device takes what the hold takes
_CYCLES_PER_US = 1980  # of an H200; where the clock is slower, the device waits longer


class DeviceHold:
    """Has the device wait twice as long as the host takes for the launches of the slowest of several calls."""

    def __init__(self) -> None:
        self._launches_us: dict[Hashable, float] = {}

    @property
    def length_us(self) -> float:
        """How long the device waits, in us: as long for each call, since a device that rested is quicker
        afterwards."""
        return min(_LONGEST_US, max(_SHORTEST_US, 2 * max(self._launches_us.values(), default=0.0)))

    def wait(self) -> None:
        """Has the device wait, on the current stream."""
        torch.cuda._sleep(round(self.length_us * _CYCLES_PER_US))  # type: ignore[no-untyped-call]

    @contextmanager
    def launching(self, name: Hashable = None) -> Iterator[None]:
        """Around the launches of the call ``name``; the quickest of them counts, as the first one may compile."""
        start_s = time.perf_counter()
        yield
        launches_us = (time.perf_counter() - start_s) * 1e6
        self._launches_us[name] = min(launches_us, self._launches_us.get(name, math.inf))
