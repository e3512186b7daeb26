"""Ulysses' exchanges in a group that spans nodes (part of feature ``sp``): by rails between nodes, by peer memory
inside.

With N nodes of L ranks each, what rank (n, l) owes to rank (n', l') goes to rank (n', l) first, in one all-to-all of
the rail l (the ranks of one local rank, whose NICs face each other), then inside node n' by ``ditron_train.sp``'s
exchange: its
"local rows" are those of the rail's N ranks, one rank after another, and a table says where in the sequence they
are. The way back is the mirror. Data only moves: the bits are those of one all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ditron_train.runtime.derivatives import refuse_second_derivatives
from ditron_train.runtime.errors import ArenaError, NotSupportedError
from ditron_train.runtime.groups import GroupCache, unwrapped
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.sp import (
    HeadsLayout,
    SPContext,
    get_sp_context,
    heads_exchange,
    sequence_exchange,
    to_heads,
    to_sequence,
)
from ditron_train.sp.layouts import global_rows
from ditron_train.symm import nodes as symm_nodes
from ditron_train.symm.exchange import on_all_ranks
from ditron_train.symm.nodes import NodeGroups, node_groups

_Result = TypeVar("_Result")

_contexts: GroupCache[tuple[dist.ProcessGroup, torch.device], NodesContext] = GroupCache()


def get_nodes_context(group: dist.ProcessGroup, device: torch.device) -> NodesContext:
    """The context of a group that spans nodes, made at the first call (collective).

    Raises:
        NotSupportedError: Nodes with one rank, with different numbers of ranks, or whose ranks are not neighbours; on
            every rank alike.
        ArenaError: A node cannot have its context; on every rank alike.
    """
    group = unwrapped(group)
    key = (group, device)
    if key not in _contexts or _contexts[key].node.arena.closed:
        _contexts[key] = NodesContext(group, device)
    return _contexts[key]


def forget_nodes() -> None:
    """Let go of the contexts."""
    _contexts.clear()
    symm_nodes.forget_nodes()


@outside_compile
class _AlongRail(torch.autograd.Function):
    """All-to-all of equal shares [nodes, ...] along a rail; its backward is the same."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, nodes: NodeGroups) -> torch.Tensor:
        ctx.nodes = nodes
        return nodes.exchange_along_rail(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        refuse_second_derivatives("an exchange along rails")
        return ctx.nodes.exchange_along_rail(grad), None


class NodesContext:
    """The groups of a group that spans nodes (constructed collectively).

    Attributes:
        node: Context of this rank's node.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        nodes = node_groups(group)
        assert nodes is not None, "of a group that spans nodes"
        self._group, self.world_size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self._nodes, self._num_nodes, self._per_node = nodes, nodes.num_nodes, nodes.local_size
        if self._per_node == 1:
            raise NotSupportedError("one rank a node: exchanges by rails need nodes of 2 ranks or more")
        self._node_group = nodes.node_group
        self.node: SPContext = self._on_all_nodes("making a context", lambda: get_sp_context(self._node_group, device))
        self._tables: dict[int, torch.Tensor] = {}
        self._reserved: set[tuple[HeadsLayout, int, torch.dtype]] = set()

    def synchronize(self) -> None:
        """Waits for the device and raises what an exchange of the node has recorded."""
        self.node.synchronize()

    def _on_all_nodes(self, what: str, step: Callable[[], _Result]) -> _Result:
        """``step``, which takes memory of this node's group: if there is none, only its ranks know, and would
        run natively while the others wait for them in their rails."""
        return on_all_ranks(self._group, f"{what} on every node", step, (ArenaError, NotSupportedError))

    def _reserve(self, layout: HeadsLayout, num_rows: int, dtype: torch.dtype) -> None:
        """Has the node's memory for both exchanges of ``layout`` and ``num_rows`` rows of a rank: one is the other's
        backward. Collective over all nodes at the first call, where the exchanges are run on nothing.

        Raises:
            ArenaError: A node cannot have it; on every rank alike.
        """
        key = (layout, num_rows, dtype)
        if key in self._reserved:
            return

        def run_once() -> None:
            options: dict[str, Any] = dict(context=self.node, layout=layout)
            sizes = [
                (layout.num_heads(part) * self._per_node, head_dim) for part, head_dim in enumerate(layout.head_dims)
            ]
            with torch.inference_mode(False):
                like = torch.empty(self._num_nodes * num_rows, dtype=dtype, device=self.node.device)
                to_sequence(to_heads([like.new_zeros(len(like), *size) for size in sizes], **options), **options)

        reserved, self._reserved = (
            self._reserved,
            set(),
        )  # what fails may have given back what is there for other sizes
        self._on_all_nodes(f"exchanging {num_rows} rows", run_once)
        self._reserved = reserved | {key}

    def _table(self, num_rows: int, row_table: torch.Tensor | None) -> torch.Tensor:
        """Row in the whole of each row that a rank of this node holds after the exchange along the rail, int32 [L, N
        * num_rows]."""
        if row_table is None:
            if num_rows not in self._tables:
                rows = [
                    torch.from_numpy(global_rows(rank, self.world_size, num_rows)) for rank in range(self.world_size)
                ]
                # The copy to the device comes last: the host waits for it, so every stream may use the table from then
                # on.
                self._tables[num_rows] = self._by_rail(torch.stack(rows).to(torch.int32)).to(self.node.device)
            return self._tables[num_rows]
        return self._by_rail(row_table)

    def _by_rail(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(self._num_nodes, self._per_node, -1).transpose(0, 1).reshape(self._per_node, -1)

    def to_heads(
        self, parts: Sequence[torch.Tensor], layout: HeadsLayout, row_table: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """As ``sp.heads_exchange``: [s / W, ..., heads, d] -> [s, ..., heads / W, d]; differentiable."""
        lead, nodes = parts[0].shape[:-2], self._num_nodes
        self._reserve(layout, lead.numel(), parts[0].dtype)
        columns = [part.shape[-2] * part.shape[-1] // nodes for part in parts]
        packed = torch.cat([part.reshape(*lead, nodes, -1) for part in parts], dim=-1).movedim(-2, 0).contiguous()
        arrived = _AlongRail.apply(packed, self._nodes).flatten(0, 1)
        parts = [
            one.unflatten(-1, (-1, head_dim))
            for one, head_dim in zip(arrived.split(columns, dim=-1), layout.head_dims)
        ]
        table = self._table(lead.numel(), row_table)
        with self._nodes.naming("an exchange of heads"):
            return heads_exchange(parts, context=self.node, layout=layout, row_table=table)

    def to_sequence(self, attended: torch.Tensor, layout: HeadsLayout, row_table: torch.Tensor | None) -> torch.Tensor:
        """As ``sp.sequence_exchange`` of one part: [s, ..., heads / W, d] -> [s / W, ..., heads, d];
        differentiable."""
        nodes, num_rows = self._num_nodes, attended.shape[:-2].numel() // self.world_size
        self._reserve(layout, num_rows, attended.dtype)
        table = self._table(num_rows, row_table)
        with self._nodes.naming("an exchange of rows"):
            (gathered,) = sequence_exchange((attended,), context=self.node, layout=layout, row_table=table)
        arrived = _AlongRail.apply(gathered.unflatten(0, (nodes, -1)), self._nodes)
        return arrived.movedim(0, -3).flatten(-3, -2)
