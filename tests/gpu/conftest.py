"""Every rank of torchrun runs pytest on the same tests, rank 0 reports; skipped with a reason without GPUs or
torchrun.

With more ranks than GPUs see ``shared_gpus``.
"""

from __future__ import annotations

import datetime
import io
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import shared_gpus  # noqa: E402

RANK = int(os.environ.get("RANK", 0))
SHARES_GPUS = shared_gpus.is_needed()


class _FailuresOnly:
    """What a rank beside the first reports: nothing while tests pass, at the end what failed here."""

    def __init__(self, config: pytest.Config) -> None:
        self._text = io.StringIO()
        config.pluginmanager.getplugin("terminalreporter")._tw._file = self._text

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        reporter, text = config.pluginmanager.getplugin("terminalreporter"), self._text.getvalue()
        if reporter.stats.keys() & {"failed", "error"}:
            lines = text[max(text.find("= FAILURES ="), 0) :].splitlines()
            sys.stderr.write("".join(f"[rank {RANK}] {line}\n" for line in lines))


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """All ranks run the same tests: the first one's report is enough."""
    if SHARES_GPUS:
        shared_gpus.set_up()
    if RANK > 0:
        config.pluginmanager.register(_FailuresOnly(config))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """What failed is told at once: where the ranks then wait for each other, the summary never comes."""
    if report.failed:
        lines = [line for line in str(report.longrepr).splitlines() if line.startswith(("E ", ">"))]
        sys.__stderr__.write("".join(f"[rank {RANK}] {line}\n" for line in (report.nodeid, *lines[:12])))


def _gpu_of_this_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()


@pytest.fixture(autouse=True, scope="session")
def _on_the_gpu_of_this_rank() -> None:
    """Under torchrun also those tests that need no group."""
    if torch.cuda.is_available():
        torch.cuda.set_device(_gpu_of_this_rank())


@pytest.fixture(scope="session")
def shares_gpus() -> bool:
    """Whether there are more ranks than GPUs: everything is slow, a kernel that waits for another rank most of all."""
    return SHARES_GPUS


@pytest.fixture(scope="session")
def nccl() -> None:
    """Of tests that need NCCL."""
    if shared_gpus.backend() != "nccl":
        pytest.skip("needs NCCL, and more than 2 ranks a GPU for each")


@pytest.fixture(scope="session")
def own_gpus(shares_gpus: bool) -> None:
    """Of tests that measure, or ask what runs beside what, or have nothing to do with other ranks."""
    if shares_gpus:
        pytest.skip("needs a GPU for every rank")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """This rank's GPU, with NCCL (gloo where more than 2 ranks share GPUs) initialised over all ranks.

    As Megatron does without a ``device_id``: with one every group connects when it is made, and each of Megatron's
    forty groups then takes a second to be torn down at exit.
    """
    if not torch.cuda.is_available():
        pytest.skip("needs GPUs")
    if "RANK" not in os.environ:
        pytest.skip("needs torchrun (scripts/test_gpu.sh)")
    device = torch.device("cuda", _gpu_of_this_rank())
    if not dist.is_initialized():
        dist.init_process_group(shared_gpus.backend(), timeout=datetime.timedelta(seconds=120))
    return device


@pytest.fixture
def folder(device, tmp_path):
    """Rank 0's folder, the same on every rank of an even number of them."""
    if dist.get_world_size() % 2:
        pytest.skip("needs an even number of GPUs")
    path = [str(tmp_path)]
    dist.broadcast_object_list(path, src=0)
    yield Path(path[0])
    dist.barrier()


@pytest.fixture
def all_equal(device):
    """``all_equal(a, b)``: whether ``torch.equal`` holds on every rank (collective)."""

    def compare(a: torch.Tensor, b: torch.Tensor) -> bool:
        verdict = torch.tensor([int(torch.equal(a, b))], device=device)
        dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
        return bool(verdict.item())

    return compare
