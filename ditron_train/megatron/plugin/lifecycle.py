"""When memory goes back: groups that are destroyed, trainers that sleep while something else has the GPU."""

from __future__ import annotations

import functools
import gc
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch.distributed as dist

from ditron_train.hook import after_import
from ditron_train.megatron.plugin import patching
from ditron_train.policy import gate
from ditron_train.pp.context import close_pipeline_contexts
from ditron_train.runtime.groups import forget_destroyed_groups
from ditron_train.runtime.logs import log_once
from ditron_train.symm import close_all_arenas

_destroy = dist.destroy_process_group
_is_on = False


def release() -> None:
    """Gives all symmetric memory and recorded CUDA graphs back, between two steps; a call of every rank of the job.

    What was decided is remembered: the first call of each shape afterwards makes its buffers again and compares and
    times nothing. Memory that a CUDA graph of the job may use stays. With the nvshmem transport the reserve stays,
    too.

    Raises:
        PeerTimeoutError: A rank did not arrive.
    """
    gate.release()
    close_pipeline_contexts()
    num_kept = close_all_arenas(keeps_captured=True)
    gc.collect()  # contexts and what they prepared refer to each other
    if num_kept:
        log_once("release", f"symmetric memory of {num_kept} groups stays: captured CUDA graphs may use it")


@functools.wraps(_destroy)
def _destroy_and_forget(*args: Any, **kwargs: Any) -> None:
    _destroy(*args, **kwargs)
    with suppress(RuntimeError):  # of a device that has failed: what destroyed the groups says more
        forget_destroyed_groups()


def _hook_memory_saver(module: ModuleType) -> None:
    """``torch_memory_saver`` takes back what torch's allocator has; symmetric memory comes from the driver."""
    saver = module.TorchMemorySaver
    native = saver.pause

    @functools.wraps(native)
    def pause(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_on:
            release()
        return native(self, *args, **kwargs)

    saver.pause = pause


def start() -> None:
    """From now on memory goes back at once when groups are destroyed or a memory saver pauses."""
    global _is_on
    _is_on = True
    patching.replace_symbol(_destroy, _destroy_and_forget, package="torch.distributed")
    after_import("torch_memory_saver", _hook_memory_saver)


def stop() -> None:
    """Memory of destroyed groups goes when something is kept for another one (patched names go with all others)."""
    global _is_on
    _is_on = False
