"""The ops around an attention of Ulysses, declared for the policy: the two exchanges (all-to-alls), and
the projections fused with them.

What all ranks see alike is decided without communication; the rest is tried once per shape, all ranks together
(`ditron_train.policy`): whether memory can be had, and on GPUs bits and times.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ditron_train.megatron.compat.batch_invariant import is_batch_invariant_mode_enabled
from ditron_train.megatron.shared.devices import unsupported_reason_on_device
from ditron_train.megatron.shared.te_products import (
    bias_like,
    product_pairs,
    product_with_bias,
    unsupported_reason_bias,
)
from ditron_train.megatron.shared.values import order_probe_like, own_or_normal, unsupported_reason_hidden
from ditron_train.megatron.sp.exchange import AttentionShape, Exchange
from ditron_train.megatron.sp.nodes import NodesContext, get_nodes_context
from ditron_train.megatron.sp.norms import key_of, twins_of, words_of
from ditron_train.policy import Function, Op, Run, Trial, gate
from ditron_train.policy.op import ProofPart, dtype_name, make_trial
from ditron_train.runtime.values import normal_values
from ditron_train.sp import HeadsLayout, SPContext, get_sp_context, output_projection, qkv_projection, split_by_heads
from ditron_train.sp.head_norms import Norms, normalised
from ditron_train.symm.nodes import spans_nodes

_Tensors = Sequence[torch.Tensor]


class UlyssesCall(NamedTuple):
    """One attention on this rank.

    Attributes:
        group: Context parallel group.
        shape: Heads of the attention.
        rows: ``[s / W, b]``; packed sequences are one of them without a batch.
        like: A tensor of the attention's type, on its device; the call's own input if its shape is the input's.
        weights: Of the projections that are fused: none, ``(out,)`` or ``(qkv, out)``.
        values: Inputs of a comparison; empty in a call to be decided.
        grads: Gradients of its results.
        bias: Of q, k and v, if it is added inside the product, before its rounding.
        norms: Of q and k, if they are normalised, as ``qkv_projection`` takes them.
    """

    group: dist.ProcessGroup
    shape: AttentionShape
    rows: tuple[int, int]
    like: torch.Tensor
    weights: tuple[torch.Tensor, ...] = ()
    values: tuple[torch.Tensor, ...] = ()
    grads: tuple[torch.Tensor, ...] = ()
    bias: torch.Tensor | None = None
    norms: Norms = ()


class _UlyssesOp(Op[UlyssesCall, Any]):
    """What the three ops have in common."""

    word: str
    decides_forward = True
    synchronizes = True

    def device(self, call: UlyssesCall) -> torch.device:
        return call.like.device

    def key(self, call: UlyssesCall) -> tuple[Hashable, ...]:
        return (
            call.rows,
            call.shape,
            tuple([weight.shape for weight in call.weights]),
            call.like.dtype,
            call.like.device,
            bool(call.weights) and torch.is_autocast_enabled(call.like.device.type),
            is_batch_invariant_mode_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            None if call.bias is None else call.bias.dtype,
            key_of(call.norms),
        )

    def family(self, call: UlyssesCall) -> tuple[tuple[Hashable, ...], int] | None:
        """Of one number of sequences: it is part of the kernels' own shapes."""
        rows = math.prod(call.rows) * (1 if call.group is None else dist.get_world_size(call.group))
        if not rows or call.group is None or spans_nodes(call.group):
            return None
        return (call.rows[1], *self.key(call)[1:]), rows

    def at_rows(self, call: UlyssesCall, rows: int) -> UlyssesCall:
        local = rows // dist.get_world_size(call.group) // call.rows[1]
        like, *weights = (
            one.new_empty(()).expand(shape)
            for one, shape in (
                (call.like, (local, *call.rows[1:])),
                *((weight, weight.shape) for weight in call.weights),
            )
        )
        return call._replace(rows=(local, call.rows[1]), like=like, weights=tuple(weights))

    def unsupported_reason(self, call: UlyssesCall) -> str | None:
        reason = self.unsupported_tensors(call)
        return reason or ("the group spans nodes" if call.weights and spans_nodes(call.group) else None)

    def unsupported_tensors(self, call: UlyssesCall) -> str | None:
        """As ``unsupported_reason``, of the tensors alone."""
        reason = unsupported_reason_on_device(call.like.device)
        if reason is not None or not call.weights:
            return reason
        if torch.is_autocast_enabled(call.like.device.type):
            return "autocast is on"
        if any(weight.dtype != call.like.dtype for weight in call.weights):
            return (
                f"the input is {call.like.dtype}, the weights are {', '.join(str(one.dtype) for one in call.weights)}"
            )
        features = [size for weight in call.weights for size in weight.shape]
        return unsupported_reason_bias(call.bias, call.like) or unsupported_reason_hidden(
            call.like.device, math.prod(call.rows), *features
        )

    def make_context(self, call: UlyssesCall) -> SPContext | NodesContext:
        if not call.weights and spans_nodes(call.group):
            return get_nodes_context(call.group, call.like.device)
        return get_sp_context(call.group, call.like.device)

    def describe(self, call: UlyssesCall, context: Any) -> str:
        shape = call.shape
        heads = (shape.num_heads, shape.num_groups, shape.head_dim, shape.value_head_dim)
        sizes = "x".join(map(str, (*self._lead(call), *heads, *(weight.shape[0] for weight in call.weights[-1:]))))
        more = ("" if call.bias is None else ", bias inside") + (
            f", norms of heads {words_of(call.norms)}" if call.norms else ""
        )
        return f"sp {self.word} {sizes} {dtype_name(call.like.dtype)}{more}"

    def _lead(self, call: UlyssesCall) -> tuple[int, ...]:
        return call.rows

    def extra_cases(self, call: UlyssesCall, context: Any) -> Sequence[tuple[Run, Run]]:
        """Both libraries' products."""
        return [pair for weight in call.weights for pair in product_pairs(math.prod(call.rows), weight)]

    def timed_call(self, call: UlyssesCall, context: Any) -> UlyssesCall:
        """With inputs and gradients of its results."""
        raise NotImplementedError

    def order_probe(self, call: UlyssesCall, context: Any) -> Sequence[UlyssesCall]:
        """With order-probe inputs; none for an op that adds nothing up."""
        return ()

    def trial(self, call: UlyssesCall, context: Any) -> Trial:
        timed, extra = self.timed_call(call, context), self.extra_cases(call, context)
        probe = partial(self.order_probe, call, context)
        return make_trial(self, timed, context, order_probe=probe, extra_cases=extra)

    def inputs(self, call: UlyssesCall) -> _Tensors:
        return call.values

    def grads(self, call: UlyssesCall) -> _Tensors:
        return call.grads


