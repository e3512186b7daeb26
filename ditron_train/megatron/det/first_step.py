"""Deterministic mode without PyTorch's fill of new tensors, once the job has shown that its bits do not depend on it.

Megatron's ``--deterministic-mode`` leaves ``torch.utils.deterministic.fill_uninitialized_memory`` on, so that PyTorch
writes NaN into every new tensor. Here the first training step runs three times, each time from the same state:

    1. as it is: new tensors are filled with NaN
    2. without that fill; finite values are written into new tensors instead
    3. without any fill, if losses and gradients of both runs have equal bits on all ranks; else as it is

The third is the job's own step. If bits differ, more runs find the new tensor whose content reaches a result: the
first tensors of all ranks are filled with finite values, the others with NaN, and their number is halved each time.

All three of Megatron's schedules are replaced, which every framework that trains with Megatron-core calls. What one
run of them changes is in `step_state`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules

from ditron_train.megatron.det import embedding
from ditron_train.megatron.det.step_state import StepState, unsupported_reason
from ditron_train.megatron.plugin import patching
from ditron_train.megatron.plugin.fused_calls import FUSED_CALLS
from ditron_train.policy.probe import time_without_fill
from ditron_train.policy.uninitialized import FillNewTensors, fills_new_tensors, set_torch_fill, torch_fill
from ditron_train.runtime.errors import DitronError, PeerTimeoutError
from ditron_train.runtime.groups import world_group
from ditron_train.runtime.logs import get_logger, log_once
from ditron_train.runtime.settings import get_settings
from ditron_train.symm.exchange import exchange

_TURNS = 3  # deadlines: stages of a pipeline end a step one after the other
_is_awaited = _is_switched_off = False


class _CheckError(DitronError):
    """The check cannot be started or finished; the same on every rank."""


def _of_all_ranks(value: Any) -> list[Any]:
    return exchange(world_group(), value, _TURNS)


@dataclass(frozen=True)
class _Check:
    """Runs of the first step, each from the same state; collective over the job."""

    schedule: Callable[..., Any]
    arguments: dict[str, Any]
    state: StepState

    def difference(self) -> str | None:
        """What a dependence on the fill is due to, in words; None if there is none."""
        filled = self._run(is_filled=True)
        if self._run(FillNewTensors(is_finite=True), is_filled=False) == filled:
            return None
        if self._run(is_filled=True) != filled:
            return "two runs of the same step differ, whatever new tensors hold"
        return self._origin(filled)

    def _origin(self, filled: list[str]) -> str:
        """Which new tensor has a content that reaches a result."""
        everything = FillNewTensors(is_finite=True)
        if self._run(everything, is_filled=True) == filled:
            return "a result depends on memory that an operator of C++ allocated for itself"
        counts = _of_all_ranks(everything.count)
        before, mine = sum(counts[: dist.get_rank()]), counts[dist.get_rank()]

        def first(count: int) -> FillNewTensors:
            """Of the new tensors of all ranks, one rank after the other, so many are finite."""
            return FillNewTensors(is_finite=True, limit=min(max(count - before, 0), mine))

        low, high = 0, sum(counts)  # as many as change no bit, as many as change one
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._run(first(middle), is_filled=True) == filled else (low, middle)
        last = first(high)
        self._run(last, is_filled=True)
        origins = enumerate(_of_all_ranks(last.origin if before < high <= before + mine else ""))
        found = next((f"{origin} (rank {rank})" for rank, origin in origins if origin), "a new tensor")
        return f"a result depends on what {found} left unwritten"

    def _run(self, mode: FillNewTensors | None = None, *, is_filled: bool) -> list[str]:
        """Digests of one run on all ranks.

        Raises:
            _CheckError: It failed on a rank. All ranks have come to the end of what they had in common.
            PeerTimeoutError: A rank did not arrive.
            Exception: It failed here, and a rank did not arrive, which waits for this one elsewhere.
        """
        mine, failure = "", None
        try:
            with self.state.unobserved(), torch_fill(is_filled), mode or nullcontext():
                result = self.schedule(**self.arguments)
            mine = self.state.digest(result)
        except Exception as error:  # whatever a job's own step may raise
            failure = error
            get_logger("det").warning("the check of the fill failed here: %s: %s", type(error).__name__, error)
        result, text = None, "" if failure is None else f"{type(failure).__name__}: {failure}"
        try:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # whoever comes here has nothing that waits for others: all ranks are in step
            gathered = _of_all_ranks([mine, text])
        except PeerTimeoutError as timeout:
            raise failure or timeout from timeout
        finally:
            failure = None  # its frames hold the step's tensors
            self.state.restore()
        failed = [f"on rank {rank}: {text}" for rank, (_, text) in enumerate(gathered) if text]
        if failed:
            raise _CheckError(f"the step failed {failed[0]}")
        return [one for one, _ in gathered]


def _prepare(arguments: dict[str, Any]) -> StepState:
    """The state of the step (collective over the job).

    Raises:
        _CheckError: A rank cannot keep it.
        PeerTimeoutError: A rank did not arrive.
    """
    model, iterator, state = arguments["model"], arguments["data_iterator"], None
    try:
        reason = unsupported_reason(model, iterator)
        state = StepState(model, iterator) if reason is None else None
    except Exception as error:  # models and iterators are whatever a framework makes
        reason = f"{type(error).__name__}: {error}"
    reasons = [one for one in _of_all_ranks(reason) if one is not None]
    if state is None or reasons:
        raise _CheckError(reasons[0])
    return state


def _first_step(schedule: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The first training step, after the check."""
    global _is_switched_off
    begun_s = time.monotonic()
    try:
        state = _prepare(arguments)
        arguments = {**arguments, "data_iterator": state.data_iterator}
        difference = _Check(schedule, arguments, state).difference()
    except (_CheckError, PeerTimeoutError) as error:
        difference = str(error)
    _is_switched_off, seconds = difference is None, time.monotonic() - begun_s
    set_torch_fill(not _is_switched_off)
    time_without_fill(_is_switched_off)
    if difference is None:
        words = "fill of new tensors off: bits do not depend on it"
        log_once("det", f"det: {words} (checked at the first step, {seconds:.1f} s)")
    else:
        log_once("det", f"det: new tensors stay filled with NaN: {difference}", level=logging.WARNING)
    FUSED_CALLS.take()  # those of the runs that were no step of the job
    step_without_fill()
    return schedule(**arguments)


