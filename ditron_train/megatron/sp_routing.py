"""Decides for each attention whether its exchanges, and the projections around them, run as ops of ``ditron_train.sp``.

As ``routing`` does for linear layers: what all ranks see alike decides without talking; whether memory can be had, and on
GPUs whether the bits are those of cuBLAS, is tried once per shape, all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all

from ditron_train.megatron.routing import log_native
from ditron_train.runtime.device import is_interpreter, kernel_target
from ditron_train.runtime.errors import ArenaError, NotSupportedError
from ditron_train.sp import (
    HeadsLayout,
    SPContext,
    a2a_gemm,
    gemm_a2a,
    get_context,
    heads_exchange,
    output_layout,
    qkv_layout,
    sequence_exchange,
    to_heads,
    to_sequence,
)

__all__ = ["AttentionShape", "Exchange", "forget_routes", "route_exchange", "route_projections"]

#: A context (run ours) or None (run natively), by everything that the decision depends on.
_routes: dict[tuple[Any, ...], SPContext | None] = {}


def forget_routes() -> None:
    """Decide anew from now on, and let go of the contexts."""
    _routes.clear()


@dataclass(frozen=True)
class AttentionShape:
    """One self-attention on one tensor parallel rank, before its heads are spread over the context parallel group."""

    num_heads: int
    num_groups: int
    head_dim: int
    value_head_dim: int

    def qkv_layout(self, world_size: int) -> HeadsLayout:
        """Raises NotSupportedError where heads do not divide, as native does."""
        return qkv_layout(
            self.num_heads, self.num_groups, self.head_dim, world_size, value_head_dim=self.value_head_dim
        )

    def output_layout(self, world_size: int) -> HeadsLayout:
        """Layout of the attention's output."""
        return output_layout(self.num_heads, self.value_head_dim, world_size)


