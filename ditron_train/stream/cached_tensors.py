"""Cached tensors: one that a stream makes once for users on any stream, and small tables by their values."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from ditron_train.runtime.device import is_capturing
from ditron_train.stream.events import current_stream


class CachedTensor:
    """A tensor that the current stream makes once, for users on any stream.

    ``get`` makes a user's stream wait for what made the tensor, and records that stream with the allocator, so that
    the cache may drop the tensor at any time. Neither is needed in a CUDA graph's capture, which begins after the
    tensor was made.

    Args:
        tensor: The tensor; the work that writes it has been enqueued on the current stream.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._made_on = current_stream(tensor.device) if tensor.device.type == "cuda" else None
        self._made: Any = None if self._made_on is None else self._made_on.record_event()

    def get(self) -> torch.Tensor:
        """The tensor, for later work on the current stream."""
        if self._made_on is not None and not is_capturing(self._tensor.device):
            stream = current_stream(self._tensor.device)
            if stream != self._made_on:
                stream.wait_event(self._made)
                self._tensor.record_stream(stream)
        return self._tensor


#: Tables of each kind that no captured graph reads: a layer has some four; buffers of sharded gradients move at each
#: step.
_MOST_TABLES = 4096


class DeviceTables:
    """Tables of one type by their values; launches hold their addresses only.

    A table that was used during a capture is kept for good, since replays read it. Of the others the most recently
    used are kept, and the memory of a dropped one is reused only after the streams that it was used on.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._recent: OrderedDict[tuple[tuple[int, ...], torch.device], tuple[torch.Tensor, Any]] = OrderedDict()
        self._captured: dict[tuple[tuple[int, ...], torch.device], torch.Tensor] = {}

    def __call__(self, values: tuple[int, ...], device: torch.device) -> torch.Tensor:
        key = values, device
        stream = current_stream(device) if device.type == "cuda" else None
        known = self._recent.get(key)
        if known is not None and known[1] == stream and len(self._recent) <= _MOST_TABLES // 2:
            if not is_capturing(device):
                return known[0]
        if key in self._captured:
            return self._captured[key]
        table, used_on = self._recent.pop(key, (None, stream))
        if table is None:
            table = torch.tensor(values, dtype=self._dtype, device=device)
        if is_capturing(device):
            self._captured[key] = table
            return table
        if stream is not None and used_on != stream:
            table.record_stream(stream)
        self._recent[key] = table, stream
        if len(self._recent) > _MOST_TABLES:
            self._recent.popitem(last=False)
        return table


#: Of numbers, and of addresses.
int32_table, int64_table = DeviceTables(torch.int32), DeviceTables(torch.int64)
