"""The orders in which NCCL's all-reduce adds, element by element: found by order-probe inputs, as ``policy.order``
does for the reduce-scatter.

NCCL's ring all-reduce is a reduce-scatter and an all-gather over chunks of the buffer. The rank where a chunk's sum
ends depends on the chunk's place in the buffer, on the channels and on the size. So the map holds for one number of
elements of one type. It is found by two rounds of one all-reduce for every pair of ranks: the first shows every rank's
place in the sum of every element; the second checks that a reduction from left to right in these places explains the
results, and that the order does not change from call to call. A last all-reduce shows whether every hop rounds to the
type.

Two ranks need no map: ``a + b`` is ``b + a``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist

from ditron_train.policy.order import VALUES, sum_in_order, various_values
from ditron_train.runtime.groups import GroupCache
from ditron_train.symm.exchange import exchange

#: ``(x)``: replaces x by the sum over ranks.
AllReduce = Callable[[torch.Tensor], object]

_MOST_RUNS = 1 << 16  # of one map; NCCL's chunks are far longer
_SAMPLE = 8191  # random values that are repeated over a buffer
_SETTINGS = "NCCL_ALGO=Ring and NCCL_NVLS_ENABLE=0"


@dataclass(frozen=True)
class SumMap:
    """Runs of elements whose sums are reductions from left to right in one order each.

    Attributes:
        ends: For every run, the element after its last; ascending.
        order_of_run: For every run, an index of ``orders``.
        orders: Permutations of the ranks: the first two are added, then the third, ..., each sum rounded.
    """

    ends: tuple[int, ...]
    order_of_run: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...]

    @classmethod
    def ring(cls, num_elements: int, world_size: int) -> SumMap:
        """One chunk for each rank, in the order of the ranks: what a ring of one channel does in one round."""
        ends = tuple(num_elements * (rank + 1) // world_size for rank in range(world_size))
        orders = (tuple((rank + 1 + hop) % world_size for hop in range(world_size)) for rank in range(world_size))
        return cls(ends, tuple(range(world_size)), tuple(orders))


@dataclass(frozen=True)
class SumOrders:
    """The orders that were found; the same on every rank of the group.

    Attributes:
        sums: The map; None if the sums are not reductions from left to right, or differed between the two rounds.
        reason: Why the fused path cannot add in these orders, and what would change that; None with a map.
    """

    sums: SumMap | None
    reason: str | None


_known: GroupCache[tuple[dist.ProcessGroup, torch.dtype, int], SumOrders] = GroupCache()


def forget_all_reduce_orders() -> None:
    """Drops the orders that were found: the next use probes again."""
    _known.clear()


def all_reduce_orders(
    group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, num_elements: int
) -> SumOrders:
    """NCCL's orders on ``group`` for buffers of ``num_elements``; probed once (collective, some 50 ms for 8 ranks and
    128 MB)."""
    key = (group, dtype, num_elements)
    if key not in _known:

        def all_reduce(x: torch.Tensor) -> None:
            dist.all_reduce(x, group=group)

        _known[key] = probe_orders(all_reduce, num_elements, group=group, device=device, dtype=dtype)
    return _known[key]


def probe_orders(
    all_reduce: AllReduce, num_elements: int, *, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype
) -> SumOrders:
    """Probes the orders of ``all_reduce`` (collective over ``group``).

    Args:
        all_reduce: An all-reduce over ``group``.
        num_elements: Elements of its buffer.
        dtype: bfloat16 or float16; with two ranks, any.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if world <= 2:
        return SumOrders(SumMap.ring(num_elements, world), None)
    if dtype not in VALUES or world > VALUES[dtype][2]:
        return SumOrders(None, f"the orders of sums of {world} ranks in {dtype} cannot be read from their values")
    seen = _Seen(all_reduce, num_elements, world, rank, device, dtype)
    mine = seen.read()
    found = exchange(group, None if mine is None else astuple(mine))
    if any(one != found[0] for one in found) or mine is None:
        return SumOrders(
            None, f"NCCL's all-reduce does not add along a chain of the ranks ({_SETTINGS} would change it)"
        )
    equal = exchange(group, int(_rounds_each_hop(all_reduce, mine, world, rank, device, dtype)))
    if not all(equal):
        return SumOrders(
            None, f"NCCL's all-reduce does not round to {dtype} at every hop ({_SETTINGS} would change it)"
        )
    return SumOrders(mine, None)


