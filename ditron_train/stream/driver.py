"""Driver calls that torch does not offer cheaply: asynchronous copies and stream memory operations.

From ``cuda.bindings`` (extra ``cuda``): a copy takes 2.7 us of the host's time, while ``Tensor.copy_`` takes 6-8 us.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

from ditron_train.runtime.errors import DitronError, NotSupportedError
from ditron_train.runtime.versions import pip_command

_WAIT_GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ
_EVENT_DISABLE_TIMING = 2
_STREAM_NON_BLOCKING = 1  # not ordered with the legacy default stream
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
_USE_NODE_PRIORITY = 8  # kernels of a graph keep the priority of the stream that they were captured from
_OPERATIONS = {"wait": 1, "write": 2}  # CU_STREAM_MEM_OP_{WAIT,WRITE}_VALUE_32
_PARAMETERS = struct.Struct("<IIQQIIQQ")  # CUstreamBatchMemOpParams: operation, -, address, value, flags, -, alias, -


@cache
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
        raise NotSupportedError(f"copy-engine signals need cuda-bindings: {pip_command('cuda-bindings')}")
    return driver


def _check(result: tuple) -> None:
    if result[0]:  # 0: success
        raise DitronError(f"CUDA driver call failed: {result[0]!r}")


def call_beside_captures() -> None:
    """From now on calls of this thread neither break a CUDA graph's capture on another thread nor are refused because
    of it.

    In CUDA's default mode ("global") a call that may be unsafe in a capture does both, whichever thread makes it."""
    driver = _require()
    _check(driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))


def memcpy_async(destination: int, source: int, num_bytes: int, stream: int) -> None:
    """Copies between device addresses, peers' included, by a copy engine; stream-ordered, capturable."""
    _check(_require().cuMemcpyAsync(destination, source, num_bytes, stream))


def memcpys_async(copies: Iterable[tuple[int, int, int]], stream: int) -> None:
    """``memcpy_async`` of several (destination, source, bytes), in this order."""
    copy = _require().cuMemcpyAsync
    for destination, source, num_bytes in copies:
        _check(copy(destination, source, num_bytes, stream))


def memcpy_2d_async(
    destination: int, destination_pitch: int, source: int, source_pitch: int, num_bytes: int, count: int, stream: int
) -> None:
    """Copies ``count`` pieces of ``num_bytes`` in one command, piece i at ``i * pitch`` of each side; otherwise as
    ``memcpy_async``."""
    driver = _require()
    copy = driver.CUDA_MEMCPY2D()
    copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.dstDevice, copy.dstPitch = destination, destination_pitch
    copy.srcDevice, copy.srcPitch = source, source_pitch
    copy.WidthInBytes, copy.Height = num_bytes, count
    _check(driver.cuMemcpy2DAsync(copy, stream))


def map_side_by_side(addresses: Sequence[int], num_bytes: int) -> tuple[int, int, int]:
    """Maps the allocations that contain the addresses a second time, one after another, for the current device.
    Returns (where the first one begins, the size of each, the address's offset in each). An allocation that is named
    several times is mapped as often.

    The memory is not freed before ``unmap``. ``num_bytes``: bytes of each that are used, from the address on.

    Raises:
        DitronError: The addresses are not at the same offset of equally large allocations that can be mapped
            (``cuMemCreate``).
    """
    driver = _require()
    places = set()
    for address in set(addresses):
        result = driver.cuMemGetAddressRange(address)
        _check(result)
        places.add((address - int(result[1]), int(result[2])))
    if len(places) > 1:
        raise DitronError(f"addresses are at different places of their allocations: {sorted(places)}")
    ((offset, size),) = places
    if offset + num_bytes > size:
        raise DitronError(f"{num_bytes} bytes are more than one mapping: {size - offset}")
    reserved = driver.cuMemAddressReserve(len(addresses) * size, 0, 0, 0)
    _check(reserved)
    base = int(reserved[1])
    num_mapped = 0
    try:
        for address in addresses:
            handle = driver.cuMemRetainAllocationHandle(address)
            _check(handle)
            mapped = driver.cuMemMap(base + num_mapped * size, size, 0, handle[1], 0)
            driver.cuMemRelease(handle[1])  # the mapping keeps the memory
            _check(mapped)
            num_mapped += 1
        _allow_access(base, len(addresses) * size)
    except BaseException:
        if num_mapped:
            driver.cuMemUnmap(base, num_mapped * size)
        driver.cuMemAddressFree(base, len(addresses) * size)
        raise
    return base, size, offset


def _allow_access(base: int, num_bytes: int) -> None:
    driver = _require()
    device = driver.cuCtxGetDevice()
    _check(device)
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = int(device[1])
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    _check(driver.cuMemSetAccess(base, num_bytes, [access], 1))


def unmap(base: int, num_bytes: int) -> None:
    """Undoes ``map_side_by_side``; nothing may use the mapping any more."""
    driver = _require()
    _check(driver.cuMemUnmap(base, num_bytes))
    _check(driver.cuMemAddressFree(base, num_bytes))


