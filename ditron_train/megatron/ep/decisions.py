"""Asks the policy once for each kind of MoE layer: bits and time of dispatch and combine, forward and backward.

Ranks may hold different numbers of tokens, so the question is asked for the largest number of the first step and the
answer holds for every later one; the first step's own tokens, wherever they are routed, are compared, too. Native is
compared in PyTorch's deterministic mode, where it repeats itself, and timed in the mode that is in force.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import get_capacity

from ditron_train.ep import EPContext, ExpertCall, Layout, Pair, SumOrder, fewest_rows_before
from ditron_train.ep import expert_functions as pairs_of
from ditron_train.ep.launch import compiling
from ditron_train.policy import decide
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.groups import GroupCache
from ditron_train.runtime.logs import log_once
from ditron_train.runtime.settings import get_settings

__all__ = ["forget", "fused_pairs_here", "warns_of_few_rows", "why_not_here"]

_answers: GroupCache[tuple[Any, ...], str | None] = GroupCache()
_pairs: GroupCache[tuple[Any, ...], frozenset[Pair]] = GroupCache()


def forget() -> None:
    """Ask anew from now on."""
    _answers.clear()
    _pairs.clear()


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


def _forward_backward(dispatcher: Any, data: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Rows, results and gradients of a dispatcher around experts that scale their rows by the probabilities.

    Args:
        dispatcher: Native or ours.
        data: Tokens, routing map, probabilities and the results' gradient.
    """
    x, routed, weights, grad = data
    leaves = [x.detach().requires_grad_(), weights.detach().requires_grad_()]
    with torch.inference_mode(False), torch.enable_grad():
        tokens, row_probs = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(leaves[0], routed, leaves[1]))
        rows, _, row_probs = dispatcher.dispatch_postprocess(tokens, row_probs)
        scaled = (rows * row_probs[:, None]).to(rows.dtype)
        out = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(scaled)))
        out.backward(grad)
    return [rows.detach(), out.detach(), *(leaf.grad for leaf in leaves)]


