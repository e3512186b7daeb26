"""Events between streams, straight from the driver: 1.5 us to record one and wait for it, while ``torch.cuda.Event``
takes 5."""

from __future__ import annotations

from typing import Any

import torch

from ditron_train.stream import driver

_streams: dict[int, torch.cuda.Stream] = {}


def current_handle(device: torch.device) -> int:
    """The driver's handle of the current stream of a GPU; 0 on the CPU."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """``torch.cuda.current_stream``, the object kept by its handle."""
    handle = current_handle(device)
    stream = _streams.get(handle)
    if stream is None or stream.device != device:
        stream = _streams[handle] = torch.cuda.current_stream(device)
    return stream


def stream_of(handle: int, device: torch.device) -> torch.cuda.Stream:
    """The stream of a GPU whose handle in the driver is ``handle``.

    The default stream's handle is 0, for which ``torch.cuda.ExternalStream`` returns some stream of torch's pool: ops
    that are ordered by that stream have wrong results if the GPU is slow (``docs/measurements/runtime.md``).
    """
    return torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream(device)


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of a GPU that is not shared. torch has 32 streams of each priority, and hands them out again and again,
    also to NCCL.

    Raises:
        NotSupportedError: ``cuda-bindings`` is missing.
    """
    with torch.cuda.device(device):
        return torch.cuda.ExternalStream(driver.stream_create(), device)


class StreamEvent:
    """A point in a stream's work. The driver's event behind it is reused once this object is freed."""

    __slots__ = ("_event", "_pool")

    def __init__(self, event: Any, pool: list[Any]) -> None:
        self._event, self._pool = event, pool

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Makes ``stream`` wait for this point."""
        driver.stream_wait_event(stream.cuda_stream, self._event)

    def is_over(self) -> bool:
        """Whether the stream has reached this point (no wait)."""
        return driver.event_query(self._event)

    def __del__(self) -> None:
        self._pool.append(self._event)


def event_of(device: torch.device) -> Any:
    """A new driver event of a GPU, without timing.

    Raises:
        NotSupportedError: ``cuda-bindings`` is missing.
    """
    with torch.cuda.device(device):
        return driver.event_create()


class EventPool:
    """Events of one device."""

    def __init__(self) -> None:
        self._pool: list[Any] = []

    def record(self, stream: torch.cuda.Stream) -> StreamEvent:
        """The point at which ``stream`` has done what is enqueued on it now."""
        event = self._pool.pop() if self._pool else event_of(stream.device)
        driver.event_record(event, stream.cuda_stream)
        return StreamEvent(event, self._pool)
