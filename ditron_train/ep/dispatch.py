"""Dispatch: tokens to their experts. The kernel ``push_tokens``, or its halves ``push_ahead`` and ``place_arrived``,
and their host side.

    # equivalent, with the native order [local expert, source rank, token] of rows
    rows = all_to_all(x[token_of_row], input_split_sizes, output_split_sizes)
    rows = rows[by_expert_then_source]

    senders:    wait for start signals -> push slots and entries of chunk 0, 1, ... to every rank, flag each chunk
    receivers:                            wait for a chunk's flag -> copy each slot to its rows, probabilities too

As in ``combine``, one launch has two roles. Programs below ``NUM_SENDERS`` push over the links; the others run
concurrently and place what has arrived, chunk by chunk. Senders have the lower program ids, so they are scheduled
first, and they wait for start signals only. In the interpreter one program plays both roles (``SHARED``): it sends
everything, then receives.

A tile is ``ROWS`` rows of ``BLOCK_H`` elements. Rows that do not exist are masked, so there is no branch inside a
tile. Indices that came from a peer are bounded before they are used, so that a call that failed writes nothing outside
its buffers.

The time is that of the links, plus the start and the last chunk: docs/measurements/ep.md.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.ep.context import EPContext, Kind, TokenBuffers, check_tokens, launch, move_tile, pointers
from ditron_train.ep.handle import EPHandle
from ditron_train.ep.layout import PendingLayout, SentAhead
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile


class Placed(NamedTuple):
    """What receivers write: rows of this rank's experts, their probabilities, and the entries, by arrival and by
    row."""

    rows: torch.Tensor
    probs: torch.Tensor
    entries: torch.Tensor
    origins: torch.Tensor


class Inbox(NamedTuple):
    """What a rank's receivers read: where each chunk's entries begin, slots, entries, flags."""

    recv_offsets: torch.Tensor
    tokens: torch.Tensor
    entries: torch.Tensor
    signals: torch.Tensor
    control: torch.Tensor


class MoveSizes(NamedTuple):
    """Constants of the kernels that move tokens to the experts."""

    WITH_ENTRIES: bool
    ZERO_PROBS: bool
    WORLD_SIZE: int
    RANKS: int
    NUM_CHUNKS: int
    ROWS: int
    BLOCK_H: int
    TARGET: str
    NUM_SENDERS: int
    SHARED: bool = False


@triton.jit
def start(channel, epoch, rank, SIZES: tl.constexpr):
    """Program 0 announces this rank and compares signatures; every sender waits until all may be written to."""
    program = tl.program_id(0)
    if program == 0:
        dl.announce(channel.ready_addresses, channel.signature, epoch, rank, SIZES.WORLD_SIZE, SIZES.TARGET)
    dl.verify_peers(channel.ready, channel.signature, epoch, channel.control, rank, SIZES.WORLD_SIZE, SIZES.TARGET)
    if program < SIZES.NUM_SENDERS:
        for peer in tl.static_range(SIZES.WORLD_SIZE):
            dl.await_ready(channel.ready, epoch, channel.control, peer, SIZES.WORLD_SIZE, SIZES.TARGET)


@triton.jit
def send_entries(to, entry_addresses, chunk, entry_capacity, MOVE: tl.constexpr, BLOCK: tl.constexpr):
    """Copies one chunk's entries to each destination's list (int32, four an entry, contiguous on both sides)."""
    lanes = tl.arange(0, BLOCK)
    for peer in tl.static_range(MOVE.WORLD_SIZE):
        done = tl.load(to.chunk_entries + peer * (MOVE.NUM_CHUNKS + 1) + chunk)
        words = (tl.load(to.chunk_entries + peer * (MOVE.NUM_CHUNKS + 1) + chunk + 1) - done) * 4
        source = to.send_list + tl.cast(tl.load(to.list_base + peer) + done, tl.int64) * 4
        first = tl.load(to.entry_base + peer) + done
        target = dl.symm_at(entry_addresses, peer, tl.int32) + tl.cast(first, tl.int64) * 4
        room = (entry_capacity - first) * 4
        for start in range(0, words, BLOCK):
            offsets = start + lanes
            values = tl.load(source + offsets, mask=offsets < words)
            tl.store(target + offsets, values, mask=(offsets < words) & (offsets < room))


@triton.jit
def send_tokens(x, dest_slots, buffer_addresses, rank, first, last, hidden, slot_capacity, MOVE: tl.constexpr):
    """Reads tokens ``first .. last - 1`` once and stores each to its slot at every other rank that wants it."""
    for start in range(first, last, MOVE.ROWS):
        tokens = start + tl.arange(0, MOVE.ROWS)
        inside = tokens < last
        source = x + tl.cast(tokens, tl.int64)[:, None] * hidden
        for column in range(0, hidden, MOVE.BLOCK_H):
            offsets = column + tl.arange(0, MOVE.BLOCK_H)
            valid = inside[:, None] & (offsets < hidden)[None, :]
            tile = tl.load(source + offsets[None, :], mask=valid)
            for step in tl.static_range(1, MOVE.WORLD_SIZE):
                peer = (rank + step) % MOVE.WORLD_SIZE
                slot = tl.load(dest_slots + tokens * MOVE.RANKS + peer, mask=inside, other=-1)
                held = (slot >= 0) & (slot < slot_capacity)
                target = dl.symm_at(buffer_addresses, peer, x.dtype.element_ty)
                target += tl.cast(slot, tl.int64)[:, None] * hidden + offsets[None, :]
                tl.store(target, tile, mask=valid & held[:, None])


@triton.jit
def send_chunk(
    chunk, x, to, buffers, signal_addresses, rank, epoch, room, num_tokens, chunk_tokens, hidden, MOVE: tl.constexpr
):
    """Sends one chunk of tokens, with its entries if ``WITH_ENTRIES``, and sets flag [rank, chunk] at every rank that
    gets rows of it; ``room``: how many entries and slots every rank has room for."""
    first = chunk * chunk_tokens
    last = tl.minimum(first + chunk_tokens, num_tokens)
    if MOVE.WITH_ENTRIES:
        send_entries(to, buffers.entry_addresses, chunk, room[0], MOVE, 1024)
    send_tokens(x, to.dest_slots, buffers.token_addresses, rank, first, last, hidden, room[1], MOVE)
    for step in tl.static_range(MOVE.WORLD_SIZE):
        peer = (rank + step) % MOVE.WORLD_SIZE
        counted = to.chunk_entries + peer * (MOVE.NUM_CHUNKS + 1) + chunk
        if tl.load(counted + 1) > tl.load(counted):
            flag = dl.symm_at(signal_addresses, peer, tl.int32) + rank * MOVE.NUM_CHUNKS + chunk
            dl.notify(flag, epoch, MOVE.TARGET)


@triton.jit
def _send_chunks(x, to, buffers, channel, rank, epoch, limits, num_tokens, chunk_tokens, hidden, MOVE: tl.constexpr):
    """Sender p takes chunks p, p + NUM_SENDERS, ..."""
    flags = channel.signals_addresses
    room = (tl.load(limits + 1), tl.load(limits + 2))
    for chunk in range(tl.program_id(0), tl.cdiv(num_tokens, chunk_tokens), MOVE.NUM_SENDERS):
        send_chunk(chunk, x, to, buffers, flags, rank, epoch, room, num_tokens, chunk_tokens, hidden, MOVE)


@triton.jit
def place_rows(
    x, placed, inbox, source, rank, begin, end, hidden, num_tokens, num_rows, slot_capacity, MOVE: tl.constexpr
):
    """rows[row] = tokens[slot] for entries ``begin .. end - 1`` of rank ``source``; tokens of this rank are read from
    ``x[slot]``.

    Entries that have just arrived are kept, also by row: ``origins[row]`` is source and place.
    """
    for start in range(begin, end, MOVE.ROWS):
        index = start + tl.arange(0, MOVE.ROWS)
        inside = (index < end) & (index < num_rows)
        entry = tl.cast(index, tl.int64) * 4
        if MOVE.WITH_ENTRIES:
            row = tl.load(inbox.entries + entry, mask=inside, other=-1)
            slot = tl.load(inbox.entries + entry + 1, mask=inside, other=-1)
            place = tl.load(inbox.entries + entry + 2, mask=inside, other=-1)
            bits = tl.load(inbox.entries + entry + 3, mask=inside, other=0)
            tl.store(placed.entries + entry, row, mask=inside)
            tl.store(placed.entries + entry + 1, slot, mask=inside)
            tl.store(placed.entries + entry + 2, place, mask=inside)
            tl.store(placed.entries + entry + 3, bits, mask=inside)
        else:
            row = tl.load(placed.entries + entry, mask=inside, other=-1)
            slot = tl.load(placed.entries + entry + 1, mask=inside, other=-1)
            place = tl.load(placed.entries + entry + 2, mask=inside, other=-1)
            bits = tl.load(placed.entries + entry + 3, mask=inside, other=0)
        held = inside & (row >= 0) & (row < num_rows)
        held = held & (place >= 0) & (slot >= 0) & (slot < tl.where(source == rank, num_tokens, slot_capacity))
        prob = bits.to(tl.float32, bitcast=True)
        if MOVE.WITH_ENTRIES:
            tl.store(placed.probs + row, prob.to(placed.probs.dtype.element_ty), mask=held)
            tl.store(placed.origins + row * 2, tl.zeros_like(row) + source, mask=held)
            tl.store(placed.origins + row * 2 + 1, place, mask=held)
        read = held
        if MOVE.ZERO_PROBS:
            read = held & (prob != 0.0)
        lines = tl.where(source == rank, x, inbox.tokens) + tl.cast(slot, tl.int64)[:, None] * hidden
        target = placed.rows + tl.cast(row, tl.int64)[:, None] * hidden
        for column in range(0, hidden, MOVE.BLOCK_H):
            offsets = column + tl.arange(0, MOVE.BLOCK_H)
            narrow = (offsets < hidden)[None, :]
            tile = tl.load(lines + offsets[None, :], mask=read[:, None] & narrow, other=0.0)
            tl.store(target + offsets[None, :], tile, mask=held[:, None] & narrow)


@triton.jit
def _place_chunks(
    program, num_programs, x, placed, inbox, rank, epoch, limits, num_tokens, hidden, MOVE: tl.constexpr
):
    """Copies chunks from their slots to their rows in the order of arrival, each once its flag is set."""
    num_rows = tl.load(limits)
    slot_capacity = tl.load(limits + 2)
    for item in range(program, MOVE.WORLD_SIZE * MOVE.NUM_CHUNKS, num_programs):
        chunk = item // MOVE.WORLD_SIZE
        source = (rank + item % MOVE.WORLD_SIZE) % MOVE.WORLD_SIZE
        begin = tl.load(inbox.recv_offsets + source * (MOVE.NUM_CHUNKS + 1) + chunk)
        end = tl.load(inbox.recv_offsets + source * (MOVE.NUM_CHUNKS + 1) + chunk + 1)
        if end > begin:
            flag = inbox.signals + source * MOVE.NUM_CHUNKS + chunk
            dl.wait(flag, epoch, inbox.control, source, chunk, MOVE.TARGET)
        place_rows(x, placed, inbox, source, rank, begin, end, hidden, num_tokens, num_rows, slot_capacity, MOVE)


@triton.jit(do_not_specialize=["num_tokens"])
def push_tokens(
    x, placed, to, recv_offsets, buffers, channel, limits, num_tokens, chunk_tokens, hidden, MOVE: tl.constexpr
):
    """rows[row(t, e)] = x[t] for every (token, expert), where row(t, e) is at the expert's rank.

    Senders read each token once, store it to its slot at every other rank that has one of its experts (ascending
    tokens: consecutive stores leave over different links) and set a flag there, chunk by chunk.
    WITH_ENTRIES also sends the chunk's entries (the first dispatch of a handle); without, receivers use the entries
    that they kept. Receivers copy from slot to row (``rows[row] = tokens[slot]``; this rank's own tokens directly from
    ``x``) and set ``probs[row] = probability``. ZERO_PROBS writes zeros to rows whose probability is 0, as the fused
    native permutation does.

    Waits: senders, before their first store, for every rank's start signal; receivers for a chunk's flag (acquire)
    before they read its entries or slots. A chunk without entries for a rank sets no flag there and is not waited for.
    """
    program = tl.program_id(0)
    epoch = dl.next_epoch(channel.tickets)
    rank = dl.rank(channel.control)
    start(channel, epoch, rank, MOVE)
    if program < MOVE.NUM_SENDERS:
        _send_chunks(x, to, buffers, channel, rank, epoch, limits, num_tokens, chunk_tokens, hidden, MOVE)
    if MOVE.SHARED or program >= MOVE.NUM_SENDERS:
        first: tl.constexpr = 0 if MOVE.SHARED else MOVE.NUM_SENDERS
        inbox = Inbox(recv_offsets, buffers.tokens, buffers.entries, channel.signals, channel.control)
        receiver = program - first
        num_receivers = tl.num_programs(0) - first
        _place_chunks(receiver, num_receivers, x, placed, inbox, rank, epoch, limits, num_tokens, hidden, MOVE)


@triton.jit(do_not_specialize=["num_tokens", "slot_room", "entry_room"])
def push_ahead(
    x, to, buffers, channel, limits, num_tokens, chunk_tokens, hidden, slot_room, entry_room, MOVE: tl.constexpr
):
    """The senders of ``push_tokens`` alone, before the host knows any size: ``place_arrived`` follows once it does.

    Sends nothing if any rank has more slots, places or entries than the buffers hold (``slot_room`` slots and places,
    ``entry_room`` entries). ``limits`` is the same on every rank, and the host will decide by the same numbers.
    """
    epoch = dl.next_epoch(channel.tickets)
    rank = dl.rank(channel.control)
    start(channel, epoch, rank, MOVE)
    if (tl.load(limits + 1) <= entry_room) & (tl.maximum(tl.load(limits + 2), tl.load(limits + 3)) <= slot_room):
        _send_chunks(x, to, buffers, channel, rank, epoch, limits, num_tokens, chunk_tokens, hidden, MOVE)


@triton.jit(do_not_specialize=["num_tokens"])
def place_arrived(x, placed, inbox, limits, num_tokens, hidden, MOVE: tl.constexpr):
    """The receivers of ``push_tokens`` alone, concurrent with this rank's ``push_ahead``, whose epoch is in
    ``limits``."""
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    rank = dl.rank(inbox.control)
    epoch = tl.load(limits + 4)
    _place_chunks(program, num_programs, x, placed, inbox, rank, epoch, limits, num_tokens, hidden, MOVE)


def move_sizes(
    context: EPContext, hidden: int, elements: int, *, with_entries: bool = True, zero_probs: bool = False
) -> MoveSizes:
    """Constants of a kernel that moves tokens of ``hidden`` elements, about ``elements`` at a time."""
    shape, (rows, columns) = context.shape, move_tile(hidden, elements)
    is_shared = context.target == "interpreter"
    return MoveSizes(
        with_entries,
        zero_probs,
        shape.world_size,
        shape.ranks,
        shape.num_chunks,
        rows,
        columns,
        context.target,
        context.senders("dispatch", hidden),
        is_shared,
    )


@outside_compile
def dispatch(
    x: torch.Tensor,
    handle: EPHandle,
    context: EPContext,
    *,
    probs_dtype: torch.dtype = torch.float32,
    zero_probs: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sends tokens to their experts: a token is sent once to each rank, and copied to its experts there.

    Args:
        x: [num_tokens, hidden].
        handle: Handle of the routing. The first dispatch of a handle sends the probabilities, too, later ones only
            rows.
        context: The group's context.
        probs_dtype: Type of the returned probabilities.
        zero_probs: Whether rows of probability 0 are zero, as the fused native permutation writes them.

    Returns:
        rows [num_rows, hidden] by local expert, source rank, token; their probabilities [num_rows], or None if this is
        not the handle's first dispatch.

    Raises:
        NotSupportedError: Shape, type or device does not fit.
        PeerTimeoutError, MismatchError: An earlier call failed.
    """
    try:
        return _dispatch(x, handle, context, probs_dtype, zero_probs)
    except BaseException:  # no memory for the rows, say: the side stream must not outlive what it sends ahead
        context.rejoin()
        raise


