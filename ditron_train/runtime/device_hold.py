"""Keeps the device waiting in front of what is timed, until the host has launched all of it.

In training the host is ahead of the device. A timing in which it is not measures the host
(``docs/measurements/runtime.md``).

The clock that a GPU runs at and the energy that it takes, as its driver tells (NVML); nothing here sets one.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import cache

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


_LIBRARY = "libnvidia-ml.so.1"


_SM = 1  # NVML_CLOCK_SM


@cache
def _handle(index: int) -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """The library and its handle of torch's device; None where there is no such library, or it does not know it."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    handle, uuid = ctypes.c_void_p(), f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return None
    return library, handle


def _current() -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    return _handle(torch.cuda.current_device()) if torch.cuda.is_available() else None


def sm_clock_mhz() -> int | None:
    """The clock of the current device's multiprocessors in MHz at this moment; None where nothing tells it."""
    found, clock = _current(), ctypes.c_uint()
    if found is None:
        return None
    library, handle = found
    return None if library.nvmlDeviceGetClockInfo(handle, _SM, ctypes.byref(clock)) else clock.value


def energy_mj() -> int | None:
    """What the current device has taken since its driver was loaded, in millijoules; None where nothing tells it."""
    found, energy = _current(), ctypes.c_ulonglong()
    if found is None:
        return None
    library, handle = found
    return None if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(energy)) else energy.value