class ExchangeOp(_UlyssesOp):
    """Both exchanges of an attention: q, k, v to heads, the attended values to the sequence."""

    name, word = "sp exchange", "exchange"

    def describe_shape(self, call: UlyssesCall) -> str:
        return f"at {tuple(call.like.shape)} "

    def bits_proof(self, call: UlyssesCall, context: Any) -> Sequence[ProofPart]:
        """Nothing is added up: bits that were equal at one length are so at every length."""
        return ()

    def timed_call(self, call: UlyssesCall, context: Any) -> UlyssesCall:
        """Normal values."""
        world, shape, like = context.world_size, call.shape, call.like
        local, whole = shape.qkv_layout(world), (call.rows[0] * world, call.rows[1])
        values = _parts(call.rows, local, like, world, 1 + context.rank)
        values += _parts(whole, shape.output_layout(world), like, 1, 11 + context.rank)
        grads = _parts(whole, local, like, 1, 21 + context.rank)
        grads.append(_normal((*call.rows, shape.num_heads * shape.value_head_dim), like, 31 + context.rank))
        return call._replace(values=tuple(values), grads=tuple(grads))

    def native(self, call: UlyssesCall) -> Function:
        return self._both(Exchange(call.group, call.shape, None))

    def fused(self, call: UlyssesCall, context: SPContext | NodesContext) -> Function:
        return self._both(Exchange(call.group, call.shape, context))

    def _both(self, exchange: Exchange) -> Function:
        def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attended: torch.Tensor) -> _Tensors:
            return [*exchange.to_heads(q, k, v), exchange.to_sequence(attended.flatten(2))]

        return function


class OutputOp(_UlyssesOp):
    """The output projection fused with its exchange; the exchange before the attention runs by itself."""

    name, word = "sp output projection", "output"

    def describe_shape(self, call: UlyssesCall) -> str:
        return f"at {call.rows} x {tuple(call.weights[0].shape)} "

    def timed_call(self, call: UlyssesCall, context: SPContext) -> UlyssesCall:
        """Normal values and the layer's own weight."""
        world, rank, (weight,) = context.world_size, context.rank, call.weights
        layout = call.shape.output_layout(world)
        attended = _parts((call.rows[0] * world, call.rows[1]), layout, call.like, 1, 1 + rank)
        grad = _normal((*call.rows, weight.shape[0]), call.like, 21 + rank)
        return call._replace(values=(*attended, _given(weight.shape, weight, 0)), grads=(grad,))

    def order_probe(self, call: UlyssesCall, context: SPContext) -> list[UlyssesCall]:
        exchange = Exchange(call.group, call.shape, None)
        with torch.inference_mode(False):
            values, grads = _probe_of_output(exchange, call, call.weights[-1], context.rank)
        return [call._replace(values=values, grads=grads)]

    def native(self, call: UlyssesCall) -> Function:
        """The exchange that would run otherwise, and the projection after it."""
        query = call.like.new_empty((*call.rows, call.shape.num_heads, call.shape.head_dim))
        exchange = Exchange(call.group, call.shape, route_exchange(call.group, call.shape, query))

        def function(attended: torch.Tensor, weight: torch.Tensor) -> _Tensors:
            return [torch.matmul(exchange.to_sequence(attended.flatten(2)), weight.t())]

        return function

    def fused(self, call: UlyssesCall, context: SPContext) -> Function:
        layout = call.shape.output_layout(context.world_size)
        return lambda attended, weight: [output_projection(attended, weight, context=context, layout=layout)]


