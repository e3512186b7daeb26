"""Which transport a group's symmetric memory comes from."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ditron_train.runtime.errors import ArenaError
from ditron_train.runtime.settings import get_settings
from ditron_train.symm.exchange import exchange
from ditron_train.symm.nvshmem_transport import NvshmemTransport
from ditron_train.symm.shm_transport import ShmTransport
from ditron_train.symm.torch_transport import TorchTransport
from ditron_train.symm.transport import Transport, node_of_process


def _spans_nodes(group: dist.ProcessGroup) -> bool:
    return len(set(exchange(group, node_of_process()))) > 1


def select_transport(group: dist.ProcessGroup, device: torch.device, name: str | None = None) -> Transport:
    """Chooses the transport of a group (collective).

    ``name`` or ``DITRON_TRANSPORT`` forces one; ``auto`` takes ``shm`` for CPU, ``torch`` where the group lies inside
    one node ("node" means one torchrun agent), and ``nvshmem`` across nodes.

    Raises:
        ArenaError: The transport does not fit the device or the nodes, or is not installed; the same on every rank.
    """
    name = name or get_settings().transport
    is_chosen = name != "auto"
    if not is_chosen:
        if device.type == "cpu":
            name = "shm"
        else:
            name = "nvshmem" if _spans_nodes(group) else "torch"
    names = exchange(group, name)
    if len(set(names)) > 1:
        raise ArenaError(f"ranks chose different transports: {names}; set DITRON_TRANSPORT to one of them everywhere")
    if name not in ("shm", "torch", "nvshmem") or (name == "shm") != (device.type == "cpu"):
        raise ArenaError(f"transport {name!r} does not serve {device.type} tensors")
    if name == "shm":
        return ShmTransport()
    if name == "torch":
        # Tried between nodes, it would fail in the middle, and there would be none inside a node either.
        if is_chosen and _spans_nodes(group):
            raise ArenaError("the transport torch reaches the ranks of one torchrun agent, and this group has several")
        return TorchTransport()
    return NvshmemTransport.get(group, device)
