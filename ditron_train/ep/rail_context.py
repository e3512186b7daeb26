"""``RailContext``: expert parallelism on a group that spans nodes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ditron_train.ep.context import EPContext, get_ep_context
from ditron_train.runtime.errors import ArenaError, NotSupportedError
from ditron_train.runtime.groups import GroupCache
from ditron_train.symm.exchange import on_all_ranks
from ditron_train.symm.nodes import NodeGroups, node_groups


@dataclass(frozen=True)
class RailContext:
    """A group that spans nodes.

    Attributes:
        inner: Context of this rank's node, with the node's experts.
        nodes: The groups of a node and of a rail.
        num_experts: Experts over all nodes.
        topk: Experts of a token at most.
    """

    inner: EPContext
    nodes: NodeGroups
    num_experts: int
    topk: int

    @property
    def num_nodes(self) -> int:
        """Nodes of the group."""
        return self.nodes.num_nodes

    @property
    def target(self) -> str:
        """As ``EPContext.target``."""
        return self.inner.target

    def check(self) -> None:
        """As ``EPContext.check``; names the rank that is missing from the whole group."""
        with self.nodes.naming("expert parallel"):
            self.inner.check()


_contexts: GroupCache[tuple[dist.ProcessGroup, torch.device, int, int], RailContext | None] = GroupCache()


def get_rail_context(
    group: dist.ProcessGroup, device: torch.device, num_experts: int, topk: int
) -> RailContext | None:
    """The context of a group that spans nodes, or None where it lies inside one; the first call is collective.

    Raises:
        NotSupportedError: Nodes with different numbers of ranks, ranks that are not grouped by node, or experts that
            do not divide; on every rank alike.
        ArenaError: A node cannot have its context; on every rank alike.
    """
    key = (group, device, num_experts, topk)
    known = _contexts.get(key)
    if key not in _contexts or (known is not None and known.inner.arena.closed):
        _contexts[key] = _make_context(group, device, num_experts, topk)
    return _contexts[key]


def _make_context(group: dist.ProcessGroup, device: torch.device, num_experts: int, topk: int) -> RailContext | None:
    nodes = node_groups(group)
    if nodes is None:
        return None
    world_size = dist.get_world_size(group)
    if num_experts % world_size:
        raise NotSupportedError(
            f"expert parallel: {num_experts} experts do not divide by the group's {world_size} ranks"
        )
    inner_experts = num_experts // nodes.num_nodes
    arguments = (nodes.node_group, device, inner_experts, min(topk, inner_experts))
    # Where a node has no memory its ranks alone hear of it, and would turn to native while the others wait for them.
    inner = on_all_ranks(
        group, "making a context on every node", lambda: get_ep_context(*arguments), (ArenaError, NotSupportedError)
    )
    return RailContext(inner, nodes, num_experts, topk)
