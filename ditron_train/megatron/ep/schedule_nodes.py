"""Whether a layer is being run in pieces by the nodes of a schedule plan.

``ScheduleNode`` frees the storage of what it has given to a piece of a layer, which Megatron's own dispatchers have
copied by then. With ``overlap_moe_expert_parallel_comm`` layers know of it when they are built; a caller who builds
plans himself may do so with that flag off.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from megatron.core.pipeline_parallel.utils import ScheduleNode

_running = threading.local()
_run_native = ScheduleNode._forward


@functools.wraps(_run_native)
def _run(self: Any, *inputs: Any) -> Any:
    outer = in_schedule_node()
    _running.node = True
    try:
        return _run_native(self, *inputs)
    finally:
        _running.node = outer


def watch_schedule_nodes() -> None:
    """From now on nodes say when they run; for good, since layers that exist outlive `restore`."""
    ScheduleNode._forward = _run


def in_schedule_node() -> bool:
    """Whether the forward of a node of a schedule plan is running in this thread."""
    return getattr(_running, "node", False)
