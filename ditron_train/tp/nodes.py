"""AG-GEMM and GEMM-RS of a tensor parallel group that spans nodes: rails between nodes, concurrent with what runs
inside them.

A rank sends its rows along its rail, to the rank with its local rank on every other node, and meanwhile multiplies
what its own node gathers by peer memory; then what has come from the next node is gathered and multiplied likewise.
Rows cross the border once, and only the first border is not under a GEMM. Sums over ranks go from node to node in the
order of the process group's own reduce-scatter; if the fused path cannot follow that order, or the policy found it to
be slower, they are that reduce-scatter. If the policy found it to be slower, the gather is the process group's, too.

GEMM-RS: NCCL's ring and gloo's visit the ranks of a group one by one, so node by node: the sum of rank d's rows begins
behind d (ascending: rank d + 1), and d itself comes last. Rows of all ranks of one node, a *block*, are one product.
Inside a node copy engines hand each rank its rail's rows of the partial sums, and a kernel adds them onto the sum that
came along the rail, in the ring's order and with its roundings. Then the rail carries the sum to the next node. So a
border is crossed once for each block, by all adapters of a node at a time, while the product of the next block runs.

For node n of N and an ascending ring: block n first, whose ranks behind the owner begin its sums; then n - 1, n - 2,
..., each added whole onto what came from node n - 1; at last what is left of block n, up to the owner itself. If a
node has one rank, block n is multiplied last, under the last border.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from ditron_train.policy.order import reduction_order
from ditron_train.runtime.device import is_capturing
from ditron_train.runtime.errors import ArenaError, NotSupportedError
from ditron_train.runtime.groups import GroupCache, unwrapped
from ditron_train.runtime.launch import KernelLaunch
from ditron_train.runtime.logs import log_once
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.stream.agreement import MAX_KNOWN_SHAPES
from ditron_train.symm.exchange import on_all_ranks
from ditron_train.symm.nodes import NodeGroups, node_groups
from ditron_train.tp.ag_gemm import ag_gemm, plan_ag_gemm
from ditron_train.tp.choices import Layout
from ditron_train.tp.context import RowPartition, TPContext, can_copy, get_tp_context
from ditron_train.tp.gemm_rs import covers
from ditron_train.tp.reduce_scatter import ReduceScatter, reduce_onto_kernel

_Made = TypeVar("_Made")
_contexts: GroupCache[tuple[dist.ProcessGroup, torch.device], NodesTPContext] = GroupCache()


class NodesTPContext:
    """A tensor parallel group that spans nodes (constructed collectively).

    Attributes:
        group: All ranks.
        rank, world_size: Of ``group``.
        nodes: The groups of a node and of a rail.
        inner: Context of this rank's node; None if a node has one rank.
        device: The device of the activations.
        leaves_gather, leaves_sums: Whether the policy has left the gather, or the sums over ranks, to the process
            group. These are set for the layers of one answer (``for_answer``).
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        nodes = node_groups(group)
        if nodes is None:
            raise NotSupportedError("the tensor parallel group is inside one node")
        self.group, self.nodes, self.device = group, nodes, device
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.inner: TPContext | None = None
        if nodes.local_size > 1:
            # If a node has no memory, only its own ranks learn it, and would go native while the others wait.
            self.inner = on_all_ranks(
                group,
                "making a context on every node",
                lambda: get_tp_context(nodes.node_group, device),
                (ArenaError, NotSupportedError),
            )
        self.leaves_gather = self.leaves_sums = False
        self._planned: set[Hashable] = set()  # one for all answers: they share the node's memory

    def for_answer(self) -> NodesTPContext:
        """The same context with choices of its own."""
        made = copy.copy(self)
        made.leaves_gather = made.leaves_sums = False
        return made

    @property
    def target(self) -> str:
        """As ``TPContext.target``; ``cublas`` if a node has one rank."""
        return "cublas" if self.inner is None else self.inner.target

    def ring_step(self, rows: int, n: int, dtype: torch.dtype) -> int:
        """The ring along which the process group reduce-scatters [rows, n]: 1: ascending ranks, -1: descending ranks,
        0: no order that the fused path can follow, which is logged once (collective the first time)."""
        of_gloo = rows * n // self.world_size if self.device.type == "cpu" else None
        order = reduction_order(self.group, self.device, dtype, of_gloo)
        if order.ring_step == 0:
            name = f"tp sums over nodes in {dtype}"
            log_once(f"native {name} {order.reason}", f"{name}: native, {order.reason}", name="policy")
        return order.ring_step

    def sums_by_rails(self, rows: int, n: int, dtype: torch.dtype) -> bool:
        """Whether a product [rows, n] is reduce-scattered along rails (collective the first time)."""
        if self.leaves_sums or rows % self.world_size:
            return False
        if self.inner is not None and not (covers(n, dtype) and can_copy(self.inner)):
            return False
        return self.ring_step(rows, n, dtype) != 0

    def plan(self, make: Callable[..., _Made], *arguments: Hashable) -> _Made:
        """As ``OpContext.plan`` of the node's context, inside ``naming``. At the first such call the nodes tell each
        other whether they have room for it, before anything is sent between nodes.

        Raises:
            ArenaError: A node cannot make the plan; on every rank alike.
        """
        inner, call = self.inner, (make, *arguments)
        assert inner is not None, "a node of one rank needs no memory"
        # During a capture, in which no rank may wait, only what all nodes have planned is used, else all ranks refuse.
        if call in self._planned or is_capturing(self.device):
            return inner.plan(make, *arguments)
        inner.enter("preparing on every node")
        before = set(self._planned) if len(self._planned) < MAX_KNOWN_SHAPES else set()
        self._planned.clear()  # a failure may have freed memory that other calls use
        plan = self.nodes.on_every_node("making room on every node", lambda: inner.plan(make, *arguments), self.device)
        self._planned.update(before, {call})
        return plan

    def synchronize(self) -> None:
        """As ``TPContext.synchronize``."""
        if self.inner is not None:
            with self.nodes.naming("tensor parallel"):
                self.inner.synchronize()


