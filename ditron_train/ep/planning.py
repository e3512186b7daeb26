"""Makes layouts: counts a routing map, exchanges the counts, lists what is sent where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ditron_train.ep.arguments import Destinations, Starts, Tables
from ditron_train.ep.context import EPContext
from ditron_train.ep.launch import DTYPES, Kind, check_tokens, launch, pointers
from ditron_train.ep.layout import HostCounts, Layout, Room
from ditron_train.ep.layout_kernels import count_chunks, exchange_counts, list_entries
from ditron_train.runtime.device import is_capturing
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.stream.events import current_stream


@dataclass(frozen=True)
class SentAhead:
    """Tokens that travel already, if what every rank needs fits into this room (in slots and places, and in
    entries)."""

    tokens: torch.Tensor
    slot_room: int
    entry_room: int


@dataclass
@outside_compile
class PendingLayout:
    """A layout whose counts are still on their way to the host; ``finish`` waits for them (the one host sync).

    With a capacity there is nothing to wait for: ``room`` holds the sizes. With one of each expert
    ``tokens_per_expert`` does. The epoch of the next dispatch, which the tables hold, was read behind the first
    ``moves_before`` ops that move rows (None: beside one of them, on another stream). ``padding``: see there.
    """

    context: EPContext
    num_tokens: int
    chunk_tokens: int
    hidden: int
    dtype: torch.dtype
    tables: Tables
    send_list: torch.Tensor
    dest_slots: torch.Tensor
    expert_ids: torch.Tensor
    token_places: torch.Tensor | None
    room: Room | None
    tokens_per_expert: torch.Tensor | None = None
    host_messages: torch.Tensor | None = None
    copied: torch.cuda.Event | None = None
    ahead: SentAhead | None = None
    begun_on: torch.cuda.Stream | None = None
    moves_before: int | None = None
    padding: int = 0

    @property
    def destinations(self) -> Destinations:
        """What is sent where."""
        tables = self.tables
        return Destinations(self.dest_slots, self.send_list, tables.chunk_entries, tables.list_base, tables.entry_base)

    def finish(self) -> Layout:
        """Waits for the counts, makes the buffers large enough and returns the layout.

        Raises:
            MismatchError: The ranks called it with different hidden sizes, types, experts, top-k or capacities.
            NotSupportedError: A token has more than top-k experts, or a padded routing map more than its padding
                allows; on every rank alike.
            PeerTimeoutError: A rank did not come.
            ArenaError: The buffers do not fit; on every rank alike.
        """
        context, shape = self.context, self.context.shape
        if self.room is not None:
            known = self.tokens_per_expert
            on_device = self.tables.expert_tokens[: shape.experts_per_rank]
            expert_rows = None if known is None else np.full(shape.num_experts, int(known[0]))
            return self._layout(self.room.rows, on_device if known is None else known, self.room, expert_rows)
        ahead, self.ahead = self.ahead, None
        try:
            if self.copied is not None:
                self.copied.synchronize()
            context.counts_channel.check()
            assert self.host_messages is not None, "copied where no room is given"
            host = HostCounts.from_messages(self.host_messages.numpy(), shape)
            reason = host.why_not_listed(shape, self.padding, ragged=self.token_places is not None)
            if reason is not None:
                raise NotSupportedError(f"expert parallel: {reason}")
            room = host.room(shape, self.padding)
            sent = (
                ahead is not None and room.rows <= ahead.entry_room and max(room.slots, room.places) <= ahead.slot_room
            )
            if ahead is not None and not sent:
                context.rejoin()
            context.reserve(room, int(host.tokens.sum()), self.hidden, self.dtype)
            local = slice(context.rank * shape.experts_per_rank, (context.rank + 1) * shape.experts_per_rank)
            tokens_per_expert = torch.from_numpy(host.expert_rows[local].astype("int64"))
            num_rows = int(host.rows(shape)[context.rank])
            return self._layout(
                num_rows, tokens_per_expert, room, host.expert_rows, ahead.tokens if ahead and sent else None
            )
        except Exception:
            context.rejoin()  # no op behind this one may meet what was sent ahead, nor anybody have its memory
            raise

    def _layout(
        self,
        num_rows: int,
        tokens_per_expert: torch.Tensor,
        room: Room,
        expert_rows: np.ndarray | None,
        ahead: torch.Tensor | None = None,
    ) -> Layout:
        shape, device = self.context.shape, self.context.device
        on_one_stream = device.type == "cuda" and current_stream(device) is self.begun_on
        return Layout(
            shape=shape,
            num_tokens=self.num_tokens,
            chunk_tokens=self.chunk_tokens,
            num_rows=num_rows,
            tokens_per_expert=tokens_per_expert,
            tables=self.tables,
            expert_ids=self.expert_ids,
            token_places=self.expert_ids if self.token_places is None else self.token_places,
            ragged=self.token_places is not None,
            dest_slots=self.dest_slots,
            send_list=self.send_list,
            entries=torch.empty(num_rows, 4, dtype=torch.int32, device=device),
            origins=torch.empty(num_rows, 2, dtype=torch.int32, device=device),
            slot_capacity=room.slots,
            entry_capacity=room.rows,
            place_capacity=room.places,
            ahead=ahead,
            expert_rows=expert_rows,
            kept_for=self.begun_on if on_one_stream else None,
        )


def _tables(context: EPContext) -> Tables:
    """int32 tables of one layout, carved from one allocation in steps of 16 bytes."""
    words = context.shape.table_words
    memory = torch.empty(sum(words), dtype=torch.int32, device=context.device)
    return Tables._make(torch.split(memory, words)[::2])


def _check_routing(
    routing_map: torch.Tensor, probs: torch.Tensor, dtype: torch.dtype, context: EPContext, num_places: int
) -> None:
    shape = context.shape
    if routing_map.dim() != 2 or routing_map.shape[1] != shape.num_experts or routing_map.dtype != torch.bool:
        raise NotSupportedError(
            f"routing map: needs bool [tokens, {shape.num_experts}], got {routing_map.dtype} "
            f"{tuple(routing_map.shape)}"
        )
    if probs.shape != routing_map.shape:
        raise NotSupportedError(
            f"probs: shape {tuple(probs.shape)} differs from the routing map's {tuple(routing_map.shape)}"
        )
    check_tokens("probs", probs, context)
    if dtype not in DTYPES:
        raise NotSupportedError(f"tokens: {dtype}; allowed: {', '.join(map(str, DTYPES))}")
    if num_places * 4 >= 2**31:
        raise NotSupportedError(
            f"expert parallel: {num_places} rows of {routing_map.shape[0]} tokens overflow int32 indices"
        )


@outside_compile
def begin_layout(
    routing_map: torch.Tensor,
    probs: torch.Tensor,
    hidden: int,
    dtype: torch.dtype,
    context: EPContext,
    *,
    capacity_factor: float | None = None,
    expert_capacity: int | None = None,
    padding: int = 0,
) -> PendingLayout:
    """Enqueues the counting of a routing map, the exchange of counts and the listing of what is sent.

    Args:
        routing_map: bool [num_tokens, num_experts]; at most ``topk`` True a row, any number with an
            ``expert_capacity`` or ``padding``. ``num_tokens`` may differ between ranks where there is no capacity.
        probs: [num_tokens, num_experts] of bf16, fp16 or fp32.
        hidden: Elements of a token, the same on every rank.
        dtype: Their type.
        context: Of the group.
        capacity_factor: None: exact sizes, for one host sync in ``finish``. A number: fixed sizes, so many times the
            rows of even routing, no host sync; what does not fit, and a token of more than ``topk`` experts, is
            recorded on the device and raised at the next check.
        expert_capacity: How many tokens of every rank each expert gets, exactly: the routing map is padded to it.
            Sizes are known without a host sync.
        padding: How many entries a rank's routing map has at most beyond ``topk`` for each of its tokens, where it is
            padded to whole multiples of rows an expert; the same on every rank.

    Raises:
        NotSupportedError: Shapes, types or devices that do not fit.
    """
    shape = context.shape
    num_tokens, device = routing_map.shape[0], context.device
    num_places = num_tokens * shape.topk + padding if expert_capacity is None else shape.num_experts * expert_capacity
    _check_routing(routing_map, probs, dtype, context, num_places)
    context.check()
    stream = context.counts.enter()
    moves_before = context.num_moves if context.moves.is_here() else None
    context.rejoin()  # nothing runs there, unless a layout was given up
    room, tokens_per_expert, token_places = None, None, None
    if expert_capacity is not None:
        room = context.room_of_experts(num_tokens, expert_capacity)
        of_each = shape.world_size * expert_capacity
        tokens_per_expert = torch.full((shape.experts_per_rank,), of_each, device="cpu")
        token_places = _first_places(routing_map, num_places, device)
    elif capacity_factor is not None:
        room = context.room_for(num_tokens, capacity_factor)
    elif padding:
        token_places = _first_places(routing_map, num_places, device)
    chunk_tokens = shape.chunk_tokens(num_tokens, hidden * dtype.itemsize)
    routed = routing_map.contiguous().view(torch.uint8)
    tables = _tables(context)
    block_tokens = min(chunk_tokens, max(8192 // shape.columns, 1), 16 if context.target != "interpreter" else 64)
    launch(context, count_chunks, shape.num_chunks, {"S": context.layout_sizes, "BLOCK_T": block_tokens}, 4)(
        routed, tables.chunk_counts, tables.chunk_dests, tables.chunk_widest, num_tokens, chunk_tokens
    )
    _exchange(context, tables, num_tokens, hidden, dtype, room, padding, ragged=token_places is not None)
    host: dict[str, Any] = (
        {} if room else dict(zip(("host_messages", "copied"), _copy_to_host(context.messages.local)))
    )
    lists = _list_entries(context, tables, routed, probs, token_places, num_places, chunk_tokens, block_tokens)
    if room is not None:
        context.reserve_room(room, num_tokens, hidden, dtype)
    return PendingLayout(
        context,
        num_tokens,
        chunk_tokens,
        hidden,
        dtype,
        tables,
        *lists,
        token_places,
        room,
        tokens_per_expert,
        begun_on=stream,
        moves_before=moves_before,
        padding=padding,
        **host,
    )


def _first_places(routing_map: torch.Tensor, num_places: int, device: torch.device) -> torch.Tensor:
    """int32 [num_tokens + 1]: the first place of each token, of which padding to capacity leaves some more than
    others."""
    places = torch.zeros(len(routing_map) + 1, dtype=torch.int32, device=device)
    torch.cumsum(routing_map.sum(1, dtype=torch.int32), 0, dtype=torch.int32, out=places[1:])
    return places.clamp_(max=num_places)


def _list_entries(
    context: EPContext,
    tables: Tables,
    routed: torch.Tensor,
    probs: torch.Tensor,
    token_places: torch.Tensor | None,
    num_places: int,
    chunk_tokens: int,
    block_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launches ``list_entries``; returns the list of what is sent, the slot of each token at each rank, and each
    place's expert."""
    shape, device, num_tokens = context.shape, context.device, len(routed)
    send_list = torch.empty(num_places, 4, dtype=torch.int32, device=device)
    dest_slots = torch.empty(num_tokens, shape.ranks, dtype=torch.int32, device=device)
    ids_shape = (num_places,) if token_places is not None else (num_tokens, shape.topk_lanes)
    expert_ids = torch.empty(ids_shape, dtype=torch.int32, device=device)
    starts = Starts(*(getattr(tables, name) for name in Starts._fields))
    constants = {"S": context.layout_sizes, "RAGGED": token_places is not None, "BLOCK_T": block_tokens}
    places, given = expert_ids if token_places is None else token_places, probs.detach().contiguous()
    launch(context, list_entries, shape.num_chunks, constants, 4, probs.dtype)(
        routed,
        given,
        starts,
        places,
        send_list,
        dest_slots,
        expert_ids,
        num_tokens,
        chunk_tokens,
        num_places,
        context.rank,
    )
    return send_list, dest_slots, expert_ids


