"""Expert parallelism over several nodes: along rails between nodes, by ``dispatch`` and ``combine`` inside each.

A *rail* is the ranks with the same local rank on their nodes. A token is sent to a node once, along its own rail,
however many experts it has there; inside the node it is dispatched like a local token. Every row returns the same way:
adding up the rows of a node before sending them would change bits. Between nodes the process group's all-to-all moves
them.

    rank (node, local): tokens --rail--> (other node, local): visitors --dispatch--> (other node, any): rows
    rows --return--> visitors' places --rail--> the token's rank, which adds them up

Rows arrive by [expert, local rank, node, token] and are put into the native order [expert, node, local rank, token]:
weight gradients add up in that order. Exact sizes only, with host syncs for the counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ditron_train.ep.combine import SumOrder
from ditron_train.ep.combine import combine as combine_in_node
from ditron_train.ep.context import EPContext, get_ep_context
from ditron_train.ep.dispatch import dispatch as dispatch_in_node
from ditron_train.ep.handle import EPHandle
from ditron_train.ep.layout import PendingLayout
from ditron_train.ep.layout import begin_layout as begin_layout_in_node
from ditron_train.runtime.errors import ArenaError, NotSupportedError
from ditron_train.runtime.groups import GroupCache, unwrapped
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
    """The context of a group that spans nodes, or None if the group is inside one; the first call is collective.

    Raises:
        NotSupportedError: Nodes with different numbers of ranks, ranks that are not grouped by node, or experts that
            do not divide; on every rank alike.
        ArenaError: A node cannot have its context; on every rank alike.
    """
    group = unwrapped(group)
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
    # If a node has no memory, only its own ranks learn it, and would go native while the others wait for them.
    inner = on_all_ranks(
        group, "making a context on every node", lambda: get_ep_context(*arguments), (ArenaError, NotSupportedError)
    )
    return RailContext(inner, nodes, num_experts, topk)


@dataclass
class RailHandle:
    """One routing over several nodes, kept for backward.

    Attributes:
        num_tokens: Tokens of this rank.
        num_rows: Rows of this rank's experts.
        tokens_per_expert: int64 [experts_per_rank], on the CPU.
        inner: Handle of the visitors inside the node.
        rows_order: int64 [num_rows]: native row -> row of the inner handle; ``inner_order`` is the inverse.
        send_index: int64: tokens in the order in which they leave, by node.
        sent, received: Tokens to, and visitors from, each node.
        places: int64: visitors' places that hold a row, by node and token.
        returned, awaited: Rows to, and from, each node.
        row_index: int64 [num_tokens, topk]: the awaited row of the token's j-th expert, -1 if there is none.
        experts: int64 [num_tokens, topk]: that expert.
    """

    num_tokens: int
    num_rows: int
    tokens_per_expert: torch.Tensor
    inner: EPHandle
    rows_order: torch.Tensor
    inner_order: torch.Tensor
    send_index: torch.Tensor
    sent: list[int]
    received: list[int]
    places: torch.Tensor
    returned: list[int]
    awaited: list[int]
    row_index: torch.Tensor
    experts: torch.Tensor


class _Visits(NamedTuple):
    """Which tokens visit which node.

    Attributes:
        by_node: bool [nodes, tokens, experts of a node].
        node, token: int64: node and token of each visit, by node.
        sent, received, returned, awaited: As of a ``RailHandle``.
        widest: The most experts of a token of this rail.
    """

    by_node: torch.Tensor
    node: torch.Tensor
    token: torch.Tensor
    sent: list[int]
    received: list[int]
    returned: list[int]
    awaited: list[int]
    widest: int


@dataclass
class PendingRailLayout:
    """The arguments of a handle; ``finish`` makes it, since this needs the host in any case."""

    routing_map: torch.Tensor
    probs: torch.Tensor
    hidden: int
    dtype: torch.dtype
    context: RailContext

    def finish(self) -> RailHandle:
        """Exchanges counts between the nodes and makes the handle.

        Raises:
            As ``layout.PendingLayout.finish``, of any node, on every rank of all nodes.
        """
        with self.context.nodes.naming("expert parallel layout"):
            return self._finished()

    def _finished(self) -> RailHandle:
        context, visits = self.context, self._visits()
        node, token, sent, received = visits.node, visits.token, visits.sent, visits.received
        probs = self.probs.detach().unflatten(1, (context.num_nodes, -1)).transpose(0, 1)
        visitor_map = context.nodes.exchange_along_rail(
            visits.by_node[node, token].to(torch.uint8), received, sent
        ).bool()
        visitor_probs = context.nodes.exchange_along_rail(probs[node, token], received, sent)
        segments = self._segments(visitor_map, visits)

        def begin() -> PendingLayout:
            return begin_layout_in_node(visitor_map, visitor_probs, self.hidden, self.dtype, context.inner)

        return self._on_all_nodes(begin, visits, segments)

    def _visits(self) -> _Visits:
        """Exchanges with the ranks of the rail how many tokens they send and how many rows these have."""
        nodes, routed = self.context.nodes, self.routing_map
        by_node = routed.unflatten(1, (nodes.num_nodes, -1)).transpose(0, 1)
        visits, widths = by_node.any(2), routed.sum(1)
        widest = widths.max() if len(widths) else widths.new_zeros(())
        counts = torch.stack([visits.sum(1), by_node.sum((1, 2)), widest.expand(nodes.num_nodes)], dim=1)
        theirs = nodes.exchange_along_rail(counts, for_host=True)
        (sent, awaited, _), (received, returned, widest_of_rail) = counts.t().tolist(), theirs.t().tolist()
        node, token = visits.nonzero(as_tuple=True)
        return _Visits(by_node, node, token, sent, received, returned, awaited, max(widest_of_rail))

    def _segments(self, visitor_map: torch.Tensor, visits: _Visits) -> np.ndarray:
        """[local experts of this rank, local ranks, nodes] rows from each (local rank, node).

        Raises:
            NotSupportedError: A token of any rank has more than top-k experts, although it may have fewer in each
            node;
                on every rank alike.
        """
        context = self.context
        blocks = visitor_map.split(visits.received)
        mine = torch.stack([block.sum(0) for block in blocks])  # [nodes, experts of the node]
        announced = torch.cat([mine.flatten(), mine.new_full((1,), visits.widest)])
        every = [torch.empty_like(announced) for _ in range(context.nodes.local_size)]
        context.nodes.wait(dist.all_gather(every, announced, group=context.nodes.node_group, async_op=True))
        of_rails = torch.stack(every).cpu()
        widest = int(of_rails[:, -1].max())  # of all rails: this node has a rank of each
        if widest > context.topk:
            raise NotSupportedError(f"expert parallel: a token has {widest} experts, top-k is {context.topk}")
        local = context.inner.shape.experts_per_rank
        first = context.inner.rank * local
        return of_rails[:, :-1].unflatten(1, mine.shape).permute(2, 0, 1)[first : first + local].numpy()

    def _on_all_nodes(self, begin: Callable[[], PendingLayout], visits: _Visits, segments: np.ndarray) -> RailHandle:
        """The handle, once every node has announced that it has room, which overlaps with making the rest.

        Raises:
            ArenaError: A node has no room; on every rank alike.
        """
        nodes, inner, lack = self.context.nodes, None, None
        try:
            inner = begin().finish()
        except (ArenaError, NotSupportedError) as error:  # raised by every rank of this node alike
            lack = error
        announced = nodes.start_telling(lack, self.routing_map.device)
        handle = None if inner is None else self._laid_out(inner, visits, segments)
        nodes.finish_telling("making room on every node", announced)
        assert handle is not None, "no node lacks room"
        return handle

    def _laid_out(self, inner: EPHandle, visits: _Visits, segments: np.ndarray) -> RailHandle:
        context, routed = self.context, self.routing_map
        rows_order = torch.from_numpy(_native_order(segments)).to(routed.device)
        assert len(rows_order) == inner.num_rows
        topk = context.inner.shape.topk
        held = inner.expert_ids[:, :topk].reshape(-1) >= 0
        row_index, experts = _awaited_rows(routed, visits.by_node, context.topk)
        return RailHandle(
            num_tokens=routed.shape[0],
            num_rows=inner.num_rows,
            tokens_per_expert=inner.tokens_per_expert,
            inner=inner,
            rows_order=rows_order,
            inner_order=rows_order.argsort(),
            send_index=visits.token,
            sent=visits.sent,
            received=visits.received,
            places=held.nonzero()[:, 0],
            returned=visits.returned,
            awaited=visits.awaited,
            row_index=row_index,
            experts=experts,
        )


def _native_order(segments: np.ndarray) -> np.ndarray:
    """Inner rows [expert, local rank, node, token] in the native order [expert, node, local rank, token]."""
    ends = segments.reshape(-1).cumsum().reshape(segments.shape)
    pieces = [
        np.arange(ends[expert, local, node] - segments[expert, local, node], ends[expert, local, node])
        for expert in range(segments.shape[0])
        for node in range(segments.shape[2])
        for local in range(segments.shape[1])
    ]
    return np.concatenate(pieces).astype(np.int64)


def _awaited_rows(routed: torch.Tensor, by_node: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``RailHandle.row_index`` and ``experts``: rows come back by node, token, expert."""
    num_tokens = routed.shape[0]
    node, token, expert = by_node.nonzero(as_tuple=True)
    expert = node * by_node.shape[2] + expert
    nth = (routed.cumsum(1) - 1)[token, expert]
    row_index = torch.full((num_tokens, topk), -1, dtype=torch.int64, device=routed.device)
    experts = torch.zeros_like(row_index)
    row_index[token, nth] = torch.arange(len(token), device=routed.device)
    experts[token, nth] = expert
    return row_index, experts


