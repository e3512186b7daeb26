"""Each pair of a dispatch or combine and a grouped GEMM declared for the policy: one kernel for both, or one after the
other; and each product of all experts: one kernel, or Transformer Engine's, one for each expert."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ditron_train.ep import EPContext, EPHandle, ExpertCall, Pair, SumOrder, begin_layout, dispatch
from ditron_train.ep.context import compiling
from ditron_train.ep.dispatcher import dispatch_linear_backward, linear_combine_forward
from ditron_train.ep.grouped_gemm import RowTiles, group_wgrad_into
from ditron_train.ep.plan import (
    NEVER,
    OTHER_BITS,
    PAIRS,
    RowProduct,
    WgradProduct,
    agreed_min_rows,
    agreed_most_rows,
    pairs_of_step,
    products_of,
)
from ditron_train.megatron.ep.spec import random_inputs
from ditron_train.megatron.shared.values import own_or_normal
from ditron_train.policy import Function, Op, Trial, gate
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.logs import log_once
from ditron_train.runtime.settings import get_settings


class PairCall(NamedTuple):
    """A pair of a dispatch or combine and a grouped GEMM in a kind of MoE layer.

    Attributes:
        pair: Which.
        runs: Data and functions of the layer, made at the first use.
        group: The expert parallel group.
        kind: All that is particular to the layer.
    """

    pair: Pair
    runs: _PairRuns
    group: dist.ProcessGroup
    kind: tuple[Hashable, ...]


#: Which weight a pair multiplies by, and whether it is transposed.
_PRODUCTS: dict[Pair, tuple[str, bool]] = {
    "gemm_combine": ("linear_fc2", True),
    "fc1_gemm": ("linear_fc1", True),
    "fc2_gemm": ("linear_fc2", True),
    "fc2_dgrad": ("linear_fc2", False),
    "fc1_dgrad": ("linear_fc1", False),
}
_ALONE = frozenset(PAIRS) - {"gemm_combine", "overlap_wgrad"}
_MOST_ELEMENTS = 1 << 24  # of a weight: a product of larger ones takes the device longer than its launch the host


class PairOp(Op[PairCall, None]):
    """One kernel for a dispatch or combine and a grouped GEMM, against our dispatch or combine and Transformer
    Engine's GEMM one after the other: all of these have the bits of stock Megatron.

    Products alone are timed on an idle device: a layer begins with a host sync, so the device waits for the launches
    of many small products."""

    def __init__(self, pair: Pair) -> None:
        self.pair, self.name = pair, f"ep {pair}"

    def device(self, call: PairCall) -> torch.device:
        return call.runs.device

    def key(self, call: PairCall) -> tuple[Hashable, ...]:
        return call.kind

    def make_context(self, call: PairCall) -> None:
        """The layer has it already; its kernels are compiled."""
        call.runs.compile()

    def describe(self, call: PairCall, context: None) -> str:
        return f"ep {self.pair} {call.runs.words}"

    def trial(self, call: PairCall, context: None) -> Trial:
        return replace(super().trial(call, context), host_counts="alone" if self.pair in _ALONE else False)

    def peak_bytes(self, call: PairCall) -> int:
        return call.runs.peak_bytes + (self.pair == "group_wgrad") * call.runs.wgrad_bytes

    def inputs(self, call: PairCall) -> Sequence[torch.Tensor]:
        """Made by the layer's `_PairRuns`."""
        return ()

    def native(self, call: PairCall) -> Function:
        return functools.partial(call.runs.run, self.pair, frozenset())

    def fused(self, call: PairCall, context: None) -> Function:
        return functools.partial(call.runs.run, self.pair, frozenset({self.pair}))


_PAIRS: dict[Pair, PairOp] = {pair: PairOp(pair) for pair in PAIRS}
OPS: Sequence[Op[Any, Any]] = tuple(_PAIRS.values())


