"""What one call of Megatron's schedules changes in addition to gradients, which are zero, so that the same step can
run again.

Kept on the host: the batches, random states, tensors and numbers of modules, the bookkeeping of Megatron's DDP, and
what is gathered for the log. Gradients have to be zero before, and are zeroed again.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.rerun_state_machine import RerunStateMachine
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.utils import get_model_config
from torch.utils._pytree import tree_leaves, tree_map_only

from ditron_train.megatron.plugin.record_steps import digest
from ditron_train.runtime.values import have_same_bits

#: Dictionaries of class or module attributes in which Megatron adds up losses for its log: module, owner, name.
_LOGGED = (
    ("megatron.core.transformer.moe.moe_utils", "", "_MOE_LAYER_WISE_LOGGING_TRACKER"),
    ("megatron.core.transformer.multi_token_prediction", "MTPLossLoggingHelper", "tracker"),
    ("megatron.core.transformer.experimental_attention_variant.dsa", "DSAIndexerLossLoggingHelper", "tracker"),
)
_FLAG = "grad_added_to_main_grad"
_FP8_WITHOUT_HISTORY = ("tensorwise", "blockwise", "mxfp8")


class _RandomStates:
    """States of all random generators of this process that training uses, of now."""

    def __init__(self) -> None:
        self._python, self._numpy, self._torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        self._tracker = megatron_random._CUDA_RNG_STATE_TRACKER
        states = self._tracker.get_states().items() if self._tracker is not None else ()
        # Transformer Engine's tracker has generators, Megatron's own has states, which it replaces.
        self._tracked = {name: one.get_state() if isinstance(one, torch.Generator) else one for name, one in states}

    def restore(self) -> None:
        """The generators are as they were."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        if self._tracked:
            states = self._tracker.get_states()
            for name, kept in self._tracked.items():
                is_generator = isinstance(states[name], torch.Generator)
                states[name] = states[name].set_state(kept) if is_generator else kept
            self._tracker.set_states(states)


class ReplayedIterator:
    """An iterator that gives copies of what it gave once more, when ``position`` is set back; random states move with
    it as they did the first time.

    Attributes:
        position: How many of what it gave come before the next one.
        is_exact: Whether all of it could be copied.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._given: list[tuple[Any, _RandomStates]] = []
        self.position = 0
        self.is_exact = True

    def __iter__(self) -> ReplayedIterator:
        return self

    def __next__(self) -> Any:
        if self.position < len(self._given):
            kept, states = self._given[self.position]
            states.restore()
            item = self._copy(kept)
        else:
            item = next(self._iterator)
            self._given.append((self._copy(item), _RandomStates()))
        self.position += 1
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def _copy(self, item: Any) -> Any:
        try:
            return copy.deepcopy(item)
        except Exception:  # whatever a framework's batches raise
            self.is_exact = False
            return item


def _in_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def unsupported_reason(model: Any, data_iterator: Any) -> str | None:
    """Why a step cannot be run again from the same state, or None; see `StepState`. Waits for the device."""
    if not all(one is None or hasattr(one, "__next__") for one in _in_list(data_iterator)):
        return "the data come from something that is no iterator"
    reasons = map(_unsupported_reason_of_chunk, _in_list(model))
    return next((reason for reason in reasons if reason is not None), None)


class StepState:
    """The state of a training step before it runs, one for which there is no `unsupported_reason`.

    Args:
        model: One chunk of Megatron's model, or a list of them.
        data_iterator: An iterator, one for each chunk, or None.

    Attributes:
        data_iterator: What the schedule is to be given instead.
    """

    def __init__(self, model: Any, data_iterator: Any) -> None:
        self._chunks: list[torch.nn.Module] = _in_list(model)
        self._configs = [(config, config.timers) for config in map(get_model_config, self._chunks)]
        known = {id(one): ReplayedIterator(one) for one in _in_list(data_iterator) if one is not None}
        self._iterators = list(known.values())
        replayed = [None if one is None else known[id(one)] for one in _in_list(data_iterator)]
        self.data_iterator = replayed if isinstance(data_iterator, (list, tuple)) else replayed[0]
        self._random = _RandomStates()
        self._grads = [(p, p.grad, getattr(p, _FLAG, None)) for chunk in self._chunks for p in chunk.parameters()]
        self._groups = [(group, _plain(vars(group))) for chunk in self._chunks for group in _bucket_groups(chunk)]
        self._logged = [(place, _cloned(place)) for place in _logged()]
        self._places = [place for chunk in self._chunks for place in _places(chunk)]
        self._kept = [
            value.detach().to("cpu", copy=True) if torch.is_tensor(value) else None for *_, value in self._places
        ]

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """Inside, Megatron neither counts the step's time nor judges its results: a NaN
        would otherwise raise an error on one rank alone."""
        validate = RerunStateMachine.validate_result
        RerunStateMachine.validate_result = lambda *args, **kwargs: None
        for config, _ in self._configs:
            config.timers = None
        try:
            yield
        finally:
            RerunStateMachine.validate_result = validate
            for config, timers in self._configs:
                config.timers = timers

    def digest(self, result: Any) -> str:
        """64 bits of all gradients, of the tensors of modules, and of what the schedule returned.

        Raises:
            ValueError: Batches could not be copied.
        """
        if not all(one.is_exact for one in self._iterators):
            raise ValueError("batches cannot be copied")
        tensors = [gradient for chunk in self._chunks for gradient in _gradients(chunk)]
        tensors += [namespace[name] for namespace, name, _ in self._places if torch.is_tensor(namespace.get(name))]
        leaves = tree_leaves(result)
        tensors += [leaf for leaf in leaves if torch.is_tensor(leaf)]
        numbers = [repr(leaf) for leaf in leaves if isinstance(leaf, (bool, int, float, str))]
        return " ".join([digest(tensors), *numbers])

    @torch.no_grad()
    def restore(self) -> None:
        """Everything is as it was. The device is idle."""
        for group, values in self._groups:
            for handle in _in_flight(group):  # of a run that ended by an error
                handle.wait()
            vars(group).update(_plain(values))
        for chunk in self._chunks:
            for gradient in _gradients(chunk):
                gradient.zero_()
        for parameter, grad, flag in self._grads:
            parameter.grad = grad
            if flag is not None:
                setattr(parameter, _FLAG, flag)
        for place, values in self._logged:
            place.clear()
            place.update(_cloned(values))
        for (namespace, name, value), kept in zip(self._places, self._kept):
            namespace[name] = value
            if kept is not None and not have_same_bits(value.detach().cpu(), kept):
                value.copy_(kept)
        for iterator in self._iterators:
            iterator.position = 0
        self._random.restore()


def _bucket_groups(chunk: torch.nn.Module) -> Iterable[Any]:
    """Of Megatron's DDP: buckets that are communicated together."""
    names = ("bucket_groups", "expert_parallel_bucket_groups")
    return [group for name in names for group in getattr(chunk, name, ())]


