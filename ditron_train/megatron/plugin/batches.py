"""Sends the numbers that Megatron-LM broadcasts with each microbatch from host to host.

``get_batch_on_this_tp_rank`` (``megatron.training.utils``) broadcasts how many sequences a microbatch packs, as a
tensor on the GPU, and reads it: the host waits for all that the GPU has been given and begins the microbatch without a
lead. Here the same code runs with such tensors on the CPU and their broadcast by gloo. What the model computes with is
broadcast as before.

    Megatron: n on the GPU, NCCL's broadcast, n.item() waits for the GPU
    here:     n on the CPU, gloo's broadcast, which waits for the hosts of the tensor parallel ranks

Megatron's wait also bounds memory: without it, weight gradients of several microbatches are held at once (8.5 GiB for
6 layers of LLaMA-70B without gradient accumulation fusion). So each microbatch begins with ``await_freed_memory``,
which leaves the GPU enough work to go on with.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from ditron_train.megatron.plugin import patching
from ditron_train.megatron.shared.devices import current_device
from ditron_train.megatron.shared.freed_memory import await_freed_memory
from ditron_train.megatron.shared.other_names import called, rebind_globals
from ditron_train.policy import log_native
from ditron_train.runtime.errors import ArenaError, PeerTimeoutError
from ditron_train.runtime.groups import GroupCache
from ditron_train.runtime.logs import log_once
from ditron_train.runtime.settings import get_settings
from ditron_train.symm.exchange import on_all_ranks
from ditron_train.symm.groups import make_group

_MODULE, _NAME = "megatron.training.utils", "get_batch_on_this_tp_rank"
#: Options under which the shape of a microbatch is told, too.
_UNEVEN = ("hybrid_context_parallel", "dynamic_context_parallel")

_NUMBERS = ((), (1,))  # shapes
_CONNECT_S = 30.0
_FAILURES = (RuntimeError, OSError, ValueError)  # what torch raises if gloo finds no address or no peer
#: None: it cannot be had. Torch alone holds a group: who destroys all groups closes its sockets, and so wakes a rank
#: that waits there.
_host_groups: GroupCache[dist.ProcessGroup, weakref.ref[dist.ProcessGroup] | None] = GroupCache()


def _is_number_elsewhere(shape: tuple[int, ...], options: dict[str, Any]) -> bool:
    """By shape and type, which all ranks of a group name alike for one number."""
    device = options.get("device")
    is_elsewhere = device is not None and (isinstance(device, int) or torch.device(device).type != "cpu")
    return is_elsewhere and shape in _NUMBERS and options.get("dtype") == torch.int64


class _Distributed:
    """``torch.distributed``, whose broadcast of a tensor on the CPU takes the group's hosts."""

    def broadcast(self, tensor: torch.Tensor, src: int, group: Any = None, **options: Any) -> Any:
        if tensor.device.type != "cpu":
            return dist.broadcast(tensor, src, group=group, **options)
        host_group = _known_host_group(group)
        if host_group is not None:
            return dist.broadcast(tensor, src, group=host_group, **options)
        if group is not None and group.size() == 1:
            return None
        moved = tensor.to(current_device())  # another group than the tensor parallel one
        dist.broadcast(moved, src, group=group)
        return tensor.copy_(moved)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