def fused_pairs_here(
    experts: Any, handle: EPHandle, context: EPContext, hidden_states: torch.Tensor, order: SumOrder, *, group: Any
) -> frozenset[Pair]:
    """Which pairs of a dispatch or combine and a grouped GEMM are faster as one kernel, with equal bits (collective
    the first time).

    Each is compared on the experts' weights and a handle of even routing for the largest number of tokens of any rank.

    Args:
        experts: A ``DitronTEGroupedMLP``.
        handle: Handle of the first step's routing.
        context: Of the group.
        hidden_states: The first step's tokens.
        order: Which native permutation is in force.
        group: The expert-parallel group.
    """
    first, second = experts.linear_fc1.weight0, experts.linear_fc2.weight0
    into_main_grad = experts.linear_fc2.fuse_wgrad_accumulation
    kind = (
        context.shape,
        tuple(first.shape),
        tuple(second.shape),
        hidden_states.dtype,
        order,
        into_main_grad,
        handle.ragged,
    )
    with torch.no_grad():
        runs = _PairRuns(experts, handle, context, hidden_states, order, group)
        are_small = max(first.numel(), second.numel()) <= _MOST_ELEMENTS
        chosen: frozenset[Pair] = frozenset()
        for pair, op in _PAIRS.items():
            is_asked = are_small and not (pair == "fc2_gemm" and "gemm_combine" in chosen) or pair not in _ALONE
            if is_asked and gate.is_fused(op, PairCall(pair, runs, group, kind)):
                chosen |= {pair}
    names = ", ".join(sorted(chosen)) or "no movement or GEMM"
    log_once(f"ep fused {names}", f"ep: one kernel for {names}")
    return chosen


def with_limits(
    pairs: frozenset[Pair], experts: Any, like: torch.Tensor, group: dist.ProcessGroup
) -> tuple[frozenset[Pair], dict[Pair, int]]:
    """``pairs``, and how many rows an expert must have in a step for the product of each to add up as native's does,
    for ``group_wgrad`` may have at most: of rows ``like`` these. If it never does, the pair is left out (collective
    the first time)."""
    limits: dict[Pair, int] = {}
    if "group_wgrad" in pairs and like.is_cuda:
        linears = [experts.linear_fc1, experts.linear_fc2]
        into = _main_grad_dtype(linears[1].weight0) if linears[1].fuse_wgrad_accumulation else None
        products = [WgradProduct(tuple(one.weight0.shape), experts.num_local_experts, into) for one in linears]
        limits["group_wgrad"] = agreed_most_rows(frozenset(products), like.dtype, like.device, group)
        pairs -= {"group_wgrad"} if limits["group_wgrad"] <= 0 else set()
    for pair in sorted(pairs & _PRODUCTS.keys()) if like.is_cuda else ():
        linear, transpose = _PRODUCTS[pair]
        product = RowProduct(tuple(getattr(experts, linear).weight0.shape), experts.num_local_experts, transpose)
        limits[pair] = agreed_min_rows(frozenset([product]), like.dtype, like.device, group)
        if limits[pair] == NEVER:
            log_once(f"ep {pair} never", f"ep: no kernel for {pair}, {OTHER_BITS}")
            pairs -= {pair}
    return pairs, limits


def min_rows_of_layer(experts: Any, like: torch.Tensor, group: dist.ProcessGroup) -> int:
    """How many rows an expert must have for all products of a layer to be as native's; 0 on CPUs (collective the first
    time)."""
    if not like.is_cuda:
        return 0
    products = products_of(experts.num_local_experts, experts.linear_fc1.weight0, experts.linear_fc2.weight0)
    return agreed_min_rows(products, like.dtype, like.device, group)


