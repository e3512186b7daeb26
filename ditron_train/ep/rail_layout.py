"""Makes layouts over several nodes: who crosses to which node, where its rows lie there, which rows come back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from ditron_train.ep import planning
from ditron_train.ep.layout import Layout
from ditron_train.ep.rail_context import RailContext


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
            As ``planning.PendingLayout.finish``.
        """
        with self.context.nodes.naming("expert parallel layout"):
            return self._finished()

    def _finished(self) -> RailLayout:
        context, routed = self.context, self.routing_map
        num_tokens, device = routed.shape[0], routed.device
        by_node = routed.unflatten(1, (context.num_nodes, -1)).transpose(0, 1)  # [nodes, tokens, experts of a node]
        visits = by_node.any(2)
        counts = torch.stack([visits.sum(1), by_node.sum((1, 2))], dim=1)  # tokens and rows for each node
        theirs = context.nodes.exchange_along_rail(counts, for_host=True)
        (sent, awaited), (received, returned) = counts.t().tolist(), theirs.t().tolist()
        node, token = visits.nonzero(as_tuple=True)
        probs = self.probs.detach().unflatten(1, (context.num_nodes, -1)).transpose(0, 1)
        visitor_map = context.nodes.exchange_along_rail(by_node[node, token].to(torch.uint8), received, sent).bool()
        visitor_probs = context.nodes.exchange_along_rail(probs[node, token], received, sent)
        pending = planning.begin_layout(visitor_map, visitor_probs, self.hidden, self.dtype, context.inner)
        segments = self._segments(visitor_map, received)
        inner = pending.finish()
        rows_order = torch.from_numpy(_native_order(segments)).to(device)
        assert len(rows_order) == inner.num_rows
        topk = context.inner.shape.topk
        held = inner.expert_ids[:, :topk].reshape(-1) >= 0
        row_index, experts = _awaited_rows(routed, by_node, context.topk)
        return RailLayout(
            num_tokens=num_tokens,
            num_rows=inner.num_rows,
            tokens_per_expert=inner.tokens_per_expert,
            inner=inner,
            rows_order=rows_order,
            inner_order=rows_order.argsort(),
            send_index=token,
            sent=sent,
            received=received,
            places=held.nonzero()[:, 0],
            returned=returned,
            awaited=awaited,
            row_index=row_index,
            experts=experts,
        )

    def _segments(self, visitor_map: torch.Tensor, received: list[int]) -> np.ndarray:
        """[local experts of this rank, local ranks, nodes] rows from each (local rank, node)."""
        context = self.context
        mine = torch.stack([block.sum(0) for block in visitor_map.split(received)])  # [nodes, experts of the node]
        every = [torch.empty_like(mine) for _ in range(context.nodes.local_size)]
        context.nodes.wait(dist.all_gather(every, mine, group=context.nodes.node_group, async_op=True))
        local = context.inner.shape.experts_per_rank
        first = context.inner.rank * local
        return torch.stack(every).permute(2, 0, 1)[first : first + local].cpu().numpy()


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
