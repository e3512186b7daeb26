"""A tensor parallel group that spans nodes: its groups, its node's memory, and whose order its sums follow."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.policy.order import reduction_order
from ditron_train.runtime.device import is_capturing
from ditron_train.runtime.errors import ArenaError, NotSupportedError
from ditron_train.runtime.groups import GroupCache
from ditron_train.runtime.logs import log_once
from ditron_train.stream.op_context import MAX_KNOWN_SHAPES
from ditron_train.symm.exchange import on_all_ranks
from ditron_train.symm.nodes import node_groups
from ditron_train.tp.chunked_gemm_rs import covers
from ditron_train.tp.context import TPContext, get_tp_context
from ditron_train.tp.prepared import can_copy

__all__ = ["NodesTPContext", "get_nodes_tp_context"]

_contexts: GroupCache[tuple[dist.ProcessGroup, torch.device], NodesTPContext] = GroupCache()


class NodesTPContext:
    """A tensor parallel group that spans nodes (collective to make).

    Attributes:
        group: All ranks.
        rank, world_size: In it.
        nodes: The groups of a node and of a rail.
        inner: Context of this rank's node; None where a node has one rank.
        device: Where activations live.
        leaves_gather, leaves_sums: Whether the policy has left the gather of a column layer's forward or a row layer's
            backward, or sums over ranks, to the process group: of the layers that one answer is for (``for_answer``).
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        nodes = node_groups(group)
        if nodes is None:
            raise NotSupportedError("the tensor parallel group lies inside one node")
        self.group, self.nodes, self.device = group, nodes, device
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.inner: TPContext | None = None
        if nodes.local_size > 1:
            # Where a node has no memory its ranks alone hear of it, and would turn to native while the others wait.
            self.inner = on_all_ranks(
                group,
                "making a context on every node",
                lambda: get_tp_context(nodes.node_group, device),
                (ArenaError, NotSupportedError),
            )
        self.leaves_gather = self.leaves_sums = False
        self._prepared: set[Hashable] = set()  # one for all answers: they share the node's memory

    def for_answer(self) -> NodesTPContext:
        """The same context with choices of its own."""
        made = copy.copy(self)
        made.leaves_gather = made.leaves_sums = False
        return made

    @property
    def target(self) -> str:
        """As ``TPContext.target``; ``cublas`` where a node has one rank."""
        return "cublas" if self.inner is None else self.inner.target

    def ring_step(self, rows: int, n: int, dtype: torch.dtype) -> int:
        """Along which ring the process group reduce-scatters [rows, n]: 1 by ascending ranks, -1 by descending ones, 0
        in no order that ours can follow, which is logged once (collective the first time)."""
        of_gloo = rows * n // self.world_size if self.device.type == "cpu" else None
        order = reduction_order(self.group, self.device, dtype, of_gloo)
        if order.ring_step == 0:
            name = f"tp sums over nodes in {dtype}"
            log_once(f"native {name} {order.reason}", f"{name}: native, {order.reason}", name="policy")
        return order.ring_step

    def sums_by_rails(self, rows: int, n: int, dtype: torch.dtype) -> bool:
        """Whether a product [rows, n] is reduce-scattered by rails (collective the first time)."""
        if self.leaves_sums or rows % self.world_size:
            return False
        if self.inner is not None and not (covers(n, dtype) and can_copy(self.inner)):
            return False
        return self.ring_step(rows, n, dtype) != 0

    def prepare(self, *call: Any) -> Any:
        """As ``TPContext.prepare``, of the node's context and inside ``naming``. At the first such call the nodes tell
        each other whether they have room for it, before anything of it crosses a border.

        Raises:
            ArenaError: A node cannot prepare it; on every rank alike.
        """
        inner = self.inner
        assert inner is not None, "a node of one rank needs no memory"
        # A capture, in which nobody may wait, takes what all nodes have prepared, or is refused by each alike.
        if call in self._prepared or is_capturing(self.device):
            return inner.prepare(*call)
        inner.enter("preparing on every node")
        before = set(self._prepared) if len(self._prepared) < MAX_KNOWN_SHAPES else set()
        self._prepared.clear()  # what fails may have given back what is there for other calls
        prepared = self.nodes.on_every_node("making room on every node", lambda: inner.prepare(*call), self.device)
        self._prepared.update(before, {call})
        return prepared

    def synchronize(self) -> None:
        """As ``TPContext.synchronize``."""
        if self.inner is not None:
            with self.nodes.naming("tensor parallel"):
                self.inner.synchronize()


def get_nodes_tp_context(group: dist.ProcessGroup, device: torch.device) -> NodesTPContext:
    """The context of ``group``, made at the first call (collective).

    Raises:
        NotSupportedError: The group lies inside a node, or its nodes are no equal blocks of ranks; on every rank
            alike.
        ArenaError: A node cannot have its context; on every rank alike.
    """
    key = (group, device)
    known = _contexts.get(key)
    if known is None or (known.inner is not None and known.inner.arena.closed):
        _contexts[key] = NodesTPContext(group, device)
    return _contexts[key]
