"""GEMM-RS of a group that spans nodes: sums go from node to node along rails, under the products of the next node.

NCCL's ring and gloo's visit the ranks of a group one by one, so node by node: the sum of rank d's rows begins behind d
(ascending: rank d + 1), and d itself comes last. Rows of all ranks of one node, a *block*, are one product. Inside a
node copy engines hand each rank its rail's rows of the partial sums, and a kernel adds them onto the sum that came
along the rail, in the ring's order and with its roundings. Then the rail carries the sum to the next node. So a border
is crossed once for each block, by all adapters of a node at a time, while the product of the next block runs.

For node n of N and an ascending ring: block n first, whose ranks behind the owner begin its sums; then n - 1, n - 2,
..., each added whole onto what came from node n - 1; at last what is left of block n, up to the owner itself. Where a
node has one rank, block n is multiplied last, under the last border.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch

from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.launch import KernelLaunch
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.tp.context import RowPartition, TPContext
from ditron_train.tp.nodes_context import NodesTPContext
from ditron_train.tp.problem import Layout
from ditron_train.tp.scatter import PreparedScatter
from ditron_train.tp.scatter_kernels import fold_onto_kernel

__all__ = ["gemm_rs_over_nodes"]

_Part = Literal[
    "begin", "whole", "end"
]  # of an owner's sum: what its node adds first, another node's, its node's last


class _NodeSumCall(NamedTuple):
    """Sums of one block's rows [rows, N] inside a node."""

    rows: int
    num_columns: int
    dtype: torch.dtype
    ring_step: int

    def prepare(self, context: TPContext) -> _PreparedNodeSum:
        """See ``tp.prepared``."""
        return _PreparedNodeSum(context, self)


class _PreparedNodeSum(PreparedScatter):
    """What a node adds onto the sums of one block, for one shape (collective to make): ``begin``, ``hand_out``, then
    ``add_up`` behind what the current stream has been given meanwhile."""

    def __init__(self, context: TPContext, call: _NodeSumCall) -> None:
        world = context.world_size
        partition = RowPartition.of([call.rows // world] * world)
        super().__init__(context, partition, call.num_columns, call.dtype)
        self._step = call.ring_step
        self._folds: dict[bool, KernelLaunch] = {
            goes_on: self._launch_of_sum(fold_onto_kernel, {"STEP": call.ring_step, "GOES_ON": goes_on})
            for goes_on in (False, True)
        }

    def ranks(self, part: _Part, owner: int) -> range:
        """Whom the node adds up for ``owner``, in this order."""
        world, step = self.context.world_size, self._step
        first, last = (0, world - 1) if step > 0 else (world - 1, 0)
        bounds = {"begin": (owner + step, last), "whole": (first, last), "end": (first, owner)}[part]
        return range(bounds[0], bounds[1] + step, step)

    def hand_out(self, partial: torch.Tensor, part: _Part) -> None:
        """Sends the owners' rows of ``partial`` [rows, N], contiguous, to them."""
        self.begin()
        with self.context.aborting(self.channel):
            starts, rank = self.partition.starts, self.context.rank
            for position, owner in enumerate(self.peers):
                end = starts[owner + 1] if rank in self.ranks(part, owner) else starts[owner]
                self.send(partial, position, slice(starts[owner], end), signals=True)

    def add_up(self, partial: torch.Tensor, total: torch.Tensor | None, out: torch.Tensor, part: _Part) -> None:
        """``out`` [rows of a rank, N]: ``total``, if any, and this node's; on the communication stream."""
        ranks = self.ranks(part, self.context.rank)
        operands = (partial, self._slots.local, self._pointers, out if total is None else total, out, self._row_starts)
        sizes = (self._num_columns, self.partition.max_count, ranks.start, len(ranks))
        with self.context.aborting(self.channel):
            self._folds[total is not None](*operands, *sizes, stream=self.context.comm_stream)
        self.context.join()
        self.context.leave(self.channel)


class _Rail:
    """The sums of this rank's rail on their way: each is sent on, and the next one awaited, on the stream that adds
    up."""

    def __init__(self, context: NodesTPContext, step: int, like: torch.Tensor) -> None:
        nodes = context.nodes
        self._nodes, self._like = nodes, like
        self._to, self._from = (nodes.node + step) % nodes.num_nodes, (nodes.node - step) % nodes.num_nodes
        self._stream = None if context.inner is None else context.inner.comm_stream
        self._on_its_way: tuple[torch.Tensor, Any] | None = None

    def beside(self) -> AbstractContextManager[Any]:
        """Where sums are added up."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def send(self, total: torch.Tensor) -> None:
        """To the next node; the last one's comes meanwhile."""
        shares = [
            [len(total) * (node == one) for node in range(self._nodes.num_nodes)] for one in (self._from, self._to)
        ]
        with self.beside():
            self._on_its_way = self._nodes.start_along_rail(total, *shares)

    def receive(self) -> torch.Tensor | None:
        """What the last node has sent; None where sums begin here."""
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
        context: Of the group.
        layout: How ``weight`` lies.

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
        call = (_NodeSumCall, rows // num_nodes, n, x.dtype, step)
        prepared: _PreparedNodeSum = context.prepare(*call)
        return _by_nodes([blocks[one] for one in (node, *others)], factor, prepared, rail)


def _by_single_ranks(blocks: list[torch.Tensor], factor: torch.Tensor, rail: _Rail) -> torch.Tensor:
    """Of nodes of one rank: each product runs while the sum that it is added onto comes."""
    for index, block in enumerate(blocks):
        total = block.matmul(factor)
        before = rail.receive()
        if before is not None:
            total = torch.add(before, total, out=before)
        if index < len(blocks) - 1:
            rail.send(total)
    return total


def _by_nodes(
    blocks: list[torch.Tensor], factor: torch.Tensor, prepared: _PreparedNodeSum, rail: _Rail
) -> torch.Tensor:
    own = partial = blocks[0].matmul(factor)
    rank, num_rows = prepared.context.rank, len(own) // prepared.context.world_size
    for index, block in enumerate([*blocks[1:], None]):
        part: _Part = "begin" if index == 0 else "whole"
        prepared.hand_out(partial, part)
        with prepared.context.aborting(prepared.channel):
            out = own.new_empty(num_rows, own.shape[1])
            following = own if block is None else block.matmul(factor)  # under the exchange and the border
            total = rail.receive()
        prepared.add_up(partial, total, out, part)
        if prepared.ranks("begin", rank) or index:
            rail.send(out)
        partial = following
    prepared.hand_out(own, "end")
    with prepared.context.aborting(prepared.channel):
        out = own.new_empty(num_rows, own.shape[1])
        total = rail.receive()
    prepared.add_up(own, total, out, "end")
    return out
