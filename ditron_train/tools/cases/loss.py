"""The cross entropy of language models as tools measure it: loss and gradient of a microbatch's logits.

The peer is Megatron's fused cross entropy, which adds up in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

from ditron_train.megatron.loss.cross_entropy import CROSS_ENTROPY, LossCall
from ditron_train.runtime.device import is_interpreter
from ditron_train.runtime.values import normal_values
from ditron_train.tools.cases.case import BenchCase, ModelSizes, RunEnvironment, Shape
from ditron_train.tools.timing import Timing

_VOCABULARIES = {"Qwen3": 151936, "LLaMA-3": 128256, "DeepSeek-V3": 129280, "LLaMA-2": 32000}


def loss_shape(model: str, tokens: int, vocabulary: int) -> Shape:
    """Logits of all ranks."""
    return Shape(model, {"tokens": tokens, "vocabulary": vocabulary})


class CrossEntropyCase(BenchCase[LossCall, None]):
    """Forward and backward."""

    row = "cross_entropy"
    measured = "forward_backward"
    groups = "tensor"
    num_sets = 2  # logits are larger than an L2 cache

    def shapes(self, world_size: int, on_gpu: bool) -> list[Shape]:
        if not on_gpu:
            return [loss_shape("tiny", 8, 64 * world_size)]
        return [loss_shape(model, 8192, vocabulary) for model, vocabulary in _VOCABULARIES.items()]

    def shapes_of_model(self, model: ModelSizes, world_size: int) -> list[Shape]:
        """With a small vocabulary if only the tokenizer knows it."""
        return [loss_shape("custom", model.tokens, model.vocabulary or 256 * world_size)]

    def unsupported_shape(self, shape: Shape, world_size: int) -> str | None:
        words = shape.sizes["vocabulary"]
        return f"{words} words do not divide by {world_size}" if words % world_size else None

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


CASES = (CrossEntropyCase(CROSS_ENTROPY),)
