"""The order in which NCCL's reduce-scatter adds: found by order-probe inputs, never assumed.

A floating-point sum depends on its association, so the fused path is bitwise identical only if both paths add in the
same order. To find NCCL's, rank ``i`` contributes a huge ``M``, rank ``j`` a ``-M`` and every other rank a small unit.
A unit that is added to ``M`` or ``-M`` before these two cancel is absorbed. So the result is the number of units that
are added after them, and ``world_size`` minus the result is the number of leaves of the smallest subtree that contains
both. Over all pairs ``(i, j)`` these numbers determine the whole tree of the sum. They are read at every element of
small and of large buffers, twice. Whether each hop rounds to the type is then tested by a reduction of random values
of very different magnitudes in the order that was found.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ditron_train.runtime.groups import GroupCache
from ditron_train.symm.exchange import exchange

#: ``(out [n], x [world_size, n])``: writes the sum over ranks of row ``rank``.
ReduceScatter = Callable[[torch.Tensor, torch.Tensor], object]

#: Huge value, unit and largest group by type: all units together are below half the huge value's last place, in fp32,
#: too (a sum may be kept in fp32), and their number is exact.
VALUES = {torch.bfloat16: (2.0**60, 1.0, 256), torch.float16: (2.0**15, 2.0**-13, 16)}
_VALUES = {**VALUES, torch.float32: VALUES[torch.bfloat16]}
_ELEMENTS = (1 << 10, 1 << 20)  # of a shard, for NCCL's protocols for small and for large messages
_DESCENDING = "ring-descending"
_RING_SETTINGS = "NCCL_ALGO=Ring and NCCL_NVLS_ENABLE=0"


@dataclass(frozen=True)
class ReductionOrder:
    """The order that was found; the same on every rank of the group.

    Attributes:
        name: ``ring`` (the order of the fused path: rank ``d`` gets ``((x[d+1] + x[d+2]) + ...) + x[d]``, rounded at
            every hop), or a name for another order. Part of a plan's keys.
        reason: Why the fused path cannot add in this order, and what would change that; None for ``ring``.
    """

    name: str
    reason: str | None

    @property
    def is_fused(self) -> bool:
        """Whether the fused path adds in this order."""
        return self.reason is None

    @property
    def ring_step(self) -> int:
        """The step from rank to rank: 1 for ``ring``; -1 for a ring of descending ranks, as gloo's, which only the
        fused path over nodes follows; 0 for other orders."""
        return {"ring": 1, _DESCENDING: -1}.get(self.name, 0)


def _other(name: str, seen: str) -> ReductionOrder:
    return ReductionOrder(name, f"NCCL's reduce-scatter {seen} ({_RING_SETTINGS} would change that)")


_orders: GroupCache[tuple[dist.ProcessGroup, torch.dtype, int | None], ReductionOrder] = GroupCache()


def forget_orders() -> None:
    """Drops the orders that were found: the next use probes again."""
    _orders.clear()


def reduction_order(
    group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, num_elements: int | None = None
) -> ReductionOrder:
    """NCCL's order on ``group``; probed once (collective, a few milliseconds).

    Args:
        num_elements: Elements of a shard, if the order depends on them, as with gloo, which cuts large buffers into
            rings at other places than between shards. All elements of a shard of this size are probed then.
    """
    key = (group, dtype, num_elements)
    if key not in _orders:

        def reduce_scatter(out: torch.Tensor, x: torch.Tensor) -> None:
            dist.reduce_scatter_tensor(out, x.view(-1), group=group)

        _orders[key] = probe_order(reduce_scatter, group=group, device=device, dtype=dtype, num_elements=num_elements)
    return _orders[key]


def probe_order(
    reduce_scatter: ReduceScatter,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    dtype: torch.dtype,
    num_elements: int | None = None,
) -> ReductionOrder:
    """Probes the order of ``reduce_scatter`` (collective over ``group``).

    Args:
        reduce_scatter: A reduce-scatter over ``group``.
        dtype: bfloat16, float16 or float32.
        num_elements: As of ``reduction_order``.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if dtype not in _VALUES or world > _VALUES[dtype][2]:
        return ReductionOrder(
            "unknown", f"the order of a sum of {world} ranks in {dtype} cannot be read from its values"
        )
    seen: list[list[int] | None] = []
    for count in _ELEMENTS if num_elements is None else (num_elements,):
        look = _subtree_sizes if num_elements is None else _subtree_sizes_of_all
        sizes = [look(reduce_scatter, world, rank, count, device, dtype) for _ in range(2)]
        if sizes[0] is None or sizes[1] is None:
            seen.append(None)
            continue
        seen += sizes
    mine = [None if one is None else tuple(one) for one in seen]
    order = _name(exchange(group, mine), world)
    step = order.ring_step
    if step and world > 2:
        same = torch.tensor([int(_rounds_each_hop(reduce_scatter, group, device, dtype, step))], device=device)
        dist.all_reduce(same, op=dist.ReduceOp.MIN, group=group)
        if not same.item():
            return _other("ring-unrounded", "adds in ring order but does not round to the type at every hop")
    return order