def why_not_here(
    make: Callable[[bool], Any],
    hidden_states: torch.Tensor,
    routing_map: torch.Tensor,
    probs: torch.Tensor,
    *,
    topk: int,
    fused: bool,
    group: Any,
    pad_factor: float | None = None,
) -> str | None:
    """Why layers of this kind stay native on this machine, or None (collective the first time, with host syncs).

    Args:
        make: Builds a dispatcher, native (True) or ours.
        hidden_states: The first step's tokens ``[..., hidden]``.
        routing_map: bool ``[num_tokens, num_experts]``.
        probs: ``[num_tokens, num_experts]``.
        topk: Experts of a token.
        fused: Whether ``moe_permute_fusion`` is on.
        group: The expert-parallel group.
        pad_factor: Capacity factor where tokens are padded to capacity.

    Raises:
        ArenaError, NotSupportedError: Ours cannot run here; on every rank alike.
    """
    key = (group, hidden_states.shape[-1], hidden_states.dtype, probs.shape[1], probs.dtype, topk, fused, pad_factor)
    if key in _answers:
        return _answers[key]
    most = torch.tensor([probs.shape[0]], device=hidden_states.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    num_tokens, capacity = int(most.item()), None
    if pad_factor is not None:
        capacity = get_capacity(num_tokens=num_tokens * topk, num_experts=probs.shape[1], capacity_factor=pad_factor)
    with torch.inference_mode(False):
        even = _random_inputs(num_tokens, hidden_states, probs, topk, 1 + dist.get_rank(group), capacity)
        own, *routing = (
            one.clone() if one.is_inference() else one.detach() for one in (hidden_states, routing_map, probs)
        )
        own = own.view(-1, own.shape[-1])
        given = (own, *routing, even[3][: len(own)])
    calls = {"native": 0}
    dispatchers = {"native": make(True), "ours": make(False)}

    def native() -> list[torch.Tensor]:
        calls["native"] += 1
        with _deterministic() if calls["native"] == 1 and not fused else contextlib.nullcontext():
            return _forward_backward(dispatchers["native"], even)

    def native_given() -> list[torch.Tensor]:
        with contextlib.nullcontext() if fused else _deterministic():
            return _forward_backward(dispatchers["native"], given)

    words = f"ep {num_tokens} tokens x {own.shape[1]}, top-{topk} of {probs.shape[1]}, {own.dtype}" + ", fused" * fused
    words += "" if capacity is None else f", padded to {capacity}"
    ours, ours_given = (functools.partial(_forward_backward, dispatchers["ours"], data) for data in (even, given))
    decision = decide(words, native, ours, group=group, device=own.device, also=[(native_given, ours_given)])
    _answers[key] = None if decision.use_ditron else decision.reason
    return _answers[key]


def fused_pairs_here(
    experts: Any, layout: Layout, context: EPContext, hidden_states: torch.Tensor, order: SumOrder, *, group: Any
) -> frozenset[Pair]:
    """Which pairs of a movement and a grouped GEMM are faster as one kernel, with equal bits (collective the first
    time).

    Each is compared with our movement and Transformer Engine's GEMM one after the other, on the experts' weights and a
    layout of even routing for the largest number of tokens of any rank.

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
    key = (
        group,
        context.shape,
        tuple(first.shape),
        tuple(second.shape),
        hidden_states.dtype,
        order,
        into_main_grad,
        layout.ragged,
    )
    if key not in _pairs:
        with torch.no_grad():
            _pairs[key] = _ask_for_pairs(experts, layout, context, hidden_states, order, group)
    return _pairs[key]


def _ask_for_pairs(
    experts: Any, layout: Layout, context: EPContext, hidden_states: torch.Tensor, order: SumOrder, group: Any
) -> frozenset[Pair]:
    from ditron_train.ep import begin_layout, dispatch
    from ditron_train.megatron.ep.experts import TEGemm, TEWgrad

    shape, device, hidden = context.shape, hidden_states.device, hidden_states.shape[-1]
    most = torch.tensor([layout.num_tokens], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    like = torch.empty(1, shape.num_experts, device=device)
    capacity = layout.place_capacity // shape.num_experts if layout.ragged else None
    x, routed, probs, _ = _random_inputs(
        int(most), hidden_states, like, shape.topk, 1 + dist.get_rank(group), capacity
    )
    fresh = begin_layout(routed, probs, hidden, x.dtype, context, expert_capacity=capacity).finish()
    rows, row_probs = dispatch(x, fresh, context)
    weights, back = (
        [getattr(linear, f"weight{index}").detach() for index in range(linear.num_gemms)]
        for linear in (experts.linear_fc1, experts.linear_fc2)
    )
    generator = torch.Generator(device).manual_seed(1)
    narrow, wide = (
        torch.empty(fresh.num_rows, columns, dtype=x.dtype, device=device).normal_(generator=generator)
        for columns in (back[0].shape[1], weights[0].shape[0])
    )
    splits = fresh.tokens_per_expert.tolist()
    bodies: dict[Pair, Callable[[ExpertCall], list[Any]]] = {
        "dispatch_gemm": lambda call: list(pairs_of.forward_in(x, weights, call, torch.float32)[:2]),
        "gemm_combine": lambda call: [pairs_of.forward_out(narrow, back, call)],
        "dispatch_dgrad": lambda call: list(pairs_of.backward_out(x, back, call)),
        "dgrad_combine": lambda call: list(
            pairs_of.backward_in(wide, rows, weights, call, row_probs, torch.float32)[:2]
        ),
    }
    bodies["beside_wgrad"] = bodies["dgrad_combine"]
    own_bits = get_settings().policy == "force" or pairs_of.own_wgrad_has_native_bits(*back[0].shape)
    if own_bits and not experts.linear_fc2.fuse_wgrad_accumulation:
        bodies["own_wgrad"] = lambda call: list(pairs_of.wgrad_out(rows, narrow, back, call))

    def call_with(pairs: set[Pair]) -> ExpertCall:
        return ExpertCall(fresh, context, order, frozenset(pairs), TEGemm(splits), TEWgrad(splits))

    runs = [(body, call_with({pair})) for pair, body in bodies.items()] + [
        (body, call_with(set())) for body in bodies.values()
    ]
    _compile_together(runs, context, group)
    chosen: set[Pair] = set()
    for pair, body in bodies.items():
        others = chosen & {"dgrad_combine"} if pair == "beside_wgrad" else set()  # against the better one so far
        apart, ours = call_with(others), call_with({pair})
        words = (
            f"ep {pair} {fresh.num_tokens} tokens x {hidden}, top-{shape.topk} of {shape.num_experts}, experts "
            f"{tuple(weights[0].shape)}, {tuple(back[0].shape)}, {x.dtype}, {order}"
        )
        timed = (functools.partial(body, call) for call in (apart, ours))
        try:
            decision = decide(words, *timed, group=group, device=device)
        except NotSupportedError as error:  # raised by every rank alike
            log_once(f"ep {pair} {error}", f"ep: {pair} stays apart, {error}")
            continue
        if decision.use_ditron:
            chosen = chosen - others | {pair}
    return frozenset(chosen)


def _compile_together(
    runs: list[tuple[Callable[[ExpertCall], list[Any]], ExpertCall]], context: EPContext, group: Any
) -> None:
    """Compiles the kernels of ``runs``, each by one of the ranks, which share Triton's cache; not those that a plan
    decides.

    Seen on 2 x H200 with an empty cache: asking for the pairs took 12.8 s, 8.6 s with this (without launchers).
    """
    if get_settings().plan is not None:
        return
    with compiling(context):
        for body, call in runs[dist.get_rank(group) :: dist.get_world_size(group)]:
            with contextlib.suppress(NotSupportedError):  # it is raised again, by every rank
                body(call)
    dist.barrier(group=group)


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
