"""More ranks than GPUs: several processes on each GPU, which takes turns between them.

NCCL refuses two ranks on one GPU of one host. With 2 ranks every one poses as a host of its own, for NCCL alone, which
then joins them by sockets: the tests compare with NCCL itself. With more ranks such a pose would change the order of
NCCL's sums, so gloo stands in. Movement is movement. Of sums the order matters: NCCL's is known from runs with a GPU
for every rank, on 4 and 8 GPUs the one that ``ring_reduce`` follows, and ``reduce_scatter_tensor`` adds in it. So a
sum that has the bits of these tests has those of the *recorded* order; that NCCL adds in it, too, only runs with a GPU
for every rank can show (``test_policy``'s ``test_order_of_nccl_is_revealed``).

Nothing here is about time: a kernel that waits for a rank on the same GPU waits until the GPU turns to that one,
milliseconds each.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent / "tp"))


def is_needed() -> bool:
    """Whether torchrun has started more ranks than there are GPUs."""
    return torch.cuda.is_available() and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > torch.cuda.device_count()


def backend() -> str:
    """What joins the ranks: NCCL, or gloo where NCCL cannot give the sums of one host, or SHARED_GPUS_GLOO is set."""
    if not is_needed():
        return "nccl"
    return "nccl" if os.environ["WORLD_SIZE"] == "2" and not os.environ.get("SHARED_GPUS_GLOO") else "gloo"


def set_up() -> None:
    """Before a process group is made, or Megatron imported, which takes its collectives by their values."""
    if backend() == "gloo":
        _join_by_sockets()
        dist.reduce_scatter_tensor = reduce_scatter_tensor
        dist._coalescing_manager = _one_by_one
    else:
        pose_as_hosts()


def pose_as_hosts() -> None:
    """Every rank is a host of its own to NCCL; to the package all are on one."""
    _join_by_sockets()
    for name, value in (
        ("NCCL_HOSTID", f"rank{os.environ['RANK']}"),
        ("NCCL_NET", "Socket"),
        ("NCCL_SOCKET_IFNAME", "lo"),
    ):
        os.putenv(name, value)  # C code sees it, ``os.environ`` does not


def _join_by_sockets() -> None:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # torch refuses two ranks on one GPU otherwise
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


@contextlib.contextmanager
def _one_by_one(group: object = None, device: object = None, async_ops: bool = False) -> Iterator[_Done]:
    """``dist._coalescing_manager``, which gloo has not: collectives inside run as they come."""
    yield _Done()


class _Done:
    def wait(self) -> bool:
        return True


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: dist.ReduceOp = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> _Done | None:
    """``dist.reduce_scatter_tensor`` in the order recorded of NCCL; gloo's own adds in another one."""
    from bodies_tp import ring_reduce

    assert op == dist.ReduceOp.SUM
    shares = torch.empty_like(input, memory_format=torch.contiguous_format)
    dist.all_to_all_single(shares, input.contiguous(), group=group)
    output.copy_(ring_reduce(list(shares.view(dist.get_world_size(group), *output.shape)), dist.get_rank(group)))
    return _Done() if async_op else None
