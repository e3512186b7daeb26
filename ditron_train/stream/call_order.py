"""``CallOrder``: calls that share buffers run one after the other, on whichever streams they are made."""

from __future__ import annotations

import torch

from ditron_train.runtime.errors import NotSupportedError
from ditron_train.stream.events import current_stream


class CallOrder:
    """Orders calls on the device as the host makes them, at no cost if two follow each other on one stream.

    Calls that a CUDA graph captures are ordered among themselves: a capture may not wait for a stream outside of it,
    nor a stream for a capture. Replaying a graph is not a call: the user orders the replay with the calls before and
    after it.

    Args:
        device: The device of the streams. On the CPU calls have ended when they return, and nothing is done.

    Attributes:
        is_capturing: Whether the last call is captured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._index = device.index
        # Of the last call's stream: comparing it takes a third of the time that finding the stream does.
        self._handle = -1
        self._stream: torch.cuda.Stream | None = None
        self._last: torch.cuda.Stream | None = None
        self._last_captured: torch.cuda.Stream | None = None
        self.is_capturing = False

    def enter(self) -> torch.cuda.Stream | None:
        """Start of a call: makes the current stream wait for the last call's stream, and returns it; None on the CPU.

        Raises:
            NotSupportedError: Another GPU is the current one: kernels would be launched there.
        """
        if not self._is_cuda:
            return None
        cuda, index = torch._C, self._index
        if cuda._cuda_getDevice() != index:
            current = f"the current GPU is cuda:{torch.cuda.current_device()}, the op's is {self._device}"
            raise NotSupportedError(f"{current}: call torch.cuda.set_device({index}) on this thread")
        handle, is_capturing = cuda._cuda_getCurrentRawStream(index), cuda._cuda_isCurrentStreamCapturing()
        if handle != self._handle or is_capturing != self.is_capturing:
            self._handle, self._stream, self.is_capturing = handle, current_stream(self._device), is_capturing
            self._change_to(self._stream)
        return self._stream

    def is_here(self) -> bool:
        """Whether the current stream is the last call's, so that it needs no wait."""
        return self._last is None or self._last == current_stream(self._device)

    def _change_to(self, stream: torch.cuda.Stream) -> None:
        last = self._last_captured if self.is_capturing else self._last
        # An earlier capture's stream is outside of this one.
        if last is not None and last != stream and _is_captured(last) == self.is_capturing:
            stream.wait_stream(last)
        if self.is_capturing:
            self._last_captured = stream
        else:
            self._last = stream


def _is_captured(stream: torch.cuda.Stream) -> bool:
    """Whether what is enqueued on ``stream`` now goes into a CUDA graph."""
    with torch.cuda.stream(stream):
        return torch._C._cuda_isCurrentStreamCapturing()