class ProjectionsOp(_UlyssesOp):
    """Both projections of an attention fused with their exchanges."""

    name, word = "sp projections", "projections"

    def describe_shape(self, call: UlyssesCall) -> str:
        return f"at {self._lead(call)} x {tuple(call.weights[0].shape)} "

    def _lead(self, call: UlyssesCall) -> tuple[int, ...]:
        return (*call.rows, call.weights[0].shape[1])

    def timed_call(self, call: UlyssesCall, context: SPContext) -> UlyssesCall:
        """The call's input, weights and norms, normal attended values."""
        world, rank, (qkv, out), like = context.world_size, context.rank, call.weights, call.like
        layout, whole = call.shape.qkv_layout(world), (call.rows[0] * world, call.rows[1])
        values = [
            _given(self._lead(call), like, 1 + rank),
            *(_given(weight.shape, weight, 0) for weight in (qkv, out)),
        ]
        values += _parts(whole, call.shape.output_layout(world), like, 1, 41 + rank)
        grads = _parts(whole, layout, like, 1, 51 + rank)
        grads.append(_normal((*call.rows, out.shape[0]), like, 61 + rank))
        with torch.inference_mode(False):
            norms = twins_of(call.norms)
        return call._replace(values=tuple(values), grads=tuple(grads), norms=norms)

    def order_probe(self, call: UlyssesCall, context: SPContext) -> list[UlyssesCall]:
        rank, (qkv, out), exchange = context.rank, call.weights, Exchange(call.group, call.shape, None)
        layout = call.shape.qkv_layout(context.world_size)
        with torch.inference_mode(False):
            (attended, order_probe_out), (grad,) = _probe_of_output(exchange, call, out, rank)
            x = order_probe_like(call.like.new_empty(self._lead(call)), 81 + rank, "rows")
            mixed = order_probe_like(call.like.new_empty(*call.rows, qkv.shape[0]), 82 + rank, "columns")
            grads = exchange.to_heads(*split_by_heads(mixed, layout, context.world_size))
            values = (x, order_probe_like(qkv, 83 + rank, "columns"), order_probe_out, attended)
        # Norms would make roundings as large as anything; the order of sums does not depend on them.
        return [call._replace(values=values, grads=(*grads, grad), norms=())]

    def extra_cases(self, call: UlyssesCall, context: SPContext) -> Sequence[tuple[Run, Run]]:
        """Also the QKV projection whose bias is added inside its product."""
        pairs, bias, world = list(super().extra_cases(call, context)), call.bias, context.world_size
        if bias is None:
            return pairs
        bias = bias_like(bias, 93)
        exchange, layout = Exchange(call.group, call.shape, None), call.shape.qkv_layout(world)

        def data() -> tuple[torch.Tensor, torch.Tensor]:
            x = order_probe_like(call.like.new_empty(self._lead(call)), 91 + context.rank, "rows")
            return x, order_probe_like(call.weights[0], 92, "columns")

        def by_library() -> list[torch.Tensor]:
            x, weight = data()
            mixed = product_with_bias(x.flatten(0, 1), weight, bias).view(*call.rows, -1)
            return list(exchange.to_heads(*split_by_heads(mixed, layout, world)))

        def by_op() -> list[torch.Tensor]:
            x, weight = data()
            return list(qkv_projection(x, weight, context=context, layout=layout, bias=bias, rounds_once=True))

        return [*pairs, (by_library, by_op)]

    def native(self, call: UlyssesCall) -> Function:
        """Of an attention with norms the exchanges and the output projection that would run
        otherwise."""
        exchange, world = Exchange(call.group, call.shape, None), dist.get_world_size(call.group)
        layout, project = call.shape.qkv_layout(world), None
        if call.norms:
            query = call.like.new_empty((*call.rows, call.shape.num_heads, call.shape.head_dim))
            exchange = Exchange(call.group, call.shape, route_exchange(call.group, call.shape, query))
            routed = route_output(call.group, call.shape, call.rows, call.weights[1], call.like)
            project = None if routed is None else OUTPUT.fused(call, routed)

        def function(x: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, attended: torch.Tensor) -> _Tensors:
            parts = normalised(split_by_heads(torch.matmul(x, qkv.t()), layout, world), call.norms)
            if project is not None:
                return [*exchange.to_heads(*parts), *project(attended, out)]
            return [*exchange.to_heads(*parts), torch.matmul(exchange.to_sequence(attended.flatten(2)), out.t())]

        return function

    def fused(self, call: UlyssesCall, context: SPContext) -> Function:
        layout = call.shape.qkv_layout(context.world_size)
        out_layout = call.shape.output_layout(context.world_size)

        def function(x: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, attended: torch.Tensor) -> _Tensors:
            parts = qkv_projection(x, qkv, context=context, layout=layout, norms=call.norms)
            return [*parts, output_projection(attended, out, context=context, layout=out_layout)]

        return function


