"""Gathered experts declared for the policy and the tools: the movement of tokens around any experts, and the experts'
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

from ditron_train.ep.combine import SumOrder, deterministic, index_add_order
from ditron_train.ep.gather import GatheredLayout
from ditron_train.ep.plan import MOST_FEW, Product, agreed_fewest_rows, native_products, products_of
from ditron_train.ep.spec import MoeSpec, routing_of
from ditron_train.megatron.ep.gather import GatheredCall, gather_linear, given_up_on_error, linear_scatter, start
from ditron_train.megatron.ep.movement_spec import repeating
from ditron_train.megatron.ep.spec import MovementCall, MovementSpec
from ditron_train.policy import Cost, Function, OpSpec, Place, Shape, Trial
from ditron_train.runtime.derivatives import refuse_second_derivatives
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.tp.context import TPContext, get_tp_context


class GatheredSpec(MovementSpec):
    """Gather and reduce-scatter, forward and backward, around experts that scale their rows."""

    name, row = "ep gather_scatter", "gather_scatter"

    def trial(self, call: MovementCall, context: Any) -> Trial:
        """See `OpSpec`; NCCL adds up gradients in the tokens' type."""
        dtype = call.hidden_states.dtype
        trial = super().trial(call, context)
        return replace(trial, words=f"{trial.words}, gathered", summed=None if dtype == torch.float32 else dtype)


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