def memset_u32_async(destination: int, value: int, count: int, stream: int) -> None:
    """Fills ``count`` 32-bit words; stream-ordered, capturable."""
    _check(_require().cuMemsetD32Async(destination, value & 0xFFFFFFFF, count, stream))


def register_host_memory(address: int, num_bytes: int) -> int | None:
    """Makes shared host memory addressable by streams of the current device. Returns its device address, None if
    refused.

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


def event_create() -> Any:
    """A new event of the current device, without timing."""
    result = _require().cuEventCreate(_EVENT_DISABLE_TIMING)
    _check(result)
    return result[1]


def event_record(event: Any, stream: int) -> None:
    """Records the event on the stream."""
    _check(_require().cuEventRecord(event, stream))


def event_query(event: Any) -> bool:
    """Whether the event has completed."""
    driver = _require()
    result = driver.cuEventQuery(event)
    if result[0] == driver.CUresult.CUDA_ERROR_NOT_READY:
        return False
    _check(result)
    return True


def stream_wait_event(stream: int, event: Any) -> None:
    """Makes the stream wait for the event."""
    _check(_require().cuStreamWaitEvent(stream, event, 0))


def graph_record(stream: int, enqueue: Callable[[], object]) -> Any:
    """Records what ``enqueue`` puts onto the stream, instead of running it, and returns a graph for ``graph_launch``.
    If ``enqueue`` raises, the capture ends and nothing is kept."""
    driver = _require()
    _check(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    is_whole = False
    try:
        enqueue()
        is_whole = True
    finally:
        captured = driver.cuStreamEndCapture(stream)
        if not (is_whole or captured[0]):
            driver.cuGraphDestroy(captured[1])
    _check(captured)
    instantiated = driver.cuGraphInstantiate(captured[1], _USE_NODE_PRIORITY)
    driver.cuGraphDestroy(captured[1])
    _check(instantiated)
    return instantiated[1]


def graph_upload(graph: Any, stream: int) -> None:
    """Uploads the graph to the device, after what the stream has, so that the first launch takes no longer than later
    ones."""
    _check(_require().cuGraphUpload(graph, stream))


def graph_launch(graph: Any, stream: int) -> None:
    """Launches the graph on the stream."""
    _check(_require().cuGraphLaunch(graph, stream))


def graph_destroy(graph: Any) -> None:
    """Frees the graph; if it is running, after it has ended."""
    _require().cuGraphExecDestroy(graph)


@cache
def _pointer_attribute() -> Any:
    """``cuPointerGetAttribute`` of the driver's library, which takes 1 us; through ``cuda.bindings`` it takes several,
    for the conversion of its result. None if the library is missing."""
    try:
        function = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint64]
    return function


def allocation_of(address: int) -> int | None:
    """The driver's number, never used twice, of the allocation that contains the address; None if the driver does not
    know it."""
    ask, number = _pointer_attribute(), ctypes.c_uint64()
    return None if ask is None or ask(ctypes.byref(number), _BUFFER_ID, address) else number.value


def stream_create() -> int:
    """Handle of a new stream of the current device (``stream.events.own_stream``)."""
    result = _require().cuStreamCreate(_STREAM_NON_BLOCKING)
    _check(result)
    return int(result[1])


@cache
def _batch_function() -> Any:
    """``cuStreamBatchMemOp`` of the driver's library: filling in the parameters through ``cuda.bindings`` would take
    longer than the calls that a batch saves. None if the library lacks it.
    """
    try:
        function = ctypes.CDLL("libcuda.so.1").cuStreamBatchMemOp_v2
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_char_p, ctypes.c_uint]
    return function


def stream_memory_ops(stream: int, operations: list[tuple[str, int, int]]) -> None:
    """Enqueues ``("write" | "wait", address, value)`` on 32-bit words, in this order.

    A write comes after everything before it in the stream and is fenced at system scope; a wait blocks the stream
    until ``word - value >= 0`` (cyclic). A wait has no timeout of its own, so use ``stream.waits``. Several operations
    are one call: write, wait, write took 4.8 us of device time instead of 8.1 (H200).
    """
    driver = _require()
    batch = _batch_function() if len(operations) > 1 else None
    if batch is not None:
        parameters = b"".join(
            _PARAMETERS.pack(_OPERATIONS[kind], 0, address, value & 0xFFFFFFFF, 0, 0, 0, 0)
            for kind, address, value in operations
        )
        _check((batch(stream, len(operations), parameters, 0),))
        return
    for kind, address, value in operations:
        if kind == "write":
            _check(driver.cuStreamWriteValue32(stream, address, value & 0xFFFFFFFF, 0))
        else:
            _check(driver.cuStreamWaitValue32(stream, address, value & 0xFFFFFFFF, _WAIT_GREATER_OR_EQUAL))
