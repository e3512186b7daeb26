"""The clock that a GPU runs at and the energy that it takes, as its driver tells (NVML); nothing here sets one."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

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