class Exchange:
    """The two exchanges of one attention: by ops, or (``context`` None) by all-to-alls of the process group."""

    def __init__(
        self, group: dist.ProcessGroup, shape: AttentionShape, context: SPContext | None, row_table: torch.Tensor | None = None
    ) -> None:
        assert context is not None or row_table is None, "all-to-alls here know no packed sequences"
        self._group = group
        self._world_size = dist.get_world_size(group)
        self._shape = shape
        self._context = context
        self._row_table = row_table

    def to_heads(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k, v [s / W, b, heads, d] -> [s, b, heads / W, d], in the order of the sequence."""
        if self._context is not None:
            layout = self._shape.qkv_layout(self._world_size)
            return heads_exchange(parts, context=self._context, layout=layout, row_table=self._row_table)
        return tuple(self._native_to_heads(part) for part in parts)

    def to_sequence(self, attended: torch.Tensor) -> torch.Tensor:
        """[s, b, heads / W * d] -> [s / W, b, heads * d]."""
        attended = attended.view(*attended.shape[:-1], -1, self._shape.value_head_dim)
        if self._context is not None:
            layout = self._shape.output_layout(self._world_size)
            (result,) = sequence_exchange((attended,), context=self._context, layout=layout, row_table=self._row_table)
            return result.flatten(-2)
        return self._native_to_sequence(attended).flatten(2)

    def _places(self, device: torch.device) -> torch.Tensor:
        """Chunk of the sequence that each rank's two chunks are, rank by rank."""
        last = 2 * self._world_size - 1
        return torch.tensor([chunk for rank in range(self._world_size) for chunk in (rank, last - rank)], device=device)

    def _native_to_heads(self, x: torch.Tensor) -> torch.Tensor:
        (s, b, h, d), world = x.shape, self._world_size
        y = all_to_all(self._group, x.reshape(s, b, world, h // world, d).movedim(2, 0).contiguous())
        order = torch.argsort(self._places(x.device))
        return y.view(2 * world, s // 2, b, h // world, d).index_select(0, order).view(world * s, b, h // world, d)

    def _native_to_sequence(self, x: torch.Tensor) -> torch.Tensor:
        (s, b, h, d), world = x.shape, self._world_size
        chunks = x.reshape(2 * world, s // (2 * world), b, h, d).index_select(0, self._places(x.device))
        y = all_to_all(self._group, chunks.view(world, s // world, b, h, d))
        return y.movedim(0, 2).reshape(s // world, b, world * h, d)


def _why_not_device(tensor: torch.Tensor) -> str | None:
    if tensor.device.type == "cpu":
        return None if is_interpreter() else "the tensors are on the CPU and Triton's interpreter is off"
    try:
        kernel_target(tensor.device)
    except NotSupportedError as error:
        return str(error)
    return None


def _decide(
    name: str, key: tuple[Any, ...], x: torch.Tensor, group: dist.ProcessGroup, attempt: Callable[[SPContext], str | None]
) -> SPContext | None:
    """The decision for ``key``: known, or made by ``attempt``, which all ranks run together."""
    if key in _routes:
        return _routes[key]
    if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        log_native(name, "a shape was first seen while a CUDA graph was being captured (run a warm-up step before)")
        return None
    context, reason = None, _why_not_device(x)
    if reason is None:
        try:
            context = get_context(group, x.device)
            with torch.no_grad():
                reason = attempt(context)
        except (ArenaError, NotSupportedError) as error:  # raised by every rank alike
            reason = str(error)
    if reason is not None:
        log_native(name, reason)
        context = None
    _routes[key] = context
    return context


def route_exchange(group: dist.ProcessGroup, shape: AttentionShape, query: torch.Tensor) -> SPContext | None:
    """The context for the exchanges around the attention of ``query`` [s / W, b, heads, d] (packed [t / W, heads, d]), or None
    for all-to-alls."""
    lead = tuple(query.shape[:-2])

    def attempt(context: SPContext) -> str | None:
        """Both exchanges and their backward once: nothing of them can fail later for want of memory."""
        world = context.world_size
        parts = _zeros(lead, shape.qkv_layout(world), query, world)
        to_sequence(to_heads(parts, context=context, layout=shape.qkv_layout(world)), context=context,
                    layout=shape.qkv_layout(world))  # fmt: skip
        (attended,) = _zeros((lead[0] * world, *lead[1:]), shape.output_layout(world), query, 1)
        outputs = to_sequence((attended,), context=context, layout=shape.output_layout(world))
        to_heads(outputs, context=context, layout=shape.output_layout(world))
        context.synchronize()
        return None

    return _decide("sp exchange", ("exchange", lead, shape, query.dtype, query.device, group), query, group, attempt)


def _zeros(lead: tuple[int, ...], layout: HeadsLayout, like: torch.Tensor, factor: int) -> list[torch.Tensor]:
    return [like.new_zeros(*lead, layout.num_heads(part) * factor, dim) for part, dim in enumerate(layout.head_dims)]


def route_projections(
    group: dist.ProcessGroup, shape: AttentionShape, x: torch.Tensor, weight_qkv: torch.Tensor, weight_out: torch.Tensor
) -> SPContext | None:
    """The context to run the projections of ``x`` [s / W, b, hidden] fused with their exchanges, or None."""
    autocast = torch.is_autocast_enabled(x.device.type)
    key = ("projections", tuple(x.shape), weight_qkv.shape, weight_out.shape, shape, x.dtype, x.device, group, autocast)

    def attempt(context: SPContext) -> str | None:
        if autocast:
            return "autocast is on"
        if weight_qkv.dtype != x.dtype or weight_out.dtype != x.dtype:
            return f"the input is {x.dtype}, the weights are {weight_qkv.dtype} and {weight_out.dtype}"
        layout, out_layout = shape.qkv_layout(context.world_size), shape.output_layout(context.world_size)
        equal = [
            _try_projection(context, layout, x, weight_qkv, ("nt", "nn")),
            _try_projection(context, out_layout, x, weight_out, ("nn", "nt")),
        ]
        if x.device.type != "cuda":  # the interpreter's GEMM is NumPy's, whose bits are not torch's
            return None
        agreed = torch.tensor([int(all(equal))], dtype=torch.int32, device=x.device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
        if agreed.item():
            return None
        return f"at {tuple(x.shape)} x {tuple(weight_qkv.shape)} the bits would not be those of cuBLAS on this machine"

    return _decide("sp projections", key, x, group, attempt)


def _try_projection(
    context: SPContext, layout: HeadsLayout, x: torch.Tensor, weight: torch.Tensor, weight_layouts: tuple[str, str]
) -> bool:
    """Whether GEMM-A2A and A2A-GEMM with ``weight`` have the bits of a GEMM and the exchange, on this rank, for random data."""

    def normal(shape: tuple[int, ...], seed: int) -> torch.Tensor:
        generator = torch.Generator(device=x.device).manual_seed(seed + context.rank)
        return torch.empty(shape, dtype=x.dtype, device=x.device).normal_(generator=generator)

    options = dict(context=context, layout=layout)
    x, weight = normal(tuple(x.shape), 1), normal(tuple(weight.shape), 101)
    heads = gemm_a2a(x, weight, weight_layout=weight_layouts[0], **options)
    back = a2a_gemm(heads, weight, weight_layout=weight_layouts[1], **options)
    context.synchronize()

    def matrix(weight_layout: str) -> torch.Tensor:
        return weight.t() if weight_layout == "nt" else weight

    projected = torch.matmul(x, matrix(weight_layouts[0]))
    groups = context.world_size * layout.num_groups
    split = torch.split(projected.view(*x.shape[:2], groups, -1), list(layout.widths), dim=3)
    native = to_heads([part.reshape(*x.shape[:2], -1, dim) for part, dim in zip(split, layout.head_dims)], **options)
    gathered = projected  # the exchanges are each other's inverse, so this is what comes back where forward was equal
    equal = all(torch.equal(ours, theirs) for ours, theirs in zip(heads, native))
    return equal and torch.equal(back, torch.matmul(gathered, matrix(weight_layouts[1])))