class _Torch:
    """``torch``, which makes whole numbers on the CPU, wherever they are asked for."""

    distributed = _Distributed()

    def tensor(self, data: Any, *args: Any, **options: Any) -> torch.Tensor:
        if isinstance(data, int) and _is_number_elsewhere((), options):
            options["device"] = "cpu"
        return torch.tensor(data, *args, **options)

    def empty(self, *size: Any, **options: Any) -> torch.Tensor:
        given = options.get("size", size[0] if len(size) == 1 else size)
        if _is_number_elsewhere((given,) if isinstance(given, int) else tuple(given), options):
            options["device"] = "cpu"
        return torch.empty(*size, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _host_group(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """A group of gloo's with the same ranks (collective the first time); None on all of them if one cannot have
    it."""
    if group not in _host_groups:
        members, host_group = list(range(group.size())), None
        # Ranks that cannot connect give up before those that have failed do: so all of them hear of it.
        connect_s = min(_CONNECT_S, get_settings().timeout_s / 2)

        def make() -> dist.ProcessGroup:
            return make_group(group, members, "batch_numbers", backend="gloo", connect_s=connect_s)

        try:
            host_group = on_all_ranks(group, "a group of hosts", make, _FAILURES)
        except (ArenaError, PeerTimeoutError) as error:
            log_native("batch numbers", str(error))
        _host_groups[group] = None if host_group is None else weakref.ref(host_group)
    return _known_host_group(group)


def _known_host_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    reference = _host_groups.get(group)  # type: ignore[arg-type]  # of no group there is none
    return None if reference is None else reference()


def _is_number(value: Any) -> bool:
    is_made_here = isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dtype == torch.int64
    return is_made_here and tuple(value.shape) in _NUMBERS


def told_by_hosts(native: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """``native``, Megatron-LM's function, whose numbers go from host to host if ``start`` has made a group for it.
    What it returns is the same, on the same devices."""
    on_hosts = rebind_globals(native, {"torch": _Torch()})
    get_args = native.__globals__["get_args"]

    @functools.wraps(native)
    def get_batch_on_this_tp_rank(*args: Any, **kwargs: Any) -> dict[str, Any]:
        given = get_args()
        if any(getattr(given, name, False) for name in _UNEVEN):
            return native(*args, **kwargs)
        group = parallel_state.get_tensor_model_parallel_group()
        if group.size() > 1 and _known_host_group(group) is None:
            return native(*args, **kwargs)
        await_freed_memory(current_device())
        batch: dict[str, Any] = on_hosts(*args, **kwargs)
        if not isinstance(batch, dict):
            return batch
        return {name: one.to(current_device()) if _is_number(one) else one for name, one in batch.items()}

    return get_batch_on_this_tp_rank


def _with_hosts(update: Callable[..., None]) -> Callable[..., None]:
    """``update_pg_timeout``, by which Megatron sets the deadlines of its groups
    (``--distributed-timeout-seconds-after-init``), for those of hosts, too."""

    @functools.wraps(update)
    def update_pg_timeout(timeout: timedelta, pg: dist.ProcessGroup | None = None) -> None:
        update(timeout, pg)
        for group in list(_host_groups):
            host_group = _known_host_group(group)
            if host_group is not None and pg in (None, group):
                dist.distributed_c10d._set_pg_timeout(timeout, host_group)

    return update_pg_timeout


def start() -> None:
    """From now on Megatron-LM's training does so, if this process has imported it; on all ranks alike (collective over
    Megatron's tensor parallel group, if that is new)."""
    known = getattr(sys.modules.get(_MODULE), _NAME, None)
    if known is None or get_settings().batch_numbers == "gpu" or not torch.cuda.is_available():
        return
    native = getattr(known, "__wrapped__", known)
    if not {"item", "distributed", "get_args"} <= called(native):
        return
    try:
        given = native.__globals__["get_args"]()
    except AssertionError:  # groups are made without Megatron-LM's arguments: no training loop will ask for a batch
        return
    is_uneven = any(getattr(given, name, False) for name in _UNEVEN)
    if is_uneven or not getattr(given, "enable_gloo_process_groups", True):
        return
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() > 1 and _host_group(group) is None:
        return
    if known is native:
        fused = told_by_hosts(native)
        for package in ("megatron", "__main__"):  # the script has imported it by name
            patching.replace_symbol(native, fused, package=package)
        patching.replace_symbol(parallel_state.update_pg_timeout, _with_hosts(parallel_state.update_pg_timeout))
        log_once("batch numbers", "numbers of a microbatch go from host to host")


def stop() -> None:
    """Forgets the groups of hosts; the names are taken back with all others (``patching.undo_all``)."""
    _host_groups.clear()