def _exchange(
    context: EPContext,
    tables: Tables,
    num_tokens: int,
    hidden: int,
    dtype: torch.dtype,
    room: Room | None,
    padding: int,
    *,
    ragged: bool,
) -> None:
    """Launches ``exchange_counts``, which fills the tables; ranks that pad otherwise have another signature."""
    rows, slots, places = (room.rows, room.slots, room.places) if room else (0, 0, padding)
    messages, given = (
        context.messages,
        pointers(context, context.counts_channel, hidden, dtype, Kind.COUNTS, rows or padding),
    )
    tickets, shape = context.dispatch_channel.tickets, context.shape
    most_experts = shape.num_experts if ragged else shape.topk
    launch(context, exchange_counts, 1, {"S": context.layout_sizes, "HAS_CAPACITY": room is not None}, 8)(
        tables, messages.local, messages.addresses, given, tickets, num_tokens, rows, slots, places, most_experts
    )


def _copy_to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    if tensor.device.type != "cuda":
        return tensor.clone(), None
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event


def fewest_rows_before(context: EPContext) -> int | None:
    """Rows of the expert, of those that have some, that had fewest in an earlier layout of `context`; never waits.

    For layouts of a fixed capacity, whose counts the host does not learn: call it behind ``begin_layout``. One call
    begins to copy the last exchange's counts, the first one behind the copy's end reads them and begins anew. The copy
    stands on the current stream, in front of the start signal that lets peers write the next counts.

    Returns:
        None while nothing has arrived, and always while a CUDA graph is captured: replays are not looked at.
    """
    if is_capturing(context.device):
        return None
    begun = context.counts_on_their_way
    if begun is not None and begun[1] is not None and not begun[1].query():
        return None
    context.counts.enter()
    context.counts_on_their_way = _copy_to_host(context.messages.local)
    return None if begun is None else HostCounts.from_messages(begun[0].numpy(), context.shape).fewest_rows
