"""Makes handles (``EPHandle``): counts a routing map, exchanges the counts, lists what is sent where.

Columns of experts are padded: column ``owner * SLOTS + local`` is local expert ``local`` of rank ``owner``, with
``RANKS >= WORLD_SIZE`` and ``SLOTS >= EXPERTS_PER_RANK`` powers of two. Padding holds zeros, so ascending columns are
ascending global experts. A rank's tokens are cut into ``NUM_CHUNKS`` chunks of ``chunk_tokens`` (a power of two).
Sizes that change from step to step are not specialised on.

    device:  count_chunks -> exchange_counts (waits for every rank's message) -> list_entries -> [tokens sent ahead]
    host:                    copy of all messages ........................ finish(): waits, sizes the buffers
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.ep.context import DTYPES, EPContext, Kind, check_tokens, launch, pointers
from ditron_train.ep.handle import Destinations, EPHandle, HostCounts, Room, Starts, Tables
from ditron_train.runtime.device import is_capturing
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.stream.events import current_stream
from ditron_train.symm import control as control_layout

KIND_OVERFLOW = tl.constexpr(control_layout.KIND_OVERFLOW)
KIND_REFUSED = tl.constexpr(control_layout.KIND_REFUSED)
TICKET_UNIT_LOG2 = tl.constexpr(control_layout.TICKET_UNIT_LOG2)


@triton.jit
def _load_map(pointer, tokens, last_token, S: tl.constexpr):
    """Rows ``tokens`` of a [num_tokens, num_experts] matrix in padded columns [BLOCK, RANKS * SLOTS], 0 elsewhere."""
    lanes = tl.arange(0, S.COLUMNS)
    owner = lanes // S.SLOTS
    local = lanes % S.SLOTS
    valid = (owner < S.WORLD_SIZE) & (local < S.EXPERTS_PER_RANK)
    offsets = (
        tl.cast(tokens, tl.int64)[:, None] * (S.WORLD_SIZE * S.EXPERTS_PER_RANK)
        + (owner * S.EXPERTS_PER_RANK + local)[None, :]
    )
    return tl.load(pointer + offsets, mask=(tokens < last_token)[:, None] & valid[None, :], other=0)


@triton.jit(do_not_specialize=["num_tokens"])
def count_chunks(
    routing_map,
    chunk_counts,
    chunk_dests,
    chunk_widest,
    num_tokens,
    chunk_tokens,
    S: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Program c counts chunk c: tokens of each expert, distinct tokens of each destination rank, experts of the widest
    token.

    No program waits. Writes ``chunk_counts[c, column]``, ``chunk_dests[c, owner]``, ``chunk_widest[c]``.
    """
    chunk = tl.program_id(0)
    first = chunk * chunk_tokens
    last = tl.minimum(first + chunk_tokens, num_tokens)
    counts = tl.zeros((S.COLUMNS,), tl.int32)
    dests = tl.zeros((S.RANKS,), tl.int32)
    widest = tl.zeros((1,), tl.int32)
    for start in range(0, chunk_tokens, BLOCK_T):
        tokens = first + start + tl.arange(0, BLOCK_T)
        routed = _load_map(routing_map, tokens, last, S).to(tl.int32)
        per_rank = tl.sum(tl.reshape(routed, (BLOCK_T, S.RANKS, S.SLOTS)), axis=2)
        counts += tl.sum(routed, axis=0)
        dests += tl.sum((per_rank > 0).to(tl.int32), axis=0)
        widest = tl.maximum(widest, tl.max(tl.sum(routed, axis=1), axis=0))
    tl.store(chunk_counts + chunk * S.COLUMNS + tl.arange(0, S.COLUMNS), counts)
    tl.store(chunk_dests + chunk * S.RANKS + tl.arange(0, S.RANKS), dests)
    tl.store(chunk_widest + chunk + tl.arange(0, 1), widest)