def begin_layout(
    routing_map: torch.Tensor, probs: torch.Tensor, hidden: int, dtype: torch.dtype, context: RailContext
) -> PendingRailLayout:
    """As ``layout.begin_layout`` with exact sizes."""
    context.check()
    return PendingRailLayout(routing_map, probs, hidden, dtype, context)


def dispatch(
    x: torch.Tensor,
    handle: RailHandle,
    context: RailContext,
    *,
    probs_dtype: torch.dtype = torch.float32,
    zero_probs: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As ``dispatch.dispatch``."""
    with context.nodes.naming("expert parallel dispatch"):
        visitors = context.nodes.exchange_along_rail(
            x.index_select(0, handle.send_index), handle.received, handle.sent
        )
        rows, row_probs = dispatch_in_node(
            visitors, handle.inner, context.inner, probs_dtype=probs_dtype, zero_probs=zero_probs
        )
        in_order = rows.index_select(0, handle.rows_order)
        return in_order, None if row_probs is None else row_probs.index_select(0, handle.rows_order)


def combine(
    y: torch.Tensor,
    handle: RailHandle,
    context: RailContext,
    *,
    order: SumOrder,
    row_grads: torch.Tensor | None = None,
    probs_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As ``combine``: rows return to the visitors' places, cross to the tokens' ranks and are added up there."""
    with context.nodes.naming("expert parallel combine"):
        inner, topk = handle.inner, context.inner.shape.topk
        flat = replace(  # every place of a visitor is a token with one expert: its row is returned, not added up
            inner,
            shape=replace(inner.shape, topk=1),
            num_tokens=inner.num_tokens * topk,
            chunk_tokens=inner.chunk_tokens * topk,
            expert_ids=inner.expert_ids[:, :topk].reshape(-1, 1).contiguous(),
        )
        grads = None if row_grads is None else row_grads.float().index_select(0, handle.inner_order)
        places, place_grads = combine_in_node(
            y.index_select(0, handle.inner_order), flat, context.inner, order="ascending", row_grads=grads
        )
        rows = context.nodes.exchange_along_rail(
            places.index_select(0, handle.places), handle.awaited, handle.returned
        )
        out = _add_up(rows, handle.row_index, order)
        if place_grads is None:
            return out, None
        of_place = place_grads.gather(1, flat.expert_ids.clamp(min=0).long())[:, 0].index_select(0, handle.places)
        awaited = context.nodes.exchange_along_rail(of_place, handle.awaited, handle.returned)
        held = handle.row_index >= 0
        values = torch.where(held, awaited[handle.row_index.clamp(min=0)] if len(awaited) else 0.0, 0.0).to(
            probs_dtype
        )
        prob_grads = torch.zeros(handle.num_tokens, context.num_experts, dtype=probs_dtype, device=y.device)
        token = torch.arange(handle.num_tokens, device=y.device)[:, None].expand_as(held)
        prob_grads[token[held], handle.experts[held]] = values[held]
        return out, prob_grads


def _add_up(rows: torch.Tensor, row_index: torch.Tensor, order: SumOrder) -> torch.Tensor:
    """Sums in the order and with the roundings of ``SumOrder``, as the kernels add them."""
    num_tokens, topk = row_index.shape
    total = torch.zeros(num_tokens, rows.shape[1], dtype=torch.float32, device=rows.device)
    if len(rows):
        for nth in reversed(range(topk)) if order == "descending" else range(topk):
            index = row_index[:, nth]
            total += torch.where((index >= 0)[:, None], rows[index.clamp(min=0)].float(), 0.0)
            if order == "ascending_rounded":
                total = total.to(rows.dtype).float()
    return total.to(rows.dtype)
