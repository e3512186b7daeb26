"""Driver calls that torch does not offer cheaply: asynchronous copies and stream memory operations.

From ``cuda.bindings`` (extra ``cuda``): about 2 us a call from Python, where ``Tensor.copy_`` costs 6-8 us.
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

from ditron_train.runtime.errors import DitronError, NotSupportedError

__all__ = ["has_driver", "memcpy_async", "memset_u32_async", "register_host_memory", "stream_memory_ops"]

_WAIT_GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ


@lru_cache(maxsize=None)
def _driver() -> ModuleType | None:
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    return driver


def has_driver() -> bool:
    """Whether ``cuda.bindings`` is installed."""
    return _driver() is not None


def _require() -> ModuleType:
    driver = _driver()
    if driver is None:
        raise NotSupportedError("copy-engine signals need cuda-bindings: pip install 'ditron_train[cuda]'")
    return driver


def _check(result: tuple) -> None:
    if int(result[0]) != 0:
        raise DitronError(f"CUDA driver call failed: {result[0]!r}")


def memcpy_async(destination: int, source: int, num_bytes: int, stream: int) -> None:
    """Copies between device addresses, peers' included, by a copy engine; stream-ordered, capturable."""
    _check(_require().cuMemcpyAsync(destination, source, num_bytes, stream))


def memset_u32_async(destination: int, value: int, count: int, stream: int) -> None:
    """Fills ``count`` 32-bit words; stream-ordered, capturable."""
    _check(_require().cuMemsetD32Async(destination, value & 0xFFFFFFFF, count, stream))


def register_host_memory(address: int, num_bytes: int) -> int | None:
    """Makes shared host memory addressable by streams of the current device; its device address, None if refused.

    It stays registered until the process ends.
    """
    driver = _driver()
    if driver is None:
        return None
    portable, device_map = 1, 2
    if int(driver.cuMemHostRegister(address, num_bytes, portable | device_map)[0]) != 0:
        return None
    status, mapped = driver.cuMemHostGetDevicePointer(address, 0)
    return int(mapped) if int(status) == 0 else None


def stream_memory_ops(stream: int, operations: list[tuple[str, int, int]]) -> None:
    """Enqueues ``("write" | "wait", address, value)`` on 32-bit words, in this order.

    A write is ordered behind everything before it in the stream and fenced at system scope; a wait holds the stream
    until ``word - value >= 0`` (cyclic). A wait has no timeout of its own: go through ``stream.waits``. One driver call each:
    filling in the parameters of a batched call takes longer from Python than the calls it saves.
    """
    driver = _require()
    for kind, address, value in operations:
        if kind == "write":
            _check(driver.cuStreamWriteValue32(stream, address, value & 0xFFFFFFFF, 0))
        else:
            _check(driver.cuStreamWaitValue32(stream, address, value & 0xFFFFFFFF, _WAIT_GREATER_OR_EQUAL))
