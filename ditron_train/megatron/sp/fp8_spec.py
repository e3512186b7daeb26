"""A QKV projection in FP8 fused with its exchange, declared for the policy (part of feature ``sp``).

What is compared begins with quantized operands: the product and its way to the ranks of the heads, and the way back of
the gradients. Quantizing and all other products are Transformer Engine's either way, so the recipes tensorwise and
delayed are one op. Imported only where Transformer Engine is installed.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ditron_train.gemm.revealing import revealing_matrix
from ditron_train.megatron.sp.exchange import AttentionShape, Exchange
from ditron_train.megatron.sp.spec import route_exchange, split_by_heads
from ditron_train.megatron.tp.fp8_spec import tensor_quantizer, why_not_device
from ditron_train.megatron.tp.te_coverage import why_not_fp8_sizes
from ditron_train.megatron.tp.te_passes import multiply
from ditron_train.megatron.tp.te_tensor_passes import operands
from ditron_train.policy import Decision, Function, OpSpec
from ditron_train.policy.spec import Trial
from ditron_train.sp import SPContext, gather_sequence, gemm_a2a, get_sp_context
from ditron_train.symm.nodes import spans_nodes

__all__ = ["FP8_PROJECTION", "Fp8ProjectionCall", "Fp8ProjectionSpec"]


class Fp8ProjectionCall(NamedTuple):
    """The QKV projection of one attention on this rank.

    Attributes:
        group: Context parallel group.
        shape: Heads of the attention.
        rows: ``[s / W, b]``.
        like: A bf16 tensor on the layer's device.
        weight: ``[columns of all heads, hidden]``, bf16 (or FP8 that says so).
        has_bias: Whether a bias is added to the product before it is rounded.
    """

    group: dist.ProcessGroup
    shape: AttentionShape
    rows: tuple[int, int]
    like: torch.Tensor
    weight: torch.Tensor
    has_bias: bool


class _Operands(NamedTuple):
    """Quantized operands, what is added to their product, and gradients of q, k and v."""

    x: Any
    weight: Any
    bias: torch.Tensor | None
    grads: list[torch.Tensor]


class Fp8ProjectionSpec(OpSpec[Fp8ProjectionCall, SPContext]):
    """(q, k, v) = P(x W^T + c) of quantized x and W, and P^T(dq, dk, dv); P: the exchange before the attention."""

    name, row, measured = "sp projection fp8", "qkv_projection_fp8", "forward_backward"

    def device(self, call: Fp8ProjectionCall) -> torch.device:
        """See `OpSpec`."""
        return call.like.device

    def key(self, call: Fp8ProjectionCall) -> tuple[Hashable, ...]:
        """See `OpSpec`."""
        weight = call.weight
        return (
            call.rows,
            call.shape,
            tuple(weight.shape),
            weight.dtype,
            call.like.dtype,
            call.like.device,
            call.has_bias,
            torch.are_deterministic_algorithms_enabled(),
        )

    def why_not(self, call: Fp8ProjectionCall) -> str | None:
        """See `OpSpec`."""
        rows = call.like.new_empty(1).expand(math.prod(call.rows), call.weight.shape[1])
        reason = why_not_fp8_sizes("column", rows, call.weight, 1, has_blocks=False) or why_not_device(rows.device)
        return reason or ("the group spans nodes" if spans_nodes(call.group) else None)

    def context(self, call: Fp8ProjectionCall) -> SPContext:
        """See `OpSpec`."""
        return get_sp_context(call.group, call.like.device)

    def decide(self, call: Fp8ProjectionCall, context: SPContext) -> Decision:
        """See `OpSpec`. Nothing of the op can fail later for want of memory."""
        decision = super().decide(call, context)
        context.synchronize()
        return decision

    def words(self, call: Fp8ProjectionCall, context: SPContext) -> str:
        """See `OpSpec`."""
        shape, (n, k) = call.shape, call.weight.shape
        sizes = "x".join(map(str, (*call.rows, k, shape.num_heads, shape.num_groups, shape.head_dim, n)))
        return f"{self.name} {sizes}{', bias' if call.has_bias else ''}"

    def where(self, call: Fp8ProjectionCall) -> str:
        """See `OpSpec`."""
        return f"at {call.rows} x {tuple(call.weight.shape)} "

    def trial(self, call: Fp8ProjectionCall, context: SPContext) -> Trial:
        """See `OpSpec`: on random values, which are timed, and on values that show the order of sums."""
        made = [self._operands(call, context, reveals=reveals) for reveals in (False, True)]
        query = call.like.new_empty((*call.rows, call.shape.num_heads, call.shape.head_dim))
        exchange = Exchange(call.group, call.shape, route_exchange(call.group, call.shape, query))
        first, *more = (
            (lambda one=one: self._native(call, one, exchange), lambda one=one: self._fused(call, one, context))
            for one in made
        )
        return Trial(self.words(call, context), *first, None, more)

    def held_bytes(self, call: Fp8ProjectionCall) -> int:
        """See `OpSpec`: as of tensor parallel layers in FP8, with parts that are sent and put in order."""
        (n, k), rows = call.weight.shape, math.prod(call.rows)
        return 10 * rows * k + 12 * n * k + 12 * rows * n

    def inputs(self, call: Fp8ProjectionCall) -> tuple[torch.Tensor, torch.Tensor]:
        """See `OpSpec`."""
        return call.like, call.weight

    def megatron(self, call: Fp8ProjectionCall) -> Function:
        """See `OpSpec`: on operands of its own."""
        exchange = Exchange(call.group, call.shape, None)
        made = self._operands(call, self.context(call), reveals=False)
        return lambda x, weight: self._native(call, made, exchange)

    def fused(self, call: Fp8ProjectionCall, context: SPContext) -> Function:
        """See `OpSpec`: on operands of its own."""
        made = self._operands(call, context, reveals=False)
        return lambda x, weight: self._fused(call, made, context)

    def _operands(self, call: Fp8ProjectionCall, context: SPContext, *, reveals: bool) -> _Operands:
        (n, k), rank, rows, device = call.weight.shape, context.rank, math.prod(call.rows), call.like.device

        def normal(shape: tuple[int, ...], seed: int) -> torch.Tensor:
            generator = torch.Generator(device).manual_seed(seed)
            return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)

        def made(num_rows: int, seed: int, signed: Any) -> Any:
            quantizer = tensor_quantizer("E4M3", device, columnwise=False)
            if not reveals:
                return quantizer(normal((num_rows, k), seed))
            options = dict(seed=seed, signed=signed, row_block=num_rows)
            return quantizer(revealing_matrix((num_rows, k), torch.bfloat16, device, **options))

        with torch.inference_mode(False), torch.no_grad():
            layout, lead = call.shape.qkv_layout(context.world_size), (call.rows[0] * context.world_size, call.rows[1])
            grads = [
                normal((*lead, layout.num_heads(part), size), 51 + 10 * rank + part)
                for part, size in enumerate(layout.head_dims)
            ]
            bias = normal((n,), 31 + rank) if call.has_bias else None
            return _Operands(made(rows, 1 + rank, "rows"), made(n, 101 + rank, "columns"), bias, grads)

    def _native(self, call: Fp8ProjectionCall, made: _Operands, exchange: Exchange) -> list[torch.Tensor]:
        world_size = dist.get_world_size(call.group)
        options = dict(out_dtype=torch.bfloat16, use_split_accumulator=False, bias=made.bias)
        with torch.inference_mode(False), torch.no_grad():
            y, *_ = multiply(made.weight, made.x, **options)
        with torch.inference_mode(False), torch.enable_grad():
            y = y.view(*call.rows, -1).requires_grad_()
            parts = exchange.to_heads(*split_by_heads(y, call.shape.qkv_layout(world_size), world_size))
            (grad,) = torch.autograd.grad(parts, y, made.grads)
        return [*(part.detach() for part in parts), grad.flatten(0, 1)]

    def _fused(self, call: Fp8ProjectionCall, made: _Operands, context: SPContext) -> list[torch.Tensor]:
        options: dict[str, Any] = dict(context=context, layout=call.shape.qkv_layout(context.world_size))
        with torch.inference_mode(False), torch.no_grad():
            x, weight, scales = operands(made.x, made.weight)
            parts = gemm_a2a(x.view(*call.rows, -1), weight, scales=scales, bias=made.bias, **options)
            # A copy, since the next op writes where it lies.
            grad = gather_sequence(made.grads, meanwhile=lambda: None, **options).clone()
        return [*parts, grad]


FP8_PROJECTION = Fp8ProjectionSpec()
