"""Expert parallelism declared for the policy: the movement of tokens, and each pair of a movement and a grouped GEMM.

Ranks may hold different numbers of tokens, so the movement is asked about once for each kind of MoE layer, for the largest
number of the first step, and the answer holds for every later one; the first step's own tokens, wherever they are routed,
are compared, too. Megatron's path is compared in PyTorch's deterministic mode, where it repeats itself, and timed in the
mode that is in force.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import get_capacity

from ditron_train.ep import EPContext, ExpertCall, Layout, Pair, SumOrder, begin_layout, dispatch, fewest_rows_before
from ditron_train.ep import expert_functions as pairs_of
from ditron_train.ep.launch import compiling
from ditron_train.policy import Function, OpSpec, Trial, gate
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.logs import log_once
from ditron_train.runtime.settings import get_settings

__all__ = ["SPECS", "MOVEMENT", "MovementCall", "fused_pairs_here", "warns_of_few_rows"]


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def _random_inputs(
    num_tokens: int,
    hidden_states: torch.Tensor,
    probs: torch.Tensor,
    topk: int,
    seed: int,
    expert_capacity: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, even routing (padded to ``expert_capacity``), probabilities and an output gradient, from a generator of
    its own."""
    device, hidden, num_experts = hidden_states.device, hidden_states.shape[-1], probs.shape[1]
    generator = torch.Generator(device).manual_seed(seed)
    x, grad = (
        torch.empty(num_tokens, hidden, dtype=hidden_states.dtype, device=device).normal_(generator=generator)
        for _ in range(2)
    )
    scores = torch.empty(num_tokens, num_experts, device=device).uniform_(0.1, 1.0, generator=generator)
    routed = torch.zeros(num_tokens, num_experts, dtype=torch.bool, device=device)
    routed.scatter_(1, scores.topk(topk, dim=1).indices, True)
    scores *= routed
    if expert_capacity is not None:  # as the router pads: with tokens of probability 0
        routed = torch.zeros_like(routed).scatter_(0, scores.topk(expert_capacity, dim=0).indices, True)
    return x, routed, (scores * routed).to(probs.dtype), grad


def _rows_and_results(
    dispatcher: Any, x: torch.Tensor, routed: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts' rows, and the results of experts that scale them by the probabilities."""
    tokens, row_probs = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, routed, weights))
    rows, _, row_probs = dispatcher.dispatch_postprocess(tokens, row_probs)
    scaled = (rows * row_probs[:, None]).to(rows.dtype)
    return rows, dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(scaled)))