@triton.jit
def _make_message(tables, mine, num_tokens, S: tl.constexpr):
    """Turns the counts of chunks into exclusive sums, in place, and writes the part of the message that is the same
    for every rank to ``mine``."""
    chunks = tl.arange(0, S.NUM_CHUNKS)
    ranks = tl.arange(0, S.RANKS)
    for owner in tl.static_range(S.RANKS):
        places = tables.chunk_counts + chunks[:, None] * S.COLUMNS + owner * S.SLOTS + tl.arange(0, S.SLOTS)[None, :]
        tile = tl.load(places)
        tl.store(places, tl.cumsum(tile, 0) - tile)
        tl.store(mine + owner * S.SLOTS + tl.arange(0, S.SLOTS), tl.sum(tile, axis=0))
        entries = tables.chunk_entries + owner * (S.NUM_CHUNKS + 1)
        tl.store(entries + 1 + chunks, tl.cumsum(tl.sum(tile, axis=1), 0))
        tl.store(entries + tl.arange(0, 1), tl.zeros((1,), tl.int32))
    places = tables.chunk_dests + chunks[:, None] * S.RANKS + ranks[None, :]
    tile = tl.load(places)
    tl.store(places, tl.cumsum(tile, 0) - tile)
    tl.store(mine + S.COLUMNS + ranks, tl.sum(tile, axis=0))
    tl.store(mine + S.COLUMNS + S.RANKS, tl.cast(num_tokens, tl.int32))
    tl.store(mine + S.COLUMNS + S.RANKS + 1, tl.max(tl.load(tables.chunk_widest + chunks), axis=0))


@triton.jit
def _trade_messages(mine, chunk_entries, message_addresses, channel, rank, epoch, S: tl.constexpr):
    """Sends every rank its message once it has started, and waits for theirs."""
    chunks = tl.arange(0, S.NUM_CHUNKS)
    for step in tl.static_range(S.WORLD_SIZE):
        peer = (rank + step) % S.WORLD_SIZE
        dl.verify_ready(channel.ready, channel.signature, epoch, channel.control, peer, S.WORLD_SIZE, S.TARGET)
        theirs = dl.symm_at(message_addresses, peer, tl.int32) + rank * S.MESSAGE_WORDS
        if step > 0:
            dl.putmem(theirs, mine, S.COMMON_WORDS, 0, 1, 256)
        tl.store(theirs + S.COMMON_WORDS + chunks, tl.load(chunk_entries + peer * (S.NUM_CHUNKS + 1) + 1 + chunks))
        dl.notify(dl.symm_at(channel.signals_addresses, peer, tl.int32) + rank, epoch, S.TARGET)
    for step in tl.static_range(S.WORLD_SIZE):
        peer = (rank + step) % S.WORLD_SIZE
        dl.wait(channel.signals + peer, epoch, channel.control, peer, -2, S.TARGET)


@triton.jit
def _set_no_rows(tables, S: tl.constexpr):
    """Makes the handle one without rows, so that no row is sent, awaited or multiplied."""
    chunks = tl.arange(0, S.NUM_CHUNKS)
    ranks = tl.arange(0, S.RANKS)
    slots = tl.arange(0, S.SLOTS)
    offsets = ranks[:, None] * (S.NUM_CHUNKS + 1) + chunks[None, :]
    none = tl.zeros((S.RANKS, S.NUM_CHUNKS), tl.int32)
    tl.debug_barrier()  # behind what other threads stored there
    tl.store(tables.chunk_entries + offsets, none)
    tl.store(tables.chunk_entries + offsets + 1, none)
    tl.store(tables.recv_offsets + offsets, none)
    tl.store(tables.recv_offsets + offsets + 1, none)
    tl.store(tables.expert_tokens + slots, tl.zeros((S.SLOTS,), tl.int32))
    tl.store(tables.sources + ranks[:, None] * S.SLOTS + slots[None, :], tl.zeros((S.RANKS, S.SLOTS), tl.int32))


