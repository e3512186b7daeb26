"""What is kept for a process group goes once the group has been destroyed, and not before."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist

from ditron_train.runtime.groups import broadcast_together
from tests.support.patience import HANG_S
from tests.support.processes import run_workers

CPU = torch.device("cpu")
ROUNDS = 5


def _everyone() -> dist.ProcessGroup:
    return dist.new_group(list(range(dist.get_world_size())))


def _num_maps() -> int:
    """Pieces of symmetric memory that this process has mapped."""
    with open("/proc/self/maps") as maps:
        return sum("/dev/shm/ditron-" in line for line in maps)


def _make_and_destroy() -> tuple[bool, list[int], list[int]]:
    """Groups, each with ops of TP, one after another: whether results are right, what is alive, what is mapped."""
    from torch.multiprocessing.reductions import StorageWeakRef

    from ditron_train.symm import close_all_arenas
    from ditron_train.tp import ag_gemm, gemm_rs, get_tp_context

    close_all_arenas()
    gc.collect()  # what an earlier test of this process left
    right, alive, maps, seen, storages = True, [], [], [], []
    for number in range(ROUNDS):
        group = _everyone()
        context = get_tp_context(group, CPU)
        alive.append(
            sum(reference() is not None for reference in seen) + sum(not storage.expired() for storage in storages)
        )
        seen += [
            weakref.ref(context),
            weakref.ref(context.arena),
            weakref.ref(context.gather_channel),
            weakref.ref(group),
        ]
        whole = torch.randint(
            -3, 4, (32 * context.world_size, 32), generator=torch.Generator().manual_seed(number)
        ).float()
        mine = slice(32 * context.rank, 32 * (context.rank + 1))
        weight = whole[:16]
        right &= torch.equal(ag_gemm(whole[mine], weight, context=context), whole @ weight.t())
        right &= torch.equal(gemm_rs(whole, weight, context=context), context.world_size * (whole @ weight.t())[mine])
        right &= get_tp_context(group, CPU) is context
        maps.append(_num_maps())
        storages += [
            StorageWeakRef(segment.local.untyped_storage()) for segment, _ in context.arena._segments.values()
        ]
        right &= not any(storage.expired() for storage in storages[-2:])
        dist.destroy_process_group(group)
        del context, group
    return right, alive, maps


def test_a_job_that_makes_and_destroys_groups_keeps_nothing_of_them() -> None:
    for right, alive, maps in run_workers(2, _make_and_destroy):
        assert right
        assert alive == [0] * ROUNDS
        assert maps[0] > 0 and maps == [maps[0]] * ROUNDS


def _one_goes_and_others_stay() -> list[object]:
    from ditron_train.runtime.groups import GroupCache, belongs_to, forget_destroyed_groups, is_destroyed
    from ditron_train.symm import get_arena

    kept, inner, gone = _everyone(), _everyone(), _everyone()
    released: list[str] = []
    cache: GroupCache = GroupCache(released.append)
    cache[kept, 1], cache[gone, 1], cache[dist.group.WORLD, CPU] = "kept", "gone", "world"
    cache[belongs_to(inner, gone)] = "inner"
    arenas = [get_arena(group, CPU) for group in (kept, gone)]
    arenas[0].tensor("test.kept", (4,), torch.float32).local.fill_(3)
    arenas[1].tensor("test.gone", (4,), torch.float32)
    dist.destroy_process_group(gone)
    dist.barrier()
    found = [is_destroyed(group) for group in (kept, inner, gone, dist.group.WORLD)]
    before = sorted(cache.values())
    forget_destroyed_groups()
    found += [before, sorted(cache.values()), released, [arena.closed for arena in arenas]]
    found.append(arenas[0].tensor("test.kept", (4,), torch.float32).local.tolist())
    dist.destroy_process_group(inner)
    arenas[0].close()
    return found


def test_what_belongs_to_other_groups_stays() -> None:
    for found in run_workers(2, _one_goes_and_others_stay):
        *destroyed, before, after, released, closed, values = found
        assert destroyed == [False, True, True, False]
        assert before == ["gone", "inner", "kept", "world"] and after == ["kept", "world"]
        assert sorted(released) == ["gone", "inner"]
        assert closed == [False, True] and values == [3.0] * 4


class _Group:
    """A stand-in for a group over NCCL, which knows what was begun inside one launch and what alone."""

    def __init__(self):
        self.launches, self.open = [], None

    def _get_backend(self, device):
        return self

    def _start_coalescing(self, device):
        self.open = []

    def _end_coalescing(self, device):
        self.launches.append(self.open)
        self.open = None
        return "all"

    def broadcast(self, tensor, group, group_src, async_op):
        assert async_op and group is self
        if group_src == 7:
            raise RuntimeError("no such rank")
        if self.open is None:
            self.launches.append([(tensor.numel(), group_src)])
        else:
            self.open.append((tensor.numel(), group_src))
        return "one"


@pytest.mark.parametrize("is_nccl", [True, False])
def test_broadcasts_of_several_ranks_begin_in_one_launch(monkeypatch, is_nccl):
    group = _Group()
    monkeypatch.setattr(dist, "broadcast", group.broadcast)
    monkeypatch.setattr(dist, "ProcessGroup", _Group)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", _Group if is_nccl else dict, raising=False)
    sent = [(torch.ones(3), 0), (torch.ones(0), 1), (torch.ones(5), 2)]
    assert broadcast_together(sent, group) == (["all"] if is_nccl else ["one", "one"])
    assert group.launches == ([[(3, 0), (5, 2)]] if is_nccl else [[(3, 0)], [(5, 2)]])
    group.launches.clear()
    assert broadcast_together(sent[1:], group) == ["one"] and group.launches == [[(5, 2)]]
    group.launches.clear()
    assert broadcast_together(sent[1:2], group) == [] and group.launches == []
    with pytest.raises(RuntimeError, match="no such rank"):
        broadcast_together([*sent, (torch.ones(2), 7)], group)
    assert group.open is None  # what comes later is launched


def _broadcasts() -> list[list[float]]:
    """Of uneven tensors, by the backend that is there."""
    rank = dist.get_rank()
    tensors = [torch.full((size,), float(rank)) for size in (3, 0, 2)]
    for work in broadcast_together([(tensors[0], 1), (tensors[1], 0), (tensors[2], 0)], dist.group.WORLD):
        work.wait()
    return [tensor.tolist() for tensor in tensors]


def test_broadcasts_arrive():
    assert run_workers(2, _broadcasts) == [[[1.0] * 3, [], [0.0] * 2]] * 2


AT_EXIT = """
import atexit, weakref

def say():  # registered first, called last
    print("gone" if group() is None else "kept")

atexit.register(say)
import torch
import torch.distributed as dist
from ditron_train.tp import get_tp_context

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
get_tp_context(None, torch.device("cpu"))
{destroys}
"""


@pytest.mark.parametrize(
    ("destroys", "found"), [("dist.destroy_process_group()", "gone"), ("kept = dist.group.WORLD", "kept")]
)
def test_a_destroyed_group_of_gloo_is_gone_before_python_ends(destroys: str, found: str) -> None:
    """Its threads, too: one that lets go of a tensor later aborts the process."""
    script = AT_EXIT.format(destroys=destroys)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=HANG_S, check=True
    )
    assert done.stdout.split()[-1:] == [found], done.stdout + done.stderr
