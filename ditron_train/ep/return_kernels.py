"""Kernels that bring rows back to their tokens: ``return_rows``, whose sums ``sum_returned`` can do later.

Roles, tiles and masks are those of ``kernels``.

Seen on 4 x H200, 8192 tokens of 14 KiB a rank, top-8 of 128 experts, in ms, of 1.91 (even routing) and 2.7 (Zipf) that
the busiest link needs: 16 senders 2.23 and 3.02, 24 senders 2.15 and 2.91. With a rank's own rows left to the
receivers 12, 16, 20 and 24 senders took 2.42, 2.33, 2.23, 2.07 and 3.31, 3.02, 2.89, 2.79: no gain at 16, which is
what may move rows beside other work.
"""

import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.ep.kernels import start
from ditron_train.symm import control as control_layout

TICKET_UNIT_LOG2 = tl.constexpr(control_layout.TICKET_UNIT_LOG2)

__all__ = ["return_rows", "scatter_grads", "sum_returned", "sum_rows"]


@triton.jit
def _send_rows(
    y, row_grads, kept, begin, end, target, grad_target, hidden, num_rows, place_capacity,
    WITH_GRADS: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """target[place] = y[row] for entries ``begin .. end - 1``, all of one source rank."""
    for first_entry in range(begin, end, ROWS):
        index = first_entry + tl.arange(0, ROWS)
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
    buffer, out, expert_ids, token_places, first, last, hidden, RAGGED: tl.constexpr, TOPK: tl.constexpr,
    TOPK_LANES: tl.constexpr, ROUND_EACH: tl.constexpr, DESCENDING: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out[t] = ((0 + r_0) + r_1) + ..., r_j token t's rows by expert, ascending or descending.

    In fp32 with one rounding at the end, or (ROUND_EACH) rounded to the rows' type after every addition. RAGGED: a
    token has as many rows as lie between its ``token_places`` and the next one's.
    """
    dtype = out.dtype.element_ty
    for first_token in range(first, last, ROWS):
        tokens = first_token + tl.arange(0, ROWS)
        inside = tokens < last
        for column in range(0, hidden, BLOCK_H):
            offsets = column + tl.arange(0, BLOCK_H)
            narrow = (offsets < hidden)[None, :]
            total = tl.zeros((ROWS, BLOCK_H), tl.float32)
            if RAGGED:
                places = tl.load(token_places + tokens, mask=inside, other=0)
                count = tl.load(token_places + tokens + 1, mask=inside, other=0) - places
                for step in range(0, tl.max(count, axis=0)):
                    nth = count - 1 - step if DESCENDING else step
                    source = buffer + tl.cast(places + nth, tl.int64)[:, None] * hidden + offsets[None, :]
                    total += tl.load(source, mask=(step < count)[:, None] & narrow, other=0.0).to(tl.float32)
                    if ROUND_EACH:
                        total = total.to(dtype).to(tl.float32)
            else:
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
    grad_buffer, prob_grads, expert_ids, token_places, first, last, num_experts, RAGGED: tl.constexpr, TOPK: tl.constexpr,
    TOPK_LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """prob_grads[t, e] = grad_buffer[place of (t, j)] where e is token t's j-th expert; the rest stays as it was."""
    for first_token in range(first, last, ROWS):
        tokens = first_token + tl.arange(0, ROWS)
        inside = tokens < last
        line = prob_grads + tl.cast(tokens, tl.int64)[:, None] * num_experts
        if RAGGED:
            places = tl.load(token_places + tokens, mask=inside, other=0)
            count = tl.load(token_places + tokens + 1, mask=inside, other=0) - places
            for done in range(0, tl.max(count, axis=0), TOPK_LANES):
                nth = done + tl.arange(0, TOPK_LANES)
                valid = nth[None, :] < count[:, None]
                place = places[:, None] + nth[None, :]
                expert = tl.load(expert_ids + place, mask=valid, other=0)
                grad = tl.load(grad_buffer + place, mask=valid)
                tl.store(line + expert, grad.to(prob_grads.dtype.element_ty), mask=valid)
        else:
            nth = tl.arange(0, TOPK_LANES)
            valid = inside[:, None] & (nth < TOPK)[None, :]
            expert = tl.load(expert_ids + tokens[:, None] * TOPK_LANES + nth[None, :], mask=valid, other=-1)
            valid = valid & (expert >= 0)
            grad = tl.load(grad_buffer + tokens[:, None] * TOPK + nth[None, :], mask=valid)
            tl.store(line + expert, grad.to(prob_grads.dtype.element_ty), mask=valid)


@triton.jit
def _sum_arrived(
    program, num_programs, out, prob_grads, chunk_entries, expert_ids, token_places, buffer, grad_buffer, signals, control,
    rank, epoch, num_tokens, chunk_tokens, hidden, num_experts, WITH_GRADS: tl.constexpr, RAGGED: tl.constexpr,
    TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, ROUND_EACH: tl.constexpr, DESCENDING: tl.constexpr, WORLD_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, SUM_ROWS: tl.constexpr, BLOCK_H: tl.constexpr, ITEM_TOKENS: tl.constexpr, TARGET: tl.constexpr,
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
        sum_rows(
            buffer, out, expert_ids, token_places, first, last, hidden, RAGGED, TOPK, TOPK_LANES, ROUND_EACH, DESCENDING,
            SUM_ROWS, BLOCK_H,
        )  # fmt: skip
        if WITH_GRADS:
            scatter_grads(
                grad_buffer,
                prob_grads,
                expert_ids,
                token_places,
                first,
                last,
                num_experts,
                RAGGED,
                TOPK,
                TOPK_LANES,
                ITEM_TOKENS,
            )


@triton.jit(do_not_specialize=["num_tokens"])
def return_rows(
    y, row_grads, out, prob_grads, kept, recv_offsets, chunk_entries, expert_ids, token_places,
    buffer, buffer_addresses, grad_buffer, grad_addresses, signals, signal_addresses, ready, ready_addresses,
    signature, tickets, control, limits, num_tokens, chunk_tokens, hidden, num_experts,
    WITH_GRADS: tl.constexpr, RAGGED: tl.constexpr, TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, ROUND_EACH: tl.constexpr,
    DESCENDING: tl.constexpr, WORLD_SIZE: tl.constexpr, NUM_CHUNKS: tl.constexpr, SUM_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr, ITEM_TOKENS: tl.constexpr, TARGET: tl.constexpr, ROWS: tl.constexpr,
    NUM_SENDERS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over token t's experts of y[row(t, e)], in the order and with the roundings of the native
    unpermute.

    Every (token, expert) row goes back to place ``t * TOPK + j`` at its source: adding the experts of one rank before
    would change bits. Senders take (chunk of a source, source) items, neighbours to different sources, so that all
    links are busy; then set flag [rank, chunk] there. Receivers sum a chunk's tokens once every rank that has rows of
    it has set its flag; a launch of NUM_SENDERS programs has none, ``sum_returned`` follows it. WITH_GRADS carries one
    fp32 a row along (the gradient of the probabilities), scattered into ``prob_grads[t, expert]``.

    Waits: senders for all start signals, receivers (acquire) for the flags of ranks that hold rows of the chunk.
    """
    program = tl.program_id(0)
    epoch = dl.next_epoch(tickets)
    rank = dl.rank(control)
    num_rows = tl.load(limits)
    place_capacity = tl.load(limits + 3)
    start(ready, ready_addresses, signature, control, epoch, rank, NUM_SENDERS, WORLD_SIZE, TARGET)
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
            program - first_receiver, tl.num_programs(0) - first_receiver, out, prob_grads, chunk_entries, expert_ids,
            token_places, buffer, grad_buffer, signals, control, rank, epoch, num_tokens, chunk_tokens, hidden, num_experts,
            WITH_GRADS, RAGGED, TOPK, TOPK_LANES, ROUND_EACH, DESCENDING, WORLD_SIZE, NUM_CHUNKS, SUM_ROWS, BLOCK_H,
            ITEM_TOKENS, TARGET,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def sum_returned(
    out, prob_grads, chunk_entries, expert_ids, token_places, buffer, grad_buffer, signals, tickets, control,
    num_tokens, chunk_tokens, hidden, num_experts,
    WITH_GRADS: tl.constexpr, RAGGED: tl.constexpr, TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, ROUND_EACH: tl.constexpr,
    DESCENDING: tl.constexpr, WORLD_SIZE: tl.constexpr, NUM_CHUNKS: tl.constexpr, SUM_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr, ITEM_TOKENS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """The second half of ``return_rows``, where that was launched with senders alone: its receivers' work, by all
    programs.

    Runs behind that launch, whose epoch is the number of launches that drew tickets. Waits (acquire) for the flags of
    ranks that hold rows of a chunk: they may still be sending.
    """
    epoch = (tl.load(tickets) >> TICKET_UNIT_LOG2).to(tl.int32)
    _sum_arrived(
        tl.program_id(0), tl.num_programs(0), out, prob_grads, chunk_entries, expert_ids, token_places, buffer, grad_buffer,
        signals, control, dl.rank(control), epoch, num_tokens, chunk_tokens, hidden, num_experts, WITH_GRADS, RAGGED, TOPK,
        TOPK_LANES, ROUND_EACH, DESCENDING, WORLD_SIZE, NUM_CHUNKS, SUM_ROWS, BLOCK_H, ITEM_TOKENS, TARGET,
    )  # fmt: skip