class GatheredExpertsSpec(MoeSpec[ExpertsCall, TPContext]):
    """AG-GroupGEMM and GroupGEMM-RS, forward and backward."""

    name, row, measured, groups = "ep gathered_experts", "gathered_experts", "forward_backward", "expert"

    def key(self, call: ExpertsCall) -> tuple[Hashable, ...]:
        """See `OpSpec`; how many rows an expert has is another number at every step."""
        kinds = (tuple(call.x.shape), *(tuple(one[0].shape) for one in (call.firsts, call.seconds)))
        return (*kinds, len(call.firsts), call.x.dtype, call.sum_dtype, call.order, call.is_fused, call.x.device)

    def why_not(self, call: ExpertsCall) -> str | None:
        wrong = [one for one in (*call.firsts, *call.seconds) if one.dtype != call.x.dtype or not one.is_contiguous()]
        return "weights are not contiguous, or of another type than the tokens" if wrong else None

    def context(self, call: ExpertsCall) -> TPContext:
        return get_tp_context(call.group, call.x.device)

    def summed_dtype(self, call: ExpertsCall) -> torch.dtype | None:
        return None if call.x.dtype == torch.float32 else call.x.dtype

    def words(self, call: ExpertsCall, context: TPContext) -> str:
        sizes = " ".join(
            "x".join(map(str, one)) for one in (call.x.shape, call.firsts[0].shape, call.seconds[0].shape)
        )
        return f"{self.name} {sizes} {len(call.firsts)} experts, {call.x.dtype}, {call.order}, {call.sum_dtype}"

    def inputs(self, call: ExpertsCall) -> Sequence[torch.Tensor]:
        return call.x, *call.firsts, *call.seconds

    def held_bytes(self, call: ExpertsCall) -> int:
        """See `OpSpec`, as counted (``tests/policy/bodies_held.py``), and the data that reveals: gradients of all
        weights by both paths, and the rows of this rank's experts many times."""
        (n, k), num_rows = call.firsts[0].shape, int(call.local_map.sum())
        of_weights = 4 * sum(one.nbytes for one in (*call.firsts, *call.seconds))
        return of_weights + num_rows * (6 * k + 4 * n) * call.x.element_size() + 10 * call.x.nbytes

    def grads(self, call: ExpertsCall) -> Sequence[torch.Tensor]:
        return (call.grad,)

    def given(self, call: ExpertsCall, context: TPContext) -> ExpertsCall:
        """See `OpSpec`: an evaluation may come before training."""

        def normal(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone() if tensor.is_inference() else tensor

        with torch.inference_mode(False):
            firsts, seconds = (list(map(normal, weights)) for weights in (call.firsts, call.seconds))
            x, local_map, grad = map(normal, (call.x, call.local_map, call.grad))
        return call._replace(x=x, firsts=firsts, seconds=seconds, local_map=local_map, grad=grad)

    def megatron(self, call: ExpertsCall) -> Function:
        """See `OpSpec`: the allgather dispatcher's steps."""
        num, rows_of, is_fused = len(call.firsts), call.local_map, call.is_fused

        def function(x: torch.Tensor, *weights: torch.Tensor) -> Sequence[torch.Tensor]:
            counts = rows_of.sum(0).tolist()
            tokens = gather_from_sequence_parallel_region(x, group=call.group)
            rows, _, places, *_ = permute(  # since 0.17 offsets of padding and counts, too
                tokens, rows_of, num_out_tokens=sum(counts), fused=is_fused
            )
            y = _NativeProducts.apply(rows, counts, *weights[:num])
            h = y[:, : weights[num].shape[1]].contiguous()
            z = _NativeProducts.apply(h, counts, *weights[num:])
            sums = unpermute(z, places, restore_shape=tokens.shape, routing_map=rows_of, fused=is_fused)
            summed = reduce_scatter_to_sequence_parallel_region(sums.to(call.sum_dtype), group=call.group)
            return [summed.to(x.dtype)]

        return function

    def trial(self, call: ExpertsCall, context: TPContext) -> Trial:
        """See `OpSpec`: without fused permutation Megatron's path is compared, at its first call, in deterministic
        mode, and timed in the mode that is in force."""
        trial = super().trial(call, context)
        if call.is_fused:
            return trial
        num_calls = 0

        def megatron() -> Any:
            nonlocal num_calls
            num_calls += 1
            with deterministic(warn_only=True) if num_calls == 1 else contextlib.nullcontext():
                return trial.megatron()

        return replace(trial, megatron=megatron)

    def surroundings(self, shape: Shape) -> Any:
        return repeating(shape)

    def fused(self, call: ExpertsCall, context: TPContext) -> Function:
        num = len(call.firsts)

        def function(x: torch.Tensor, *weights: torch.Tensor) -> Sequence[torch.Tensor]:
            fewest = self.fewest_rows(call) if HAVE_TE and x.is_cuda else 0
            one: GatheredCall | None = None
            started = start(x, context, call.sum_dtype)  # before the sizes are there, as a layer's tokens do
            with given_up_on_error(lambda: started if one is None else one.take_started()):
                layout = GatheredLayout(call.local_map, context.world_size)
                one = GatheredCall(layout, context, call.order, call.sum_dtype, started)
                if HAVE_TE and x.is_cuda:
                    from ditron_train.megatron.ep.experts import TEGemm, TEWgrad

                    splits = layout.tokens_per_expert.tolist()
                    one.wgrad, one.few, one.fewest_rows = TEWgrad(splits), TEGemm(splits).some, fewest
                y = gather_linear(x, weights[:num], one)
            h = y[:, : weights[num].shape[1]].contiguous()
            return [linear_scatter(h, weights[num:], replace(one))]

        return function

    def why_no_row(self, call: ExpertsCall) -> str | None:
        """See `OpSpec`: what a layer leaves native."""
        if call.x.device.type == "cpu":
            return None
        counts, fewest = call.local_map.sum(0), self.fewest_rows(call)
        share = counts[counts < fewest].sum().double() / counts.sum().clamp(min=1)
        dist.all_reduce(share, op=dist.ReduceOp.MAX, group=call.group)
        if float(share) <= MOST_FEW:
            return None
        return f"{float(share):.0%} of a rank's rows are of experts with so few that a layer leaves its GEMMs native"

    def fewest_rows(self, call: ExpertsCall) -> int:
        """Rows of an expert below which its product is native; the same on all ranks, which compare together. It is
        measured the first time."""
        products = products_of(len(call.firsts), call.firsts[0], call.seconds[0])
        return agreed_fewest_rows(products, call.x.dtype, call.x.device, call.group)

    def sample(self, shape: Shape, place: Place, seed: int) -> ExpertsCall:
        """See `OpSpec` (collective)."""
        routed, _ = routing_of(shape, place, seed)
        world, device = place.world_size, place.device
        maps = routed.new_empty(world * len(routed), routed.shape[1])
        dist.all_gather_into_tensor(maps.view(torch.uint8), routed.view(torch.uint8), group=place.group)
        local = maps.view(len(maps), world, -1)[:, place.rank].contiguous()
        hidden, ffn, num = shape.sizes["hidden"], shape.sizes["ffn_hidden"], local.shape[1]
        generator = torch.Generator(device).manual_seed(1000 * seed + place.rank)

        def values(*size: int) -> torch.Tensor:
            if device.type == "cpu":  # small integers: exact in every order of a sum
                return torch.randint(-2, 3, size, device=device, generator=generator).to(place.dtype)
            return torch.empty(size, dtype=place.dtype, device=device).normal_(generator=generator)

        is_fused = HAVE_TE and not shape.options["deterministic"]
        order: SumOrder | None = "descending" if is_fused else index_add_order(place.dtype, device)
        if order is None:
            raise NotSupportedError(f"index_add_ of {place.dtype} adds in an order of its own here")
        x, grad = values(len(routed), hidden), values(len(routed), hidden)
        firsts, seconds = [values(2 * ffn, hidden) for _ in range(num)], [values(hidden, ffn) for _ in range(num)]
        return ExpertsCall(x, firsts, seconds, local, place.group, order, torch.float32, is_fused, grad)

    def cost(self, call: ExpertsCall, context: TPContext) -> Cost:
        """See `OpSpec`: tokens go out and sums come back, forward and backward; sums of results in their own type."""
        elements = call.x.numel() * (context.world_size - 1)
        size = call.x.element_size()
        rows = int(call.local_map.sum())
        features = call.firsts[0].numel() + call.seconds[0].numel()
        return Cost(elements * (3.0 * size + call.sum_dtype.itemsize), 6.0 * rows * features)


GATHERED, GATHERED_EXPERTS = GatheredSpec(), GatheredExpertsSpec()
SPECS: Sequence[OpSpec[Any, Any]] = (GATHERED, GATHERED_EXPERTS)
