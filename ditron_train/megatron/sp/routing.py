"""Decides for each attention whether its exchanges, and the projections around them, run as ops of
``ditron_train.sp``.

As ``routing`` does for linear layers: what all ranks see alike decides without talking; the rest is tried once per
shape, all ranks together (``ditron_train.policy``): whether memory can be had, and on GPUs bits and times.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.custom_layers.batch_invariant_kernels import is_batch_invariant_mode_enabled

from ditron_train.megatron.shared.te_products import product_pairs
from ditron_train.megatron.sp.nodes import NodesContext, forget_nodes, get_nodes_context, spans_nodes
from ditron_train.megatron.tp.routing import has_room, log_native, revealing_like, why_hidden
from ditron_train.policy import decide
from ditron_train.runtime.device import is_capturing, is_interpreter, kernel_target
from ditron_train.runtime.errors import ArenaError, NotSupportedError
from ditron_train.runtime.groups import GroupCache
from ditron_train.sp import (
    HeadsLayout,
    SPContext,
    get_context,
    heads_exchange,
    output_layout,
    output_projection,
    qkv_layout,
    qkv_projection,
    sequence_exchange,
)

__all__ = ["AttentionShape", "Exchange", "forget_routes", "route_exchange", "route_output", "route_projections"]

_MAX_ROUTES = 256

#: A context (run ours) or None (run natively), by everything that the decision depends on.
_routes: GroupCache[tuple[Any, ...], SPContext | NodesContext | None] = GroupCache()
#: Groups that know as many shapes as they may.
_full: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def forget_routes() -> None:
    """Decide anew from now on, and let go of the contexts."""
    _routes.clear()
    _full.clear()
    forget_nodes()


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
        self,
        group: dist.ProcessGroup,
        shape: AttentionShape,
        context: SPContext | NodesContext | None,
        row_table: torch.Tensor | None = None,
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
            if isinstance(self._context, NodesContext):
                return self._context.to_heads(parts, layout, self._row_table)
            return heads_exchange(parts, context=self._context, layout=layout, row_table=self._row_table)
        return tuple(self._native_to_heads(part) for part in parts)

    def to_sequence(self, attended: torch.Tensor) -> torch.Tensor:
        """[s, b, heads / W * d] -> [s / W, b, heads * d]."""
        attended = attended.view(*attended.shape[:-1], -1, self._shape.value_head_dim)
        if self._context is not None:
            layout = self._shape.output_layout(self._world_size)
            if isinstance(self._context, NodesContext):
                return self._context.to_sequence(attended, layout, self._row_table).flatten(-2)
            (result,) = sequence_exchange((attended,), context=self._context, layout=layout, row_table=self._row_table)
            return result.flatten(-2)
        return self._native_to_sequence(attended).flatten(2)

    def _places(self, device: torch.device) -> torch.Tensor:
        """Chunk of the sequence that each rank's two chunks are, rank by rank; nothing comes from the host, which a
        CUDA graph's capture would not allow."""
        ranks = torch.arange(self._world_size, device=device)
        return torch.stack((ranks, 2 * self._world_size - 1 - ranks), dim=1).flatten()

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
    name: str,
    key: tuple[Any, ...],
    x: torch.Tensor,
    group: dist.ProcessGroup,
    attempt: Callable[[Any], str | None],
    *,
    across_nodes: bool,
) -> Any:
    """The decision for ``key``: known, or made by ``attempt``, which all ranks run together. ``across_nodes``: it also
    takes the context of a group that spans nodes."""
    key = (*key, is_batch_invariant_mode_enabled(), torch.are_deterministic_algorithms_enabled())
    if key in _routes:
        return _routes[key]
    if is_capturing(x.device):
        log_native(name, "a shape was first seen while a CUDA graph was being captured (run a warm-up step before)")
        return None
    if not has_room(_routes, _full, group, _MAX_ROUTES):
        log_native(name, f"more than {_MAX_ROUTES} shapes: each has to be tried, which would cost more than it gives")
        return None
    context, reason = None, _why_not_device(x)
    if reason is None:
        try:
            if not spans_nodes(group):
                context = get_context(group, x.device)
            elif across_nodes:
                context = get_nodes_context(group, x.device)
            reason = "the group spans nodes" if context is None else attempt(context)
            if context is not None:
                context.synchronize()
        except (ArenaError, NotSupportedError) as error:  # raised by every rank alike
            reason = str(error)
    if reason is not None:
        log_native(name, reason)
        context = None
    _routes[key] = context
    return context


def _normal(shape: tuple[int, ...], like: torch.Tensor, seed: int) -> torch.Tensor:
    """Normal values from a generator of their own: the user's random state does not move."""
    generator = torch.Generator(device=like.device).manual_seed(seed)
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=like.dtype, device=like.device).normal_(generator=generator)


def _given(shape: tuple[int, ...], like: torch.Tensor, seed: int) -> torch.Tensor:
    """The call's own ``like`` where it has ``shape``, else normal values."""
    if tuple(like.shape) != tuple(shape):
        return _normal(shape, like, seed)
    with torch.inference_mode(False):
        return like.clone() if like.is_inference() else like.detach()


