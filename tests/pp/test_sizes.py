"""What ranks say and hear of messages that did not fit a slot, step by step."""

from __future__ import annotations

import random
import time

import torch
import torch.distributed as dist

from ditron_train.pp import PipelineContext
from ditron_train.runtime.errors import PeerTimeoutError
from tests.support.processes import run_workers, run_workers_once


def _context() -> PipelineContext:
    return PipelineContext(dist.group.WORLD, torch.device("cpu"), with_network=True)


def _heard(steps: int) -> tuple[list[int], list[int]]:
    """What each step hears, and what was to be heard, with late ranks and agreements in between."""
    rank, world = dist.get_rank(), dist.get_world_size()
    context, late = _context(), random.Random(rank)
    assert context.sizes is not None and context.reserve(256)
    of_all = random.Random(5)
    noted = [[of_all.choice([0, of_all.randrange(1000)]) for _ in range(world)] for _ in range(steps)]
    found = []
    for step in range(steps):
        time.sleep(late.random() * 0.01)
        found.append(context.sizes.of_last_step())
        if step % 3 == 2:
            context.reserve(300 + step)
        context.sizes.note(noted[step][rank])
    largest = [max([0, *(one for logged in noted[: max(step - 1, 0)] for one in logged)]) for step in range(steps)]
    return found, largest


def test_all_ranks_hear_the_largest_of_the_step_before():
    found = run_workers(3, _heard, 12)
    for heard, expected in found:
        assert heard == expected and heard[-1] > heard[0] == 0
    assert len({tuple(heard) for heard, _ in found}) == 1


def _in_sequence(steps: int) -> list[int]:
    """Rank 1 begins each step when rank 0 is through with its own."""
    context, heard = _context(), []
    for step in range(steps):
        if dist.get_rank() == 1:
            dist.barrier()
        heard.append(context.sizes.of_last_step())
        context.sizes.note(10 * step + dist.get_rank())
        if dist.get_rank() == 0:
            dist.barrier()
        dist.barrier()
    return heard


def test_no_step_waits_for_others_to_begin_it():
    """As where messages go one way alone, from a stage that is ahead."""
    assert run_workers(2, _in_sequence, 5) == [[0, 0, 1, 11, 21]] * 2


def _absent() -> tuple[str, int | None]:
    """The error of the ranks that come for the second time, rank 2 never; it hears of it, too."""
    context = _context()
    if dist.get_rank() == 2:
        deadline = time.monotonic() + 60
        while not context.channel.mailbox.failure.is_posted and time.monotonic() < deadline:
            time.sleep(0.01)
    try:
        if dist.get_rank() == 2:
            context.check()
        for _ in range(2):
            context.sizes.of_last_step()
    except PeerTimeoutError as error:
        return str(error), error.missing_rank
    return "no error", None


def test_a_rank_that_does_not_begin_a_step_is_named():
    outcomes = run_workers_once(3, _absent, env={"DITRON_TIMEOUT_S": "1"})
    found = {outcome.value for outcome in outcomes}
    assert len(found) == 1, [outcome.traceback or outcome.value for outcome in outcomes]
    ((words, missing),) = found
    assert missing == 2 and "rank 2" in words
