"""Kernels that bring rows back to their tokens: ``return_rows``, whose sums ``sum_returned`` can do later.

Roles, tiles and masks are those of ``kernels``.

Senders that take a rank's own rows, too, are no slower: docs/measurements/ep.md.
"""

import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.ep.arguments import RowInbox
from ditron_train.ep.kernels import start
from ditron_train.symm import control as control_layout

TICKET_UNIT_LOG2 = tl.constexpr(control_layout.TICKET_UNIT_LOG2)


@triton.jit
def _send_rows(sent, begin, end, target, grad_target, hidden, num_rows, place_capacity, SUM: tl.constexpr):
    """target[place] = rows[row] for entries ``begin .. end - 1``, all of one source rank."""
    for first_entry in range(begin, end, SUM.ROWS):
        index = first_entry + tl.arange(0, SUM.ROWS)
        inside = (index < end) & (index < num_rows)
        entry = tl.cast(index, tl.int64) * 4
        row = tl.load(sent.entries + entry, mask=inside, other=-1)
        place = tl.load(sent.entries + entry + 2, mask=inside, other=-1)
        held = inside & (row >= 0) & (row < num_rows) & (place >= 0) & (place < place_capacity)
        if SUM.WITH_GRADS:
            grad = tl.load(sent.grads + row, mask=held, other=0.0)
            tl.store(grad_target + place, grad.to(tl.float32), mask=held)
        for column in range(0, hidden, SUM.BLOCK_H):
            offsets = column + tl.arange(0, SUM.BLOCK_H)
            valid = held[:, None] & (offsets < hidden)[None, :]
            tile = tl.load(sent.rows + tl.cast(row, tl.int64)[:, None] * hidden + offsets[None, :], mask=valid)
            tl.store(target + tl.cast(place, tl.int64)[:, None] * hidden + offsets[None, :], tile, mask=valid)


@triton.jit
def _sum_rows(buffer, sums, first, last, hidden, SUM: tl.constexpr):
    """out[t] = ((0 + r_0) + r_1) + ..., r_j token t's rows by expert, ascending or descending.

    In fp32 with one rounding at the end, or (ROUND_EACH) rounded to the rows' type after every addition. RAGGED: a
    token has as many rows as lie between its ``token_places`` and the next one's.
    """
    dtype = sums.out.dtype.element_ty
    for first_token in range(first, last, SUM.SUM_ROWS):
        tokens = first_token + tl.arange(0, SUM.SUM_ROWS)
        inside = tokens < last
        for column in range(0, hidden, SUM.BLOCK_H):
            offsets = column + tl.arange(0, SUM.BLOCK_H)
            narrow = (offsets < hidden)[None, :]
            total = tl.zeros((SUM.SUM_ROWS, SUM.BLOCK_H), tl.float32)
            if SUM.RAGGED:
                places = tl.load(sums.token_places + tokens, mask=inside, other=0)
                count = tl.load(sums.token_places + tokens + 1, mask=inside, other=0) - places
                for step in range(0, tl.max(count, axis=0)):
                    nth = count - 1 - step if SUM.DESCENDING else step
                    source = buffer + tl.cast(places + nth, tl.int64)[:, None] * hidden + offsets[None, :]
                    total += tl.load(source, mask=(step < count)[:, None] & narrow, other=0.0).to(tl.float32)
                    if SUM.ROUND_EACH:
                        total = total.to(dtype).to(tl.float32)
            else:
                for step in tl.static_range(SUM.TOPK):
                    nth = SUM.TOPK - 1 - step if SUM.DESCENDING else step
                    held = tl.load(sums.expert_ids + tokens * SUM.TOPK_LANES + nth, mask=inside, other=-1) >= 0
                    source = buffer + (tl.cast(tokens, tl.int64) * SUM.TOPK + nth)[:, None] * hidden + offsets[None, :]
                    total += tl.load(source, mask=held[:, None] & narrow, other=0.0).to(tl.float32)
                    if SUM.ROUND_EACH:
                        total = total.to(dtype).to(tl.float32)
            target = sums.out + tl.cast(tokens, tl.int64)[:, None] * hidden + offsets[None, :]
            tl.store(target, total.to(dtype), mask=inside[:, None] & narrow)


@triton.jit
def _scatter_grads(grad_buffer, sums, first, last, num_experts, SUM: tl.constexpr):
    """prob_grads[t, e] = grad_buffer[place of (t, j)] where e is token t's j-th expert; the rest stays as it was."""
    for first_token in range(first, last, SUM.ITEM_TOKENS):
        tokens = first_token + tl.arange(0, SUM.ITEM_TOKENS)
        inside = tokens < last
        line = sums.prob_grads + tl.cast(tokens, tl.int64)[:, None] * num_experts
        if SUM.RAGGED:
            places = tl.load(sums.token_places + tokens, mask=inside, other=0)
            count = tl.load(sums.token_places + tokens + 1, mask=inside, other=0) - places
            for done in range(0, tl.max(count, axis=0), SUM.TOPK_LANES):
                nth = done + tl.arange(0, SUM.TOPK_LANES)
                valid = nth[None, :] < count[:, None]
                place = places[:, None] + nth[None, :]
                expert = tl.load(sums.expert_ids + place, mask=valid, other=0)
                grad = tl.load(grad_buffer + place, mask=valid)
                tl.store(line + expert, grad.to(sums.prob_grads.dtype.element_ty), mask=valid)
        else:
            nth = tl.arange(0, SUM.TOPK_LANES)
            valid = inside[:, None] & (nth < SUM.TOPK)[None, :]
            expert = tl.load(sums.expert_ids + tokens[:, None] * SUM.TOPK_LANES + nth[None, :], mask=valid, other=-1)
            valid = valid & (expert >= 0)
            grad = tl.load(grad_buffer + tokens[:, None] * SUM.TOPK + nth[None, :], mask=valid)
            tl.store(line + expert, grad.to(sums.prob_grads.dtype.element_ty), mask=valid)