def _forward_backward(
    function: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Results of ``function`` and the gradients of its inputs."""
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        results = function(*leaves)
        torch.autograd.backward(results, list(grads))
    return [*(result.detach() for result in results), *(leaf.grad for leaf in leaves)]


_Function = Callable[..., Sequence[torch.Tensor]]
_Data = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]  # inputs, gradients of the results


def _ask(
    key: str,
    native: _Function,
    ours: _Function,
    data: _Data,
    revealing: Callable[[], _Data],
    group: Any,
    projections: tuple[int, Sequence[torch.Tensor]],
) -> Any:
    """The policy's decision about two functions, forward and backward: on ``data``, which is timed, and on GPUs on
    data that shows the order of their sums; there also whether both libraries' products agree, of ``projections``'
    rows and weights."""
    device = data[0][0].device
    with torch.inference_mode(False):
        given = [data, revealing()] if device.type == "cuda" else [data]
    first, *more = (
        tuple(functools.partial(_forward_backward, one, *each) for one in (native, ours)) for each in given
    )
    rows, weights = projections
    products = [pair for weight in weights for pair in product_pairs(rows, weight)]
    return decide(key, *first, group=group, device=device, also=[*more, *products])


def _split_by_heads(mixed: torch.Tensor, layout: HeadsLayout, world_size: int) -> list[torch.Tensor]:
    """[s / W, b, columns of a QKV projection] -> q, k, v [s / W, b, heads, d]."""
    lead = mixed.shape[:2]
    parts = torch.split(mixed.view(*lead, world_size * layout.num_groups, -1), list(layout.widths), dim=3)
    return [part.reshape(*lead, -1, dim) for part, dim in zip(parts, layout.head_dims)]


def _revealing_output(
    exchange: Exchange,
    shape: AttentionShape,
    rows: tuple[int, int],
    weight: torch.Tensor,
    like: torch.Tensor,
    rank: int,
) -> _Data:
    """Attended values and weight, and gradient of the output."""
    gathered = revealing_like(like.new_empty(*rows, weight.shape[1]), 71 + rank, "rows")
    (attended,) = exchange.to_heads(gathered.view(*rows, shape.num_heads, shape.value_head_dim))
    grad = revealing_like(like.new_empty(*rows, weight.shape[0]), 72 + rank, "columns")
    return [attended, revealing_like(weight, 73 + rank, "columns")], [grad]


def _in_words(kind: str, lead: tuple[int, ...], shape: AttentionShape, like: torch.Tensor, *more: object) -> str:
    """Key of a plan."""
    sizes = "x".join(map(str, (*lead, shape.num_heads, shape.num_groups, shape.head_dim, shape.value_head_dim, *more)))
    return f"sp {kind} {sizes} {str(like.dtype).removeprefix('torch.')}"


def route_exchange(
    group: dist.ProcessGroup, shape: AttentionShape, query: torch.Tensor
) -> SPContext | NodesContext | None:
    """The context for the exchanges around the attention of ``query`` [s / W, b, heads, d] (packed [t / W, heads, d]),
    or None for all-to-alls. Packed sequences are one of them without a batch."""
    rows = (query.shape[0], math.prod(query.shape[1:-2]))

    def attempt(context: SPContext | NodesContext) -> str | None:
        """Asks the policy, with both exchanges and their backward: nothing of them can fail later for want of
        memory."""
        world = context.world_size
        local, whole = shape.qkv_layout(world), (rows[0] * world, rows[1])
        inputs = _parts(rows, local, query, world, 1 + context.rank)
        inputs += _parts(whole, shape.output_layout(world), query, 1, 11 + context.rank)
        grads = _parts(whole, local, query, 1, 21 + context.rank)
        grads.append(_normal((*rows, shape.num_heads * shape.value_head_dim), query, 31 + context.rank))

        def both(exchange: Exchange) -> list[torch.Tensor]:
            def function(
                q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attended: torch.Tensor
            ) -> list[torch.Tensor]:
                return [*exchange.to_heads(q, k, v), exchange.to_sequence(attended.flatten(2))]

            return _forward_backward(function, inputs, grads)

        native, ours = (functools.partial(both, Exchange(group, shape, c)) for c in (None, context))
        decision = decide(_in_words("exchange", rows, shape, query), native, ours, group=group, device=query.device)
        return None if decision.use_ditron else f"at {tuple(query.shape)} {decision.reason}"

    key = ("exchange", rows, shape, query.dtype, query.device, group)
    return _decide("sp exchange", key, query, group, attempt, across_nodes=True)


def _parts(
    lead: tuple[int, ...], layout: HeadsLayout, like: torch.Tensor, factor: int, seed: int
) -> list[torch.Tensor]:
    shapes = [(*lead, layout.num_heads(part) * factor, dim) for part, dim in enumerate(layout.head_dims)]
    return [_normal(shape, like, seed + index) for index, shape in enumerate(shapes)]


def route_output(
    group: dist.ProcessGroup, shape: AttentionShape, rows: tuple[int, int], weight: torch.Tensor, like: torch.Tensor
) -> SPContext | None:
    """The context to run the output projection of [s / W, b] ``rows`` fused with its exchange, or None; the exchange
    before the attention runs by itself."""
    autocast = torch.is_autocast_enabled(like.device.type)
    key = ("output", rows, weight.shape, shape, like.dtype, like.device, group, autocast)

    def attempt(context: SPContext) -> str | None:
        """Asks the policy: against the exchange that would run otherwise, and the projection behind it."""
        if autocast:
            return "autocast is on"
        if weight.dtype != like.dtype:
            return f"the input is {like.dtype}, the weight is {weight.dtype}"
        world, rank = context.world_size, context.rank
        layout = shape.output_layout(world)
        hidden = why_hidden(like.device, rows[0] * rows[1], *weight.shape)
        if hidden is not None:
            return hidden
        inputs = [*_parts((rows[0] * world, rows[1]), layout, like, 1, 1 + rank), _given(weight.shape, weight, 0)]
        grads = [_normal((*rows, weight.shape[0]), like, 21 + rank)]
        query = like.new_empty((*rows, shape.num_heads, shape.head_dim))
        exchange = Exchange(group, shape, route_exchange(group, shape, query))

        def ours(attended: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
            return [output_projection(attended, weight, context=context, layout=layout)]

        def native(attended: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
            return [torch.matmul(exchange.to_sequence(attended.flatten(2)), weight.t())]

        decision = _ask(
            _in_words("output", rows, shape, like, weight.shape[0]), native, ours, (inputs, grads),
            lambda: _revealing_output(Exchange(group, shape, None), shape, rows, weight, like, rank), group,
            (math.prod(rows), (weight,)),
        )  # fmt: skip
        return None if decision.use_ditron else f"at {rows} x {tuple(weight.shape)} {decision.reason}"

    return _decide("sp output projection", key, like, group, attempt, across_nodes=False)


def route_projections(
    group: dist.ProcessGroup,
    shape: AttentionShape,
    input_shape: tuple[int, ...],
    weight_qkv: torch.Tensor,
    weight_out: torch.Tensor,
    like: torch.Tensor,
) -> SPContext | None:
    """The context to run the projections of an input of ``input_shape`` [s / W, b, hidden], which is ``like`` or has
    its type and device, fused with their exchanges, or None."""
    autocast = torch.is_autocast_enabled(like.device.type)
    key = (
        "projections",
        input_shape,
        weight_qkv.shape,
        weight_out.shape,
        shape,
        like.dtype,
        like.device,
        group,
        autocast,
    )

    def attempt(context: SPContext) -> str | None:
        """Asks the policy, with both projections and all their gradients."""
        if autocast:
            return "autocast is on"
        if weight_qkv.dtype != like.dtype or weight_out.dtype != like.dtype:
            return f"the input is {like.dtype}, the weights are {weight_qkv.dtype} and {weight_out.dtype}"
        world, rank = context.world_size, context.rank
        layout, out_layout = shape.qkv_layout(world), shape.output_layout(world)
        rows = input_shape[:2]
        hidden = why_hidden(like.device, rows[0] * rows[1], *weight_qkv.shape, *weight_out.shape)
        if hidden is not None:
            return hidden
        whole = (rows[0] * world, rows[1])
        inputs = [
            _given(input_shape, like, 1 + rank),
            *(_given(weight.shape, weight, 0) for weight in (weight_qkv, weight_out)),
        ]
        inputs += _parts(whole, out_layout, like, 1, 41 + rank)
        grads = [*_parts(whole, layout, like, 1, 51 + rank), _normal((*rows, weight_out.shape[0]), like, 61 + rank)]

        def ours(x: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, attended: torch.Tensor) -> list[torch.Tensor]:
            parts = qkv_projection(x, qkv, context=context, layout=layout)
            return [*parts, output_projection(attended, out, context=context, layout=out_layout)]

        exchange = Exchange(group, shape, None)

        def native(
            x: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, attended: torch.Tensor
        ) -> list[torch.Tensor]:
            parts = _split_by_heads(torch.matmul(x, qkv.t()), layout, world)
            return [*exchange.to_heads(*parts), torch.matmul(exchange.to_sequence(attended.flatten(2)), out.t())]

        def revealing() -> _Data:
            (attended, out), (grad,) = _revealing_output(exchange, shape, rows, weight_out, like, rank)
            x = revealing_like(like.new_empty(input_shape), 81 + rank, "rows")
            mixed = revealing_like(like.new_empty(*rows, weight_qkv.shape[0]), 82 + rank, "columns")
            grads = exchange.to_heads(*_split_by_heads(mixed, layout, world))
            return [x, revealing_like(weight_qkv, 83 + rank, "columns"), out, attended], [*grads, grad]

        words = _in_words("projections", input_shape, shape, like, weight_out.shape[0])
        projections = (math.prod(rows), (weight_qkv, weight_out))
        decision = _ask(words, native, ours, (inputs, grads), revealing, group, projections)
        return None if decision.use_ditron else f"at {input_shape} x {tuple(weight_qkv.shape)} {decision.reason}"

    return _decide("sp projections", key, like, group, attempt, across_nodes=False)
