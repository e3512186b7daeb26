"""Expert parallelism declared for the policy: the movement of tokens (dispatch and combine), and its pairs with GEMMs.

Ranks may hold different numbers of tokens, so the movement is asked about once for each kind of MoE layer, for the
largest number of the first step, and the answer holds for every later one; the first step's own tokens, wherever they
are routed, are compared, too. Stock Megatron is compared in PyTorch's deterministic mode, where it repeats itself,
and timed in the mode that is in force.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import get_capacity

from ditron_train.ep import EPContext, min_rows_before
from ditron_train.ep.combine import deterministic
from ditron_train.ep.plan import NEVER
from ditron_train.policy import Function, Op, Trial
from ditron_train.runtime.logs import log_once
from ditron_train.symm.nodes import num_nodes


def random_inputs(
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
        dispatcher: Native or fused.
        data: Tokens, routing map, probabilities and the results' gradient.
    """
    x, routed, weights, grad = data
    leaves = [x.detach().requires_grad_(), weights.detach().requires_grad_()]
    with torch.inference_mode(False), torch.enable_grad():
        rows, out = _rows_and_results(dispatcher, leaves[0], routed, leaves[1])
        out.backward(grad)
    return [rows.detach(), out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]


_ROWS_HELD = 8  # sets of rows, two of them for one in fp32


class MovementCall(NamedTuple):
    """The first step of a kind of MoE layer on this rank.

    Attributes:
        make: Builds a dispatcher: Megatron's (True) or the fused one.
        hidden_states: Tokens ``[..., hidden]``.
        routing_map: bool ``[num_tokens, num_experts]``.
        probs: ``[num_tokens, num_experts]``.
        topk: Experts of a token.
        is_fused: Whether ``moe_permute_fusion`` is on.
        group: The expert parallel group.
        pad_factor: Capacity factor if tokens are padded to capacity.
    """

    make: Callable[[bool], Any]
    hidden_states: torch.Tensor
    routing_map: torch.Tensor
    probs: torch.Tensor
    topk: int
    is_fused: bool
    group: dist.ProcessGroup
    pad_factor: float | None = None


def _words(name: str, call: MovementCall, num_tokens: int, capacity: int | None) -> str:
    """What a decision is about, of the largest number of tokens of any rank: gathered results are added up over ranks
    in the type of the probabilities."""
    hidden, probs, nodes = call.hidden_states, call.probs, num_nodes(call.group)
    words = f"{name} {num_tokens} tokens x {hidden.shape[-1]}, top-{call.topk} of {probs.shape[1]}, {hidden.dtype}"
    words += f", probabilities {probs.dtype}" * (probs.dtype != hidden.dtype) + f", over {nodes} nodes" * (nodes > 1)
    return words + ", fused" * call.is_fused + ("" if capacity is None else f", padded to {capacity}")