@triton.jit
def _sum(sums, buffer, grad_buffer, first, last, hidden, num_experts, SUM: tl.constexpr):
    """The sums of tokens ``first .. last - 1``, and their probabilities' gradients."""
    _sum_rows(buffer, sums, first, last, hidden, SUM)
    if SUM.WITH_GRADS:
        _scatter_grads(grad_buffer, sums, first, last, num_experts, SUM)


@triton.jit
def sum_tokens(item, sums, buffer, grad_buffer, num_tokens, hidden, num_experts, SUM: tl.constexpr):
    """Task: the sums of ITEM_TOKENS tokens whose rows are there."""
    first = item * SUM.ITEM_TOKENS
    last = tl.minimum(first + SUM.ITEM_TOKENS, num_tokens)
    _sum(sums, buffer, grad_buffer, first, last, hidden, num_experts, SUM)


@triton.jit
def _sum_arrived(
    program, num_programs, sums, inbox, rank, epoch, num_tokens, chunk_tokens, hidden, num_experts, SUM: tl.constexpr
):
    """Sums ITEM_TOKENS tokens at a time once every rank that has rows of their chunk has set its flag."""
    for item in range(program, tl.cdiv(num_tokens, SUM.ITEM_TOKENS), num_programs):
        first = item * SUM.ITEM_TOKENS
        last = tl.minimum(first + SUM.ITEM_TOKENS, num_tokens)
        chunk = first // chunk_tokens
        for step in tl.static_range(SUM.WORLD_SIZE):
            peer = (rank + step) % SUM.WORLD_SIZE
            counted = sums.chunk_entries + peer * (SUM.NUM_CHUNKS + 1) + chunk
            if tl.load(counted + 1) > tl.load(counted):
                flag = inbox.signals + peer * SUM.NUM_CHUNKS + chunk
                dl.wait(flag, epoch, inbox.control, peer, chunk, SUM.TARGET)
        _sum(sums, inbox.rows, inbox.grads, first, last, hidden, num_experts, SUM)


@triton.jit(do_not_specialize=["num_tokens"])
def return_rows(
    sent, sums, buffers, channel, limits, num_tokens, chunk_tokens, hidden, num_experts, SUM: tl.constexpr
):
    """out[t] = sum over token t's experts of rows[row(t, e)], in the order and with the roundings of the native
    unpermute.

    Every (token, expert) row goes back to place ``t * TOPK + j`` at its source: adding the experts of one rank before
    would change bits. Senders take (chunk of a source, source) items, neighbours to different sources, so that all
    links are busy; then set flag [rank, chunk] there. Receivers sum a chunk's tokens once every rank that has rows of
    it has set its flag; a launch of NUM_SENDERS programs has none, ``sum_returned`` follows it. WITH_GRADS carries one
    fp32 a row along (the gradient of the probabilities), scattered into ``prob_grads[t, expert]``.

    Waits: senders for all start signals, receivers (acquire) for the flags of ranks that hold rows of the chunk.
    """
    program = tl.program_id(0)
    epoch = dl.next_epoch(channel.tickets)
    rank = dl.rank(channel.control)
    num_rows = tl.load(limits)
    place_capacity = tl.load(limits + 3)
    start(channel, epoch, rank, SUM)
    if program < SUM.NUM_SENDERS:
        for item in range(program, SUM.WORLD_SIZE * SUM.NUM_CHUNKS, SUM.NUM_SENDERS):
            chunk = item // SUM.WORLD_SIZE
            source = (rank + 1 + item % SUM.WORLD_SIZE) % SUM.WORLD_SIZE
            begin = tl.load(sent.recv_offsets + source * (SUM.NUM_CHUNKS + 1) + chunk)
            end = tl.load(sent.recv_offsets + source * (SUM.NUM_CHUNKS + 1) + chunk + 1)
            if end > begin:
                target = dl.symm_at(buffers.row_addresses, source, sent.rows.dtype.element_ty)
                grad_target = dl.symm_at(buffers.grad_addresses, source, tl.float32)
                _send_rows(sent, begin, end, target, grad_target, hidden, num_rows, place_capacity, SUM)
                flag = dl.symm_at(channel.signals_addresses, source, tl.int32) + rank * SUM.NUM_CHUNKS + chunk
                dl.notify(flag, epoch, SUM.TARGET)
    if SUM.SHARED or program >= SUM.NUM_SENDERS:
        first: tl.constexpr = 0 if SUM.SHARED else SUM.NUM_SENDERS
        inbox = RowInbox(buffers.rows, buffers.grads, channel.signals, channel.control)
        receiver = program - first
        num_receivers = tl.num_programs(0) - first
        _sum_arrived(
            receiver, num_receivers, sums, inbox, rank, epoch, num_tokens, chunk_tokens, hidden, num_experts, SUM
        )


@triton.jit(do_not_specialize=["num_tokens"])
def sum_returned(sums, inbox, tickets, num_tokens, chunk_tokens, hidden, num_experts, SUM: tl.constexpr):
    """The second half of ``return_rows``, where that was launched with senders alone: its receivers' work, by all
    programs.

    Runs behind that launch, whose epoch is the number of launches that drew tickets. Waits (acquire) for the flags of
    ranks that hold rows of a chunk: they may still be sending.
    """
    epoch = (tl.load(tickets) >> TICKET_UNIT_LOG2).to(tl.int32)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    rank = dl.rank(inbox.control)
    _sum_arrived(program, num_programs, sums, inbox, rank, epoch, num_tokens, chunk_tokens, hidden, num_experts, SUM)
