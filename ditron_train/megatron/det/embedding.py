"""The gradient of Megatron's embedding by ``embedding.lookup``, in deterministic mode.

There Megatron indexes the weight, since ``torch.nn.functional.embedding`` has no deterministic gradient. Its forward
stays as it is: while it runs, ``weight[index]`` is taken from here, whatever a version of Megatron does around it.
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
        words: [...], counted from this rank's first word; others are below 0, or V and above.
        group: Tensor parallel group.
    """

    weight: torch.Tensor
    words: torch.Tensor
    group: dist.ProcessGroup

    @property
    def is_elsewhere(self) -> torch.Tensor:
        """Which words are other ranks'."""
        return (self.words < 0) | (self.words >= len(self.weight))

    @property
    def rows(self) -> torch.Tensor:
        """What Megatron indexes the weight with."""
        return self.words.masked_fill(self.is_elsewhere, 0)


class EmbeddingOp(Op[EmbeddingCall, None]):
    """An embedding's rows, and the sums of their gradients."""

    name = "det embedding"

    def key(self, call: EmbeddingCall) -> tuple[Hashable, ...]:
        """At any number of tokens PyTorch adds up by the same kernel, so a decision holds for all that are about as
        many; the size of the vocabulary costs both paths alike."""
        weight = call.weight
        return weight.shape[-1], call.words.numel().bit_length(), weight.dtype, weight.device

    def unsupported_reason(self, call: EmbeddingCall) -> str | None:
        return unsupported_reason(call.weight, call.words)

    def trial(self, call: EmbeddingCall, context: None) -> Trial:
        """The call's own words, and words of which each comes eight times, of a vocabulary with a row per token."""
        num_tokens = call.words.numel()
        weight = normal_values((num_tokens, call.weight.shape[-1]), call.weight.dtype, call.weight.device, 5)
        renamed = call.rows.flatten().unique(return_inverse=True)[1]
        own = EmbeddingCall(weight, renamed.masked_fill(call.is_elsewhere.flatten(), -1), call.group)
        repeated = torch.arange(num_tokens, device=weight.device) * 7 % max(1, num_tokens // 8)
        pair = make_trial(self, own._replace(words=repeated), context)
        return make_trial(self, own, context, extra_cases=[(pair.native, pair.fused)])

    def peak_bytes(self, call: EmbeddingCall) -> int:
        """Of both cases and both paths results, gradients and their sums."""
        return 12 * call.words.numel() * call.weight.shape[-1] * call.weight.itemsize + (1 << 20)

    def inputs(self, call: EmbeddingCall) -> Sequence[torch.Tensor]:
        return (call.weight,)

    def grads(self, call: EmbeddingCall) -> Sequence[torch.Tensor]:
        weight = call.weight
        values = normal_values((*call.words.shape, weight.shape[-1]), weight.dtype, weight.device, 6)
        return (values.masked_fill(call.is_elsewhere.unsqueeze(-1), 0.0),)

    def native(self, call: EmbeddingCall) -> Function:
        return lambda weight: [weight[call.rows]]

    def fused(self, call: EmbeddingCall, context: None) -> Function:
        return lambda weight: [lookup(weight, call.words)]


EMBEDDING = EmbeddingOp()
OPS: Sequence[Op[Any, Any]] = (EMBEDDING,)


def route_embedding(call: EmbeddingCall) -> Answer:
    """Which path an embedding in deterministic mode takes (collective if the shape is new)."""
    return gate.answer_for(EMBEDDING, call)


class _Lookups(TorchFunctionMode):
    """Takes ``weight[index]`` from here while Megatron's forward runs."""

    def __init__(self, call: EmbeddingCall) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_lookup = func is torch.Tensor.__getitem__ and args[0] is self._call.weight
        if is_lookup and route_embedding(self._call).is_fused:
            return lookup(self._call.weight, self._call.words)
        return func(*args, **(kwargs or {}))


def _fused(native: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(native)
    def forward(self: Any, input_: torch.Tensor) -> torch.Tensor:
        has_gradient = torch.is_grad_enabled() and self.weight.requires_grad
        is_ours = self.deterministic_mode and has_gradient and self.weight.device.type in _DEVICES
        if torch.compiler.is_compiling() or not is_ours:
            return native(self, input_)
        with _Lookups(EmbeddingCall(self.weight, input_ - self.vocab_start_index, self.tp_group)):
            return native(self, input_)

    return forward


_native = VocabParallelEmbedding.forward


def start() -> None:
    """From now on embeddings in deterministic mode have their gradients from here, if that is faster."""
    VocabParallelEmbedding.forward = _fused(_native)


def stop() -> None:
    """Embeddings use PyTorch's gradients again."""
    VocabParallelEmbedding.forward = _native
