"""Which GPU a rank takes, and what the ranks of a job talk by if several of them share one."""

from __future__ import annotations

import os

import torch


def share_gpus(local_rank: int, local_world_size: int) -> str:
    """Makes one of this machine's GPUs the current one; returns the backend for the job's process group.

    NCCL takes one rank a GPU. More ranks than GPUs take turns on them and talk by gloo: to see whether something
    works, not how long it takes. Torch's symmetric memory has to be told before it is first used.
    """
    num_gpus = torch.cuda.device_count()
    torch.cuda.set_device(local_rank % num_gpus)
    if local_world_size <= num_gpus:
        return "nccl"
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    if os.environ.get("WORLD_SIZE") == str(local_world_size):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return "gloo"
