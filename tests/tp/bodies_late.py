"""What the workers of ``test_late`` run: the data of one rank arrive late, after its start signals."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from bodies_all_reduce import WAYS
from bodies_tp import CPU, gather_rows, integers, ring_reduce

import ditron_train.lang as lang
from ditron_train.tp import (
    GatherPlan,
    TPContext,
    ag_gemm,
    all_reduce,
    gather,
    gemm_ar,
    get_tp_context,
    reduce_scatter,
    start_all_gather,
    start_reduce_scatter,
)
from ditron_train.tp.all_reduce import largest_of_ranks

LATE_S = 0.25
ROWS, COLUMNS, RESULTS = 40, 16, 24


@contextlib.contextmanager
def late(module: Any, name: str, rank: int, *, returns_late: bool = False) -> Iterator[None]:
    """On ``rank`` each call of a module's function begins, or returns, ``LATE_S`` later."""
    function = getattr(module, name)

    def delayed(*arguments: Any, **options: Any) -> Any:
        if not returns_late:
            time.sleep(LATE_S)
        result = function(*arguments, **options)
        if returns_late:
            time.sleep(LATE_S)
        return result

    with mock.patch.object(module, name, delayed) if dist.get_rank() == rank else contextlib.nullcontext():
        yield


def _gathered(op: str, x: torch.Tensor, context: TPContext) -> torch.Tensor:
    if op == "all_gather":
        return start_all_gather(x, context=context).wait().clone()
    if op == "consume":
        parts: dict[int, torch.Tensor] = {}
        started = start_all_gather(x, context=context, flags_each_rank=True)
        started.consume(lambda place, rows: parts.update({place.start: rows.clone()}))
        return torch.cat([parts[start] for start in sorted(parts)])
    plan = GatherPlan(op.removeprefix("ag_gemm "), push_programs=1, num_chunks=2)
    return ag_gemm(x, torch.eye(COLUMNS), context=context, plan=plan)


def check_late_gather(op: str, rows: int) -> None:
    """Rows of a rank that sends them late are waited for by every other rank, in poisoned buffers."""
    rank, world = dist.get_rank(), dist.get_world_size()
    context = get_tp_context(None, CPU)
    place = (lang, "putmem") if op == "ag_gemm push" else (gather, "copy_with_flags")
    _gathered(op, integers((rows, COLUMNS), 1 + rank), context)  # makes the buffer
    for late_rank in range(world):
        x = integers((rows, COLUMNS), 10 * late_rank + rank)
        expected = gather_rows(x, [rows] * world)
        context.gathered(rows * world, COLUMNS, x.dtype).local.fill_(float("nan"))
        dist.barrier()
        with late(*place, late_rank):
            assert torch.equal(_gathered(op, x, context), expected), late_rank


def check_late_reduce_scatter() -> None:
    """Partial sums of a rank that sends them late are waited for by every other rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    context = get_tp_context(None, CPU)
    for late_rank in range(world):
        partial = torch.randn(ROWS * world, COLUMNS, generator=torch.Generator().manual_seed(10 * late_rank + rank))
        parts = [torch.empty_like(partial) for _ in range(world)]
        dist.all_gather(parts, partial)
        with late(reduce_scatter, "copy_with_flags", late_rank):
            found = start_reduce_scatter(partial, context=context).wait()
        assert torch.equal(found, ring_reduce([part.chunk(world)[rank] for part in parts], rank)), late_rank


def check_late_sums() -> None:
    """A rank that adds up late finds what was sent for that call, though its peers have gone on to the next one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    context, weight = get_tp_context(None, CPU), integers((RESULTS, COLUMNS), 3)
    for repeat in range(2 * world):
        others = [integers((4, COLUMNS), 100 * repeat + peer) for peer in range(world)]
        with late(all_reduce, "_reduce_block", repeat // 2):
            y = gemm_ar(others[rank], weight, context=context, choice=WAYS["stores"])
        assert torch.equal(y, sum(others) @ weight.t()), (rank, repeat)


def check_late_largest() -> None:
    """A rank that is late between its wait and its loads finds the values of that call, though its peers have gone on
    to the next one, whose values are larger."""
    rank, world = dist.get_rank(), dist.get_world_size()
    context = get_tp_context(None, CPU)
    for repeat in range(2 * world):
        value = torch.tensor([10.0 * repeat + rank])
        with late(lang, "wait_peers", repeat // 2, returns_late=True):
            largest_of_ranks(value, context=context)
        assert value.item() == 10.0 * repeat + world - 1, (rank, repeat)