def logged_pairs_of_step(
    pairs: frozenset[Pair], expert_rows: np.ndarray | None, limits: Mapping[Pair, int]
) -> tuple[frozenset[Pair], dict[Pair, int]]:
    """``pairs_of_step``, which the log says the first time that it leaves something native."""
    left, min_rows = pairs_of_step(pairs, expert_rows, limits)
    for pair in sorted(pairs - left | min_rows.keys()):
        assert expert_rows is not None, "all pairs stay"
        if pair == "group_wgrad":
            words = f"ep: an expert has more than {limits[pair]} rows in a step, whose weight gradients"
            log_once("ep most rows", f"{words} are Transformer Engine's")
            continue
        few = expert_rows[(expert_rows > 0) & (expert_rows < limits[pair])]
        message = (
            f"ep: {len(few)} of {len(expert_rows)} experts have fewer than {limits[pair]} rows in a step, "
            f"{few.sum() / expert_rows.sum():.0%} of all rows: for {pair} "
        )
        message += "their GEMMs" if pair in left else "all GEMMs of such a step"
        log_once(f"ep min rows {pair} {pair in left}", f"{message} are Transformer Engine's")
    return left, min_rows


def _main_grad_dtype(weight: Any) -> torch.dtype:
    like = getattr(weight, "main_grad", None)
    return torch.float32 if like is None else like.dtype


