"""``CachedTensor``: a tensor that one stream makes once and users on any stream read."""

from __future__ import annotations

from typing import Any

import torch

from ditron_train.runtime.device import is_capturing
from ditron_train.stream.events import current_stream


class CachedTensor:
    """A tensor that the current stream makes once, for users on any stream.

    ``get`` orders a user's stream behind what made the tensor, and records that stream with the allocator, so that the
    cache may drop the tensor at any time. Neither is needed in a CUDA graph's capture, which begins behind all that is
    there.

    Args:
        tensor: What the current stream has been given to make.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._made_on = current_stream(tensor.device) if tensor.device.type == "cuda" else None
        self._made: Any = None if self._made_on is None else self._made_on.record_event()

    def get(self) -> torch.Tensor:
        """The tensor, for what the current stream does from now on."""
        if self._made_on is not None and not is_capturing(self._tensor.device):
            stream = current_stream(self._tensor.device)
            if stream != self._made_on:
                stream.wait_event(self._made)
                self._tensor.record_stream(stream)
        return self._tensor
