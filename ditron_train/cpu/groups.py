"""Takes back the process groups that a test or a call has made."""

from __future__ import annotations

import sys

import torch.distributed as dist


def destroy_groups() -> bool:
    """Destroys every process group but the world's, and what megatron-core keeps of them where it is imported.

    Returns:
        Whether there were any.
    """
    if not _groups():
        return False
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None:
        parallel_state.destroy_model_parallel()  # some of the groups go with it
    for group in _groups():
        dist.destroy_process_group(group)
    return True


def _groups() -> list[dist.ProcessGroup]:
    return [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
