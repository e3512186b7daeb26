"""What ranks do in the tests of the post-mortem: agree, differ, stop, die."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from ditron_train.pp import exchange, get_pipeline_context
from ditron_train.pp.messages import Header
from ditron_train.tp import TPContext, all_gather, get_tp_context

CPU = torch.device("cpu")


def gathers(rows: list[int]) -> None:
    """One gather for each number of rows."""
    context = get_tp_context(dist.group.WORLD, CPU)
    for num_rows in rows:
        all_gather(torch.ones(num_rows, 8), context=context)


def rank_differs(wrong_rank: int) -> None:
    """All gather 4 rows, then one rank comes with 6 where the others have 2; raises MismatchError on all."""
    gathers([4, 4, 6 if dist.get_rank() == wrong_rank else 2])


def rank_is_killed(dead_rank: int) -> None:
    """After two gathers one rank is killed; the others wait for it until their deadline."""
    gathers([4, 4])
    if dist.get_rank() == dead_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    gathers([4])


def rank_raises(rank: int) -> None:
    """One rank has an error of its own, which nobody catches; the others end well."""
    gathers([4])
    if dist.get_rank() == rank:
        error = ValueError("the user's own")
        sys.excepthook(ValueError, error, None)  # as the interpreter does for an error that nobody catches


def stage_is_killed(dead_rank: int) -> None:
    """A pipeline's stage dies: stages make different calls, so only the errors say who is missing."""
    context = get_pipeline_context(dist.group.WORLD, CPU)
    context.reserve(64)
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for step in range(3):
        if step == 2 and rank == dead_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        handles = exchange(
            context,
            send_next=torch.ones(4) if rank < last else None,
            recv_prev=Header((4,), torch.float32) if rank > 0 else None,
        )
        for handle in handles.values():
            handle.wait()


def subgroups(late_rank: int) -> None:
    """Two groups of two in four ranks; one rank leaves its second gather out, and an other group goes on."""
    rank = dist.get_rank()
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    context = TPContext(group, CPU)
    for step in range(3 if rank // 2 == 0 else 5):
        if rank == late_rank and step == 1:
            return
        all_gather(torch.ones(2, 8), context=context)


def rank_comes_too_late(late_rank: int, seconds: float) -> None:
    """After two gathers one rank sleeps past the deadline, comes back, and goes on alone."""
    gathers([4, 4])
    if dist.get_rank() == late_rank:
        time.sleep(seconds)
        gathers([4, 4])
    gathers([4])


def send_matrices(number: int) -> int:
    """One rank's matrices to all, in rounds; how many rounds."""
    from ditron_train.optim import LayerShards

    shards = [[index for index in range(number) if index % 2 == rank] for rank in range(2)]
    rounds = LayerShards([torch.ones(4, 4) for _ in range(number)], shards, dist.group.WORLD)
    rounds.run(lambda index: None)
    return rounds.num_rounds
