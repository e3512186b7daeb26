"""The loss of Megatron's language models by ``loss.cross_entropy``, if Megatron would take its unfused one.

Megatron's deterministic mode refuses the fused cross entropies, and without ``--cross-entropy-loss-fusion`` none is
taken in any mode. The unfused one passes over fp32 logits some ten times; here its bits come in three passes. Only
``LanguageModule.compute_language_model_loss`` is replaced: whoever calls the function itself may change the logits
before the backward, which computes from them here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

from ditron_train.loss import cross_entropy, unsupported_reason
from ditron_train.policy import Function, Op, Trial, gate
from ditron_train.policy.answer import Answer
from ditron_train.policy.op import make_trial
from ditron_train.runtime.logs import log_once
from ditron_train.runtime.settings import get_settings
from ditron_train.runtime.values import normal_values

_MOST_BYTES = 256 << 20  # of the logits that both paths are timed on
_DEVICES = ("cuda",)  # in the interpreter a model's loss would take minutes
_COMPARED_ROWS, _SPREAD = 64, 30.0  # of logits whose exponentials go down to zero


class LossCall(NamedTuple):
    """One call.

    Attributes:
        logits: This rank's [s, b, V], of V words of the vocabulary.
        target: [s, b], of the whole vocabulary.
        group: Tensor parallel group.
    """

    logits: torch.Tensor
    target: torch.Tensor
    group: dist.ProcessGroup

    @property
    def first_word(self) -> int:
        """Of this rank's."""
        return dist.get_rank(self.group) * self.logits.shape[-1]


class CrossEntropyOp(Op[LossCall, None]):
    """Cross entropy over a vocabulary that is divided over the ranks: three passes over the logits against some
    ten."""

    name = "loss cross entropy"

    def key(self, call: LossCall) -> tuple[Hashable, ...]:
        """Both paths add up by the same operator of torch, at any number of tokens, so a decision holds for all that
        are about as many."""
        logits = call.logits
        return logits.shape[-1], logits.shape[:-1].numel().bit_length(), logits.dtype, call.target.dtype, logits.device

    def unsupported_reason(self, call: LossCall) -> str | None:
        return unsupported_reason(call.logits, call.target)

    def trial(self, call: LossCall, context: None) -> Trial:
        """The call's own logits, or some of them, and others that are far apart."""
        wide = self._first_rows(call, _COMPARED_ROWS)
        spread = normal_values(tuple(wide.logits.shape), torch.float32, call.logits.device, 7) * _SPREAD
        probe = wide._replace(logits=spread.to(call.logits.dtype))
        pair = make_trial(self, probe, context)
        return make_trial(self, self._timed(call), context, extra_cases=[(pair.native, pair.fused)])

    def peak_bytes(self, call: LossCall) -> int:
        """Of both cases' logits fp32 values, and both paths' gradients."""
        return 6 * (self._timed(call).logits.nbytes + self._first_rows(call, _COMPARED_ROWS).logits.nbytes) + (1 << 20)

    def inputs(self, call: LossCall) -> Sequence[torch.Tensor]:
        return (call.logits,)

    def grads(self, call: LossCall) -> Sequence[torch.Tensor]:
        return (normal_values(tuple(call.target.shape), torch.float32, call.logits.device, 9),)

    def native(self, call: LossCall) -> Function:
        return lambda logits: [vocab_parallel_cross_entropy(logits, call.target)]

    def fused(self, call: LossCall, context: None) -> Function:
        return lambda logits: [cross_entropy(logits, call.target, call.group, first_word=call.first_word)]

    def _timed(self, call: LossCall) -> LossCall:
        return self._first_rows(call, max(1, _MOST_BYTES // (call.logits.shape[-1] * call.logits.itemsize)))

    def _first_rows(self, call: LossCall, num_rows: int) -> LossCall:
        logits = call.logits.detach().view(-1, 1, call.logits.shape[-1])[:num_rows]
        return call._replace(logits=logits, target=call.target.view(-1, 1)[:num_rows])


CROSS_ENTROPY = CrossEntropyOp()
OPS: Sequence[Op[Any, Any]] = (CROSS_ENTROPY,)


def route_loss(module: Any, call: LossCall) -> Answer:
    """Which path the loss of a language model takes (collective if the shape is new)."""
    if module.config.cross_entropy_loss_fusion or call.logits.device.type not in _DEVICES:
        return Answer(None, "Megatron fuses it, or there is no GPU")
    return gate.answer_for(CROSS_ENTROPY, call)


def _fused(native: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(native)
    def compute_language_model_loss(self: Any, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():  # what is compiled with the model has bits of its own
            return native(self, labels, logits)
        target = labels.transpose(0, 1).contiguous()
        call = LossCall(logits, target, parallel_state.get_tensor_model_parallel_group())
        if not route_loss(self, call).is_fused:
            return native(self, labels, logits)
        return cross_entropy(*call, first_word=call.first_word).transpose(0, 1).contiguous()

    return compute_language_model_loss


_native = LanguageModule.compute_language_model_loss


def class_map() -> dict[type, type]:
    """No class is replaced."""
    return {}


def start() -> None:
    """From now on language models use the fused loss."""
    if get_settings().loss == "off":
        log_once("loss off", "loss: off by DITRON_LOSS")
        return
    LanguageModule.compute_language_model_loss = _fused(_native)


def stop() -> None:
    """Language models use Megatron's loss again."""
    LanguageModule.compute_language_model_loss = _native
