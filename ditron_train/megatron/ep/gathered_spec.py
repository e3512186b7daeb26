"""Gathered experts declared for the policy: tokens gathered and scattered around any experts, and the experts'
two linear layers with the gather and the reduce-scatter beside their grouped GEMMs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_utils import permute, unpermute

from ditron_train.ep.combine import SumOrder, deterministic
from ditron_train.ep.gather import GatheredLayout
from ditron_train.ep.plan import MOST_FEW, Product, agreed_min_rows, native_products, products_of
from ditron_train.megatron.ep.gather import GatheredCall, gather_linear, given_up_on_error, linear_scatter, start
from ditron_train.megatron.ep.spec import MovementOp
from ditron_train.policy import Function, Op, Trial
from ditron_train.policy.op import make_trial
from ditron_train.runtime.derivatives import refuse_second_derivatives
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.tp.context import TPContext, get_tp_context


class ExpertsCall(NamedTuple):
    """One pass of gathered experts without an activation: of the first layer's columns the second takes the first.

    Attributes:
        x: [tokens, hidden] of this rank.
        firsts, seconds: [N, hidden] and [hidden, K] of each local expert, K at most N.
        local_map: bool [world_size * tokens, local experts].
        group: All ranks that hold experts.
        order: In which a token's rows are added up.
        sum_dtype: In which results are added up over ranks.
        is_fused: Whether ``moe_permute_fusion`` is on.
        grad: Of the result.
    """

    x: torch.Tensor
    firsts: list[torch.Tensor]
    seconds: list[torch.Tensor]
    local_map: torch.Tensor
    group: dist.ProcessGroup
    order: SumOrder
    sum_dtype: torch.dtype
    is_fused: bool
    grad: torch.Tensor


@outside_compile
class _NativeProducts(torch.autograd.Function):
    """The linear layers of experts as native layers run them: Transformer Engine's grouped GEMM, or one product an
    expert."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counts: list[int], *weights: torch.Tensor) -> torch.Tensor:
        ctx.counts = counts  # not the products: they hold this result, whose graph would hold them for ever
        ctx.save_for_backward(x, *weights)
        return _products_of(counts, weights)["forward"](x, None, weights)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_derivatives("the linear layers of experts")
        x, *weights = ctx.saved_tensors
        grad, products = grad.contiguous(), _products_of(ctx.counts, weights)
        return (products["dgrad"](x, grad, weights), None, *products["wgrad"](x, grad, weights))


def _products_of(counts: list[int], weights: Sequence[torch.Tensor]) -> dict[Product, Callable]:
    n, k = weights[0].shape
    return native_products(counts, n, k, weights[0].dtype, weights[0].device)


