"""Kernels that move tokens: ``push_tokens`` (to the experts) and ``return_rows`` (back, with the sum over experts).

Both are one launch with two roles. Programs below ``NUM_SENDERS`` push over the links; the others, which start beside
them, work on what has arrived, chunk by chunk. Senders have the lower program ids, so they are placed first, and wait for
nobody but start signals. In the interpreter one program plays both roles (``SHARED``): it sends everything, then receives.

A tile is ``ROWS`` rows of ``BLOCK_H`` elements. Rows that do not exist are masked: no branch inside a tile. Indices that
came from a peer are bounded before they are used, so that a call that failed writes nothing outside its buffers.
"""

import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.symm import control as control_layout

TICKET_UNIT_LOG2 = tl.constexpr(control_layout.TICKET_UNIT_LOG2)

__all__ = [
    "place_rows",
    "push_tokens",
    "return_rows",
    "scatter_grads",
    "send_entries",
    "send_tokens",
    "sum_returned",
    "sum_rows",
]


@triton.jit
def _start(
    ready, ready_addresses, signature, control, epoch, rank, NUM_SENDERS: tl.constexpr, WORLD_SIZE: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """Program 0 announces this rank and compares signatures; every sender waits until all may be written to."""
    program = tl.program_id(0)
    if program == 0:
        dl.announce(ready_addresses, signature, epoch, rank, WORLD_SIZE, TARGET)
        for step in tl.static_range(WORLD_SIZE):
            dl.verify_ready(ready, signature, epoch, control, (rank + step) % WORLD_SIZE, WORLD_SIZE, TARGET)
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
    WITH_ENTRIES: tl.constexpr, ZERO_PROBS: tl.constexpr, TOPK: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out[row] = buffer[slot] for entries ``begin .. end - 1`` of rank ``source``; own rows come from ``x`` itself.

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
        line = tl.where(source == rank, place // TOPK, slot)
        held = inside & (row >= 0) & (row < num_rows)
        held = held & (place >= 0) & (line >= 0) & (line < tl.where(source == rank, num_tokens, slot_capacity))
        prob = bits.to(tl.float32, bitcast=True)
        if WITH_ENTRIES:
            tl.store(out_probs + row, prob.to(out_probs.dtype.element_ty), mask=held)
            tl.store(origins + row * 2, tl.zeros_like(row) + source, mask=held)
            tl.store(origins + row * 2 + 1, place, mask=held)
        read = held
        if ZERO_PROBS:
            read = held & (prob != 0.0)
        lines = tl.where(source == rank, x, buffer) + tl.cast(line, tl.int64)[:, None] * hidden
        target = out + tl.cast(row, tl.int64)[:, None] * hidden
        for column in range(0, hidden, BLOCK_H):
            offsets = column + tl.arange(0, BLOCK_H)
            narrow = (offsets < hidden)[None, :]
            tile = tl.load(lines + offsets[None, :], mask=read[:, None] & narrow, other=0.0)
            tl.store(target + offsets[None, :], tile, mask=held[:, None] & narrow)


@triton.jit(do_not_specialize=["num_tokens"])
def push_tokens(
    x, out, out_probs, kept, origins, dest_slots, send_list, chunk_entries, list_base, entry_base, recv_offsets,
    buffer, buffer_addresses, arrived, entry_addresses, signals, signal_addresses, ready, ready_addresses,
    signature, tickets, control, limits, num_tokens, chunk_tokens, hidden,
    WITH_ENTRIES: tl.constexpr, ZERO_PROBS: tl.constexpr, TOPK: tl.constexpr, WORLD_SIZE: tl.constexpr, RANKS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, NUM_SENDERS: tl.constexpr,
    SHARED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """out[row(t, e)] = x[t] for every (token, expert), where row(t, e) is at the expert's rank.

    Sender p takes chunks p, p + NUM_SENDERS, ...: reads each token once, stores it to its slot at every other rank that has
    one of its experts (ascending tokens: consecutive stores leave over different links), then sets flag [rank, chunk] there.
    WITH_ENTRIES sends the chunk's entries along (the first dispatch of a layout); without, receivers use the entries that
    they kept. Receivers copy from slot to row (``out[row] = buffer[slot]``; this rank's own tokens straight from ``x``) and
    set ``out_probs[row] = probability``.
    ZERO_PROBS writes zeros to rows whose probability is 0 (what the fused native permutation does).

    Waits: senders, before their first store, for every rank's start signal; receivers for a chunk's flag (acquire) before
    they read its entries or slots. A chunk without entries for a rank sets no flag there and is not waited for.
    """
    program = tl.program_id(0)
    epoch = dl.next_epoch(tickets)
    rank = dl.rank(control)
    num_rows = tl.load(limits)
    entry_capacity = tl.load(limits + 1)
    slot_capacity = tl.load(limits + 2)
    _start(ready, ready_addresses, signature, control, epoch, rank, NUM_SENDERS, WORLD_SIZE, TARGET)
    if program < NUM_SENDERS:
        for chunk in range(program, tl.cdiv(num_tokens, chunk_tokens), NUM_SENDERS):
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
    if SHARED or program >= NUM_SENDERS:
        first_receiver: tl.constexpr = 0 if SHARED else NUM_SENDERS
        num_receivers = tl.num_programs(0) - first_receiver
        for item in range(program - first_receiver, WORLD_SIZE * NUM_CHUNKS, num_receivers):
            chunk = item // WORLD_SIZE
            source = (rank + item % WORLD_SIZE) % WORLD_SIZE
            begin = tl.load(recv_offsets + source * (NUM_CHUNKS + 1) + chunk)
            end = tl.load(recv_offsets + source * (NUM_CHUNKS + 1) + chunk + 1)
            if end > begin:
                dl.wait(signals + source * NUM_CHUNKS + chunk, epoch, control, source, chunk, TARGET)
            place_rows(
                x, buffer, out, out_probs, arrived, kept, origins, source, rank, begin, end, hidden, num_tokens, num_rows,
                slot_capacity, WITH_ENTRIES, ZERO_PROBS, TOPK, ROWS, BLOCK_H,
            )  # fmt: skip


@triton.jit
def _send_rows(
    y, row_grads, kept, begin, end, target, grad_target, hidden, num_rows, place_capacity,
    WITH_GRADS: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """target[place] = y[row] for entries ``begin .. end - 1``, all of one source rank."""
    for start in range(begin, end, ROWS):
        index = start + tl.arange(0, ROWS)
        inside = (index < end) & (index < num_rows)
        entry = tl.cast(index, tl.int64) * 4
        row = tl.load(kept + entry, mask=inside, other=-1)
        place = tl.load(kept + entry + 2, mask=inside, other=-1)
        held = inside & (row >= 0) & (row < num_rows) & (place >= 0) & (place < place_capacity)
        if WITH_GRADS:
            grad = tl.load(row_grads + row, mask=held, other=0.0)
            tl.store(grad_target + place, grad.to(tl.float32), mask=held)
        for column in range(0, hidden, BLOCK_H):
            offsets = column + tl.arange(0, BLOCK_H)
            valid = held[:, None] & (offsets < hidden)[None, :]
            tile = tl.load(y + tl.cast(row, tl.int64)[:, None] * hidden + offsets[None, :], mask=valid)
            tl.store(target + tl.cast(place, tl.int64)[:, None] * hidden + offsets[None, :], tile, mask=valid)


@triton.jit
def sum_rows(
    buffer, out, expert_ids, first, last, hidden, TOPK: tl.constexpr, TOPK_LANES: tl.constexpr,
    ROUND_EACH: tl.constexpr, DESCENDING: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out[t] = ((0 + r_0) + r_1) + ..., r_j token t's rows by expert, ascending or descending.

    In fp32 with one rounding at the end, or (ROUND_EACH) rounded to the rows' type after every addition.
    """
    dtype = out.dtype.element_ty
    for start in range(first, last, ROWS):
        tokens = start + tl.arange(0, ROWS)
        inside = tokens < last
        for column in range(0, hidden, BLOCK_H):
            offsets = column + tl.arange(0, BLOCK_H)
            narrow = (offsets < hidden)[None, :]
            total = tl.zeros((ROWS, BLOCK_H), tl.float32)
            for step in tl.static_range(TOPK):
                nth = TOPK - 1 - step if DESCENDING else step
                held = tl.load(expert_ids + tokens * TOPK_LANES + nth, mask=inside, other=-1) >= 0
                source = buffer + (tl.cast(tokens, tl.int64) * TOPK + nth)[:, None] * hidden + offsets[None, :]
                total += tl.load(source, mask=held[:, None] & narrow, other=0.0).to(tl.float32)
                if ROUND_EACH:
                    total = total.to(dtype).to(tl.float32)
            target = out + tl.cast(tokens, tl.int64)[:, None] * hidden + offsets[None, :]
            tl.store(target, total.to(dtype), mask=inside[:, None] & narrow)


@triton.jit
def scatter_grads(
    grad_buffer, prob_grads, expert_ids, first, last, num_experts, TOPK: tl.constexpr, TOPK_LANES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """prob_grads[t, e] = grad_buffer[t * TOPK + j] where e is token t's j-th expert; the rest stays as it was."""
    nth = tl.arange(0, TOPK_LANES)
    for start in range(first, last, ROWS):
        tokens = start + tl.arange(0, ROWS)
        valid = (tokens < last)[:, None] & (nth < TOPK)[None, :]
        expert = tl.load(expert_ids + tokens[:, None] * TOPK_LANES + nth[None, :], mask=valid, other=-1)
        valid = valid & (expert >= 0)
        grad = tl.load(grad_buffer + tokens[:, None] * TOPK + nth[None, :], mask=valid)
        target = prob_grads + tl.cast(tokens, tl.int64)[:, None] * num_experts + expert
        tl.store(target, grad.to(prob_grads.dtype.element_ty), mask=valid)


@triton.jit
def _sum_arrived(
    program, num_programs, out, prob_grads, chunk_entries, expert_ids, buffer, grad_buffer, signals, control, rank, epoch,
    num_tokens, chunk_tokens, hidden, num_experts, WITH_GRADS: tl.constexpr, TOPK: tl.constexpr, TOPK_LANES: tl.constexpr,
    ROUND_EACH: tl.constexpr, DESCENDING: tl.constexpr, WORLD_SIZE: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    SUM_ROWS: tl.constexpr, BLOCK_H: tl.constexpr, ITEM_TOKENS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Sums ITEM_TOKENS tokens at a time once every rank that has rows of their chunk has set its flag."""
    for item in range(program, tl.cdiv(num_tokens, ITEM_TOKENS), num_programs):
        first = item * ITEM_TOKENS
        last = tl.minimum(first + ITEM_TOKENS, num_tokens)
        chunk = first // chunk_tokens
        for step in tl.static_range(WORLD_SIZE):
            peer = (rank + step) % WORLD_SIZE
            counted = chunk_entries + peer * (NUM_CHUNKS + 1) + chunk
            if tl.load(counted + 1) > tl.load(counted):
                dl.wait(signals + peer * NUM_CHUNKS + chunk, epoch, control, peer, chunk, TARGET)
        sum_rows(buffer, out, expert_ids, first, last, hidden, TOPK, TOPK_LANES, ROUND_EACH, DESCENDING, SUM_ROWS, BLOCK_H)
        if WITH_GRADS:
            scatter_grads(grad_buffer, prob_grads, expert_ids, first, last, num_experts, TOPK, TOPK_LANES, ITEM_TOKENS)


@triton.jit(do_not_specialize=["num_tokens"])
def return_rows(
    y, row_grads, out, prob_grads, kept, recv_offsets, chunk_entries, expert_ids,
    buffer, buffer_addresses, grad_buffer, grad_addresses, signals, signal_addresses, ready, ready_addresses,
    signature, tickets, control, limits, num_tokens, chunk_tokens, hidden, num_experts,
    WITH_GRADS: tl.constexpr, TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, ROUND_EACH: tl.constexpr,
    DESCENDING: tl.constexpr, WORLD_SIZE: tl.constexpr, NUM_CHUNKS: tl.constexpr, SUM_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr, ITEM_TOKENS: tl.constexpr, TARGET: tl.constexpr, ROWS: tl.constexpr,
    NUM_SENDERS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over token t's experts of y[row(t, e)], in the order and with the roundings of the native unpermute.

    Every (token, expert) row goes back to place ``t * TOPK + j`` at its source: adding the experts of one rank before
    would change bits. Senders take (chunk of a source, source) items, neighbours to different sources, so that all links
    are busy; then set flag [rank, chunk] there. Receivers sum a chunk's tokens once every rank that has rows of it has
    set its flag; a launch of NUM_SENDERS programs has none, ``sum_returned`` follows it. WITH_GRADS carries one fp32 a row
    along (the gradient of the probabilities), scattered into ``prob_grads[t, expert]``.

    Waits: senders for all start signals, receivers (acquire) for the flags of ranks that hold rows of the chunk.
    """
    program = tl.program_id(0)
    epoch = dl.next_epoch(tickets)
    rank = dl.rank(control)
    num_rows = tl.load(limits)
    place_capacity = tl.load(limits + 3)
    _start(ready, ready_addresses, signature, control, epoch, rank, NUM_SENDERS, WORLD_SIZE, TARGET)
    if program < NUM_SENDERS:
        for item in range(program, WORLD_SIZE * NUM_CHUNKS, NUM_SENDERS):
            chunk = item // WORLD_SIZE
            source = (rank + 1 + item % WORLD_SIZE) % WORLD_SIZE
            begin = tl.load(recv_offsets + source * (NUM_CHUNKS + 1) + chunk)
            end = tl.load(recv_offsets + source * (NUM_CHUNKS + 1) + chunk + 1)
            if end > begin:
                target = dl.symm_at(buffer_addresses, source, y.dtype.element_ty)
                grad_target = dl.symm_at(grad_addresses, source, tl.float32)
                _send_rows(
                    y, row_grads, kept, begin, end, target, grad_target, hidden, num_rows, place_capacity, WITH_GRADS,
                    ROWS, BLOCK_H,
                )  # fmt: skip
                dl.notify(dl.symm_at(signal_addresses, source, tl.int32) + rank * NUM_CHUNKS + chunk, epoch, TARGET)
    if SHARED or program >= NUM_SENDERS:
        first_receiver: tl.constexpr = 0 if SHARED else NUM_SENDERS
        _sum_arrived(
            program - first_receiver, tl.num_programs(0) - first_receiver, out, prob_grads, chunk_entries, expert_ids, buffer,
            grad_buffer, signals, control, rank, epoch, num_tokens, chunk_tokens, hidden, num_experts, WITH_GRADS, TOPK,
            TOPK_LANES, ROUND_EACH, DESCENDING, WORLD_SIZE, NUM_CHUNKS, SUM_ROWS, BLOCK_H, ITEM_TOKENS, TARGET,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def sum_returned(
    out, prob_grads, chunk_entries, expert_ids, buffer, grad_buffer, signals, tickets, control,
    num_tokens, chunk_tokens, hidden, num_experts,
    WITH_GRADS: tl.constexpr, TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, ROUND_EACH: tl.constexpr,
    DESCENDING: tl.constexpr, WORLD_SIZE: tl.constexpr, NUM_CHUNKS: tl.constexpr, SUM_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr, ITEM_TOKENS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """The second half of ``return_rows``, where that was launched with senders alone: its receivers' work, by all programs.

    Runs behind that launch, whose epoch is the number of launches that drew tickets. Waits (acquire) for the flags of ranks
    that hold rows of a chunk: they may still be sending.
    """
    epoch = (tl.load(tickets) >> TICKET_UNIT_LOG2).to(tl.int32)
    _sum_arrived(
        tl.program_id(0), tl.num_programs(0), out, prob_grads, chunk_entries, expert_ids, buffer, grad_buffer, signals, control,
        dl.rank(control), epoch, num_tokens, chunk_tokens, hidden, num_experts, WITH_GRADS, TOPK, TOPK_LANES, ROUND_EACH,
        DESCENDING, WORLD_SIZE, NUM_CHUNKS, SUM_ROWS, BLOCK_H, ITEM_TOKENS, TARGET,
    )  # fmt: skip