def _dispatch(
    x: torch.Tensor, handle: EPHandle, context: EPContext, probs_dtype: torch.dtype, zero_probs: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    check_tokens("dispatch", x, context)
    if x.shape[0] != handle.num_tokens:
        raise NotSupportedError(f"dispatch: {x.shape[0]} tokens, the handle has {handle.num_tokens}")
    channel, tables = context.dispatch_channel, handle.tables
    context.enter_move(channel, handle)
    hidden, first = x.shape[1], handle.send_list is not None
    x = x.contiguous()
    out = torch.empty(handle.num_rows, hidden, dtype=x.dtype, device=x.device)
    out_probs = torch.empty(handle.num_rows if first else 0, dtype=probs_dtype, device=x.device)
    buffers = context.buffers.token_buffers(handle.slot_capacity, handle.entry_capacity, hidden, x.dtype)
    placed = Placed(out, out_probs, handle.entries, handle.origins)
    if handle.ahead is not None:
        assert handle.ahead.data_ptr() == x.data_ptr() and handle.ahead.shape == x.shape, (
            "other tokens were sent ahead"
        )
        _place_ahead(x, handle, context, placed, buffers, zero_probs=zero_probs)
    else:
        kind = Kind.DISPATCH if first else Kind.DISPATCH_GRAD
        sizes = move_sizes(context, hidden, context.move.push_elements, with_entries=first, zero_probs=zero_probs)
        given = pointers(context, channel, hidden, x.dtype, kind)
        sizes_of_call = (handle.num_tokens, handle.chunk_tokens, hidden)
        launch(
            context,
            push_tokens,
            context.move.num_programs,
            {"MOVE": sizes},
            context.move.num_warps,
            x.dtype,
            probs_dtype,
        )(x, placed, handle.destinations, tables.recv_offsets, buffers, given, tables.limits, *sizes_of_call)
    handle.send_list = handle.ahead = None
    return out, out_probs if first else None


def _place_ahead(
    x: torch.Tensor, handle: EPHandle, context: EPContext, placed: Placed, buffers: TokenBuffers, *, zero_probs: bool
) -> None:
    """Copies tokens that were sent ahead, and those of this rank, to their rows; the senders may still be running."""
    channel, tables, hidden, move = context.dispatch_channel, handle.tables, x.shape[1], context.move
    sizes = move_sizes(context, hidden, move.push_elements, zero_probs=zero_probs)
    inbox = Inbox(tables.recv_offsets, buffers.tokens, buffers.entries, channel.signals.local, channel.control)
    num_programs, dtypes = max(move.num_programs - sizes.NUM_SENDERS, 1), (x.dtype, placed.probs.dtype)
    launch(context, place_arrived, num_programs, {"MOVE": sizes}, move.num_warps, *dtypes)(
        x, placed, inbox, tables.limits, handle.num_tokens, hidden
    )
    context.rejoin()


@outside_compile
def dispatch_ahead(x: torch.Tensor, pending: PendingLayout) -> None:
    """Sends the tokens of a handle on the side stream before the host knows its sizes; ``dispatch`` then only places
    them.

    They are sent while the host waits for the counts and prepares what follows (docs/measurements/ep.md). If the
    buffers turn out too small nothing is sent, and ``dispatch`` does everything. The same holds if rows were moved
    since ``begin_layout``, or last on another stream, since the epoch in the handle's tables may then not be that of
    the next dispatch. The handle must be finished, and dispatched with the same ``x``, before any other op of the
    context.

    Args:
        x: [num_tokens, hidden] of the routing; nothing happens unless it is contiguous, or before the buffers exist.
        pending: A handle with exact sizes.

    Raises:
        NotSupportedError: As ``dispatch``.
        PeerTimeoutError, MismatchError: An earlier call failed.
    """
    context, tables = pending.context, pending.tables
    check_tokens("dispatch_ahead", x, context)
    if x.shape != (pending.num_tokens, pending.hidden) or x.dtype != pending.dtype:
        raise NotSupportedError(f"dispatch_ahead: {x.dtype} {tuple(x.shape)} are not the layout's tokens")
    slot_room, entry_room = context.buffers.room_now(pending.hidden, x.dtype)
    if pending.room is not None or not x.is_contiguous() or not slot_room or not entry_room:
        return
    if pending.moves_before != context.num_moves:
        return
    channel, move, hidden = context.dispatch_channel, context.move, pending.hidden
    context.enter_move(channel)
    buffers = context.buffers.token_buffers(slot_room, entry_room, hidden, x.dtype)
    sizes = move_sizes(context, hidden, move.push_elements)
    given = pointers(context, channel, hidden, x.dtype, Kind.DISPATCH)
    sizes_of_call = (pending.num_tokens, pending.chunk_tokens, hidden, slot_room, entry_room)
    push = launch(context, push_ahead, sizes.NUM_SENDERS, {"MOVE": sizes}, move.num_warps, x.dtype)
    stream = context.fork()
    try:
        push(x, pending.destinations, buffers, given, tables.limits, *sizes_of_call, stream=stream)
    except BaseException:  # no memory, a kernel that does not compile
        context.join()
        raise
    pending.ahead = SentAhead(x, slot_room, entry_room)
