"""Kernels that move tokens to the experts: ``push_tokens``, or its halves ``push_ahead`` and ``place_arrived``.

As in ``return_kernels``, one launch has two roles. Programs below ``NUM_SENDERS`` push over the links; the others,
which start beside them, work on what has arrived, chunk by chunk. Senders have the lower program ids, so they are
placed first, and wait for nobody but start signals. In the interpreter one program plays both roles (``SHARED``): it
sends everything, then receives.

A tile is ``ROWS`` rows of ``BLOCK_H`` elements. Rows that do not exist are masked: no branch inside a tile. Indices
that came from a peer are bounded before they are used, so that a call that failed writes nothing outside its buffers.

Seen on 4 x H200, 8192 tokens of 14 KiB a rank, 320 MB over the links (0.87 ms at their speed): 1.05 ms. The links, the
start and the last chunk are what is left: own tokens not sent to oneself, the next tile loaded ahead, one fence for
the flags of all ranks, tiles of 8, 16 or 32 Ki elements, 8 or 16 warps all gave 1.02-1.07 ms, 20 senders 1.05, 12
senders 1.11.
"""

import triton
import triton.language as tl

import ditron_train.lang as dl

__all__ = ["place_arrived", "place_rows", "push_ahead", "push_tokens", "send_entries", "send_tokens", "start"]


