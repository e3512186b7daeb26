"""Every rank of torchrun runs pytest on the same tests; skipped with a reason where there is no GPU or no torchrun."""

from __future__ import annotations

import datetime
import os

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="session")
def device() -> torch.device:
    """This rank's GPU, with NCCL initialised over all ranks.

    As Megatron does without a ``device_id``: with one every group connects when it is made, and each of Megatron's forty groups
    then takes a second to be torn down at exit.
    """
    if not torch.cuda.is_available():
        pytest.skip("needs GPUs")
    if "RANK" not in os.environ:
        pytest.skip("needs torchrun (scripts/test_gpu.sh)")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=120))
    return device


@pytest.fixture
def all_equal(device):
    """``all_equal(a, b)``: whether ``torch.equal`` holds on every rank (collective)."""

    def compare(a: torch.Tensor, b: torch.Tensor) -> bool:
        verdict = torch.tensor([int(torch.equal(a, b))], device=device)
        dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
        return bool(verdict.item())

    return compare
