"""Where a job learns of ops that have failed: before an optimizer's step, and before a checkpoint.

A wait that ran out of time leaves a record, and the kernels after it run on with whatever data are there. The host
raises at its next check: at the next op, or here. Before a step it checks without waiting for the device, which would
take the host's lead; Megatron has mostly waited then, for the norm of the gradients. Before a checkpoint it waits:
what a failed op has made is never saved.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from ditron_train.megatron.plugin import patching
from ditron_train.symm import check_all

_SAVES = (("megatron.core.dist_checkpointing", "save"), ("megatron.training.checkpointing", "save_checkpoint"))
_hooks: list[Any] = []


def _check_before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    check_all()


def _checked(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_what_is_right(*args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        check_all()
        return save(*args, **kwargs)

    save_what_is_right.of_ditron = True  # type: ignore[attr-defined]
    return save_what_is_right


class _CheckBeforeReplays:
    """A captured step (``--optimizer-cuda-graph``, since 0.17) is replayed without torch's hooks: the check comes
    before the wrapper's calls."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper, self._native = wrapper, wrapper.__call__

        @functools.wraps(self._native)
        def step(this: Any, *args: Any, **kwargs: Any) -> Any:
            _check_before_step(this, args, kwargs)
            return self._native(this, *args, **kwargs)

        wrapper.__call__ = step

    def remove(self) -> None:
        """The wrapper is as before."""
        self._wrapper.__call__ = self._native


def start() -> None:
    """From now on the job looks; checkpoints of modules that are imported by now (patched names go with all others:
    ``patching.undo_all``)."""
    for module, name in _SAVES:
        save = getattr(sys.modules.get(module), name, None)
        if save is not None and not hasattr(save, "of_ditron"):
            patching.replace_symbol(save, _checked(save))
    if not _hooks:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        _hooks.append(register_optimizer_step_pre_hook(_check_before_step))
        with contextlib.suppress(ImportError, AttributeError):
            captured = importlib.import_module("megatron.core.optimizer.optimizer_cuda_graph")
            _hooks.append(_CheckBeforeReplays(captured.OptimizerCudaGraphWrapper))


def stop() -> None:
    """Steps are no longer checked."""
    while _hooks:
        _hooks.pop().remove()