@triton.jit
def _refuse_wide(
    tables, messages, control, counts, place_capacity, most_experts, S: tl.constexpr, HAS_CAPACITY: tl.constexpr
):
    """Makes the handle one without rows if any rank has a token of more than ``most_experts`` experts, or more rows
    than its list has places: further entries are not listed, and unwritten memory would be sent instead.

    Every rank finds the same in the messages. With HAS_CAPACITY the error is recorded, else the host raises.
    """
    ranks = tl.arange(0, S.RANKS)
    theirs = messages + ranks * S.MESSAGE_WORDS + S.COLUMNS + S.RANKS
    widest = tl.load(theirs + 1, mask=ranks < S.WORLD_SIZE, other=0)
    rows = tl.sum(counts, axis=1)
    places = tl.zeros((S.RANKS,), tl.int32) + tl.cast(place_capacity, tl.int32)
    if not HAS_CAPACITY:
        places += tl.load(theirs, mask=ranks < S.WORLD_SIZE, other=0) * S.TOPK
    is_beyond = ((widest > most_experts) | (rows > places)).to(tl.int32)
    if tl.max(is_beyond, axis=0) > 0:
        if HAS_CAPACITY:
            peer = tl.argmax(is_beyond, axis=0)
            width = tl.sum(tl.where(ranks == peer, widest, 0), axis=0)
            length = tl.sum(tl.where(ranks == peer, rows, 0), axis=0)
            is_wide = width > most_experts
            seen, bound = tl.where(is_wide, width, length), tl.where(is_wide, most_experts, place_capacity)
            dl.record_failure(control, KIND_REFUSED, peer, tl.where(is_wide, 0, 1), bound, seen)
        _set_no_rows(tables, S)