def _in_flight(group: Any) -> list[Any]:
    """What a bucket group communicates now."""
    handles = (getattr(group, name, None) for name in ("param_gather_handle", "grad_reduce_handle"))
    return [handle for handle in handles if handle is not None]


def _gradients(chunk: torch.nn.Module) -> list[torch.Tensor]:
    """All gradients, in order: Megatron's buffers, or those of the parameters."""
    if isinstance(chunk, DistributedDataParallel):
        return [buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    found = [one for p in chunk.parameters() for one in (p.grad, getattr(p, "main_grad", None))]
    return [one for one in found if one is not None]


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Counts and marks among the attributes of a bucket group, copied."""
    return {name: copy.copy(value) for name, value in values.items() if value is None or type(value) in (bool, dict)}


def _logged() -> list[dict[Any, Any]]:
    modules = ((sys.modules.get(module), owner, name) for module, owner, name in _LOGGED)
    found = (getattr(getattr(module, owner, None) if owner else module, name, None) for module, owner, name in modules)
    return [one for one in found if isinstance(one, dict)]


def _cloned(values: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.clone, values)


def _places(chunk: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Where modules keep tensors that are no parameters, and numbers: a namespace, the name in it, what is there."""
    parameters = {p.untyped_storage().data_ptr() for p in chunk.parameters()}
    for module in chunk.modules():
        of_package = type(module).__module__.startswith("ditron_train")  # which count calls that peers count, too
        for namespace in (vars(module)["_buffers"], {} if of_package else vars(module)):
            for name, value in namespace.items():
                is_own = type(value) is torch.Tensor and value.untyped_storage().data_ptr() not in parameters
                if is_own or type(value) in (int, float):
                    yield namespace, name, value


def _unsupported_reason_of_chunk(chunk: torch.nn.Module) -> str | None:
    config = get_model_config(chunk)
    is_ddp = isinstance(chunk, DistributedDataParallel)
    is_wrapped = isinstance(chunk, (_BaseDataParallel, torch.nn.parallel.DistributedDataParallel)) and not is_ddp
    shares_memory = getattr(getattr(chunk, "ddp_config", None), "reuse_grad_buf_for_mxfp8_param_ag", False)

    def has(*names: str) -> bool:
        return any(getattr(config, name, None) not in (None, False, "none") for name in names)

    reasons = {
        "scaling factors in FP4 cannot be put back": has("fp4"),
        "scaling factors in FP8 by a recipe with a history cannot be put back": has("fp8")
        and config.fp8_recipe not in _FP8_WITHOUT_HISTORY,
        "the job captures CUDA graphs": has("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"),
        "activations are offloaded": has("fine_grained_activation_offloading", "cpu_offloading"),
        f"{type(chunk).__name__} holds the gradients": is_wrapped,
        "parameters are split over ranks (FSDP)": any(hasattr(p, "to_local") for p in chunk.parameters()),
        "parameters are gathered into the memory of gradients": shares_memory,
        "parameters are being gathered": any(_in_flight(group) for group in _bucket_groups(chunk)),
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    if reason is None and any(bool(gradient.any()) for gradient in _gradients(chunk)):
        reason = "there are gradients already"
    return reason
