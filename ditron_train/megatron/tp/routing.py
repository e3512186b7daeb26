"""Decides for each call of a linear layer whether it runs as an overlapped op or natively.

The answer depends on what all ranks of the group see alike (shapes, types, options), so the ranks agree without
talking. What they cannot know beforehand is tried once per shape, all ranks together (`ditron_train.policy`), on the
call's own tensors and on data that shows the order of sums: whether the symmetric memory can be had, whether all
results have native's bits, and whether it is faster. Everything that is not covered runs natively: same bits, one log
line a reason on rank 0.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import (
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron.core.tensor_parallel.mappings import reduce_scatter_to_sequence_parallel_region
from megatron.core.transformer.custom_layers.batch_invariant_kernels import is_batch_invariant_mode_enabled

from ditron_train.gemm.revealing import HIDDEN_TERMS, revealing_matrix
from ditron_train.megatron.shared.te_products import product_pairs
from ditron_train.policy import decide
from ditron_train.runtime.device import is_capturing, is_interpreter, kernel_target
from ditron_train.runtime.errors import ArenaError, NotSupportedError
from ditron_train.runtime.groups import GroupCache
from ditron_train.runtime.logs import log_once
from ditron_train.runtime.settings import get_settings
from ditron_train.tp.choices import prefers_native
from ditron_train.tp.context import TPContext, get_context
from ditron_train.tp.functions import column_linear, row_linear

__all__ = [
    "Kind",
    "forget_routes",
    "has_room",
    "log_native",
    "native_column",
    "native_row",
    "revealing_like",
    "route",
    "swap_routes",
    "why_hidden",
]

Kind = Literal["column", "row"]

_Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_GPU_DTYPES = (torch.bfloat16, torch.float16)
_CPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_MAX_ROUTES = 256  # sequences of ever new lengths would be tried for ever

#: What was decided: a context (run ours) or None (run natively), by everything that the decision depends on.
_routes: dict[tuple[Any, ...], TPContext | None] = GroupCache()
#: Groups that know as many shapes as they may.
_full: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def forget_routes() -> None:
    """Decide anew from now on, and let go of the contexts."""
    _routes.clear()
    _full.clear()


def swap_routes(routes: dict[tuple[Any, ...], TPContext | None]) -> dict[tuple[Any, ...], TPContext | None]:
    """Puts other decisions in place and returns those that were: to compare policies in one process."""
    global _routes
    previous, _routes = _routes, routes
    _full.clear()
    return previous


def log_native(name: str, reason: str) -> None:
    """One line, the first time that `name` runs natively for `reason`."""
    log_once(f"native {name} {reason}", f"{name}: native, {reason}")


def route(
    kind: Kind,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    sequence_parallel: bool,
    is_frozen: bool = False,
) -> TPContext | None:
    """Returns the context to run this call with, or None for the native path.

    Args:
        kind: ``column`` (gather, then GEMM) or ``row`` (GEMM, then reduce-scatter).
        x: Input of the layer on this rank, ``[s, b, K]`` or ``[tokens, K]``: of ``column`` the local part of the
        sequence. weight: This rank's ``[N, K]``.
        group: Tensor parallel group.
        sequence_parallel: Whether activations outside the layer are split along the sequence.
        is_frozen: Whether the weight needs no gradient: dgrad of ``column``, which nothing hides then, is another
            kernel.
    """
    is_frozen = is_frozen and kind == "column"
    autocast = torch.is_autocast_enabled(x.device.type)
    key = (
        kind, tuple(x.shape), weight.shape, weight.stride(), x.dtype, weight.dtype, x.device, group, sequence_parallel, autocast,
        is_batch_invariant_mode_enabled(), torch.are_deterministic_algorithms_enabled(), is_frozen,
    )  # fmt: skip
    if key in _routes:
        return _routes[key]
    if is_capturing(x.device):
        log_native(
            f"tp {kind}", "a shape was first seen while a CUDA graph was being captured (run a warm-up step before)"
        )
        return None
    if not has_room(_routes, _full, group, _MAX_ROUTES):
        log_native(
            f"tp {kind}", f"more than {_MAX_ROUTES} shapes: each has to be tried, which would cost more than it gives"
        )
        return None
    reason = _why_not(kind, x, weight, group, sequence_parallel, autocast)
    context = None
    if reason is None:
        try:
            context = get_context(group, x.device)
            reason = _try(kind, x, weight, context, is_frozen)
        except (ArenaError, NotSupportedError) as error:  # raised by every rank alike
            reason = str(error)
    if reason is not None:
        log_native(f"tp {kind}", reason)
        context = None
    _routes[key] = context
    return context


def has_room(
    routes: Mapping[tuple[Any, ...], Any],
    full: weakref.WeakSet[dist.ProcessGroup],
    group: dist.ProcessGroup,
    most: int,
) -> bool:
    """Whether another shape of ``group`` may be tried beside those that ``routes`` knows.

    The group's own are counted, which all of its ranks know alike: some of them may be in other groups, too. ``full``:
    groups for which that was no; from then on it is asked at every call.
    """
    if group in full:
        return False
    if sum(any(part is group for part in key) for key in routes) < most:
        return True
    full.add(group)
    return False


def _why_not(
    kind: Kind,
    x: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup,
    sequence_parallel: bool,
    autocast: bool,
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
    rows_of_a_rank = x.shape[:-1].numel() // (world_size if kind == "row" else 1)
    return why_hidden(x.device, rows_of_a_rank, *weight.shape)


def why_hidden(device: torch.device, rows_of_a_rank: int, *features: int) -> str | None:
    """Why the bits of a linear layer cannot be compared, or None: the partners of wgrad's sums are among the rows of
    one rank, those of forward's and dgrad's among the features."""
    if device.type == "cuda" and min(rows_of_a_rank, *features) <= HIDDEN_TERMS:
        return f"the order of sums of at most {HIDDEN_TERMS} features, or tokens a rank, cannot be compared"
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


def revealing_like(
    tensor: torch.Tensor, seed: int, signed: Literal["rows", "columns"], row_block: int | None = None
) -> torch.Tensor:
    """Values whose sums show their order, in the layout of `tensor`; the user's random state does not move."""
    shape = (tensor.shape[:-1].numel(), tensor.shape[-1])
    values = revealing_matrix(shape, tensor.dtype, tensor.device, seed=seed, signed=signed, row_block=row_block)
    return torch.empty_like(tensor).copy_(values.view(tensor.shape))


