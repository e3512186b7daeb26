"""Decides for each call of a linear layer whether it runs as an overlapped op or natively.

The answer depends on what all ranks of the group see alike (shapes, types, options), so the ranks agree without talking;
where they cannot know (the bits of an unmeasured shape, memory that has to be had together) they decide together, once
per shape. Everything that is not covered runs natively: same bits, one log line a reason on rank 0.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch
import torch.distributed as dist

from ditron_train.gemm.bits import known_bits, probe_bits
from ditron_train.runtime.device import is_interpreter, kernel_target
from ditron_train.runtime.errors import ArenaError, NotSupportedError
from ditron_train.runtime.logs import log_once
from ditron_train.tp.context import TPContext, get_tp_context

__all__ = ["Kind", "forget_routes", "log_native", "route"]

Kind = Literal["column", "row"]

_GPU_DTYPES = (torch.bfloat16, torch.float16)
_CPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: What was decided: a context (run ours) or None (run natively), by everything that the decision depends on.
_routes: dict[tuple[Any, ...], TPContext | None] = {}


def forget_routes() -> None:
    """Decide anew from now on, and let go of the contexts."""
    _routes.clear()


def log_native(name: str, reason: str) -> None:
    """One line, the first time that `name` runs natively for `reason`."""
    log_once(f"native {name} {reason}", f"{name}: native, {reason}", level=logging.INFO)


def route(
    kind: Kind, x: torch.Tensor, weight: torch.Tensor, *, group: dist.ProcessGroup, sequence_parallel: bool
) -> TPContext | None:
    """Returns the context to run this call with, or None for the native path.

    Args:
        kind: ``column`` (gather, then GEMM) or ``row`` (GEMM, then reduce-scatter).
        x: Input of the layer on this rank, ``[s, b, K]`` or ``[tokens, K]``: of ``column`` the local part of the sequence.
        weight: This rank's ``[N, K]``.
        group: Tensor parallel group.
        sequence_parallel: Whether activations outside the layer are split along the sequence.
    """
    autocast = torch.is_autocast_enabled(x.device.type)
    key = (kind, tuple(x.shape), weight.shape, weight.stride(), x.dtype, weight.dtype, x.device, group, sequence_parallel, autocast)
    if key in _routes:
        return _routes[key]
    if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        log_native(f"tp {kind}", "a shape was first seen while a CUDA graph was being captured (run a warm-up step before)")
        return None
    reason = _why_not(kind, x, weight, group, sequence_parallel, autocast)
    context = None
    if reason is None:
        try:
            context = get_tp_context(group, x.device)
            context.reserve(kind, x, weight)
        except (ArenaError, NotSupportedError) as error:
            context, reason = None, str(error)
    if context is None:
        log_native(f"tp {kind}", str(reason))
    _routes[key] = context
    return context


def _why_not(
    kind: Kind, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, sequence_parallel: bool, autocast: bool
) -> str | None:
    if not sequence_parallel:
        return "sequence parallelism is off"
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return "the tensor parallel group has one rank"
    if autocast:
        return "autocast is on"
    if x.dtype != weight.dtype:
        return f"the input is {x.dtype} and the weight {weight.dtype}"
    reason = _why_not_device(x)
    if reason is not None:
        return reason
    if x.dim() < 2 or 0 in x.shape or 0 in weight.shape or x.shape[-1] != weight.shape[1]:
        return f"shapes {tuple(x.shape)} and {tuple(weight.shape)} are not covered"
    if kind == "row" and x.shape[0] % world_size:
        return f"the sequence of {x.shape[0]} does not divide by {world_size}"
    if x.device.type == "cuda" and not _bits_are_equal(kind, x, weight, group, world_size):
        return f"at {tuple(x.shape)} x {tuple(weight.shape)} the bits of cuBLAS are other than those of the tile GEMM"
    return None


def _why_not_device(x: torch.Tensor) -> str | None:
    if x.device.type == "cpu":
        if not is_interpreter():
            return "the tensors are on the CPU and Triton's interpreter is off"
        return None if x.dtype in _CPU_DTYPES else f"{x.dtype} is not covered"
    try:
        kernel_target(x.device)
    except NotSupportedError as error:
        return str(error)
    return None if x.dtype in _GPU_DTYPES else f"{x.dtype} is not covered"


def _bits_are_equal(kind: Kind, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, world_size: int) -> bool:
    """Whether forward and dgrad have cuBLAS's bits on every rank of `group`; a collective where measurements do not say."""
    n, k = weight.shape
    m = x.shape[:-1].numel() * (world_size if kind == "column" else 1)
    target = kernel_target(x.device)
    products = ((m, n, k, "nt"), (m, k, n, "nn"))
    known = [known_bits(*product, x.dtype, target) for product in products]
    if weight.stride(1) != 1 or weight.stride(0) != k:
        known = [None, None]
    if all(answer is not None for answer in known):
        return all(known)
    equal = all(
        probe_bits(*product, x.dtype, x.device, b_row_stride=weight.stride(0) if weight.stride(1) == 1 else None)
        for product in products
    )
    agreed = torch.tensor([int(equal)], dtype=torch.int32, device=x.device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
    return bool(agreed.item())
