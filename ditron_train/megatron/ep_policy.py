"""Asks the policy once for each kind of MoE layer: bits and time of dispatch and combine, forward and backward.

Ranks may hold different numbers of tokens, so the question is asked for the largest number of the first step and the
answer holds for every later one. Native is compared in PyTorch's deterministic mode, where it repeats itself, and timed in
the mode that is in force.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.policy import decide

__all__ = ["forget", "why_not_here"]

_answers: dict[tuple[Any, ...], str | None] = {}


def forget() -> None:
    """Ask anew from now on."""
    _answers.clear()


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    before, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def _random_inputs(
    num_tokens: int, hidden_states: torch.Tensor, probs: torch.Tensor, topk: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, even routing, probabilities and an output gradient, from a generator of its own."""
    device, hidden, num_experts = hidden_states.device, hidden_states.shape[-1], probs.shape[1]
    generator = torch.Generator(device).manual_seed(seed)
    x, grad = (
        torch.empty(num_tokens, hidden, dtype=hidden_states.dtype, device=device).normal_(generator=generator) for _ in range(2)
    )
    scores = torch.empty(num_tokens, num_experts, device=device).uniform_(0.1, 1.0, generator=generator)
    routed = torch.zeros(num_tokens, num_experts, dtype=torch.bool, device=device)
    routed.scatter_(1, scores.topk(topk, dim=1).indices, True)
    return x, routed, (scores * routed).to(probs.dtype), grad


def why_not_here(
    make: Callable[[bool], Any], hidden_states: torch.Tensor, probs: torch.Tensor, *, topk: int, fused: bool, group: Any
) -> str | None:
    """Why layers of this kind stay native on this machine, or None (collective the first time, with host syncs).

    Args:
        make: Builds a dispatcher, native (True) or ours.
        hidden_states: The first step's tokens ``[..., hidden]``.
        probs: ``[num_tokens, num_experts]``.
        topk: Experts of a token.
        fused: Whether ``moe_permute_fusion`` is on.
        group: The expert-parallel group.

    Raises:
        ArenaError, NotSupportedError: Ours cannot run here; on every rank alike.
    """
    key = (group, hidden_states.shape[-1], hidden_states.dtype, probs.shape[1], probs.dtype, topk, fused)
    if key in _answers:
        return _answers[key]
    most = torch.tensor([probs.shape[0]], device=hidden_states.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    num_tokens = int(most.item())
    with torch.inference_mode(False):
        x, routed, weights, grad = _random_inputs(num_tokens, hidden_states, probs, topk, 1 + dist.get_rank(group))
    calls = {"native": 0}

    def run(dispatcher: Any) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_(), weights.detach().requires_grad_()]
        with torch.inference_mode(False), torch.enable_grad():
            tokens, row_probs = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(leaves[0], routed, leaves[1]))
            rows, _, row_probs = dispatcher.dispatch_postprocess(tokens, row_probs)
            scaled = (rows * row_probs[:, None]).to(rows.dtype)
            out = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(scaled)))
            out.backward(grad)
        return [rows.detach(), out.detach(), *(leaf.grad for leaf in leaves)]

    dispatchers = {"native": make(True), "ours": make(False)}

    def native() -> list[torch.Tensor]:
        calls["native"] += 1
        with _deterministic() if calls["native"] == 1 and not fused else contextlib.nullcontext():
            return run(dispatchers["native"])

    words = f"ep {num_tokens} tokens x {x.shape[1]}, top-{topk} of {probs.shape[1]}, {x.dtype}" + ", fused" * fused
    decision = decide(words, native, lambda: run(dispatchers["ours"]), group=group, device=x.device)
    _answers[key] = None if decision.use_ditron else decision.reason
    return _answers[key]