class GatheredExpertsOp(Op[ExpertsCall, TPContext]):
    """AG-GroupGEMM and GroupGEMM-RS, forward and backward."""

    name = "ep gathered_experts"

    def key(self, call: ExpertsCall) -> tuple[Hashable, ...]:
        """How many rows an expert has is another number at every step."""
        kinds = (tuple(call.x.shape), *(tuple(one[0].shape) for one in (call.firsts, call.seconds)))
        return (*kinds, len(call.firsts), call.x.dtype, call.sum_dtype, call.order, call.is_fused, call.x.device)

    def unsupported_reason(self, call: ExpertsCall) -> str | None:
        wrong = [one for one in (*call.firsts, *call.seconds) if one.dtype != call.x.dtype or not one.is_contiguous()]
        return "weights are not contiguous, or of another type than the tokens" if wrong else None

    def make_context(self, call: ExpertsCall) -> TPContext:
        return get_tp_context(call.group, call.x.device)

    def describe(self, call: ExpertsCall, context: TPContext) -> str:
        sizes = " ".join(
            "x".join(map(str, one)) for one in (call.x.shape, call.firsts[0].shape, call.seconds[0].shape)
        )
        return f"{self.name} {sizes} {len(call.firsts)} experts, {call.x.dtype}, {call.order}, {call.sum_dtype}"

    def inputs(self, call: ExpertsCall) -> Sequence[torch.Tensor]:
        return call.x, *call.firsts, *call.seconds

    def peak_bytes(self, call: ExpertsCall) -> int:
        """As counted (``tests/policy/bodies_held.py``), and the order-probe inputs: gradients of all
        weights by both paths, and the rows of this rank's experts many times."""
        (n, k), num_rows = call.firsts[0].shape, int(call.local_map.sum())
        of_weights = 4 * sum(one.nbytes for one in (*call.firsts, *call.seconds))
        return of_weights + num_rows * (6 * k + 4 * n) * call.x.element_size() + 10 * call.x.nbytes

    def grads(self, call: ExpertsCall) -> Sequence[torch.Tensor]:
        return (call.grad,)

    def native(self, call: ExpertsCall) -> Function:
        """The allgather dispatcher's steps."""
        num, rows_of, is_fused = len(call.firsts), call.local_map, call.is_fused

        def function(x: torch.Tensor, *weights: torch.Tensor) -> Sequence[torch.Tensor]:
            counts = rows_of.sum(0).tolist()
            tokens = gather_from_sequence_parallel_region(x, group=call.group)
            # Since 0.17 offsets of padding and counts, too.
            rows, _, places, *_ = permute(tokens, rows_of, num_out_tokens=sum(counts), fused=is_fused)
            y = _NativeProducts.apply(rows, counts, *weights[:num])
            h = y[:, : weights[num].shape[1]].contiguous()
            z = _NativeProducts.apply(h, counts, *weights[num:])
            sums = unpermute(z, places, restore_shape=tokens.shape, routing_map=rows_of, fused=is_fused)
            summed = reduce_scatter_to_sequence_parallel_region(sums.to(call.sum_dtype), group=call.group)
            return [summed.to(x.dtype)]

        return function

    def trial(self, call: ExpertsCall, context: TPContext) -> Trial:
        """Without fused permutation the native path is compared, at its first call, in deterministic mode, and timed
        in the mode that is in force."""
        summed = None if call.x.dtype == torch.float32 else call.x.dtype
        trial = make_trial(self, _without_inference(call), context, summed_dtype=summed)
        if call.is_fused:
            return trial
        num_calls = 0

        def native() -> Any:
            nonlocal num_calls
            num_calls += 1
            with deterministic(warn_only=True) if num_calls == 1 else contextlib.nullcontext():
                return trial.native()

        return replace(trial, native=native)

    def fused(self, call: ExpertsCall, context: TPContext) -> Function:
        num = len(call.firsts)

        def function(x: torch.Tensor, *weights: torch.Tensor) -> Sequence[torch.Tensor]:
            min_rows = self.min_rows(call) if HAVE_TE and x.is_cuda else 0
            one: GatheredCall | None = None
            started = start(x, context, call.sum_dtype)  # before the sizes are there, as a layer's tokens do
            with given_up_on_error(lambda: started if one is None else one.take_started()):
                layout = GatheredLayout(call.local_map, context.world_size)
                one = GatheredCall(layout, context, call.order, call.sum_dtype, started)
                if HAVE_TE and x.is_cuda:
                    from ditron_train.megatron.ep.experts import TEGemm, TEWgrad

                    splits = layout.tokens_per_expert.tolist()
                    one.wgrad, one.few, one.min_rows = TEWgrad(splits), TEGemm(splits).some, min_rows
                y = gather_linear(x, weights[:num], one)
            h = y[:, : weights[num].shape[1]].contiguous()
            return [linear_scatter(h, weights[num:], replace(one))]

        return function

    def min_rows_reason(self, call: ExpertsCall) -> str | None:
        """Why a layer leaves the experts' GEMMs native, of a step's rows, or None (collective)."""
        if call.x.device.type == "cpu":
            return None
        counts, min_rows = call.local_map.sum(0), self.min_rows(call)
        share = counts[counts < min_rows].sum().double() / counts.sum().clamp(min=1)
        dist.all_reduce(share, op=dist.ReduceOp.MAX, group=call.group)
        if float(share) <= MOST_FEW:
            return None
        return f"{float(share):.0%} of a rank's rows are of experts with so few that a layer leaves its GEMMs native"

    def min_rows(self, call: ExpertsCall) -> int:
        """Rows of an expert below which its product is native; the same on all ranks, which compare together. It is
        measured the first time."""
        products = products_of(len(call.firsts), call.firsts[0], call.seconds[0])
        return agreed_min_rows(products, call.x.dtype, call.x.device, call.group)


def _without_inference(call: ExpertsCall) -> ExpertsCall:
    """An evaluation may come before training."""

    def normal(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if tensor.is_inference() else tensor

    with torch.inference_mode(False):
        firsts, seconds = (list(map(normal, weights)) for weights in (call.firsts, call.seconds))
        x, local_map, grad = map(normal, (call.x, call.local_map, call.grad))
    return call._replace(x=x, firsts=firsts, seconds=seconds, local_map=local_map, grad=grad)


GATHERED, GATHERED_EXPERTS = MovementOp("ep gather_scatter", is_gathered=True), GatheredExpertsOp()
OPS: Sequence[Op[Any, Any]] = (GATHERED, GATHERED_EXPERTS)