def _try(kind: Kind, x: torch.Tensor, weight: torch.Tensor, context: TPContext, is_frozen: bool) -> str | None:
    """Asks the policy, with forward and all gradients that there are: on the job's own tensors, which are timed, too,
    and on data that shows the order of sums. Returns why this shape stays native, or None.

    Memory is had and kernels are compiled by it, so that nothing of that can fail between a forward and its backward.
    """
    output_rows = x.shape[0] * context.world_size if kind == "column" else x.shape[0] // context.world_size
    with torch.inference_mode(False):
        empty_y = x.new_empty(output_rows, *x.shape[1:-1], weight.shape[0])
        block = min(x.shape[0], output_rows) * x.shape[1:-1].numel()  # rows of a rank
        grad_y = revealing_like(empty_y, 201 + context.rank, "columns", block)
        given = tuple(tensor.clone() if tensor.is_inference() else tensor for tensor in (x, weight))
        revealing = (
            revealing_like(x, 1 + context.rank, "rows", block),
            revealing_like(weight, 101 + context.rank, "columns", weight.shape[0]),
        )

    def run(linear: _Linear, data: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        leaves = [tensor.detach().requires_grad_(needs) for tensor, needs in zip(data, (True, not is_frozen))]
        with torch.inference_mode(False), torch.enable_grad():
            y = linear(*leaves)
            y.backward(grad_y)
        return [y.detach(), *(leaf.grad for leaf in leaves if leaf.requires_grad)]

    native = functools.partial(native_row, group=context.group)
    if kind == "column":
        native = functools.partial(native_column, group=context.group, is_frozen=is_frozen)
    ours = functools.partial(column_linear if kind == "column" else row_linear, context=context)
    if get_settings().policy == "strict" and _table_prefers_native(kind, x, weight, context):
        return f"at {tuple(x.shape)} x {tuple(weight.shape)} by the tuning table: nothing that was tried is faster"
    rows = x.shape[:-1].numel()  # however they are split into sequences: verify's plan holds for a job
    key = f"tp {kind} {rows}x{x.shape[-1]} {'x'.join(map(str, weight.shape))} {str(x.dtype).removeprefix('torch.')}"
    key += ", frozen" * is_frozen
    on_given, on_revealing = (
        tuple(functools.partial(run, linear, data) for linear in (native, ours)) for data in (given, revealing)
    )
    products = product_pairs(rows * (context.world_size if kind == "column" else 1), weight)
    decision = decide(
        key, *on_given, group=context.group, device=x.device, sums=x.dtype, also=[on_revealing, *products]
    )
    context.synchronize()
    if decision.use_ditron:
        return None
    return f"at {tuple(x.shape)} x {tuple(weight.shape)} {decision.reason}"


def _table_prefers_native(kind: Kind, x: torch.Tensor, weight: torch.Tensor, context: TPContext) -> bool:
    """Whether all GEMMs that the layer overlaps were quicker natively: of row layers alone, since in backward the
    column layer overlaps more than its table says."""
    if kind == "column":
        return False
    rows, (n, k) = x.shape[:-1].numel(), weight.shape
    seen = (x.dtype, context.world_size, context.machine.device)
    return prefers_native("gemm_rs", rows, n, k, "nt", *seen) and prefers_native("ag_gemm", rows, k, n, "nn", *seen)


def native_column(
    x: torch.Tensor, weight: torch.Tensor, *, group: dist.ProcessGroup, is_frozen: bool = False
) -> torch.Tensor:
    """megatron-core's gather, GEMM, and their overlapped backward; of a weight that is frozen without any part of its
    gradient."""
    return _native_linear(x, weight, group, sequence_parallel=True, is_frozen=is_frozen)


def native_row(x: torch.Tensor, weight: torch.Tensor, *, group: dist.ProcessGroup) -> torch.Tensor:
    """megatron-core's GEMM and reduce-scatter, and their backward."""
    partial = _native_linear(x, weight, group, sequence_parallel=False)
    return reduce_scatter_to_sequence_parallel_region(partial, group=group)


def _native_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    sequence_parallel: bool,
    is_frozen: bool = False,
) -> torch.Tensor:
    linear = linear_with_frozen_weight if is_frozen else linear_with_grad_accumulation_and_async_allreduce
    return linear(
        input=x,
        weight=weight,
        bias=None,
        gradient_accumulation_fusion=False,
        allreduce_dgrad=False,
        sequence_parallel=sequence_parallel,
        tp_group=group,
    )