@dataclass(frozen=True)
class _Seen:
    """One buffer's all-reduces of huge values and units."""

    all_reduce: AllReduce
    num_elements: int
    world: int
    rank: int
    device: torch.device
    dtype: torch.dtype

    def _sizes(self, i: int, j: int) -> torch.Tensor:
        """For every element the leaves of the smallest subtree of its sum that holds both ranks, uint8."""
        huge, unit, _ = VALUES[self.dtype]
        value = huge if self.rank == i else -huge if self.rank == j else unit
        x = torch.full((self.num_elements,), value, device=self.device, dtype=self.dtype)
        self.all_reduce(x)
        return (self.world - x.div_(unit)).clamp_(0, 255).to(torch.uint8)

    def read(self) -> SumMap | None:
        """The map; None if no reduction from left to right explains the results. Every rank makes all the calls,
        whatever it finds."""
        pairs = list(itertools.combinations(range(self.world), 2))
        shape = (self.world, self.num_elements)
        places = torch.full(shape, 255, device=self.device, dtype=torch.uint8)  # of the first two ranks: 2
        for i, j in pairs:
            sizes = self._sizes(i, j)
            for one in (i, j):
                torch.minimum(places[one], sizes, out=places[one])
        is_left_to_right = torch.ones((), device=self.device, dtype=torch.bool)
        for i, j in pairs:
            is_left_to_right &= (self._sizes(i, j) == torch.maximum(places[i], places[j])).all()
        begins = torch.cat([places.new_ones(1), (places[:, 1:] != places[:, :-1]).any(0).to(torch.uint8)])
        starts = begins.nonzero().view(-1)
        if not bool(is_left_to_right) or starts.numel() > _MOST_RUNS:
            return None
        return _map_of(starts.tolist(), places[:, starts].t().tolist(), self.num_elements)


def _map_of(starts: list[int], places: list[list[int]], num_elements: int) -> SumMap | None:
    """``places``: for every run, each rank's place in the sum; the first two ranks both have 2."""
    world = len(places[0])
    orders: dict[tuple[int, ...], int] = {}
    for row in places:
        if sorted(row) != [2, *range(2, world + 1)]:
            return None
        order = tuple(sorted(range(world), key=lambda rank: row[rank]))
        orders.setdefault(order, len(orders))
    of_runs = [orders[tuple(sorted(range(world), key=lambda rank: row[rank]))] for row in places]
    return SumMap((*starts[1:], num_elements), tuple(of_runs), tuple(orders))


def _rounds_each_hop(
    all_reduce: AllReduce, sums: SumMap, world: int, rank: int, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether random values of very different magnitudes have the bits of these reductions with a rounding at every
    hop."""
    values = various_values(world, _SAMPLE, device=device, dtype=dtype)
    num_elements = sums.ends[-1]
    repeats = -(-num_elements // _SAMPLE)
    x = values[rank].repeat(repeats)[:num_elements].contiguous()
    all_reduce(x)
    is_equal = torch.ones((), device=device, dtype=torch.bool)
    reductions = [sum_in_order(values[source] for source in order) for order in sums.orders]
    start = 0
    for end, order in zip(sums.ends, sums.order_of_run):
        expected = reductions[order][torch.arange(start, end, device=device) % _SAMPLE]
        is_equal &= (x[start:end] == expected).all()
        start = end
    return bool(is_equal)
