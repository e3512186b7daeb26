"""Process groups that only their members make.

``torch.distributed.new_group`` wants every rank of the job, or, with ``use_local_synchronization``, names the group by
how many groups a rank is in, which differs between the stages of a pipeline (some are in embedding groups), so that
members wait for each other under different names. Here the members agree on a name first.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ditron_train.runtime.groups import GroupCache, belongs_to
from ditron_train.symm.exchange import exchange


def _destroy(groups: list[weakref.ref[dist.ProcessGroup]]) -> None:
    for reference in groups:
        group = reference()
        if group is not None and group in distributed_c10d._world.pg_map:
            with suppress(RuntimeError, ValueError):  # what is left of it is as good as gone
                dist.destroy_process_group(group)


#: Groups of gloo's, by the group that they were made for: destroyed once that is, or their threads and sockets would
#: stay. Others are not: destroying NCCL's waits for its peers.
_made: GroupCache[dist.ProcessGroup, list[weakref.ref[dist.ProcessGroup]]] = GroupCache(_destroy)


def make_group(
    parent: dist.ProcessGroup,
    members: list[int],
    description: str,
    options: Any = None,
    *,
    backend: str | None = None,
    connect_s: float | None = None,
) -> dist.ProcessGroup:
    """Makes a group of ``members`` (ranks in ``parent``, this one among them), with ``parent``'s deadline and backend
    if none is named, ``connect_s`` being the deadline until they are connected; it belongs to ``parent``: what is
    kept for it goes once that is destroyed.

    Collective over ``parent``: ranks may name different groups, as long as these do not overlap.
    """
    rank = dist.get_rank(parent)
    name: Any = f"{description}_{exchange(parent, secrets.token_hex(8))[members[0]]}"
    ranks = [dist.get_global_rank(parent, member) for member in members]
    timeout = _timeout_of(parent)
    if options is not None:
        options._timeout = timeout
    with _without_splitting():
        group, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            members.index(rank),
            ranks,
            dist.Backend(backend or dist.get_backend(parent)),
            distributed_c10d._get_default_store(),
            group_name=name,
            backend_options=options,
            timeout=timeout if connect_s is None else timedelta(seconds=connect_s),
            group_desc=description,
        )
    if connect_s is not None:
        distributed_c10d._set_pg_timeout(timeout, group)
    distributed_c10d._world.pg_group_ranks[group] = {global_rank: place for place, global_rank in enumerate(ranks)}
    if dist.get_backend(group) == dist.Backend.GLOO:
        _made[parent] = [*_made.get(parent, []), weakref.ref(group)]
    return belongs_to(group, parent)


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """When operations of the group's backend give up: what the job asked for, if the backend says so, else torch's
    default."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    default = distributed_c10d._get_default_timeout(dist.Backend(dist.get_backend(group)))
    timeout: timedelta = getattr(options, "_timeout", default)
    return timeout


@contextmanager
def _without_splitting() -> Iterator[None]:
    """Splitting WORLD's communicator, torch's way when WORLD is bound to a device, would take every rank of the job:
    at the group's first use, or at once if the backend is ProcessGroupNCCL2 (torch 2.15's default)."""
    world: Any = dist.group.WORLD
    device = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device