@triton.jit
def _set_limits(
    limits, messages, control, rank, totals, dests, capacities, S: tl.constexpr, HAS_CAPACITY: tl.constexpr
):
    """Writes the first four ``limits``, and records an overflow."""
    ranks = tl.arange(0, S.RANKS)
    rows_of = tl.sum(totals, axis=1)
    slots_of = tl.sum(dests, axis=0)
    row_capacity, slot_capacity, place_capacity = capacities
    if HAS_CAPACITY:
        tl.store(limits, tl.cast(row_capacity, tl.int32))
        tl.store(limits + 1, tl.cast(row_capacity, tl.int32))
        tl.store(limits + 2, tl.cast(slot_capacity, tl.int32))
        tl.store(limits + 3, tl.cast(place_capacity, tl.int32))
        columns = tl.arange(0, S.COLUMNS)
        flat = tl.reshape(totals, (S.COLUMNS,))
        for owner in tl.static_range(S.WORLD_SIZE):
            rows = tl.sum(tl.where(ranks == owner, rows_of, 0), axis=0)
            slots = tl.sum(tl.where(ranks == owner, slots_of, 0), axis=0)
            fullest = tl.argmax(tl.where(columns // S.SLOTS == owner, flat, -1), axis=0)
            if rows > row_capacity:
                dl.record_failure(control, KIND_OVERFLOW, owner, fullest % S.SLOTS, row_capacity, rows)
            if slots > slot_capacity:
                dl.record_failure(control, KIND_OVERFLOW, owner, fullest % S.SLOTS, slot_capacity, slots)
    else:
        tokens_of = tl.load(
            messages + ranks * S.MESSAGE_WORDS + S.COLUMNS + S.RANKS, mask=ranks < S.WORLD_SIZE, other=0
        )
        tl.store(limits, tl.sum(tl.where(ranks == rank, rows_of, 0), axis=0))
        tl.store(limits + 1, tl.max(rows_of, axis=0))
        tl.store(limits + 2, tl.max(slots_of, axis=0))
        tl.store(limits + 3, tl.max(tokens_of, axis=0) * S.TOPK + tl.cast(place_capacity, tl.int32))


@triton.jit
def _set_bases(tables, messages, mine, rank, S: tl.constexpr):
    """Derives ``row_base``, ``entry_base``, ``list_base`` and ``slot_base`` from all messages; returns the counts of
    every rank and column, their sums by owner and slot, and the distinct tokens of every rank at every other."""
    ranks = tl.arange(0, S.RANKS)
    columns = tl.arange(0, S.COLUMNS)
    counts = tl.load(
        messages + ranks[:, None] * S.MESSAGE_WORDS + columns[None, :], mask=(ranks < S.WORLD_SIZE)[:, None], other=0
    )
    totals = tl.reshape(tl.sum(counts, axis=0), (S.RANKS, S.SLOTS))
    before = tl.sum(tl.where((ranks < rank)[:, None], counts, 0), axis=0)
    tl.store(tables.row_base + columns, tl.reshape(tl.cumsum(totals, 1) - totals, (S.COLUMNS,)) + before)
    tl.store(tables.entry_base + ranks, tl.sum(tl.reshape(before, (S.RANKS, S.SLOTS)), axis=1))
    owned = tl.load(mine + columns)
    per_dest = tl.sum(tl.reshape(owned, (S.RANKS, S.SLOTS)), axis=1)
    tl.store(tables.list_base + ranks, tl.cumsum(per_dest, 0) - per_dest)
    dests = tl.load(
        messages + ranks[:, None] * S.MESSAGE_WORDS + S.COLUMNS + ranks[None, :],
        mask=(ranks < S.WORLD_SIZE)[:, None],
        other=0,
    )
    tl.store(tables.slot_base + ranks, tl.sum(tl.where((ranks < rank)[:, None], dests, 0), axis=0))
    return counts, totals, dests


@triton.jit(do_not_specialize=["num_tokens", "row_capacity", "slot_capacity", "place_capacity", "most_experts"])
def exchange_counts(
    tables,
    messages,
    message_addresses,
    channel,
    dispatch_tickets,
    num_tokens,
    row_capacity,
    slot_capacity,
    place_capacity,
    most_experts,
    S: tl.constexpr,
    HAS_CAPACITY: tl.constexpr,
):
    """Exchanges the counts of all ranks and derives every base and offset from them; one program.

    Turns ``chunk_counts`` and ``chunk_dests`` into exclusive sums over chunks (in place), sends this rank's message
    (counts of every column, distinct tokens of every rank, number of tokens, widest token, then the running number of
    entries for the receiver after each chunk) to every rank, waits for theirs, and writes

    - ``row_base[column]``: first row at its owner of this rank's tokens for that expert,
    - ``slot_base[d]``, ``entry_base[d]``: first slot and first entry at rank d that belong to this rank,
    - ``list_base[d]``: first entry for rank d in this rank's own list, which is grouped by destination,
    - ``chunk_entries[d, c]``: entries for rank d before chunk c (``NUM_CHUNKS + 1`` columns),
    - ``recv_offsets[s, c]``: first entry of rank s's chunk c at this rank (``NUM_CHUNKS + 1`` columns),
    - ``expert_tokens[e]``: rows of each local expert (``SLOTS`` columns),
    - ``sources[s, e]``: how many of them come from rank s,
    - ``limits``: rows here, then what every rank has room for: rows (entries), slots, places. Without HAS_CAPACITY
      these are the largest needs of any rank (``place_capacity``: places in addition to TOPK for each token); with it
      they are what was allocated, and a rank that needs more records the overflow. Then the epoch of the next
      dispatch.

    If a token of any rank has more than ``most_experts`` experts, or a rank's list has too few places, the handle is
    one without rows on every rank (``_refuse_wide``).

    Waits for every rank's start signal before its signal buffer is written (its stream has then passed the last use
    of that buffer), then for its message (release/acquire at system scope by ``notify`` and ``wait``).
    """
    epoch = dl.next_epoch(channel.tickets)
    rank = dl.rank(channel.control)
    dl.announce(channel.ready_addresses, channel.signature, epoch, rank, S.WORLD_SIZE, S.TARGET)
    chunks = tl.arange(0, S.NUM_CHUNKS)
    ranks = tl.arange(0, S.RANKS)
    mine = messages + rank * S.MESSAGE_WORDS

    _make_message(tables, mine, num_tokens, S)
    tl.debug_barrier()
    _trade_messages(mine, tables.chunk_entries, message_addresses, channel, rank, epoch, S)
    tl.debug_barrier()

    counts, totals, dests = _set_bases(tables, messages, mine, rank, S)
    columns = tl.arange(0, S.COLUMNS)
    here = tl.sum(tl.where((columns // S.SLOTS == rank)[None, :], counts, 0), axis=1)
    recv_base = tl.cumsum(here, 0) - here
    arrived = tl.load(
        messages + ranks[:, None] * S.MESSAGE_WORDS + S.COMMON_WORDS + chunks[None, :],
        mask=(ranks < S.WORLD_SIZE)[:, None],
        other=0,
    )
    places = tables.recv_offsets + ranks * (S.NUM_CHUNKS + 1)
    tl.store(places, recv_base)
    tl.store(places[:, None] + 1 + chunks[None, :], recv_base[:, None] + arrived)
    tl.store(
        tables.expert_tokens + tl.arange(0, S.SLOTS), tl.sum(tl.where((ranks == rank)[:, None], totals, 0), axis=0)
    )
    local = tl.arange(0, S.SLOTS)
    from_ranks = tl.load(
        messages + ranks[:, None] * S.MESSAGE_WORDS + rank * S.SLOTS + local[None, :],
        mask=(ranks < S.WORLD_SIZE)[:, None],
        other=0,
    )
    tl.store(tables.sources + ranks[:, None] * S.SLOTS + local[None, :], from_ranks)
    tl.store(tables.limits + 4, ((tl.load(dispatch_tickets) >> TICKET_UNIT_LOG2) + 1).to(tl.int32))
    capacities = (row_capacity, slot_capacity, place_capacity)
    _set_limits(tables.limits, messages, channel.control, rank, totals, dests, capacities, S, HAS_CAPACITY)
    _refuse_wide(tables, messages, channel.control, counts, place_capacity, most_experts, S, HAS_CAPACITY)


@triton.jit
def _store_entries(target, rows, lines, places, bits, chosen, S: tl.constexpr, BLOCK_T: tl.constexpr):
    """Writes the four words of each entry that is chosen."""
    tl.store(target, rows, mask=chosen)
    tl.store(target + 1, tl.broadcast_to(lines[:, :, None], (BLOCK_T, S.RANKS, S.SLOTS)), mask=chosen)
    tl.store(target + 2, places, mask=chosen)
    tl.store(target + 3, bits, mask=chosen)


@triton.jit(do_not_specialize=["num_tokens", "num_places", "rank"])
def list_entries(
    routing_map,
    probs,
    starts,
    token_places,
    send_list,
    dest_slots,
    expert_ids,
    num_tokens,
    chunk_tokens,
    num_places,
    rank,
    S: tl.constexpr,
    RAGGED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Program c lists what chunk c sends: one entry for each (token, expert), one slot for each (token, destination
    rank).

    ``send_list`` is grouped by destination, then ordered by token, then by expert; an entry is four int32: the row at
    the destination in [local expert, source rank, token] order, the slot where the token arrives there (for this rank
    itself, to which nothing is sent, the token), the place ``token * TOPK + j`` that its result returns to, and the
    bits of its fp32 probability. ``expert_ids[t, j]`` is token t's j-th expert, ascending (-1: none);
    ``dest_slots[t, d]`` is the token's slot at rank d (-1: not sent there). RAGGED: places are ``token_places[t] +
    j``, and ``expert_ids[place]`` is the expert.

    No program waits.
    """
    chunk = tl.program_id(0)
    first = chunk * chunk_tokens
    last = tl.minimum(first + chunk_tokens, num_tokens)
    columns = tl.arange(0, S.COLUMNS)
    ranks = tl.arange(0, S.RANKS)
    experts = tl.reshape((columns // S.SLOTS) * S.EXPERTS_PER_RANK + columns % S.SLOTS, (1, S.RANKS, S.SLOTS))
    next_row = tl.load(starts.row_base + columns) + tl.load(starts.chunk_counts + chunk * S.COLUMNS + columns)
    next_slot = tl.load(starts.slot_base + ranks) + tl.load(starts.chunk_dests + chunk * S.RANKS + ranks)
    next_entry = tl.load(starts.list_base + ranks) + tl.load(starts.chunk_entries + ranks * (S.NUM_CHUNKS + 1) + chunk)
    for start in range(0, chunk_tokens, BLOCK_T):
        tokens = first + start + tl.arange(0, BLOCK_T)
        routed = _load_map(routing_map, tokens, last, S).to(tl.int32)
        weight = _load_map(probs, tokens, last, S).to(tl.float32)
        routed3 = tl.reshape(routed, (BLOCK_T, S.RANKS, S.SLOTS))
        per_rank = tl.sum(routed3, axis=2)
        sent = (per_rank > 0).to(tl.int32)
        within = tl.cumsum(routed3, 2) - routed3
        nth = (tl.cumsum(per_rank, 1) - per_rank)[:, :, None] + within

        rows = tl.reshape(next_row[None, :] + tl.cumsum(routed, 0) - routed, (BLOCK_T, S.RANKS, S.SLOTS))
        slots = next_slot[None, :] + tl.cumsum(sent, 0) - sent
        entries = (next_entry[None, :] + tl.cumsum(per_rank, 0) - per_rank)[:, :, None] + within
        lines = tl.where(ranks[None, :] == rank, tokens[:, None], slots)  # of the buffer there, or of the tokens here
        if RAGGED:
            first_places = tl.load(token_places + tokens, mask=tokens < last, other=0)
            places = first_places[:, None, None] + nth
            chosen = (routed3 > 0) & (entries < num_places) & (places < num_places)
        else:
            places = tokens[:, None, None] * S.TOPK + nth
            chosen = (routed3 > 0) & (nth < S.TOPK) & (entries < num_places)  # of a wider token nothing is sent
        bits = tl.reshape(weight, (BLOCK_T, S.RANKS, S.SLOTS)).to(tl.int32, bitcast=True)

        _store_entries(send_list + tl.cast(entries, tl.int64) * 4, rows, lines, places, bits, chosen, S, BLOCK_T)
        inside = (tokens < last)[:, None]
        ids = places
        if not RAGGED:
            lanes = tl.arange(0, S.TOPK_LANES)
            none = tl.full((BLOCK_T, S.TOPK_LANES), -1, tl.int32)
            tl.store(expert_ids + tokens[:, None] * S.TOPK_LANES + lanes[None, :], none, mask=inside)
            tl.debug_barrier()
            ids = tokens[:, None, None] * S.TOPK_LANES + nth
        tl.store(expert_ids + ids, tl.broadcast_to(experts, (BLOCK_T, S.RANKS, S.SLOTS)), mask=chosen)
        tl.store(dest_slots + tokens[:, None] * S.RANKS + ranks[None, :], tl.where(sent > 0, slots, -1), mask=inside)
        next_row += tl.sum(routed, axis=0)
        next_slot += tl.sum(sent, axis=0)
        next_entry += tl.sum(per_rank, axis=0)


@dataclass(frozen=True)
class SentAhead:
    """Tokens that were sent ahead, provided that every rank's slots and places fit into ``slot_room``, and its entries
    into ``entry_room``."""

    tokens: torch.Tensor
    slot_room: int
    entry_room: int


@dataclass
@outside_compile
class PendingLayout:
    """A handle whose counts are still on their way to the host; ``finish`` waits for them (the one host sync).

    With a capacity there is nothing to wait for: ``room`` holds the sizes. With ``expert_capacity``,
    ``tokens_per_expert`` holds those of each expert. The tables hold the epoch of the next dispatch, which was read
    after the first ``moves_before`` ops that move rows (None: while one of them ran on another stream). ``padding``:
    as of ``begin_layout``.
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

    def finish(self) -> EPHandle:
        """Waits for the counts, makes the buffers large enough and returns the handle.

        Raises:
            MismatchError: The ranks called it with different hidden sizes, types, experts, top-k or capacities.
            NotSupportedError: A token has more than top-k experts, or a padded routing map has more entries than its
                padding allows; on every rank alike.
            PeerTimeoutError: A rank did not arrive.
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
            reason = host.unsupported_reason_listed(shape, self.padding, ragged=self.token_places is not None)
            if reason is not None:
                raise NotSupportedError(f"expert parallel: {reason}")
            room = host.room(shape, self.padding)
            sent = (
                ahead is not None and room.rows <= ahead.entry_room and max(room.slots, room.places) <= ahead.slot_room
            )
            if ahead is not None and not sent:
                context.rejoin()
            context.buffers.reserve(room, int(host.tokens.sum()), self.hidden, self.dtype)
            local = slice(context.rank * shape.experts_per_rank, (context.rank + 1) * shape.experts_per_rank)
            tokens_per_expert = torch.from_numpy(host.expert_rows[local].astype("int64"))
            num_rows = int(host.rows(shape)[context.rank])
            return self._layout(
                num_rows, tokens_per_expert, room, host.expert_rows, ahead.tokens if ahead and sent else None
            )
        except Exception:
            context.rejoin()  # later ops must not run concurrently with what was sent ahead, nor reuse its memory
            raise

    def _layout(
        self,
        num_rows: int,
        tokens_per_expert: torch.Tensor,
        room: Room,
        expert_rows: np.ndarray | None,
        ahead: torch.Tensor | None = None,
    ) -> EPHandle:
        shape, device = self.context.shape, self.context.device
        on_one_stream = device.type == "cuda" and current_stream(device) is self.begun_on
        return EPHandle(
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
    """int32 tables of one handle, parts of one allocation that are aligned to 16 bytes."""
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
        routing_map: bool [num_tokens, num_experts]; at most ``topk`` True in a row, any number with an
            ``expert_capacity`` or ``padding``. ``num_tokens`` may differ between ranks if there is no capacity.
        probs: [num_tokens, num_experts] of bf16, fp16 or fp32.
        hidden: Elements of a token, the same on every rank.
        dtype: Type of the elements.
        context: The group's context.
        capacity_factor: None: exact sizes, with one host sync in ``finish``. A number: fixed sizes, this multiple of
            the rows of even routing, without a host sync; if rows do not fit, or a token has more than ``topk``
            experts, this is recorded on the device and raised at the next check.
        expert_capacity: How many tokens of every rank each expert gets, exactly: the routing map is padded to it.
            Sizes are known without a host sync.
        padding: If the routing map is padded so that each expert has a multiple of some number of rows: the most
            entries that a rank's map has in addition to ``topk`` for each of its tokens; the same on every rank.

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
    context.rejoin()  # nothing runs on the side stream, unless a handle was never finished
    room, tokens_per_expert, token_places = None, None, None
    if expert_capacity is not None:
        room = shape.room_of_experts(num_tokens, expert_capacity)
        of_each = shape.world_size * expert_capacity
        tokens_per_expert = torch.full((shape.experts_per_rank,), of_each, device="cpu")
        token_places = _first_places(routing_map, num_places, device)
    elif capacity_factor is not None:
        room = shape.room_for(num_tokens, capacity_factor)
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
        context.buffers.reserve_room(room, num_tokens, hidden, dtype)
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
    """int32 [num_tokens + 1]: the first place of each token; after padding, tokens differ in their number of
    places."""
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
    """Launches ``exchange_counts``, which fills the tables; ranks with another padding have another signature."""
    rows, slots, places = (room.rows, room.slots, room.places) if room else (0, 0, padding)
    messages = context.messages
    given = pointers(context, context.counts_channel, hidden, dtype, Kind.COUNTS, rows or padding)
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


def min_rows_before(context: EPContext) -> int | None:
    """The fewest rows of any expert that had some, in an earlier handle of ``context``; never waits.

    For handles of a fixed capacity, whose counts the host does not learn: call it after ``begin_layout``. A call
    starts a copy of the last exchange's counts to the host; the first call after the copy has ended reads them and
    starts the next copy. The copy is on the current stream, before the start signal that lets peers write the next
    counts.

    Returns:
        None while nothing has arrived, and always while a CUDA graph is captured: replays are not observed.
    """
    if is_capturing(context.device):
        return None
    begun = context.counts_on_their_way
    if begun is not None and begun[1] is not None and not begun[1].query():
        return None
    context.counts.enter()
    context.counts_on_their_way = _copy_to_host(context.messages.local)
    return None if begun is None else HostCounts.from_messages(begun[0].numpy(), context.shape).min_rows