class _WrittenOver:
    """Transformer Engine's weight gradients as gradient accumulation fusion has them, in fresh buffers of the type of
    ``main_grad``, as the first microbatch is written over them."""

    def __init__(self, wgrad: Any, dtype: torch.dtype) -> None:
        self._wgrad, self._dtype = wgrad, dtype

    def __call__(
        self, grad: torch.Tensor, rows: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        out = [torch.empty_like(weight, dtype=self._dtype) for weight in weights]
        self._wgrad.into(out, grad, rows, accumulate=False)
        return out


def _written_over(
    dtype: torch.dtype, grad: torch.Tensor, rows: torch.Tensor, tiles: RowTiles, spare_sms: int
) -> Sequence[torch.Tensor | None]:
    """The same by our grouped GEMM."""
    shape = grad.shape[1], rows.shape[1]
    out = [torch.empty(shape, dtype=dtype, device=grad.device) for _ in range(tiles.num_experts)]
    group_wgrad_into(grad, rows, tiles, out, overwrites=True, spare_sms=spare_sms)
    return out


class _PairRuns:
    """What the pairs of one kind of layer are compared on."""

    def __init__(
        self,
        experts: Any,
        handle: EPHandle,
        context: EPContext,
        hidden_states: torch.Tensor,
        order: SumOrder,
        group: dist.ProcessGroup,
    ) -> None:
        self._experts, self._handle, self._context, self._like = experts, handle, context, hidden_states
        self._order, self._group, self.device = order, group, hidden_states.device
        self._is_compiled = False

    @property
    def peak_bytes(self) -> int:
        """What comparing a pair holds: rows of even routing with what is made of them."""
        first, second = self._experts.linear_fc1, self._experts.linear_fc2
        num_rows = self._handle.num_tokens * self._context.shape.topk
        columns = 4 * self._like.shape[-1] + 3 * (first.weight0.shape[0] + second.weight0.shape[1])
        return num_rows * columns * self._like.element_size()

    @property
    def wgrad_bytes(self) -> int:
        """All weight gradients, by both paths, in fp32."""
        linears = self._experts.linear_fc1, self._experts.linear_fc2
        return sum(8 * linear.num_gemms * linear.weight0.numel() for linear in linears)

    @functools.cached_property
    def _data(self) -> tuple[EPHandle, dict[Pair, Callable[[ExpertCall], list[Any]]], list[int], str]:
        """A handle of even routing, the bodies of the pairs on it, tokens of each expert, and all of it in words
        (collective)."""
        experts, context, hidden_states = self._experts, self._context, self._like
        shape, hidden = context.shape, hidden_states.shape[-1]
        most = torch.tensor([self._handle.num_tokens], device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group)
        like = torch.empty(1, shape.num_experts, device=self.device)
        capacity = self._handle.place_capacity // shape.num_experts if self._handle.ragged else None
        seed = 1 + dist.get_rank(self._group)
        x, routed, probs, _ = random_inputs(int(most), hidden_states, like, shape.topk, seed, capacity)
        fresh = begin_layout(routed, probs, hidden, x.dtype, context, expert_capacity=capacity).finish()
        rows, row_probs = dispatch(x, fresh, context)
        weights, back = (
            [own_or_normal(getattr(linear, f"weight{index}"), index) for index in range(linear.num_gemms)]
            for linear in (experts.linear_fc1, experts.linear_fc2)
        )
        generator = torch.Generator(self.device).manual_seed(1)
        narrow, wide = (
            torch.empty(fresh.num_rows, columns, dtype=x.dtype, device=self.device).normal_(generator=generator)
            for columns in (back[0].shape[1], weights[0].shape[0])
        )
        bodies: dict[Pair, Callable[[ExpertCall], list[Any]]] = {
            "gemm_combine": lambda call: [linear_combine_forward(narrow, back, call)],
            "fc1_gemm": lambda call: [call.product(rows, weights, True, "fc1_gemm")],
            "fc2_gemm": lambda call: [call.product(narrow, back, True, "fc2_gemm")],
            "fc2_dgrad": lambda call: [call.product(rows, back, False, "fc2_dgrad")],
            "fc1_dgrad": lambda call: [call.product(wide, weights, False, "fc1_dgrad")],
            "group_wgrad": lambda call: [
                *call.weight_grads(wide, rows, weights),
                *call.weight_grads(rows, narrow, back),
            ],
            "overlap_wgrad": lambda call: list(
                dispatch_linear_backward(wide, rows, weights, call, row_probs, torch.float32)[:2]
            ),
        }
        words = (
            f"{fresh.num_tokens} tokens x {hidden}, top-{shape.topk} of {shape.num_experts}, experts "
            f"{tuple(weights[0].shape)}, {tuple(back[0].shape)}, {x.dtype}, {self._order}"
        )
        return fresh, bodies, fresh.tokens_per_expert.tolist(), words

    @property
    def words(self) -> str:
        """Sizes of the layer, and what else a decision of another job, in a plan, is not for."""
        fc2 = self._experts.linear_fc2
        into = f", into main_grad of {_main_grad_dtype(fc2.weight0)}" if fc2.fuse_wgrad_accumulation else ""
        return f"{self._data[3]}{', padded routing' if self._handle.ragged else ''}{into}"

    def run(self, pair: Pair, chosen: frozenset[Pair]) -> list[Any]:
        """The part of the layer that ``pair`` is about, with the pairs ``chosen`` as one kernel."""
        return self._data[1][pair](self._call(chosen))

    def _call(self, chosen: frozenset[Pair]) -> ExpertCall:
        from ditron_train.megatron.ep.experts import TEGemm, TEWgrad

        handle, _, splits, _ = self._data
        gemm, wgrad = TEGemm(splits), TEWgrad(splits)
        fc2 = self._experts.linear_fc2
        dtype = _main_grad_dtype(fc2.weight0)
        if "group_wgrad" in chosen:
            own = functools.partial(_written_over, dtype) if fc2.fuse_wgrad_accumulation else None
            return ExpertCall(handle, self._context, self._order, chosen, gemm, into=own)
        into = _WrittenOver(wgrad, dtype) if fc2.fuse_wgrad_accumulation else wgrad
        return ExpertCall(handle, self._context, self._order, chosen, gemm, into)

    def compile(self) -> None:
        """Compiles the kernels of all pairs once, each by one of the ranks, which share Triton's cache; not those that
        a plan decides, nor products alone, which would run, and need memory.

        Measured on 2 x H200 with an empty cache: asking for the pairs took 12.8 s, 8.6 s with this (without
        launchers).
        """
        if self._is_compiled or get_settings().plan is not None:
            return
        self._is_compiled = True
        _ = self._data  # made by kernels that run: inside ``compiling`` none does
        pairs = [pair for pair in _PAIRS if pair not in _ALONE]
        runs = [(pair, frozenset({pair})) for pair in pairs] + [(pair, frozenset()) for pair in pairs]
        with compiling(self._context):
            for pair, chosen in runs[dist.get_rank(self._group) :: dist.get_world_size(self._group)]:
                with contextlib.suppress(NotSupportedError):  # it is raised again, by every rank
                    self.run(pair, chosen)
        dist.barrier(group=self._group)
