"""Makes layouts over several nodes: who crosses to which node, where its rows lie there, which rows come back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ditron_train.ep import planning
from ditron_train.ep.layout import Layout
from ditron_train.ep.rail_context import RailContext
from ditron_train.runtime.errors import ArenaError, NotSupportedError


@dataclass
class RailLayout:
    """One routing over several nodes, kept for backward.

    Attributes:
        num_tokens: Tokens of this rank.
        num_rows: Rows of this rank's experts.
        tokens_per_expert: int64 [experts_per_rank], on the CPU.
        inner: The visitors' layout inside the node.
        rows_order: int64 [num_rows]: native row -> row of the inner layout; ``inner_order`` is the inverse.
        send_index: int64: tokens in the order in which they leave, by node.
        sent, received: Tokens to, and visitors from, each node.
        places: int64: visitors' places that hold a row, by node and token.
        returned, awaited: Rows to, and from, each node.
        row_index: int64 [num_tokens, topk]: which awaited row is the token's j-th by expert, -1 where none.
        experts: int64 [num_tokens, topk]: its expert.
    """

    num_tokens: int
    num_rows: int
    tokens_per_expert: torch.Tensor
    inner: Layout
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
        node, token: int64: of each visit, by node.
        sent, received, returned, awaited: As of a ``RailLayout``.
        widest: To how many experts a token of this rail goes at most.
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
    """The arguments of a layout; ``finish`` does the work, which needs the host anyway."""

    routing_map: torch.Tensor
    probs: torch.Tensor
    hidden: int
    dtype: torch.dtype
    context: RailContext

    def finish(self) -> RailLayout:
        """Exchanges what the nodes need to know of each other and lays the visitors out.

        Raises:
            As ``planning.PendingLayout.finish``, of any node, on every rank of all nodes.
        """
        with self.context.nodes.naming("expert parallel layout"):
            return self._finished()

    def _finished(self) -> RailLayout:
        context, visits = self.context, self._visits()
        node, token, sent, received = visits.node, visits.token, visits.sent, visits.received
        probs = self.probs.detach().unflatten(1, (context.num_nodes, -1)).transpose(0, 1)
        visitor_map = context.nodes.exchange_along_rail(
            visits.by_node[node, token].to(torch.uint8), received, sent
        ).bool()
        visitor_probs = context.nodes.exchange_along_rail(probs[node, token], received, sent)
        segments = self._segments(visitor_map, visits)

        def begin() -> planning.PendingLayout:
            return planning.begin_layout(visitor_map, visitor_probs, self.hidden, self.dtype, context.inner)

        return self._on_all_nodes(begin, visits, segments)

    def _visits(self) -> _Visits:
        """Tells the rail how many tokens come and how many rows they have, and learns the same of its ranks."""
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
            NotSupportedError: A token of any rank has more than top-k experts, though each node may see less; on every
                rank alike.
        """
        context = self.context
        blocks = visitor_map.split(visits.received)
        mine = torch.stack([block.sum(0) for block in blocks])  # [nodes, experts of the node]
        told = torch.cat([mine.flatten(), mine.new_full((1,), visits.widest)])
        every = [torch.empty_like(told) for _ in range(context.nodes.local_size)]
        context.nodes.wait(dist.all_gather(every, told, group=context.nodes.node_group, async_op=True))
        of_rails = torch.stack(every).cpu()
        widest = int(of_rails[:, -1].max())  # of all rails: this node has a rank of each
        if widest > context.topk:
            raise NotSupportedError(f"expert parallel: a token has {widest} experts, top-k is {context.topk}")
        local = context.inner.shape.experts_per_rank
        first = context.inner.rank * local
        return of_rails[:, :-1].unflatten(1, mine.shape).permute(2, 0, 1)[first : first + local].numpy()

    def _on_all_nodes(
        self, begin: Callable[[], planning.PendingLayout], visits: _Visits, segments: np.ndarray
    ) -> RailLayout:
        """The layout, once every node has room for its own, which they tell each other while the rest is laid out.

        Raises:
            ArenaError: A node has no room; on every rank alike.
        """
        nodes, inner, lack = self.context.nodes, None, None
        try:
            inner = begin().finish()
        except (ArenaError, NotSupportedError) as error:  # raised by every rank of this node alike
            lack = error
        told = nodes.start_telling(lack, self.routing_map.device)
        layout = None if inner is None else self._laid_out(inner, visits, segments)
        nodes.finish_telling("making room on every node", told)
        assert layout is not None, "no node lacks room"
        return layout

    def _laid_out(self, inner: Layout, visits: _Visits, segments: np.ndarray) -> RailLayout:
        context, routed = self.context, self.routing_map
        rows_order = torch.from_numpy(_native_order(segments)).to(routed.device)
        assert len(rows_order) == inner.num_rows
        topk = context.inner.shape.topk
        held = inner.expert_ids[:, :topk].reshape(-1) >= 0
        row_index, experts = _awaited_rows(routed, visits.by_node, context.topk)
        return RailLayout(
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
    """``RailLayout.row_index`` and ``experts``: rows come back by node, token, expert."""
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
    """As ``planning.begin_layout`` with exact sizes."""
    context.check()
    return PendingRailLayout(routing_map, probs, hidden, dtype, context)