@triton.jit
def start(
    ready, ready_addresses, signature, control, epoch, rank, NUM_SENDERS: tl.constexpr, WORLD_SIZE: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """Program 0 announces this rank and compares signatures; every sender waits until all may be written to."""
    program = tl.program_id(0)
    if program == 0:
        dl.announce(ready_addresses, signature, epoch, rank, WORLD_SIZE, TARGET)
    dl.verify_peers(ready, signature, epoch, control, rank, WORLD_SIZE, TARGET)
    if program < NUM_SENDERS:
        for peer in tl.static_range(WORLD_SIZE):
            dl.await_ready(ready, epoch, control, peer, WORLD_SIZE, TARGET)


@triton.jit
def send_entries(
    send_list, chunk_entries, list_base, entry_base, entry_addresses, chunk, entry_capacity,
    WORLD_SIZE: tl.constexpr, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies one chunk's entries to each destination's list (int32, four an entry, contiguous on both sides)."""
    lanes = tl.arange(0, BLOCK)
    for peer in tl.static_range(WORLD_SIZE):
        done = tl.load(chunk_entries + peer * (NUM_CHUNKS + 1) + chunk)
        words = (tl.load(chunk_entries + peer * (NUM_CHUNKS + 1) + chunk + 1) - done) * 4
        source = send_list + tl.cast(tl.load(list_base + peer) + done, tl.int64) * 4
        first = tl.load(entry_base + peer) + done
        target = dl.symm_at(entry_addresses, peer, tl.int32) + tl.cast(first, tl.int64) * 4
        room = (entry_capacity - first) * 4
        for start in range(0, words, BLOCK):
            offsets = start + lanes
            values = tl.load(source + offsets, mask=offsets < words)
            tl.store(target + offsets, values, mask=(offsets < words) & (offsets < room))


@triton.jit
def send_tokens(
    x, dest_slots, buffer_addresses, rank, first, last, hidden, slot_capacity,
    WORLD_SIZE: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Reads tokens ``first .. last - 1`` once and stores each to its slot at every other rank that wants it."""
    for start in range(first, last, ROWS):
        tokens = start + tl.arange(0, ROWS)
        inside = tokens < last
        source = x + tl.cast(tokens, tl.int64)[:, None] * hidden
        for column in range(0, hidden, BLOCK_H):
            offsets = column + tl.arange(0, BLOCK_H)
            valid = inside[:, None] & (offsets < hidden)[None, :]
            tile = tl.load(source + offsets[None, :], mask=valid)
            for step in tl.static_range(1, WORLD_SIZE):
                peer = (rank + step) % WORLD_SIZE
                slot = tl.load(dest_slots + tokens * RANKS + peer, mask=inside, other=-1)
                held = (slot >= 0) & (slot < slot_capacity)
                target = dl.symm_at(buffer_addresses, peer, x.dtype.element_ty)
                target += tl.cast(slot, tl.int64)[:, None] * hidden + offsets[None, :]
                tl.store(target, tile, mask=valid & held[:, None])


@triton.jit
def place_rows(
    x, buffer, out, out_probs, arrived, kept, origins, source, rank, begin, end, hidden, num_tokens, num_rows, slot_capacity,
    WITH_ENTRIES: tl.constexpr, ZERO_PROBS: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out[row] = buffer[slot] for entries ``begin .. end - 1`` of rank ``source``; own rows are ``x[slot]``.

    Where the entries have just arrived they are kept, also by row: ``origins[row]`` is source and place.
    """
    for start in range(begin, end, ROWS):
        index = start + tl.arange(0, ROWS)
        inside = (index < end) & (index < num_rows)
        entry = tl.cast(index, tl.int64) * 4
        if WITH_ENTRIES:
            row = tl.load(arrived + entry, mask=inside, other=-1)
            slot = tl.load(arrived + entry + 1, mask=inside, other=-1)
            place = tl.load(arrived + entry + 2, mask=inside, other=-1)
            bits = tl.load(arrived + entry + 3, mask=inside, other=0)
            tl.store(kept + entry, row, mask=inside)
            tl.store(kept + entry + 1, slot, mask=inside)
            tl.store(kept + entry + 2, place, mask=inside)
            tl.store(kept + entry + 3, bits, mask=inside)
        else:
            row = tl.load(kept + entry, mask=inside, other=-1)
            slot = tl.load(kept + entry + 1, mask=inside, other=-1)
            place = tl.load(kept + entry + 2, mask=inside, other=-1)
            bits = tl.load(kept + entry + 3, mask=inside, other=0)
        held = inside & (row >= 0) & (row < num_rows)
        held = held & (place >= 0) & (slot >= 0) & (slot < tl.where(source == rank, num_tokens, slot_capacity))
        prob = bits.to(tl.float32, bitcast=True)
        if WITH_ENTRIES:
            tl.store(out_probs + row, prob.to(out_probs.dtype.element_ty), mask=held)
            tl.store(origins + row * 2, tl.zeros_like(row) + source, mask=held)
            tl.store(origins + row * 2 + 1, place, mask=held)
        read = held
        if ZERO_PROBS:
            read = held & (prob != 0.0)
        lines = tl.where(source == rank, x, buffer) + tl.cast(slot, tl.int64)[:, None] * hidden
        target = out + tl.cast(row, tl.int64)[:, None] * hidden
        for column in range(0, hidden, BLOCK_H):
            offsets = column + tl.arange(0, BLOCK_H)
            narrow = (offsets < hidden)[None, :]
            tile = tl.load(lines + offsets[None, :], mask=read[:, None] & narrow, other=0.0)
            tl.store(target + offsets[None, :], tile, mask=held[:, None] & narrow)


@triton.jit
def _send_chunks(
    x, dest_slots, send_list, chunk_entries, list_base, entry_base, buffer_addresses, entry_addresses, signal_addresses, rank,
    epoch, limits, num_tokens, chunk_tokens, hidden, WITH_ENTRIES: tl.constexpr, WORLD_SIZE: tl.constexpr,
    RANKS: tl.constexpr, NUM_CHUNKS: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, NUM_SENDERS: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """Sender p takes chunks p, p + NUM_SENDERS, ..., and sets flag [rank, chunk] at every rank that gets rows of
    one."""
    entry_capacity = tl.load(limits + 1)
    slot_capacity = tl.load(limits + 2)
    for chunk in range(tl.program_id(0), tl.cdiv(num_tokens, chunk_tokens), NUM_SENDERS):
        first = chunk * chunk_tokens
        last = tl.minimum(first + chunk_tokens, num_tokens)
        if WITH_ENTRIES:
            send_entries(
                send_list, chunk_entries, list_base, entry_base, entry_addresses, chunk, entry_capacity, WORLD_SIZE,
                NUM_CHUNKS, 1024,
            )  # fmt: skip
        send_tokens(
            x, dest_slots, buffer_addresses, rank, first, last, hidden, slot_capacity, WORLD_SIZE, RANKS, ROWS, BLOCK_H
        )
        for step in tl.static_range(WORLD_SIZE):
            peer = (rank + step) % WORLD_SIZE
            counted = chunk_entries + peer * (NUM_CHUNKS + 1) + chunk
            if tl.load(counted + 1) > tl.load(counted):
                dl.notify(dl.symm_at(signal_addresses, peer, tl.int32) + rank * NUM_CHUNKS + chunk, epoch, TARGET)


@triton.jit
def _place_chunks(
    program, num_programs, x, out, out_probs, kept, origins, recv_offsets, buffer, arrived, signals, control, rank, epoch,
    limits, num_tokens, hidden, WITH_ENTRIES: tl.constexpr, ZERO_PROBS: tl.constexpr,
    WORLD_SIZE: tl.constexpr, NUM_CHUNKS: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Copies chunks from their slots to their rows in the order of arrival, each once its flag is set."""
    num_rows = tl.load(limits)
    slot_capacity = tl.load(limits + 2)
    for item in range(program, WORLD_SIZE * NUM_CHUNKS, num_programs):
        chunk = item // WORLD_SIZE
        source = (rank + item % WORLD_SIZE) % WORLD_SIZE
        begin = tl.load(recv_offsets + source * (NUM_CHUNKS + 1) + chunk)
        end = tl.load(recv_offsets + source * (NUM_CHUNKS + 1) + chunk + 1)
        if end > begin:
            dl.wait(signals + source * NUM_CHUNKS + chunk, epoch, control, source, chunk, TARGET)
        place_rows(
            x, buffer, out, out_probs, arrived, kept, origins, source, rank, begin, end, hidden, num_tokens, num_rows,
            slot_capacity, WITH_ENTRIES, ZERO_PROBS, ROWS, BLOCK_H,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def push_tokens(
    x, out, out_probs, kept, origins, dest_slots, send_list, chunk_entries, list_base, entry_base, recv_offsets,
    buffer, buffer_addresses, arrived, entry_addresses, signals, signal_addresses, ready, ready_addresses,
    signature, tickets, control, limits, num_tokens, chunk_tokens, hidden,
    WITH_ENTRIES: tl.constexpr, ZERO_PROBS: tl.constexpr, WORLD_SIZE: tl.constexpr, RANKS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, NUM_SENDERS: tl.constexpr,
    SHARED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """out[row(t, e)] = x[t] for every (token, expert), where row(t, e) is at the expert's rank.

    Senders read each token once, store it to its slot at every other rank that has one of its experts (ascending
    tokens: consecutive stores leave over different links) and set a flag there, chunk by chunk.
    WITH_ENTRIES sends the chunk's entries along (the first dispatch of a layout); without, receivers use the entries
    that they kept. Receivers copy from slot to row (``out[row] = buffer[slot]``; this rank's own tokens straight from
    ``x``) and set ``out_probs[row] = probability``.
    ZERO_PROBS writes zeros to rows whose probability is 0 (what the fused native permutation does).

    Waits: senders, before their first store, for every rank's start signal; receivers for a chunk's flag (acquire)
    before they read its entries or slots. A chunk without entries for a rank sets no flag there and is not waited for.
    """
    program = tl.program_id(0)
    epoch = dl.next_epoch(tickets)
    rank = dl.rank(control)
    start(ready, ready_addresses, signature, control, epoch, rank, NUM_SENDERS, WORLD_SIZE, TARGET)
    if program < NUM_SENDERS:
        _send_chunks(
            x, dest_slots, send_list, chunk_entries, list_base, entry_base, buffer_addresses, entry_addresses,
            signal_addresses, rank, epoch, limits, num_tokens, chunk_tokens, hidden, WITH_ENTRIES, WORLD_SIZE, RANKS,
            NUM_CHUNKS, ROWS, BLOCK_H, NUM_SENDERS, TARGET,
        )  # fmt: skip
    if SHARED or program >= NUM_SENDERS:
        first_receiver: tl.constexpr = 0 if SHARED else NUM_SENDERS
        _place_chunks(
            program - first_receiver, tl.num_programs(0) - first_receiver, x, out, out_probs, kept, origins, recv_offsets,
            buffer, arrived, signals, control, rank, epoch, limits, num_tokens, hidden, WITH_ENTRIES, ZERO_PROBS,
            WORLD_SIZE, NUM_CHUNKS, ROWS, BLOCK_H, TARGET,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "slot_room", "entry_room"])
def push_ahead(
    x, dest_slots, send_list, chunk_entries, list_base, entry_base, buffer_addresses, entry_addresses, signal_addresses,
    ready, ready_addresses, signature, tickets, control, limits, num_tokens, chunk_tokens, hidden, slot_room, entry_room,
    WORLD_SIZE: tl.constexpr, RANKS: tl.constexpr, NUM_CHUNKS: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
    NUM_SENDERS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """The senders of ``push_tokens`` alone, before the host knows any size: ``place_arrived`` follows once it does.

    Sends nothing where slots, places or entries of any rank are more than the buffers hold (``slot_room`` slots and
    places, ``entry_room`` entries): ``limits`` says so on every rank alike, and so will the host.
    """
    epoch = dl.next_epoch(tickets)
    rank = dl.rank(control)
    start(ready, ready_addresses, signature, control, epoch, rank, NUM_SENDERS, WORLD_SIZE, TARGET)
    if (tl.load(limits + 1) <= entry_room) & (tl.maximum(tl.load(limits + 2), tl.load(limits + 3)) <= slot_room):
        _send_chunks(
            x, dest_slots, send_list, chunk_entries, list_base, entry_base, buffer_addresses, entry_addresses,
            signal_addresses, rank, epoch, limits, num_tokens, chunk_tokens, hidden, True, WORLD_SIZE, RANKS, NUM_CHUNKS,
            ROWS, BLOCK_H, NUM_SENDERS, TARGET,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def place_arrived(
    x, out, out_probs, kept, origins, recv_offsets, buffer, arrived, signals, control, limits, num_tokens, hidden,
    ZERO_PROBS: tl.constexpr, WORLD_SIZE: tl.constexpr, NUM_CHUNKS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """The receivers of ``push_tokens`` alone, beside this rank's ``push_ahead``, whose epoch ``limits`` holds."""
    _place_chunks(
        tl.program_id(0), tl.num_programs(0), x, out, out_probs, kept, origins, recv_offsets, buffer, arrived, signals, control,
        dl.rank(control), tl.load(limits + 4), limits, num_tokens, hidden, True, ZERO_PROBS, WORLD_SIZE, NUM_CHUNKS,
        ROWS, BLOCK_H, TARGET,
    )  # fmt: skip
