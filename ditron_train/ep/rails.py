"""Expert parallelism over several nodes: along rails between them, fanned out inside.

A *rail* is the ranks that have the same place in their nodes. A token crosses to a node once, on its own rail,
whatever number of experts it has there; inside the node it is dispatched like a local one. Rows come back the same
way, each of them: adding up the experts of a node before would change bits. Between nodes this is all-to-all of the
process group's backend; inside a node it is ``ops``.

    rank (node, local): tokens --rail--> (other node, local): visitors --dispatch--> (other node, any): rows
    rows --return--> visitors' places --rail--> the token's rank, which adds them up

Rows arrive by [expert, local rank, node, token] and are put into the native order [expert, node, local rank, token]:
weight gradients add up in that order. Exact sizes only, with host syncs for the counts.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ditron_train.ep import ops
from ditron_train.ep.orders import SumOrder
from ditron_train.ep.rail_context import RailContext
from ditron_train.ep.rail_layout import RailLayout


def dispatch(
    x: torch.Tensor,
    layout: RailLayout,
    context: RailContext,
    *,
    probs_dtype: torch.dtype = torch.float32,
    zero_probs: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As ``ops.dispatch``."""
    with context.nodes.naming("expert parallel dispatch"):
        visitors = context.nodes.exchange_along_rail(
            x.index_select(0, layout.send_index), layout.received, layout.sent
        )
        rows, row_probs = ops.dispatch(
            visitors, layout.inner, context.inner, probs_dtype=probs_dtype, zero_probs=zero_probs
        )
        in_order = rows.index_select(0, layout.rows_order)
        return in_order, None if row_probs is None else row_probs.index_select(0, layout.rows_order)


def combine(
    y: torch.Tensor,
    layout: RailLayout,
    context: RailContext,
    *,
    order: SumOrder,
    row_grads: torch.Tensor | None = None,
    probs_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As ``ops.combine``: rows return to the visitors' places, cross to the tokens' ranks and are added up there."""
    with context.nodes.naming("expert parallel combine"):
        inner, topk = layout.inner, context.inner.shape.topk
        flat = replace(  # every place of a visitor stands for a token with one expert: returned, not added up
            inner,
            shape=replace(inner.shape, topk=1),
            num_tokens=inner.num_tokens * topk,
            chunk_tokens=inner.chunk_tokens * topk,
            expert_ids=inner.expert_ids[:, :topk].reshape(-1, 1).contiguous(),
        )
        grads = None if row_grads is None else row_grads.float().index_select(0, layout.inner_order)
        places, place_grads = ops.combine(
            y.index_select(0, layout.inner_order), flat, context.inner, order="ascending", row_grads=grads
        )
        rows = context.nodes.exchange_along_rail(
            places.index_select(0, layout.places), layout.awaited, layout.returned
        )
        out = _add_up(rows, layout.row_index, order)
        if place_grads is None:
            return out, None
        of_place = place_grads.gather(1, flat.expert_ids.clamp(min=0).long())[:, 0].index_select(0, layout.places)
        awaited = context.nodes.exchange_along_rail(of_place, layout.awaited, layout.returned)
        held = layout.row_index >= 0
        values = torch.where(held, awaited[layout.row_index.clamp(min=0)] if len(awaited) else 0.0, 0.0).to(
            probs_dtype
        )
        prob_grads = torch.zeros(layout.num_tokens, context.num_experts, dtype=probs_dtype, device=y.device)
        token = torch.arange(layout.num_tokens, device=y.device)[:, None].expand_as(held)
        prob_grads[token[held], layout.experts[held]] = values[held]
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
