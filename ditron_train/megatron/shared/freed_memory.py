"""Keeps the host from running so far ahead of the GPU that freed memory piles up.

Autograd adds a gradient to its parameter on the stream on which the parameter's hooks were made: Megatron builds DDP
on a stream of its own. PyTorch's allocator then gives the gradient's memory back only when the GPU has passed that
addition (``Tensor.record_stream``). The further the host runs ahead, the more memory is freed but still in use, and
the more is reserved. Natively the host rarely gets ahead in such jobs, since it waits for the GPU in every microbatch
and every MoE layer. These waits are gone on the fused path, so it waits here, but only until little freed memory is
in use.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from ditron_train.runtime.derivatives import refuse_second_derivatives
from ditron_train.runtime.device import is_capturing
from ditron_train.runtime.outside_compile import outside_compile

_MOST_FREED_BYTES, _POLL_S = 256 << 20, 50e-6


def await_freed_memory(device: torch.device) -> None:
    """Waits until PyTorch's allocator holds at most 256 MiB that was freed but that the GPU may still use, or until
    the current stream is idle. Without a GPU, and while a CUDA graph is captured, it does nothing."""
    while device.type == "cuda" and not is_capturing(device):
        torch.empty(1, device=device)  # an allocation has the allocator look at what the GPU has passed
        bytes_of: Any = torch.cuda.memory_stats_as_nested_dict(device)
        freed = bytes_of["active_bytes"]["all"]["current"] - bytes_of["allocated_bytes"]["all"]["current"]
        if freed <= _MOST_FREED_BYTES or torch.cuda.current_stream(device).query():
            return
        time.sleep(_POLL_S)


@outside_compile
class _AwaitFreedMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        refuse_second_derivatives("awaiting_freed_memory")
        await_freed_memory(grad.device)
        return grad


@outside_compile
def awaiting_freed_memory(x: torch.Tensor) -> torch.Tensor:
    """``x``, whose backward first calls ``await_freed_memory``: for the input of layers with many weights, whose
    gradients have been added up to their parameters by then."""
    awaiting: torch.Tensor = _AwaitFreedMemory.apply(x)
    return awaiting