def _subtree_sizes(
    reduce_scatter: ReduceScatter, world: int, rank: int, num_elements: int, device: torch.device, dtype: torch.dtype
) -> list[int] | None:
    """For every pair of ranks, the leaves of the smallest subtree of this rank's sum with both; None if elements
    differ."""
    pairs = list(itertools.combinations(range(world), 2))
    huge, unit, _ = _VALUES[dtype]
    pattern = torch.tensor(
        [huge if rank == i else -huge if rank == j else unit for i, j in pairs], device=device, dtype=dtype
    )
    repeats = -(-num_elements // len(pairs))
    x = pattern.repeat(repeats).expand(world, -1).contiguous()
    out = torch.empty(x.shape[1], device=device, dtype=dtype)
    reduce_scatter(out, x)
    table = out.view(repeats, len(pairs)).float() / unit
    if not bool((table == table[0]).all()):
        return None
    return [world - int(count) for count in table[0].tolist()]


def _subtree_sizes_of_all(
    reduce_scatter: ReduceScatter, world: int, rank: int, num_elements: int, device: torch.device, dtype: torch.dtype
) -> list[int] | None:
    """As ``_subtree_sizes``, but with every pair at every element, in shards of exactly this size."""
    pairs = list(itertools.combinations(range(world), 2))
    huge, unit, _ = _VALUES[dtype]
    tables = []
    for pair in pairs:
        value = (huge, -huge)[pair.index(rank)] if rank in pair else unit
        out = torch.empty(num_elements, device=device, dtype=dtype)
        reduce_scatter(out, torch.full((world, num_elements), value, device=device, dtype=dtype))
        tables.append(out.float() / unit)
    if not all(bool((table == table[0]).all()) for table in tables):
        return None
    return [world - int(table[0]) for table in tables]


def _reduce_sizes(order: list[int]) -> list[int]:
    """The subtree sizes that a reduction from left to right in ``order`` has for every pair."""
    place = {rank: index + 1 for index, rank in enumerate(order)}
    return [max(place[i], place[j]) for i, j in itertools.combinations(range(len(order)), 2)]


def _name(rows: list[list[tuple[int, ...] | None]], world: int) -> ReductionOrder:
    """The order, from the measurements of every destination: lists of sizes, or None if elements differ."""
    measurements = [size for row in rows for size in row]
    if any(size is None for size in measurements) or any(len(set(row)) > 1 for row in rows):
        return _other("varying", "adds in an order that depends on the place in the buffer, its size or the call")
    sizes = [list(size) for size, *_ in rows if size is not None]
    ascending, descending = (
        [_reduce_sizes([(rank + step * (1 + hop)) % world for hop in range(world)]) for rank in range(world)]
        for step in (1, -1)
    )
    if sizes == ascending:
        return ReductionOrder("ring", None)
    if sizes == descending:
        return _other(_DESCENDING, "adds along ranks in descending order")
    reductions = [_ring_reduce(size, world) for size in sizes]
    if reductions[0] is not None and all(ring_reduce is not None for ring_reduce in reductions):
        words = " ".join(map(str, reductions[0]))
        return _other(
            f"order-{words.replace(' ', '-')}",
            f"adds rank 0's share in the order {words}, not along ranks in ring order",
        )
    return _other("tree", "adds along a tree, not in ring order")


def _ring_reduce(sizes: list[int], world: int) -> list[int] | None:
    """The order of the reduction from left to right that has these ``sizes`` (its first two ranks in ascending order),
    or None if there is none."""
    place = dict.fromkeys(range(world), world)
    for (i, j), size in zip(itertools.combinations(range(world), 2), sizes):
        place[i], place[j] = min(place[i], size), min(place[j], size)
    order = sorted(range(world), key=lambda rank: (place[rank], rank))
    return order if _reduce_sizes(order) == sizes else None


def _rounds_each_hop(
    reduce_scatter: ReduceScatter, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, step: int
) -> bool:
    """Whether random values of very different magnitudes have the bits of a ring-order reduction with a rounding at
    every hop."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    num_elements = _ELEMENTS[0]
    values = various_values(world, world, num_elements, device=device, dtype=dtype)  # [source, destination, element]
    out = torch.empty(num_elements, device=device, dtype=dtype)
    reduce_scatter(out, values[rank].contiguous())
    return torch.equal(out, sum_in_order(values[(rank + step * hop) % world, rank] for hop in range(1, world + 1)))


def various_values(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Random values of very different magnitudes, the same on every rank: each knows what all have."""
    generator = torch.Generator().manual_seed(17)
    values = torch.randn(shape, device="cpu", generator=generator)
    values *= torch.exp2(torch.randint(-6, 7, shape, device="cpu", generator=generator).float())
    return values.to(dtype).to(device)


def sum_in_order(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum from left to right, rounded to the type of ``parts`` at every hop."""
    return functools.reduce(lambda total, part: (total.float() + part.float()).to(part.dtype), parts)
