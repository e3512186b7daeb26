"""What is kept for process groups, and let go of once they have been destroyed.

A plain dictionary would keep a destroyed group for ever, with its communicators and all the memory that was made for
it. Nobody says when a group is destroyed, and freeing must not wait for a finaliser; so what belongs to destroyed
groups goes when something is kept for another group: a job that makes and destroys groups holds at most the last
one's.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ditron_train.runtime.errors import NotSupportedError

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_caches: list[weakref.ref[GroupCache[Any, Any]]] = []
_is_forgetting = False
_seen: frozenset[int] | None = None  # the groups that were registered when destroyed ones were last looked for
_owners: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def check_member(group: object) -> None:
    """Refuses what is no group of this process, before anybody waits for it.

    Raises:
        NotSupportedError: This process is not in the group, or there is none yet.
    """
    if group is None:
        raise NotSupportedError("there is no process group: call torch.distributed.init_process_group first")
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # what ``new_group`` returns on the others
        raise NotSupportedError("this rank is not in the process group: only its members may use it")
    if not isinstance(group, dist.ProcessGroup):
        raise NotSupportedError(f"{group!r} is no process group")
    if is_destroyed(group):
        raise NotSupportedError("torch.distributed does not know the process group: it was destroyed, or wraps none")


#: Where classes that stand for a group which is destroyed and made again (as slime's) keep the group of now.
_INNER = ("group", "inner_group")


def unwrapped(group: Any) -> Any:
    """The group that ``torch.distributed`` knows: ``group`` itself, or the one that it wraps."""
    while isinstance(group, dist.ProcessGroup) and group not in distributed_c10d._world.pg_map:
        held = getattr(group, "__dict__", {})  # not ``getattr``, which a wrapper hands on
        inner = next((held[name] for name in _INNER if held.get(name) is not None), None)
        if inner is None:
            break
        group = inner
    return group


def world_group() -> dist.ProcessGroup:
    """The group of all ranks of the job.

    Raises:
        ValueError: ``torch.distributed`` is not initialised.
    """
    group = dist.group.WORLD
    if group is None:
        raise ValueError("torch.distributed is not initialised: call torch.distributed.init_process_group before")
    return group


def belongs_to(group: dist.ProcessGroup, owner: dist.ProcessGroup) -> dist.ProcessGroup:
    """Says that ``group`` was made for the sake of ``owner`` and is as good as destroyed once that is; returns
    ``group``."""
    if group is not owner:
        _owners[group] = weakref.ref(owner)
    return group


def is_destroyed(group: dist.ProcessGroup) -> bool:
    """Whether ``dist.destroy_process_group`` has been called for ``group``, or for the group that it belongs to."""
    group = unwrapped(group)
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):  # no longer registered; or nothing is, and the question is about the default group
        return True
    reference = _owners.get(group)
    if reference is None:
        return False
    owner = reference()
    return owner is None or is_destroyed(owner)


class GroupCache(dict[_Key, _Value]):
    """A dictionary whose keys are process groups, or tuples with process groups in them.

    Setting an item first drops every entry, here and in all other such dictionaries, of which a group has been
    destroyed, if the registry of groups has changed since that was done last. (By ``cache[key] = value``; not by
    ``update`` or ``setdefault``. Reading costs what it costs in a dictionary.)

    Args:
        release: Called with each value that is dropped for that reason, without the peers: it must not communicate.
    """

    def __init__(self, release: Callable[[_Value], None] | None = None) -> None:
        super().__init__()
        self._release = release
        _caches.append(weakref.ref(self))

    def __setitem__(self, key: _Key, value: _Value) -> None:
        forget_destroyed_groups()
        super().__setitem__(key, value)

    def _drop_destroyed(self) -> int:
        gone = [key for key in self if any(is_destroyed(group) for group in _groups_of(key))]
        for key in gone:
            value = self.pop(key)
            if self._release is not None:
                self._release(value)
        return len(gone)


def _groups_of(key: Any) -> list[dist.ProcessGroup]:
    parts = key if isinstance(key, tuple) else (key,)
    return [part for part in parts if isinstance(part, dist.ProcessGroup)]


def forget_destroyed_groups() -> None:
    """Lets go of everything that is kept for groups that have been destroyed: contexts, symmetric memory, decisions.

    Without communication, so at any time; it waits for the device if there was something to free.
    """
    global _is_forgetting, _seen
    # Whatever is kept holds on to its groups, so an id that is registered still is that of the same group.
    registered = frozenset(map(id, distributed_c10d._world.pg_map))
    if _is_forgetting or registered == _seen:  # what goes destroys groups of its own
        return
    _is_forgetting, _seen = True, registered
    try:
        num_dropped = _forget()
    finally:
        _is_forgetting = False
    if num_dropped:
        gc.collect()  # contexts and what they prepared refer to each other


def _forget() -> int:
    _caches[:] = [cache for cache in _caches if cache() is not None]
    num_dropped = 0
    # What is made of something else was imported after it: contexts before their arenas.
    for reference in reversed(_caches):
        cache = reference()
        if cache is not None:
            num_dropped += cache._drop_destroyed()
    return num_dropped


def forget_at_exit() -> None:
    """Has ``forget_destroyed_groups`` called when this process ends, before Python does; for groups of gloo.

    Its threads end with the last reference to a group. One that lets go of a collective's tensor while the interpreter
    ends aborts the process: "terminate called without an active exception".
    """
    _register_exit(os.getpid())


@functools.cache
def _register_exit(process: int) -> None:
    atexit.register(_forget_at_exit_of, process)


def _forget_at_exit_of(process: int) -> None:
    if os.getpid() == process:  # a fork of it has none of the threads
        forget_destroyed_groups()


def broadcast_together(tensors: Sequence[tuple[torch.Tensor, int]], group: dist.ProcessGroup) -> list[dist.Work]:
    """Begins a broadcast of each tensor from its rank of ``group``; returns what to wait for.

    The same as ``[dist.broadcast(tensor, group=group, group_src=rank, async_op=True) for tensor, rank in tensors]``,
    without the empty ones. ProcessGroupNCCL begins all of them in one launch, so that those of several ranks use the
    two directions of a link at once; other backends begin them one by one. Every rank gives tensors of the same sizes
    in the same order, all on one device.
    """
    sent = [(tensor, rank) for tensor, rank in tensors if tensor.numel()]
    is_together = len(sent) > 1 and _is_nccl(group, sent[0][0].device)
    if is_together:
        group._start_coalescing(sent[0][0].device)
    try:
        works = [dist.broadcast(tensor, group=group, group_src=rank, async_op=True) for tensor, rank in sent]
    finally:
        if is_together:
            work = group._end_coalescing(sent[0][0].device)
    return [work] if is_together else works


def _is_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether torch's own NCCL backend runs collectives there: ProcessGroupNCCL2 knows no broadcasts in one launch."""
    backend = getattr(dist, "ProcessGroupNCCL", None)
    return backend is not None and type(group) is dist.ProcessGroup and isinstance(group._get_backend(device), backend)
