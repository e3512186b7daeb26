"""Adam of Megatron's optimizers in one pass: clipping, step and the copy to the model's parameters.

They are the distributed optimizer and, without it, the optimizer of 16-bit parameters (`DistributedOptimizer` and
`Float16OptimizerWithFloat16Params`), as which Muon's jobs have the parameters that AdamW steps, too.

Megatron-core clips in `ChainedOptimizer.step` or `MixedPrecisionOptimizer.step` (`clip_grad_by_total_norm_fp32`, after
the host has read the norm), then steps the inner optimizer, then copies main parameters to the model's. Here the
coefficient is kept until that step, which `optim.adam` takes together with the copy. What surrounds them stays
Megatron's, and so does the first step, in which the inner optimizer makes its state.

If a step is fused, gradients stay unscaled in their buffers. Megatron-core reads them between clipping and step to
count zeros (``--log-num-zeros-in-grad``: clipped natively), and zeroes the buffers after the step. So clipping
is deferred in those two ``step`` methods only, not if a framework clips for itself.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer import optimizer as native_module
from torch.distributed.tensor import DTensor

from ditron_train.optim.adam import AdamOptions, AdamPlan, Shard, find_form, results_of, sample_shard
from ditron_train.policy import Function, Op, Trial, gate, log_native
from ditron_train.policy.answer import Answer

_STATE = ("exp_avg", "exp_avg_sq")
_TIMED_ELEMENTS, _FEW_ELEMENTS = 1 << 24, 500  # on a GPU: more than fits in its L2 cache; on a CPU
_NATIVE = ("use_precision_aware_optimizer", "master_weights", "capturable")
_SCALE = 0.37  # of a trial's gradients

_native_clip = native_module.clip_grad_by_total_norm_fp32
_native_step = native_module.MixedPrecisionOptimizer.step_with_ready_grads
_native_steps = native_module.MixedPrecisionOptimizer.step, native_module.ChainedOptimizer.step  # which clip


class AdamCall(NamedTuple):
    """What a decision is about.

    Attributes:
        optimizer: The inner optimizer, a FusedAdam.
        group: Data parallel group.
        device: Of the optimizer's parameters.
        options: Of the first group of parameters, at its second step.
    """

    optimizer: Any
    group: dist.ProcessGroup
    device: torch.device
    options: AdamOptions


def _options(optimizer: Any, group: dict[str, Any]) -> AdamOptions:
    values = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "step")}
    return AdamOptions(**values, is_l2=not optimizer.adam_w_mode)


class AdamOp(Op[AdamCall, int]):
    """Clipping, Adam and the cast to bf16: three passes or one."""

    name = "adam step"

    def key(self, call: AdamCall) -> tuple[Hashable, ...]:
        """Elements are independent of each other, so one decision holds for all sizes."""
        return type(call.optimizer).__module__, call.options.is_l2, call.device

    def device(self, call: AdamCall) -> torch.device:
        return call.device

    def make_context(self, call: AdamCall) -> int:
        """If none has equal bits, any other: the trial then sees that on every rank."""
        found = find_form(functools.partial(_step_natively, call.optimizer), call.device, call.options)
        return found or 0

    def describe(self, call: AdamCall, context: int) -> str:
        return f"{self.name} {type(call.optimizer).__module__.split('.')[0]}{' l2' * call.options.is_l2}"

    def inputs(self, call: AdamCall) -> Sequence[torch.Tensor]:
        """A shard of the trial."""
        size = _TIMED_ELEMENTS if call.device.type == "cuda" else _FEW_ELEMENTS
        return [one for one in sample_shard(size, call.device, 1) if one is not None]

    def peak_bytes(self, call: AdamCall) -> int:
        """Of both paths' shards and what makes them."""
        return 4 * 18 * _TIMED_ELEMENTS

    def trial(self, call: AdamCall, context: int) -> Trial:
        """Each path steps a shard of its own again and again; after the first step they are compared."""
        native, fused = self.native(call), self.fused(call, context)
        shards = self.inputs(call), self.inputs(call)
        return Trial(self.describe(call, context), lambda: native(*shards[0]), lambda: fused(*shards[1]))

    def native(self, call: AdamCall) -> Function:
        """Steps a shard in place."""
        return lambda *tensors: _step_natively(call.optimizer, Shard._make(tensors), call.options, _SCALE)

    def fused(self, call: AdamCall, context: int) -> Function:
        """Steps a shard in place."""
        plan = AdamPlan()

        def step(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            plan.run([Shard._make(tensors)], call.options, _SCALE, context)
            return results_of(Shard._make(tensors))

        return step


ADAM = AdamOp()
OPS: Sequence[Op[Any, Any]] = (ADAM,)


def _step_natively(optimizer: Any, shard: Shard, options: AdamOptions, scale: float | None) -> Sequence[torch.Tensor]:
    """One step of a shard by Megatron's clipping, a copy of the inner optimizer, and the cast: the results."""
    copy = object.__new__(type(optimizer))
    param = torch.nn.Parameter(shard.param, requires_grad=False)
    group = {**optimizer.param_groups[0], "params": [param], "step": options.step - 1, "lr": options.lr}
    vars(copy).update(vars(optimizer), param_groups=[{**group, "weight_decay": options.weight_decay}])
    copy.state = defaultdict(dict, {param: dict(zip(_STATE, (shard.moment, shard.variance)))})
    param.grad = shard.grad
    if scale is not None:
        _native_clip([param], scale, 1.0 - 1.0e-6)  # whose coefficient is ``scale``
    copy.step()
    results_of(shard)[-1].copy_(param)
    return results_of(shard)


#: Of optimizers whose steps are fused: a plan for each group of parameters.
_plans: WeakKeyDictionary[Any, defaultdict[int, AdamPlan]] = WeakKeyDictionary()
#: Until the step: what their gradients are to be multiplied by, and what does it natively.
_clippings: WeakKeyDictionary[Any, tuple[float | None, Callable[[], None]]] = WeakKeyDictionary()
_running: list[Any] = []  # optimizers whose ``step`` is


def _is_distributed(owner: Any) -> bool:
    return hasattr(owner, "model_param_gbuf_map")


def _pairs(owner: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Main parameters, and the model's whose copies or shards they are."""
    if _is_distributed(owner):
        mains = *owner.shard_fp32_from_float16_groups, *owner.shard_fp32_groups
        models = *owner.model_float16_groups, *owner.model_fp32_groups
    else:
        mains = *owner.fp32_from_float16_groups, *owner.fp32_from_fp32_groups
        models = *owner.float16_groups, *owner.fp32_from_fp32_groups
    for main_group, model_group in zip(mains, models):
        yield from zip(main_group, model_group)


def _copied_to(owner: Any, main: torch.Tensor, model: torch.Tensor) -> torch.Tensor | None:
    if not _is_distributed(owner):
        return None if main is model else model.data
    place = owner._get_model_param_range_map(model)["gbuf_world_in_bucket"]
    index, _, bucket = owner.model_param_gbuf_map[model]
    shard = owner.buffers[index].buckets[bucket].param_data.view(-1)[place.start : place.end]
    assert shard.dtype == torch.bfloat16 or shard.data_ptr() == main.data_ptr(), "fp32 parameters are in the buffer"
    return None if shard.data_ptr() == main.data_ptr() else shard


def unsupported_reason_inner(inner: Any) -> str | None:
    """Why an inner optimizer steps by itself whoever owns it, or None."""
    if type(inner).__name__ != "FusedAdam" or not hasattr(inner, "multi_tensor_adam"):
        return f"the optimizer is {type(inner).__name__}, not FusedAdam of Transformer Engine or apex"
    return None


def unsupported_reason(owner: Any) -> str | None:
    """Why Megatron steps this optimizer, or None; the same on every rank of its group."""
    inner = owner.optimizer
    reason = unsupported_reason_inner(inner)
    if reason is not None:
        return reason
    given = (getattr(one, name, False) for one in (owner.config, inner) for name in _NATIVE)
    is_split = getattr(getattr(owner, "ddp_config", None), "use_megatron_fsdp", False)
    if owner.grad_scaler is not None or is_split or any(given):
        return "the loss is scaled, parameters are split (FSDP), or the optimizer is precision-aware or capturable"
    if any(is_float8tensor(model) or isinstance(model, DTensor) for _, model in _pairs(owner)):
        return "parameters are FP8, or distributed tensors"
    if not (_is_distributed(owner) or parallel_state.model_parallel_is_initialized()):
        return "data parallel ranks are unknown: Megatron's groups are not initialized"
    return None


def route_step(owner: Any) -> Answer:
    """Which path a step of an optimizer takes (collective over its data parallel ranks at first). Of Muon's jobs some
    of these ranks have no parameters that AdamW steps, but ask, too."""
    reason = unsupported_reason(owner)
    if reason is not None:
        log_native(ADAM.name, reason)
        return Answer(None, reason)
    options = _options(owner.optimizer, {**owner.optimizer.param_groups[0], "step": 2})
    group = getattr(owner, "data_parallel_group", None) or parallel_state.get_data_parallel_group(True)
    return gate.answer_for(ADAM, AdamCall(owner.optimizer, group, owner._scale_one.device, options))


def _is_ready(owner: Any) -> bool:
    """Whether this step can be fused on this rank: there are states and gradients, all contiguous, and nobody has
    wrapped it."""
    inner = owner.optimizer
    is_wrapped = "step" in vars(inner) or inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks
    if is_wrapped or not all(p.grad is not None and inner.state.get(p) for p in owner.get_parameters()):
        return False
    return all(p.is_contiguous() and p.grad.is_contiguous() for p in owner.get_parameters())


def _step_fused(owner: Any, scale: float | None, form: int) -> None:
    """The inner optimizer's step, and the copy to the model's parameters."""
    inner, plans = owner.optimizer, _plans.setdefault(owner, defaultdict(AdamPlan))
    outs = {id(main): _copied_to(owner, main, model) for main, model in _pairs(owner)}
    for index, group in enumerate(inner.param_groups):
        if not group["params"]:
            continue  # its steps are not counted
        group["step"] = group.get("step", 0) + 1
        shards = [Shard._make([p.grad, p, *map(inner.state[p].get, _STATE), outs[id(p)]]) for p in group["params"]]
        plans[index].run(shards, _options(inner, group), scale, form)


def _fused_step(native: Callable[[Any], bool]) -> Callable[[Any], bool]:
    @functools.wraps(native)
    def step_with_ready_grads(self: Any) -> bool:
        scale, clip = _clippings.pop(self, (None, lambda: None))
        answer = Answer(None, "there is nothing to step") if self.is_stub_optimizer else route_step(self)
        if not answer.is_fused or not _is_ready(self):
            clip()
            return native(self)
        self.optimizer.step = functools.partial(_step_fused, self, scale, answer.context)
        self._copy_main_params_to_model_params = lambda: None
        try:
            return native(self)
        finally:
            del self.optimizer.step, self._copy_main_params_to_model_params

    return step_with_ready_grads


def _clip_later(parameters: Any, max_norm: float, total_norm: float, *args: Any, **kwargs: Any) -> None:
    """Keeps the coefficient for the step if these are the parameters of an optimizer whose steps are fused."""
    clip = functools.partial(_native_clip, parameters, max_norm, total_norm, *args, **kwargs)
    is_plain = _running and isinstance(total_norm, float) and not any((*args, *kwargs.values()))
    owner = next((one for one in _plans if is_plain and _are_of(parameters, one)), None)
    coefficient = max_norm / (total_norm + 1.0e-6)
    if owner is None or owner.config.log_num_zeros_in_grad:
        clip()
    elif coefficient < 1.0:
        _clippings[owner] = coefficient, clip


def _are_of(parameters: Any, owner: Any) -> bool:
    return [*map(id, parameters)] == [*map(id, owner.get_parameters())]


def _clipping_later(native: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(native)
    def step(self: Any) -> Any:
        _running.append(self)
        try:
            return native(self)
        finally:
            _running.pop()
            if not _running:
                _clippings.clear()  # of a step that failed

    return step


def class_map() -> dict[type, type]:
    """No class is replaced."""
    return {}


def _install(steps: Sequence[Any], step: Any, clip: Any) -> None:
    native_module.MixedPrecisionOptimizer.step, native_module.ChainedOptimizer.step = steps
    native_module.MixedPrecisionOptimizer.step_with_ready_grads = step
    native_module.clip_grad_by_total_norm_fp32 = clip


def start() -> None:
    """Optimizers step from here."""
    _install([*map(_clipping_later, _native_steps)], _fused_step(_native_step), _clip_later)


def stop() -> None:
    """Optimizers are Megatron's again."""
    _install(_native_steps, _native_step, _native_clip)
    _plans.clear()
