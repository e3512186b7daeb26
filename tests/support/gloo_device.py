"""One gloo device for all groups of a process.

Each device of gloo has a thread that wakes a hundred times a second, whether there is something to do or not, and
torch makes a device for each group. In processes with some hundred groups these threads took a third of all processor
time.

This file imports nothing of the package or the tests: ``tests.support.warm_python`` loads it by its path.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any


def share_gloo_device() -> None:
    """Has the gloo groups that this process and its forks make from now on use one device in each process, which the
    first group makes. Idempotent."""
    import torch.distributed.distributed_c10d as c10d

    native: Any = c10d.ProcessGroupGloo
    if hasattr(native, "shared_devices"):
        return

    class AnyGloo(type(native)):  # type: ignore[misc]
        """Groups that torch made itself are instances, too."""

        def __instancecheck__(cls, group: Any) -> bool:
            return isinstance(group, native)

    class SharedDeviceGloo(native, metaclass=AnyGloo):  # type: ignore[misc]
        """``ProcessGroupGloo`` on the device of its interface."""

        shared_devices: dict[tuple[int, str], Any] = {}  # by process and interface

        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
            key = (os.getpid(), interface)
            if key not in self.shared_devices:
                made = native.create_device(interface=interface) if interface else native.create_default_device()
                self.shared_devices[key] = made
            options = native._Options()
            options._devices, options._threads, options._timeout = [self.shared_devices[key]], 2, timeout
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = SharedDeviceGloo  # type: ignore[misc]