class MovementOp(Op[MovementCall, None]):
    """Dispatch and combine, forward and backward, around experts that scale their rows. What is decided holds for a
    kind of layer, so there is no context: dispatchers have their own, from their first call.

    Args:
        name: The subpackage, then the movement.
        is_gathered: Tokens are gathered and results scattered, instead of sent to the ranks of their experts.
        runs_concurrently: Whether it runs concurrently with another microbatch: a trial compares bits alone.
    """

    def __init__(
        self, name: str = "ep movement", *, is_gathered: bool = False, runs_concurrently: bool = False
    ) -> None:
        self.name, self.log_name, self.is_gathered = name, "ep", is_gathered
        self.runs_concurrently = runs_concurrently

    def device(self, call: MovementCall) -> torch.device:
        return call.hidden_states.device

    def key(self, call: MovementCall) -> tuple[Hashable, ...]:
        hidden, probs = call.hidden_states, call.probs
        layer = (hidden.shape[-1], hidden.dtype, probs.shape[1], probs.dtype)
        return (*layer, call.topk, call.is_fused, call.pad_factor)

    def trial(self, call: MovementCall, context: None) -> Trial:
        """Even routing of the largest number of tokens of any rank, and the call's own tokens."""
        probs, group, topk = call.probs, call.group, call.topk
        most = torch.tensor([probs.shape[0]], device=probs.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        num_tokens, capacity = int(most.item()), None
        if call.pad_factor is not None:
            sizes = dict(num_experts=probs.shape[1], capacity_factor=call.pad_factor)
            capacity = get_capacity(num_tokens=num_tokens * topk, **sizes)
        with torch.inference_mode(False):
            seed = 1 + dist.get_rank(group)
            even = random_inputs(num_tokens, call.hidden_states, probs, topk, seed, capacity)
            tensors = (call.hidden_states, call.routing_map, probs)
            own, *routing = (tensor.clone() if tensor.is_inference() else tensor.detach() for tensor in tensors)
            own = own.view(-1, own.shape[-1])
            given = (own, *routing, even[3][: len(own)])
        native, accelerated = call.make(True), call.make(False)
        repeats = contextlib.nullcontext if call.is_fused else functools.partial(deterministic, warn_only=True)
        num_calls = 0

        def native_run() -> list[torch.Tensor]:
            nonlocal num_calls
            num_calls += 1  # the first call is compared, the others are timed
            with repeats() if num_calls == 1 else contextlib.nullcontext():
                return _forward_backward(native, even)

        def native_given() -> list[torch.Tensor]:
            with repeats():
                return _forward_backward(native, given)

        words = _words(self.name, call, num_tokens, capacity) + ", gathered" * self.is_gathered
        # NCCL adds up gradients of gathered tokens in their own type.
        summed = call.hidden_states.dtype if self.is_gathered and call.hidden_states.dtype != torch.float32 else None
        fused, fused_given = (functools.partial(_forward_backward, accelerated, data) for data in (even, given))
        return Trial(words, native_run, fused, summed, [(native_given, fused_given)])

    def describe_shape(self, call: MovementCall) -> str:
        """Names the kind of layer if its times come later than the trial."""
        return f"{_words(self.name, call, len(call.probs), None)}: " if self.runs_concurrently else ""

    def inputs(self, call: MovementCall) -> Sequence[torch.Tensor]:
        return call.hidden_states, call.routing_map, call.probs

    def peak_bytes(self, call: MovementCall) -> int:
        """Rows are as many as tokens have experts, and are there sent, sorted, scaled in fp32, and with
        their gradients."""
        return super().peak_bytes(call) + _ROWS_HELD * call.topk * call.hidden_states.nbytes

    def native(self, call: MovementCall) -> Function:
        return functools.partial(_rows_and_results, call.make(True))

    def fused(self, call: MovementCall, context: None) -> Function:
        return functools.partial(_rows_and_results, call.make(False))


MOVEMENT, FLEX = MovementOp(), MovementOp("ep flex")
#: Dispatch and combine in the nodes of a schedule plan (``overlap_moe_expert_parallel_comm``).
IN_PIECES = MovementOp("ep movement in pieces", runs_concurrently=True)
OPS: Sequence[Op[Any, Any]] = (MOVEMENT, FLEX, IN_PIECES)


def warns_of_min_rows(context: EPContext, needed: int) -> bool:
    """With a fixed capacity: whether an expert had fewer than the ``needed`` rows, so that bits may differ, which the
    log then says (no host sync)."""
    min_rows = min_rows_before(context)
    if needed < NEVER and (min_rows is None or min_rows >= needed):
        return False
    when = "" if needed == NEVER else f"an expert had {min_rows} rows; where one has fewer than {needed} "
    message = (
        f"ep: {when}the GEMMs of DITRON_EP_CAPACITY may add up in another order than Transformer Engine's (exact "
        "sizes do not)"
    )
    log_once("ep min rows", message, level=logging.WARNING)
    return True