def step_without_fill() -> bool | None:
    """Whether the fill is switched off for the training step that begins; None if it is not.

    Called for its side effect alone: ``plugin.fused_calls`` wraps it by name and counts the calls that return True.
    """
    return _is_switched_off or None


def _checked(schedule: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(schedule)

    @functools.wraps(schedule)
    def run_schedule(*args: Any, **kwargs: Any) -> Any:
        global _is_awaited
        if not kwargs.get("forward_only", False):
            embedding.start()  # Megatron sets the mode after features are switched on
            is_first, _is_awaited = _is_awaited, False
            if is_first and fills_new_tensors():
                return _first_step(schedule, dict(signature.bind(*args, **kwargs).arguments))
            step_without_fill()
        return schedule(*args, **kwargs)

    return run_schedule


def class_map() -> dict[type, type]:
    """No class is replaced."""
    return {}


def start() -> None:
    """From now on the first training step that any of Megatron's schedules runs is checked, in deterministic mode, in
    which embeddings have their gradients from here."""
    global _is_awaited
    if get_settings().det == "off":
        log_once("det off", "det: off by DITRON_DET")
        return
    _is_awaited = True
    time_without_fill(True)
    embedding.start()
    for native in [one for name, one in vars(schedules).items() if name.startswith("forward_backward_")]:
        patching.replace_symbol(native, _checked(native))


def stop() -> None:
    """PyTorch fills new tensors again (patched names go with all others: ``patching.undo_all``)."""
    global _is_awaited, _is_switched_off
    if _is_switched_off:
        set_torch_fill(True)
    _is_awaited = _is_switched_off = False
    time_without_fill(False)
    embedding.stop()