def get_nodes_tp_context(group: dist.ProcessGroup, device: torch.device) -> NodesTPContext:
    """The context of ``group``, made at the first call (collective).

    Raises:
        NotSupportedError: The group is inside a node, or its nodes are not equal blocks of ranks; on every rank alike.
        ArenaError: A node cannot have its context; on every rank alike.
    """
    group = unwrapped(group)
    key = (group, device)
    known = _contexts.get(key)
    if known is None or (known.inner is not None and known.inner.arena.closed):
        _contexts[key] = NodesTPContext(group, device)
    return _contexts[key]


def _parts(rows: torch.Tensor, nodes: NodeGroups) -> Iterator[tuple[int, torch.Tensor]]:
    """This rank's rows, then those of its rail's other ranks as they arrive, each with its node."""
    count, arrivals = nodes.num_nodes, []
    for step in range(1, count):  # one message each way at a time, so the next node's rows arrive first
        target, source = (nodes.node + step) % count, (nodes.node - step) % count
        splits = [[len(rows) * (node == one) for node in range(count)] for one in (source, target)]
        arrivals.append((source, *nodes.start_along_rail(rows, *splits)))
    yield nodes.node, rows
    for source, part, work in arrivals:
        nodes.wait(work)
        yield source, part


@outside_compile
def ag_gemm_over_nodes(
    x: torch.Tensor, weight: torch.Tensor, *, context: NodesTPContext, layout: Layout = "nt", keeps: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """All-gather of ``x`` [rows, K] of all ranks, times ``weight``: as ``ag_gemm``.

    Args:
        x: This rank's rows, the same number on every rank.
        weight: [N, K] (``nt``) or [K, N] (``nn``).
        context: The group's context.
        layout: Layout of ``weight``.
        keeps: Whether to return the gathered rows.

    Returns:
        [rows of all ranks, N], and [rows of all ranks, K] or None.

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``ag_gemm``; the last names a rank of the whole group.
        ArenaError: A node has no room for it; on every rank alike.
    """
    x = x.contiguous()
    products: list[Any] = [None] * context.nodes.num_nodes
    gathered: list[Any] = [None] * context.nodes.num_nodes
    with context.nodes.naming("ag_gemm over nodes"):
        if context.inner is not None:  # before rows are sent: a node that cannot gather them would not wait for them
            operands = (x.shape, weight.shape, x.dtype, weight.dtype, x.device, weight.device)
            context.plan(plan_ag_gemm, operands, layout, None, None, True)
        for node, part in _parts(x, context.nodes):
            if context.inner is None:
                products[node], gathered[node] = part.matmul(weight.t() if layout == "nt" else weight), part
                continue
            products[node], rows = ag_gemm(part, weight, context=context.inner, layout=layout, return_gathered=True)
            if keeps:  # the next node's rows will be where these are
                gathered[node] = rows[:, : x.shape[1]].clone()
    return torch.cat(products), torch.cat(gathered) if keeps else None


#: Of an owner's sum: what its node adds first, another node's, its node's last.
_Part = Literal["begin", "whole", "end"]


class _NodeSum(ReduceScatter):
    """What a node adds to the sums of one block, for one shape (constructed collectively): ``begin``, ``hand_out``,
    then ``add_up`` after what was enqueued on the current stream meanwhile."""

    def __init__(
        self, context: TPContext, num_rows: int, num_columns: int, dtype: torch.dtype, ring_step: int
    ) -> None:
        world = context.world_size
        partition = RowPartition.of([num_rows // world] * world)
        super().__init__(context, partition, num_columns, dtype)
        self._step = ring_step
        self._reductions: dict[bool, KernelLaunch] = {
            goes_on: self._launch_of_sum(reduce_onto_kernel, {"STEP": ring_step, "GOES_ON": goes_on})
            for goes_on in (False, True)
        }

    def ranks(self, part: _Part, owner: int) -> range:
        """The ranks whose partial sums the node adds up for ``owner``, in this order."""
        world, step = self.context.world_size, self._step
        first, last = (0, world - 1) if step > 0 else (world - 1, 0)
        bounds = {"begin": (owner + step, last), "whole": (first, last), "end": (first, owner)}[part]
        return range(bounds[0], bounds[1] + step, step)

    def hand_out(self, partial: torch.Tensor, part: _Part) -> None:
        """Sends the owners' rows of ``partial`` [rows, N], contiguous, to them."""
        self.begin()
        with self.aborting:
            starts, rank = self.partition.starts, self.context.rank
            for position, owner in enumerate(self.peers):
                end = starts[owner + 1] if rank in self.ranks(part, owner) else starts[owner]
                self.send(partial, position, slice(starts[owner], end), signals=True)

    def add_up(self, partial: torch.Tensor, total: torch.Tensor | None, out: torch.Tensor, part: _Part) -> None:
        """Writes ``out`` [rows of a rank, N]: ``total``, if any, plus this node's part; on the communication
        stream."""
        ranks = self.ranks(part, self.context.rank)
        operands = (partial, self._slots.local, self.pointers, out if total is None else total, out, self._row_starts)
        sizes = (self._num_columns, self.partition.max_count, ranks.start, len(ranks))
        with self.aborting:
            self._reductions[total is not None](*operands, *sizes, stream=self.context.comm_stream)
        self.context.join()
        self.context.leave(self.channel)


class _Rail:
    """The sums that move along this rank's rail: the stream that adds up also sends each sum on and waits for the
    next."""

    def __init__(self, context: NodesTPContext, step: int, like: torch.Tensor) -> None:
        nodes = context.nodes
        self._nodes, self._like = nodes, like
        self._to, self._from = (nodes.node + step) % nodes.num_nodes, (nodes.node - step) % nodes.num_nodes
        self._stream = None if context.inner is None else context.inner.comm_stream
        self._on_its_way: tuple[torch.Tensor, Any] | None = None

    def beside(self) -> AbstractContextManager[Any]:
        """A context that makes the stream that adds up the current one."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def send(self, total: torch.Tensor) -> None:
        """Starts to send ``total`` to the next node, and to receive the previous node's."""
        shares = [
            [len(total) * (node == one) for node in range(self._nodes.num_nodes)] for one in (self._from, self._to)
        ]
        with self.beside():
            self._on_its_way = self._nodes.start_along_rail(total, *shares)

    def receive(self) -> torch.Tensor | None:
        """What the previous node has sent; None if sums begin here."""
        if self._on_its_way is None:
            return None
        (total, work), self._on_its_way = self._on_its_way, None
        with self.beside():
            self._nodes.wait(work)
        return total


@outside_compile
def gemm_rs_over_nodes(
    x: torch.Tensor, weight: torch.Tensor, *, context: NodesTPContext, layout: Layout = "nt"
) -> torch.Tensor:
    """``x`` [rows, K] times ``weight``, reduce-scattered by rows: as ``gemm_rs``, in the order of sums of the process
    group's own reduce-scatter.

    Args:
        x: This rank's columns of all rows.
        weight: [N, K] (``nt``) or [K, N] (``nn``).
        context: The group's context.
        layout: Layout of ``weight``.

    Returns:
        [rows / world, N].

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``gemm_rs``; the last names a rank of the whole group.
        ArenaError: A node has no room for it; on every rank alike.
    """
    factor = weight.t() if layout == "nt" else weight
    (rows, k), n = x.shape, factor.shape[1]
    if not context.sums_by_rails(rows, n, x.dtype):
        raise NotSupportedError(f"gemm_rs over nodes: {rows}x{n}x{k} in {x.dtype} is left to the process group")
    num_nodes, node, step = context.nodes.num_nodes, context.nodes.node, context.ring_step(rows, n, x.dtype)
    blocks = x.chunk(num_nodes)
    others = [(node - step * hop) % num_nodes for hop in range(1, num_nodes)]
    rail = _Rail(context, step, x)
    with context.nodes.naming("gemm_rs over nodes"):
        if context.inner is None:
            return _by_single_ranks([blocks[one] for one in (*others, node)], factor, rail)
        context.inner.enter("gemm_rs over nodes", rows, n, k, x.dtype)
        node_sum = context.plan(_NodeSum, rows // num_nodes, n, x.dtype, step)
        return _by_nodes([blocks[one] for one in (node, *others)], factor, node_sum, rail)


def _by_single_ranks(blocks: list[torch.Tensor], factor: torch.Tensor, rail: _Rail) -> torch.Tensor:
    """The sums if each node has one rank: a product runs while the sum that it is added to arrives."""
    for index, block in enumerate(blocks):
        total = block.matmul(factor)
        before = rail.receive()
        if before is not None:
            total = torch.add(before, total, out=before)
        if index < len(blocks) - 1:
            rail.send(total)
    return total


def _by_nodes(blocks: list[torch.Tensor], factor: torch.Tensor, node_sum: _NodeSum, rail: _Rail) -> torch.Tensor:
    own = partial = blocks[0].matmul(factor)
    rank, num_rows = node_sum.context.rank, len(own) // node_sum.context.world_size
    for index, block in enumerate([*blocks[1:], None]):
        part: _Part = "begin" if index == 0 else "whole"
        node_sum.hand_out(partial, part)
        with node_sum.aborting:
            out = own.new_empty(num_rows, own.shape[1])
            following = own if block is None else block.matmul(factor)  # under the exchange and the border
            total = rail.receive()
        node_sum.add_up(partial, total, out, part)
        if node_sum.ranks("begin", rank) or index:
            rail.send(out)
        partial = following
    node_sum.hand_out(own, "end")
    with node_sum.aborting:
        out = own.new_empty(num_rows, own.shape[1])
        total = rail.receive()
    node_sum.add_up(own, total, out, "end")
    return out