def _normal(shape: tuple[int, ...], like: torch.Tensor, seed: int) -> torch.Tensor:
    """Normal values from a generator of their own: the user's random state does not move."""
    with torch.inference_mode(False):
        return normal_values(shape, like.dtype, like.device, seed)


def _given(shape: tuple[int, ...], like: torch.Tensor, seed: int) -> torch.Tensor:
    """The call's own ``like`` if it has ``shape`` and is there, else normal values. A copy: with
    ``--overlap-param-gather`` a weight is only waited for when its own module is called, which is after the
    decision."""
    if tuple(like.shape) != tuple(shape):
        return _normal(shape, like, seed)
    with torch.inference_mode(False):
        return own_or_normal(like, seed).clone()


def _probe_of_output(
    exchange: Exchange, call: UlyssesCall, weight: torch.Tensor, rank: int
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Attended values and weight; gradient of the output."""
    like, rows, shape = call.like, call.rows, call.shape
    gathered = order_probe_like(like.new_empty(*rows, weight.shape[1]), 71 + rank, "rows")
    (attended,) = exchange.to_heads(gathered.view(*rows, shape.num_heads, shape.value_head_dim))
    grad = order_probe_like(like.new_empty(*rows, weight.shape[0]), 72 + rank, "columns")
    return (attended, order_probe_like(weight, 73 + rank, "columns")), (grad,)


def _parts(
    lead: tuple[int, ...], layout: HeadsLayout, like: torch.Tensor, factor: int, seed: int
) -> list[torch.Tensor]:
    shapes = [(*lead, layout.num_heads(part) * factor, dim) for part, dim in enumerate(layout.head_dims)]
    return [_normal(shape, like, seed + index) for index, shape in enumerate(shapes)]


EXCHANGE, OUTPUT, PROJECTIONS = ExchangeOp(), OutputOp(), ProjectionsOp()
OPS: Sequence[Op[Any, Any]] = (EXCHANGE, OUTPUT, PROJECTIONS)


def route_exchange(
    group: dist.ProcessGroup, shape: AttentionShape, query: torch.Tensor
) -> SPContext | NodesContext | None:
    """The context for the exchanges around the attention of ``query`` [s / W, b, heads, d] (packed [t / W, heads, d]),
    or None for all-to-alls. Packed sequences are one of them without a batch."""
    rows = (query.shape[0], math.prod(query.shape[1:-2]))
    return gate.context_for(EXCHANGE, UlyssesCall(group, shape, rows, query))


def route_output(
    group: dist.ProcessGroup, shape: AttentionShape, rows: tuple[int, int], weight: torch.Tensor, like: torch.Tensor
) -> SPContext | None:
    """The context to run the output projection of [s / W, b] ``rows`` fused with its exchange, or None; the exchange
    before the attention runs by itself."""
    return gate.context_for(OUTPUT, UlyssesCall(group, shape, rows, like, (weight,)))


def route_projections(
    group: dist.ProcessGroup,
    shape: AttentionShape,
    input_shape: tuple[int, ...],
    weight_qkv: torch.Tensor,
    weight_out: torch.Tensor,
    like: torch.Tensor,
    bias: torch.Tensor | None = None,
    norms: Norms = (),
) -> SPContext | None:
    """The context to run the projections of an input of ``input_shape`` [s / W, b, hidden], which is ``like`` or has
    its type and device, fused with their exchanges, or None."""
    rows = (input_shape[0], input_shape[1])
    call = UlyssesCall(group, shape, rows, like, (weight_qkv, weight_out), bias=bias, norms=norms)
    return gate.context_for(PROJECTIONS, call)
