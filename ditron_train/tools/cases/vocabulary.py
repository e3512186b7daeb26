"""What tools measure of a vocabulary that is divided over the ranks: the cross entropy of language models (loss and
gradient of a microbatch's logits), and the embedding in deterministic mode (rows, and the weight's gradient).

The peer is Megatron's fused cross entropy, which adds up in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

from ditron_train.megatron.det.embedding import EMBEDDING, EmbeddingCall
from ditron_train.megatron.loss.cross_entropy import CROSS_ENTROPY, LossCall
from ditron_train.policy.op import Call
from ditron_train.runtime.device import is_interpreter
from ditron_train.runtime.values import normal_values
from ditron_train.tools.cases.case import BenchCase, ModelSizes, RunEnvironment, Shape
from ditron_train.tools.timing import Timing

_VOCABULARIES = {"Qwen3": 151936, "LLaMA-3": 128256, "DeepSeek-V3": 129280, "LLaMA-2": 32000}
_EMBEDDINGS = {"LLaMA-3-70B": (8192, 128256), "DeepSeek-V3": (7168, 129280), "Qwen3-30B-A3B": (2048, 151936)}


class _VocabularyCase(BenchCase[Call, None]):
    """Forward and backward."""

    measured = "forward_backward"
    groups = "tensor"
    num_sets = 2  # what has a vocabulary's size is larger than an L2 cache

    def unsupported_shape(self, shape: Shape, world_size: int) -> str | None:
        words = shape.sizes["vocabulary"]
        return f"{words} words do not divide by {world_size}" if words % world_size else None


def loss_shape(model: str, tokens: int, vocabulary: int) -> Shape:
    """Logits of all ranks."""
    return Shape(model, {"tokens": tokens, "vocabulary": vocabulary})


class CrossEntropyCase(_VocabularyCase[LossCall]):
    """The loss and its logits' gradient."""

    row = "cross_entropy"

    def shapes(self, world_size: int, on_gpu: bool) -> list[Shape]:
        if not on_gpu:
            return [loss_shape("tiny", 8, 64 * world_size)]
        return [loss_shape(model, 8192, vocabulary) for model, vocabulary in _VOCABULARIES.items()]

    def shapes_of_model(self, model: ModelSizes, world_size: int) -> list[Shape]:
        """With a small vocabulary if only the tokenizer knows it."""
        return [loss_shape("custom", model.tokens, model.vocabulary or 256 * world_size)]

    def sample(self, shape: Shape, environment: RunEnvironment, seed: int) -> LossCall:
        """In bf16 whatever the environment has: logits in fp32 are not covered."""
        tokens, words = shape.sizes["tokens"], shape.sizes["vocabulary"]
        size, device = (tokens, 1, words // environment.world_size), environment.device
        logits = normal_values(size, torch.bfloat16, device, 100 * seed + environment.rank)
        generator = torch.Generator(device).manual_seed(seed)
        target = torch.randint(words, (tokens, 1), generator=generator, device=device)
        return LossCall(logits, target, environment.group)

    def columns(self, call: LossCall, context: None, timings: Mapping[str, Timing]) -> dict[str, Any]:
        return {"dtype": call.logits.dtype}

    def peers(self, call: LossCall, context: None) -> Mapping[str, Callable[[], object]]:
        return {} if is_interpreter() else {"Megatron's fused": lambda: _peer(call)}


def _peer(call: LossCall) -> torch.Tensor | None:
    logits = call.logits.detach().requires_grad_()
    loss = fused_vocab_parallel_cross_entropy(logits, call.target, call.group)
    loss.backward(*CROSS_ENTROPY.grads(call))
    return logits.grad


def embedding_shape(model: str, tokens: int, hidden: int, vocabulary: int) -> Shape:
    """Of all ranks."""
    return Shape(model, {"tokens": tokens, "hidden": hidden, "vocabulary": vocabulary})


class EmbeddingCase(_VocabularyCase[EmbeddingCall]):
    """Rows and the weight's gradient. Word n is the n-th most frequent, as often as Zipf's law has it."""

    row = "embedding"

    def shapes(self, world_size: int, on_gpu: bool) -> list[Shape]:
        if not on_gpu:
            return [embedding_shape("tiny", 12, 16, 64 * world_size)]
        return [embedding_shape(model, 8192, *sizes) for model, sizes in _EMBEDDINGS.items()]

    def shapes_of_model(self, model: ModelSizes, world_size: int) -> list[Shape]:
        """With a small vocabulary if only the tokenizer knows it."""
        return [embedding_shape("custom", model.tokens, model.hidden, model.vocabulary or 256 * world_size)]

    def sample(self, shape: Shape, environment: RunEnvironment, seed: int) -> EmbeddingCall:
        sizes, device = shape.sizes, environment.device
        num_own = sizes["vocabulary"] // environment.world_size
        weight = normal_values((num_own, sizes["hidden"]), environment.dtype, device, 100 * seed + environment.rank)
        generator = torch.Generator(device).manual_seed(seed)
        shares = torch.rand(sizes["tokens"], generator=generator, device=device)
        words = (sizes["vocabulary"] ** shares).long() - 1 - environment.rank * num_own
        is_elsewhere = (words < 0) | (words >= num_own)
        index = words.masked_fill(is_elsewhere, 0)
        return EmbeddingCall(weight, index, is_elsewhere, environment.group).with_grad()

    def columns(self, call: EmbeddingCall, context: None, timings: Mapping[str, Timing]) -> dict[str, Any]:
        return {"dtype": call.weight.dtype}


CASES = (CrossEntropyCase(CROSS_ENTROPY), EmbeddingCase(EMBEDDING))
