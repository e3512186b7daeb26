"""What the workers of ``test_parts`` run: tensors gathered together, and a product scattered as it is computed."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
from bodies_tp import CPU, integers, ring_reduce

from ditron_train.runtime.errors import DitronError
from ditron_train.tp import ag_gemm, get_tp_context, start_all_gather
from ditron_train.tp.gather import start_gather_of_parts
from ditron_train.tp.reduce_scatter import scatter_as_computed


def _parts(rank: int, rows: int, columns: int, seed: int) -> list[torch.Tensor]:
    data = integers((rows, columns), seed + rank).to(torch.int8)
    generator = torch.Generator().manual_seed(seed + rank)
    return [data.view(torch.uint8), torch.randn(rows, columns // 4, generator=generator), data.neg(), data.double()]


def check_parts(rows: int, columns: int) -> None:
    """Gathers of several tensors, any number of them flagged first, between gathers of rows; ranks come late."""
    rank, world = dist.get_rank(), dist.get_world_size()
    context, rng = get_tp_context(None, CPU), random.Random(rank)
    for seed, num_flagged_first in enumerate((0, 2, 4, 1, 2)):
        shares = [_parts(peer, rows, columns, 10 * seed) for peer in range(world)]
        totals = [torch.cat(parts) for parts in zip(*shares)]
        time.sleep(rng.random() * 0.02)
        started = start_gather_of_parts(shares[rank], context=context, num_flagged_first=num_flagged_first)
        if num_flagged_first:
            seen = []

            def see(
                source: int, parts: list[torch.Tensor], seen=seen, shares=shares, num_flagged_first=num_flagged_first
            ) -> None:
                assert len(parts) == num_flagged_first and all(map(torch.equal, parts, shares[source]))
                seen.append(source)

            started.consume(see)
            assert seen == [(rank + step) % world for step in range(world)]
        else:
            started.wait()
        assert all(map(torch.equal, started.totals, totals)), num_flagged_first
        x = shares[rank][1]
        assert torch.equal(start_all_gather(x, context=context).wait(), totals[1])
    for stop in (0, 1):  # it fails: nothing is lost of the next
        consumed = []

        def fail(source: int, parts: list[torch.Tensor], consumed=consumed, stop=stop) -> None:
            if len(consumed) == stop:
                raise MemoryError
            consumed.append(source)

        with pytest.raises(MemoryError):
            start_gather_of_parts(shares[rank], context=context, num_flagged_first=1).consume(fail)
        assert len(consumed) == stop
        assert all(map(torch.equal, start_gather_of_parts(shares[rank], context=context).wait(), totals))


def check_blocks(rows: int, columns: int, num_blocks: int) -> None:
    """Gathers whose parts are consumed by blocks of ranks: whole, this rank's block first; ranks come late."""
    rank, world = dist.get_rank(), dist.get_world_size()
    context, rng, size = get_tp_context(None, CPU), random.Random(rank), world // num_blocks
    for seed in range(3):
        shares = [_parts(peer, rows, columns, 10 * seed) for peer in range(world)]
        totals = [torch.cat(parts) for parts in zip(*shares)]
        time.sleep(rng.random() * 0.02)
        started, seen = (
            start_gather_of_parts(shares[rank], context=context, num_flagged_first=2, num_blocks=num_blocks),
            [],
        )

        def see(block: int, parts: list[torch.Tensor], seen=seen, totals=totals) -> None:
            expected = [total.chunk(num_blocks)[block] for total in totals[:2]]
            assert len(parts) == 2 and all(map(torch.equal, parts, expected))
            seen.append(block)

        started.consume(see)
        assert sorted(seen) == list(range(num_blocks)) and seen[0] == rank // size
        assert all(map(torch.equal, started.totals, totals))


def check_scatter_as_computed(shape: tuple[int, ...], dtype_name: str, num_products: int | None) -> None:
    """Against the ring-order reduction, on real numbers; then with a product that fails on every rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    context = get_tp_context(None, CPU)
    for repeat in range(3):
        generator = torch.Generator().manual_seed(10 * repeat + rank)
        product, asked = torch.randn(shape, generator=generator).to(getattr(torch, dtype_name)), []

        def compute(rows, out, product=product, asked=asked):
            asked.append(rows.start)
            out.copy_(product.view(-1, shape[-1])[rows])

        found = scatter_as_computed(compute, shape, product.dtype, context=context, num_products=num_products)
        partials = [torch.empty_like(product) for _ in range(world)]
        dist.all_gather(partials, product)
        assert torch.equal(found, ring_reduce([partial.chunk(world)[rank] for partial in partials], rank))
        count, num_rows = num_products or world, product.numel() // shape[-1]
        assert len(asked) == count and asked[-1] == rank // (world // count) * (num_rows // count)

        def fail(rows, out):
            raise MemoryError

        try:
            scatter_as_computed(fail, shape, product.dtype, context=context)
        except MemoryError:
            continue
        raise AssertionError("it was swallowed")


def _said(parts: list[torch.Tensor], num_flagged_first: int) -> str:
    try:
        start_gather_of_parts(parts, context=get_tp_context(None, CPU), num_flagged_first=num_flagged_first).wait()
    except DitronError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def refused_parts() -> list[str]:
    """What is raised for parts that do not fit, by each rank alone; a good call works behind each."""
    context, logged = get_tp_context(None, CPU), []
    x, weight = integers((4, 16), 1), integers((8, 16), 2)
    calls = [([], 0), ([x[:0]], 0), ([x[:1, :1]], 0), ([x, torch.empty(4, 4, device="meta")], 0), ([x], 2), ([x], -1)]
    for parts, num_flagged_first in calls:
        logged.append(_said(parts, num_flagged_first))
        assert torch.equal(ag_gemm(x, weight, context=context), torch.cat([x @ weight.t()] * dist.get_world_size()))
    return logged


def mismatched_parts(what: str) -> str:
    """What is raised where the ranks' calls differ."""
    rank, x = dist.get_rank(), integers((4, 16), 1)
    if what == "sizes":
        return _said([integers((4 + 4 * rank, 16), 1), x], 0)
    return _said([x, x], rank) if what == "turns" else _said([x] * (1 + rank), 0)
