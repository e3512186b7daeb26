"""Adam as tools measure it: clipping, a step of the installed FusedAdam, and the cast to bf16, of one rank's shard.

Stock Megatron makes three passes over what the distributed optimizer gives a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core import optimizer as megatron_optimizer

from ditron_train.megatron.adam.optimizer import ADAM, AdamCall, unsupported_reason_inner
from ditron_train.optim.adam import AdamOptions, Shard
from ditron_train.policy import Function, Op
from ditron_train.runtime.values import normal_values
from ditron_train.tools.cases.case import BenchCase, ModelSizes, RunEnvironment, Shape
from ditron_train.tools.timing import Timing

#: Elements of a rank: the model's parameters over all ranks of a job on 8 and on 256 GPUs.
_MODELS = {"LLaMA-3-8B": 8_030_261_248 // 8, "LLaMA-3-70B": 70_553_706_496 // 256}
_OPTIONS = AdamOptions(1e-4, (0.9, 0.95), 1e-8, 0.1, step=2)


def adam_shape(model: str, elements: int) -> Shape:
    """What one rank steps."""
    return Shape(model, {"elements": elements})


class StepCall(NamedTuple):
    """A step of one rank.

    Attributes:
        decided: What the gate is asked about.
        native, fused: What each path changes in place; alike before the first step.
    """

    decided: AdamCall
    native: Shard
    fused: Shard


class AdamStepOp(Op[StepCall, Function]):
    """Steps a shard. Both paths have a state, so both are called equally often before a comparison."""

    name = "adam whole step"

    def make_context(self, call: StepCall) -> Function:
        """The fused step of a shard."""
        return ADAM.fused(call.decided, ADAM.make_context(call.decided))

    def inputs(self, call: StepCall) -> Sequence[torch.Tensor]:
        """The gradients."""
        return (call.native.grad,)

    def native(self, call: StepCall) -> Function:
        step = ADAM.native(call.decided)
        return lambda grad: step(*call.native)

    def fused(self, call: StepCall, context: Function) -> Function:
        return lambda grad: context(*call.fused)


class AdamCase(BenchCase[StepCall, Function]):
    """Against the installed optimizer and Megatron's passes around it."""

    row = "adam_step"
    groups = "tensor"
    asks_gate = True
    num_sets = 1  # of shards, which are larger than an L2 cache

    def shapes(self, world_size: int, on_gpu: bool) -> list[Shape]:
        if not on_gpu:
            return [adam_shape("tiny", 3000)]
        return [adam_shape(*model) for model in _MODELS.items()]

    def shapes_of_model(self, model: ModelSizes, world_size: int) -> list[Shape]:
        """One layer's."""
        elements = sum(rows * columns for rows, columns in model.matrices.values())
        return [adam_shape("custom", elements // world_size)]

    def sample(self, shape: Shape, environment: RunEnvironment, seed: int) -> StepCall:
        param = torch.nn.Parameter(torch.zeros(1, device=environment.device))
        inner = megatron_optimizer.Adam([param], lr=_OPTIONS.lr, betas=_OPTIONS.betas, weight_decay=0.1)
        call = AdamCall(inner, environment.group, environment.device, _OPTIONS)
        first, size = 100 * seed + 10 * environment.rank, (shape.sizes["elements"],)
        values = [normal_values(size, torch.float32, environment.device, first + place) for place in range(4)]
        values = [*values[:3], values[3].square_(), values[1].bfloat16()]
        return StepCall(call, Shard._make(values), Shard._make([one.clone() for one in values]))

    def no_row_reason(self, call: StepCall) -> str | None:
        return unsupported_reason_inner(call.decided.optimizer)

    def columns(self, call: StepCall, context: Function, timings: Mapping[str, Timing]) -> dict[str, Any]:
        return {"dtype": torch.float32}


CASES = (AdamCase(AdamStepOp()),)