def _forward_backward(dispatcher: Any, data: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Rows, results and gradients of a dispatcher around experts that scale their rows by the probabilities.

    Args:
        dispatcher: Native or ours.
        data: Tokens, routing map, probabilities and the results' gradient.
    """
    x, routed, weights, grad = data
    leaves = [x.detach().requires_grad_(), weights.detach().requires_grad_()]
    with torch.inference_mode(False), torch.enable_grad():
        rows, out = _rows_and_results(dispatcher, leaves[0], routed, leaves[1])
        out.backward(grad)
    return [rows.detach(), out.detach(), *(leaf.grad for leaf in leaves)]


class MovementCall(NamedTuple):
    """The first step of a kind of MoE layer on this rank.

    Attributes:
        make: Builds a dispatcher: Megatron's (True) or ours.
        hidden_states: Tokens ``[..., hidden]``.
        routing_map: bool ``[num_tokens, num_experts]``.
        probs: ``[num_tokens, num_experts]``.
        topk: Experts of a token.
        is_fused: Whether ``moe_permute_fusion`` is on.
        group: The expert parallel group.
        pad_factor: Capacity factor where tokens are padded to capacity.
    """

    make: Callable[[bool], Any]
    hidden_states: torch.Tensor
    routing_map: torch.Tensor
    probs: torch.Tensor
    topk: int
    is_fused: bool
    group: dist.ProcessGroup
    pad_factor: float | None = None


class MovementSpec(OpSpec[MovementCall, Any]):
    """Dispatch and combine, forward and backward, around experts that scale their rows; the context is our dispatcher."""

    name, log_name, row, measured = "ep movement", "ep", "dispatch_combine", "forward_backward"

    def device(self, call: MovementCall) -> torch.device:
        """See `OpSpec`."""
        return call.hidden_states.device

    def key(self, call: MovementCall) -> tuple[Hashable, ...]:
        """See `OpSpec`."""
        hidden, probs = call.hidden_states, call.probs
        layer = (hidden.shape[-1], hidden.dtype, probs.shape[1], probs.dtype)
        return (*layer, call.topk, call.is_fused, call.pad_factor)

    def context(self, call: MovementCall) -> Any:
        """See `OpSpec`: nothing that is not made by a dispatcher's first call."""
        return _DECIDED

    def words(self, call: MovementCall, context: Any) -> str:
        """See `OpSpec`."""
        raise AssertionError("a trial's words name the largest number of tokens of any rank")

    def trial(self, call: MovementCall, context: Any) -> Trial:
        """See `OpSpec`: even routing of the largest number of tokens of any rank, and the call's own tokens."""
        probs, group, topk = call.probs, call.group, call.topk
        most = torch.tensor([probs.shape[0]], device=probs.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        num_tokens, capacity = int(most.item()), None
        if call.pad_factor is not None:
            sizes = dict(num_experts=probs.shape[1], capacity_factor=call.pad_factor)
            capacity = get_capacity(num_tokens=num_tokens * topk, **sizes)
        with torch.inference_mode(False):
            seed = 1 + dist.get_rank(group)
            even = _random_inputs(num_tokens, call.hidden_states, probs, topk, seed, capacity)
            tensors = (call.hidden_states, call.routing_map, probs)
            own, *routing = (one.clone() if one.is_inference() else one.detach() for one in tensors)
            own = own.view(-1, own.shape[-1])
            given = (own, *routing, even[3][: len(own)])
        native, ours = call.make(True), call.make(False)
        repeats = contextlib.nullcontext if call.is_fused else _deterministic
        num_calls = 0

        def megatron() -> list[torch.Tensor]:
            nonlocal num_calls
            num_calls += 1  # the first call is compared, the others are timed
            with repeats() if num_calls == 1 else contextlib.nullcontext():
                return _forward_backward(native, even)

        def megatron_given() -> list[torch.Tensor]:
            with repeats():
                return _forward_backward(native, given)

        words = f"ep {num_tokens} tokens x {own.shape[1]}, top-{topk} of {probs.shape[1]}, {own.dtype}"
        words += ", fused" * call.is_fused + ("" if capacity is None else f", padded to {capacity}")
        fused, fused_given = (functools.partial(_forward_backward, ours, data) for data in (even, given))
        return Trial(words, megatron, fused, also=[(megatron_given, fused_given)])

    def inputs(self, call: MovementCall) -> Sequence[torch.Tensor]:
        """See `OpSpec`."""
        return call.hidden_states, call.routing_map, call.probs

    def megatron(self, call: MovementCall) -> Function:
        """See `OpSpec`."""
        return functools.partial(_rows_and_results, call.make(True))

    def fused(self, call: MovementCall, context: Any) -> Function:
        """See `OpSpec`."""
        return functools.partial(_rows_and_results, call.make(False))


_DECIDED = object()
MOVEMENT = MovementSpec()


class PairCall(NamedTuple):
    """A pair of a movement and a grouped GEMM in a kind of MoE layer.

    Attributes:
        pair: Which.
        others: Pairs that are already chosen: the pair takes their place.
        runs: Data and functions of the layer, made at the first use.
        group: The expert parallel group.
        kind: All that is particular to the layer.
    """

    pair: Pair
    others: frozenset[Pair]
    runs: _PairRuns
    group: dist.ProcessGroup
    kind: tuple[Hashable, ...]


class PairSpec(OpSpec[PairCall, Any]):
    """One kernel for a movement and a grouped GEMM, against our movement and Transformer Engine's GEMM one after the
    other: all of these have the bits of Megatron's path."""

    measured = "forward"

    def __init__(self, pair: Pair) -> None:
        self.pair, self.name, self.row = pair, f"ep {pair}", pair

    def device(self, call: PairCall) -> torch.device:
        """See `OpSpec`."""
        return call.runs.device

    def key(self, call: PairCall) -> tuple[Hashable, ...]:
        """See `OpSpec`."""
        return (call.others, *call.kind)

    def context(self, call: PairCall) -> Any:
        """See `OpSpec`: the layer has it already."""
        call.runs.compile()
        return _DECIDED

    def words(self, call: PairCall, context: Any) -> str:
        """See `OpSpec`."""
        return f"ep {self.pair} {call.runs.words}"

    def inputs(self, call: PairCall) -> Sequence[torch.Tensor]:
        """See `OpSpec`: made by the layer's `_PairRuns`."""
        return ()

    def megatron(self, call: PairCall) -> Function:
        """See `OpSpec`."""
        return functools.partial(call.runs.run, self.pair, call.others)

    def fused(self, call: PairCall, context: Any) -> Function:
        """See `OpSpec`."""
        return functools.partial(call.runs.run, self.pair, frozenset({self.pair}))


_PAIRS: dict[Pair, PairSpec] = {
    pair: PairSpec(pair) for pair in ("gemm_combine", "dgrad_combine", "beside_wgrad", "own_wgrad")
}
SPECS: Sequence[OpSpec[Any, Any]] = (MOVEMENT, *_PAIRS.values())


def fused_pairs_here(
    experts: Any, layout: Layout, context: EPContext, hidden_states: torch.Tensor, order: SumOrder, *, group: Any
) -> frozenset[Pair]:
    """Which pairs of a movement and a grouped GEMM are faster as one kernel, with equal bits (collective the first
    time).

    Each is compared on the experts' weights and a layout of even routing for the largest number of tokens of any rank.

    Args:
        experts: A ``DitronTEGroupedMLP``.
        layout: Of the first step.
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
        layout.ragged,
    )
    chosen: frozenset[Pair] = frozenset()
    with torch.no_grad():
        runs = _PairRuns(experts, layout, context, hidden_states, order, group)
        for pair in runs.pairs:
            others = chosen & {"dgrad_combine"} if pair == "beside_wgrad" else frozenset()  # the better one so far
            if gate.context_for(_PAIRS[pair], PairCall(pair, others, runs, group, kind)) is not None:
                chosen = chosen - others | {pair}
    return chosen


class _PairRuns:
    """What the pairs of one kind of layer are compared on."""

    def __init__(
        self,
        experts: Any,
        layout: Layout,
        context: EPContext,
        hidden_states: torch.Tensor,
        order: SumOrder,
        group: dist.ProcessGroup,
    ) -> None:
        self._experts, self._layout, self._context, self._like = experts, layout, context, hidden_states
        self._order, self._group, self.device = order, group, hidden_states.device
        self._is_compiled = False
        self.pairs: list[Pair] = ["gemm_combine", "dgrad_combine", "beside_wgrad"]
        own_bits = get_settings().policy == "force" or pairs_of.own_wgrad_has_native_bits(
            *experts.linear_fc2.weight0.shape
        )
        if own_bits and not experts.linear_fc2.fuse_wgrad_accumulation:
            self.pairs.append("own_wgrad")

    @functools.cached_property
    def _data(self) -> tuple[Layout, dict[Pair, Callable[[ExpertCall], list[Any]]], list[int], str]:
        """A layout of even routing, the bodies of the pairs on it, tokens of each expert, and all of it in words (collective)."""
        experts, context, hidden_states = self._experts, self._context, self._like
        shape, hidden = context.shape, hidden_states.shape[-1]
        most = torch.tensor([self._layout.num_tokens], device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group)
        like = torch.empty(1, shape.num_experts, device=self.device)
        capacity = self._layout.place_capacity // shape.num_experts if self._layout.ragged else None
        seed = 1 + dist.get_rank(self._group)
        x, routed, probs, _ = _random_inputs(int(most), hidden_states, like, shape.topk, seed, capacity)
        fresh = begin_layout(routed, probs, hidden, x.dtype, context, expert_capacity=capacity).finish()
        rows, row_probs = dispatch(x, fresh, context)
        weights, back = (
            [getattr(linear, f"weight{index}").detach() for index in range(linear.num_gemms)]
            for linear in (experts.linear_fc1, experts.linear_fc2)
        )
        generator = torch.Generator(self.device).manual_seed(1)
        narrow, wide = (
            torch.empty(fresh.num_rows, columns, dtype=x.dtype, device=self.device).normal_(generator=generator)
            for columns in (back[0].shape[1], weights[0].shape[0])
        )
        bodies: dict[Pair, Callable[[ExpertCall], list[Any]]] = {
            "gemm_combine": lambda call: [pairs_of.forward_out(narrow, back, call)],
            "dgrad_combine": lambda call: list(
                pairs_of.backward_in(wide, rows, weights, call, row_probs, torch.float32)[:2]
            ),
            "own_wgrad": lambda call: list(pairs_of.wgrad_out(rows, narrow, back, call)),
        }
        bodies["beside_wgrad"] = bodies["dgrad_combine"]
        words = (
            f"{fresh.num_tokens} tokens x {hidden}, top-{shape.topk} of {shape.num_experts}, experts "
            f"{tuple(weights[0].shape)}, {tuple(back[0].shape)}, {x.dtype}, {self._order}"
        )
        return fresh, bodies, fresh.tokens_per_expert.tolist(), words

    @property
    def words(self) -> str:
        """Sizes of the layer."""
        return self._data[3]

    def run(self, pair: Pair, chosen: frozenset[Pair]) -> list[Any]:
        """The part of the layer that ``pair`` is about, with the pairs ``chosen`` as one kernel."""
        return self._data[1][pair](self._call(chosen))

    def _call(self, chosen: frozenset[Pair]) -> ExpertCall:
        from ditron_train.megatron.ep.experts import TEGemm, TEWgrad

        layout, _, splits, _ = self._data
        return ExpertCall(layout, self._context, self._order, chosen, TEGemm(splits), TEWgrad(splits))

    def compile(self) -> None:
        """Compiles the kernels of all pairs once, each by one of the ranks, which share Triton's cache; not those that a
        plan decides.

        Measured on 2 x H200 with an empty cache: asking for the pairs took 12.8 s, 8.6 s with this (without launchers).
        """
        if self._is_compiled or get_settings().plan is not None:
            return
        self._is_compiled = True
        runs = [(pair, frozenset({pair})) for pair in self.pairs] + [(pair, frozenset()) for pair in self.pairs]
        with compiling(self._context):
            for pair, chosen in runs[dist.get_rank(self._group) :: dist.get_world_size(self._group)]:
                with contextlib.suppress(NotSupportedError):  # it is raised again, by every rank
                    self.run(pair, chosen)
        dist.barrier(group=self._group)


def warns_of_few_rows(context: EPContext) -> bool:
    """With a fixed capacity: whether an expert had so few rows that bits may differ, which the log then says (no host
    sync)."""
    fewest = fewest_rows_before(context)
    if fewest is None or fewest >= pairs_of.FEWEST_ROWS:
        return False
    message = (
        f"ep: an expert had {fewest} rows; where one has fewer than {pairs_of.FEWEST_ROWS} the GEMMs of DITRON_EP_CAPACITY may "
        "add up in another order than Transformer Engine's (exact sizes do not)"
    )
    log_once("ep few rows", message, level=logging.WARNING)
    return True
