"""The gradient of Megatron's embedding by ``embedding.lookup``, in deterministic mode.

There Megatron indexes the weight, since ``torch.nn.functional.embedding`` has no deterministic gradient. Its forward
stays as it is: while it runs, ``weight[index]`` is taken from here, of whatever index Megatron has made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from torch.overrides import TorchFunctionMode

from ditron_train.embedding import lookup, unsupported_reason
from ditron_train.policy import Function, Op, Trial, gate
from ditron_train.policy.answer import Answer
from ditron_train.policy.op import make_trial
from ditron_train.runtime.values import normal_values

_DEVICES = ("cuda",)  # in the interpreter a model's embedding would take minutes


class EmbeddingCall(NamedTuple):
    """One call.

    Attributes:
        weight: This rank's [V, H].
        rows: [...], what the weight is indexed with.
        is_elsewhere: [...], which words are other ranks'; None if there are none.
        group: Tensor parallel group.
        grad: Gradient of the rows if the call is tried or measured, of other ranks' words zero.
    """

    weight: torch.Tensor
    rows: torch.Tensor
    is_elsewhere: torch.Tensor | None
    group: dist.ProcessGroup
    grad: torch.Tensor | None = None

    def with_grad(self) -> EmbeddingCall:
        """With a gradient of random values."""
        weight = self.weight
        grad = normal_values((*self.rows.shape, weight.shape[-1]), weight.dtype, weight.device, 6)
        return self._replace(
            grad=grad if self.is_elsewhere is None else grad.masked_fill_(self.is_elsewhere[..., None], 0)
        )


class EmbeddingOp(Op[EmbeddingCall, None]):
    """An embedding's rows, and the sums of their gradients."""

    name = "det embedding"

    def key(self, call: EmbeddingCall) -> tuple[Hashable, ...]:
        """At any number of tokens PyTorch adds up by the same kernel, so a decision holds for all that are about as
        many; the size of the vocabulary costs both paths alike."""
        weight, rows = call.weight, call.rows
        kinds = type(weight), weight.dtype, weight.device, rows.dtype, rows.device
        return weight.shape[1:], rows.numel().bit_length(), *kinds

    def unsupported_reason(self, call: EmbeddingCall) -> str | None:
        return unsupported_reason(call.weight, call.rows)

    def trial(self, call: EmbeddingCall, context: None) -> Trial:
        """The call's own words, and words of which each comes eight times, of a vocabulary with a row per token."""
        num_tokens = call.rows.numel()
        weight = normal_values((num_tokens, call.weight.shape[-1]), call.weight.dtype, call.weight.device, 5)
        renamed = call.rows.flatten().unique(return_inverse=True)[1]
        is_elsewhere = None if call.is_elsewhere is None else call.is_elsewhere.flatten()
        own = EmbeddingCall(weight, renamed, is_elsewhere, call.group)
        repeated = torch.arange(num_tokens, device=weight.device) * 7 % max(1, num_tokens // 8)
        pair = make_trial(self, own._replace(rows=repeated, is_elsewhere=None).with_grad(), context)
        return make_trial(self, own.with_grad(), context, extra_cases=[(pair.native, pair.fused)])

    def peak_bytes(self, call: EmbeddingCall) -> int:
        """Of both cases and both paths results, gradients and their sums."""
        return 12 * call.rows.numel() * call.weight.shape[-1] * call.weight.itemsize + (1 << 20)

    def inputs(self, call: EmbeddingCall) -> Sequence[torch.Tensor]:
        return (call.weight,)

    def grads(self, call: EmbeddingCall) -> Sequence[torch.Tensor]:
        assert call.grad is not None, "calls of a job are not tried themselves"
        return (call.grad,)

    def native(self, call: EmbeddingCall) -> Function:
        return lambda weight: [weight[call.rows]]

    def fused(self, call: EmbeddingCall, context: None) -> Function:
        return lambda weight: [lookup(weight, call.rows, call.is_elsewhere)]


EMBEDDING = EmbeddingOp()
OPS: Sequence[Op[Any, Any]] = (EMBEDDING,)


def route_embedding(call: EmbeddingCall) -> Answer:
    """Which path an embedding in deterministic mode takes (collective if the shape is new)."""
    return gate.answer_for(EMBEDDING, call)


class _Lookups(TorchFunctionMode):
    """Takes ``weight[index]`` from here while Megatron's forward runs for ``words``, counted from this rank's
    first."""

    def __init__(self, weight: torch.Tensor, words: torch.Tensor, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._weight, self._words, self._group = weight, words, group

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_lookup = func is torch.Tensor.__getitem__ and args[0] is self._weight
        if is_lookup and isinstance(args[1], torch.Tensor) and args[1].shape == self._words.shape:
            is_elsewhere = None
            if self._group.size() > 1:  # else Megatron takes the words as they are
                is_elsewhere = (self._words < 0) | (self._words >= len(self._weight))
            call = EmbeddingCall(self._weight, args[1], is_elsewhere, self._group)
            if route_embedding(call).is_fused:
                return lookup(self._weight, args[1], is_elsewhere)
        return func(*args, **(kwargs or {}))


def _fused(native: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(native)
    def forward(self: Any, input_: torch.Tensor) -> torch.Tensor:
        has_gradient = torch.is_grad_enabled() and self.weight.requires_grad
        is_ours = self.deterministic_mode and has_gradient and self.weight.device.type in _DEVICES
        if torch.compiler.is_compiling() or not is_ours:
            return native(self, input_)
        with _Lookups(self.weight, input_ - self.vocab_start_index, self.tp_group):
            return native(self, input_)

    return forward


_native: Callable[..., torch.Tensor] | None = None


def start() -> None:
    """From now on embeddings in deterministic mode have their gradients from here, if that is faster; nothing outside
    of PyTorch's deterministic mode, where compiled models would meet this code."""
    global _native
    if _native is None and torch.are_deterministic_algorithms_enabled():
        _native = VocabParallelEmbedding.forward
        VocabParallelEmbedding.forward = _fused(_native)


def stop() -> None:
    """Embeddings use PyTorch's gradients again."""
    global _native
    if _native is not None:
        VocabParallelEmbedding.forward, _native = _native, None
