"""The layout's twin in NumPy: what the kernels plan, written as plainly as the order is defined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ditron_train.ep.handle import LayoutShape


@dataclass(frozen=True)
class RankPlan:
    """What one rank receives and sends, computed on the host.

    Attributes:
        row_token: [num_rows, 3] source rank, token and global expert of each row.
        entries: [num_rows, 3] row, slot (of the rank's own: token) and place, in the order of arrival.
        dest_slots: [num_tokens, world_size].
        expert_ids: [num_tokens, topk], or [places] of a ragged layout.
        recv_offsets: [world_size, num_chunks + 1].
    """

    row_token: np.ndarray
    entries: np.ndarray
    dest_slots: np.ndarray
    expert_ids: np.ndarray
    recv_offsets: np.ndarray


def plan_on_host(routing_maps: Sequence[np.ndarray], shape: LayoutShape, *, ragged: bool = False) -> list[RankPlan]:
    """The plans of all ranks from their routing maps.

    Args:
        routing_maps: bool [num_tokens of that rank, num_experts] by rank.
        shape: Of the context; ``topk`` must cover the widest token, and bytes must not matter to its chunks.
        ragged: As ``EPHandle.ragged``: ``topk`` does not matter then.
    """
    w, local = shape.world_size, shape.experts_per_rank
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(w)]
    for expert in range(shape.num_experts):
        for source, routed in enumerate(routing_maps):
            rows[expert // local] += [(source, int(token), expert) for token in np.flatnonzero(routed[:, expert])]
    row_of = [{key: row for row, key in enumerate(owned)} for owned in rows]

    slots = [np.full((len(routed), w), -1, np.int32) for routed in routing_maps]
    for owner in range(w):
        next_slot = 0
        for source, routed in enumerate(routing_maps):
            for token in np.flatnonzero(routed[:, owner * local : (owner + 1) * local].any(1)):
                slots[source][token, owner] = next_slot
                next_slot += 1

    plans = []
    for rank in range(w):
        entries, offsets = _entries_of(rank, routing_maps, row_of[rank], slots, shape, ragged)
        ids = np.nonzero(routing_maps[rank])[1].astype(np.int32)
        if not ragged:
            flat, ids = ids, np.full((len(routing_maps[rank]), shape.topk), -1, np.int32)
            ids[np.arange(shape.topk) < routing_maps[rank].sum(1)[:, None]] = flat
        plans.append(RankPlan(np.array(rows[rank], np.int32).reshape(-1, 3), entries, slots[rank], ids, offsets))
    return plans


def _entries_of(
    owner: int,
    routing_maps: Sequence[np.ndarray],
    row_of: dict[tuple[int, int, int], int],
    slots: Sequence[np.ndarray],
    shape: LayoutShape,
    ragged: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Entries of rank ``owner`` by source, token, expert, and where each source's chunks begin among them."""
    local = shape.experts_per_rank
    entries: list[tuple[int, int, int]] = []
    offsets = np.zeros((shape.world_size, shape.num_chunks + 1), np.int32)
    for source, routed in enumerate(routing_maps):
        chunk_tokens = shape.chunk_tokens(len(routed), 0)
        first_places = routed.sum(1).cumsum() - routed.sum(1) if ragged else np.arange(len(routed)) * shape.topk
        for chunk in range(shape.num_chunks):
            offsets[source, chunk] = len(entries)
            for token in range(chunk * chunk_tokens, min((chunk + 1) * chunk_tokens, len(routed))):
                for nth, expert in enumerate(np.flatnonzero(routed[token])):
                    if expert // local == owner:
                        place = int(first_places[token]) + nth
                        slot = token if source == owner else int(slots[source][token, owner])
                        entries.append((row_of[source, token, int(expert)], slot, place))
        offsets[source, shape.num_chunks] = len(entries)
    return np.array(entries, np.int32).reshape(-1, 3), offsets
