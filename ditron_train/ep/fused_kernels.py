"""Kernels at task level: dispatch with the grouped GEMM behind it, and a grouped GEMM with combine behind it.

Both are one persistent launch of queues (``task_kernels``). Rows, bits and the use of buffers and flags are those of
``kernels`` and ``group_gemm_kernels``: only when a piece of work begins is different.

Seen on 4 x H200, 8192 tokens of 7168 elements a rank, top-8 of 128 experts of width 2048, against our movement and
Transformer Engine's grouped GEMM one after the other, in ms:

| pair | apart | fused | |
| --- | --- | --- | --- |
| fc2, combine | 4.81 | 3.8 | strips of 1, 2 and 4 tiles alike; 12 senders 4.0, 20 senders 3.8 |
| fc1 dgrad, combine | 7.9 | 7.1 | 12 or 20 senders alike |
| dispatch, fc1 | 6.39 | 7.3-7.5 | 16 to 32 senders, 24 to 116 placers, 2 to 8 phases: never faster |
| dispatch, fc2 dgrad | 3.75 | 4.3-4.4 | likewise |

These times are of tiles drawn in strips, as a dispatch still has them. In a layer fc2 with combine then took 4.1 ms,
and the same GEMM alone 2.6; as one pipelined loop (``gemm_combine_kernel``) it was timed with the whole layer only.

A combine waits for links, so it hides under a GEMM for 16 of 132 multiprocessors. A dispatch is quick alone (1.1 ms),
since all multiprocessors then move what arrives to its rows; a GEMM that runs meanwhile loses more than that. Tiles
that start early are tiles of all experts, so each phase reads all weights again (2, 4 and 8 phases with fc2's dgrad:
4.45, 4.64, 4.91 ms); with few phases most tiles wait for the last rows, those that straddle two sources in any case.
How many programs send or place changes nothing. The policy measures each pair on the machine at hand and takes what is
faster there.
"""

import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.ep.group_gemm_kernels import group_product, store_block
from ditron_train.ep.kernels import place_rows, send_entries, send_tokens
from ditron_train.ep.return_kernels import scatter_grads, sum_rows
from ditron_train.ep.task_kernels import complete, complete_stored, need, num_strips, serve, strip_of
from ditron_train.schedule.tiles import ordered_tile

__all__ = ["dispatch_gemm_kernel", "gemm_combine_kernel", "plan_tiles"]

# Words of a board: a head for each queue, then counters of the whole, then one counter for each tile or block of rows.
HEAD_FIRST = tl.constexpr(0)
HEAD_SECOND = tl.constexpr(32)
HEAD_THIRD = tl.constexpr(64)
TOTAL = tl.constexpr(96)
COUNTERS = tl.constexpr(128)
_AT_ONCE = tl.constexpr(32)  # keys that plan_tiles compares at a time: more spill


@triton.jit
def _tile_key(
    tiles, sources, index, inside, rank, max_tiles, WORLD_SIZE: tl.constexpr, SLOTS: tl.constexpr, PHASES: tl.constexpr,
    BY_ARRIVAL: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """What row tiles are sorted by, see ``plan_tiles``."""
    entry = tiles + 4 + index * 4
    expert = tl.load(entry, mask=inside, other=0)
    row = tl.load(entry + 1, mask=inside, other=0)
    end = tl.load(entry + 2, mask=inside, other=0)
    row_ends = tiles + 4 + 4 * max_tiles
    start = tl.load(row_ends + expert - 1, mask=inside & (expert > 0), other=0)
    first = row - start
    last = tl.minimum(row + BLOCK_M, end) - start
    low = tl.zeros_like(first)
    phase = tl.zeros_like(first)
    home = tl.zeros_like(first) - 1
    for source in tl.static_range(WORLD_SIZE):
        rows = tl.load(sources + source * SLOTS + expert, mask=inside, other=0)
        top = tl.minimum(last, low + rows)
        overlaps = top > tl.maximum(first, low)
        part = ((top - low) * PHASES + rows - 1) // tl.maximum(rows, 1)
        phase = tl.maximum(phase, tl.where(overlaps, part, 0))
        home = tl.where(overlaps & (home < 0), source, home)
        low += rows
    if BY_ARRIVAL:
        return phase * max_tiles + index
    else:
        return (expert * WORLD_SIZE + (home + 2 * WORLD_SIZE - rank - 1) % WORLD_SIZE) * max_tiles + index


@triton.jit(do_not_specialize=["max_tiles"])
def plan_tiles(
    tiles, sources, order, board, control, max_tiles,
    NUM_EXPERTS: tl.constexpr, WORLD_SIZE: tl.constexpr, SLOTS: tl.constexpr, PHASES: tl.constexpr,
    BY_ARRIVAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """order[i] = the i-th row tile to compute; the board as a launch wants it. Program b does block b of both.

    BY_ARRIVAL, for ``dispatch_gemm_kernel``: tiles that need an early part of their source's tokens come first, those
    that straddle two sources, and so need the last tokens of one, last. Parts are PHASES-ths: within one, tiles stay
    by expert, so that neighbours share weights (with one phase a token, weights were read from memory again for every
    tile). Counters: rows still to be placed in each block of BLOCK_M rows, as BLOCK_M less what is missing; and of all
    together.

    Else, for ``gemm_combine_kernel``: by expert, then by source rank, beginning behind the own: ranks that compute the
    same expert at the same time then return rows to different ranks. Counters: column tiles done of each row tile.

    Nobody waits. Sorting is counting: the place of a tile is the number of tiles with a smaller key.
    """
    rank = dl.rank(control)
    num_tiles = tl.load(tiles)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_tiles
    key = _tile_key(tiles, sources, index, inside, rank, max_tiles, WORLD_SIZE, SLOTS, PHASES, BY_ARRIVAL, BLOCK_M)
    place = tl.zeros((BLOCK,), tl.int32)
    for other_block in range(0, tl.cdiv(num_tiles, _AT_ONCE)):
        others = other_block * _AT_ONCE + tl.arange(0, _AT_ONCE)
        valid = others < num_tiles
        other_key = _tile_key(
            tiles, sources, others, valid, rank, max_tiles, WORLD_SIZE, SLOTS, PHASES, BY_ARRIVAL, BLOCK_M
        )
        place += tl.sum(((other_key[None, :] < key[:, None]) & valid[None, :]).to(tl.int32), axis=1)
    tl.store(order + place, index, mask=inside)
    num_rows = tl.load(tiles + 4 + 4 * max_tiles + NUM_EXPERTS - 1)
    if BY_ARRIVAL:
        missing = tl.minimum(tl.maximum(num_rows - index * BLOCK_M, 0), BLOCK_M)
        tl.store(board + COUNTERS + index, BLOCK_M - missing, mask=index < max_tiles)
    else:
        tl.store(board + COUNTERS + index, tl.zeros((BLOCK,), tl.int32), mask=index < max_tiles)
    if tl.program_id(0) == 0:
        words = tl.arange(0, COUNTERS)
        tl.store(board + words, tl.where(words == TOTAL, -num_rows if BY_ARRIVAL else 0, 0))


@triton.jit
def _send_chunk(
    chunk, x, dest_slots, send_list, chunk_entries, list_base, entry_base, buffer_addresses, entry_addresses, signal_addresses,
    rank, epoch, entry_capacity, slot_capacity, num_tokens, chunk_tokens, hidden, WITH_ENTRIES: tl.constexpr,
    WORLD_SIZE: tl.constexpr, RANKS: tl.constexpr, NUM_CHUNKS: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """Task: one chunk of tokens, and with a layout's first dispatch their entries, to every rank that wants them."""
    first = chunk * chunk_tokens
    last = tl.minimum(first + chunk_tokens, num_tokens)
    if WITH_ENTRIES:
        send_entries(
            send_list, chunk_entries, list_base, entry_base, entry_addresses, chunk, entry_capacity, WORLD_SIZE, NUM_CHUNKS,
            1024,
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
def _place_chunk(
    item, x, buffer, rows, row_probs, arrived, kept, origins, recv_offsets, signals, control, board, rank, epoch, num_tokens,
    num_rows, slot_capacity, hidden, WITH_ENTRIES: tl.constexpr, ZERO_PROBS: tl.constexpr,
    WORLD_SIZE: tl.constexpr, NUM_CHUNKS: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_M: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """Task: rows of one source's chunk from their slots to their places; then they count in their blocks."""
    chunk = item // WORLD_SIZE
    source = (rank + item % WORLD_SIZE) % WORLD_SIZE
    begin = tl.load(recv_offsets + source * (NUM_CHUNKS + 1) + chunk)
    end = tl.load(recv_offsets + source * (NUM_CHUNKS + 1) + chunk + 1)
    if end > begin:
        dl.wait(signals + source * NUM_CHUNKS + chunk, epoch, control, source, chunk, TARGET)
        place_rows(
            x, buffer, rows, row_probs, arrived, kept, origins, source, rank, begin, end, hidden, num_tokens, num_rows,
            slot_capacity, WITH_ENTRIES, ZERO_PROBS, ROWS, BLOCK_H,
        )  # fmt: skip
        dl.fence(TARGET)  # every thread's rows are visible before any thread counts one
        for start in range(begin, end, BLOCK_M):
            index = start + tl.arange(0, BLOCK_M)
            inside = (index < end) & (index < num_rows)
            row = tl.load(kept + tl.cast(index, tl.int64) * 4, mask=inside, other=-1)
            held = inside & (row >= 0) & (row < num_rows)
            tl.atomic_add(board + COUNTERS + row // BLOCK_M, 1, mask=held, sem="release", scope="gpu")
        complete(board + TOTAL, end - begin, TARGET)


@triton.jit
def _gemm_strip(
    ticket, a_desc, b_desc, c_desc, places, tiles, order, board, control, num_row_tiles, num_tiles_n, num_k_tiles, num_programs,
    STRIP: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TRANSPOSE_B: tl.constexpr, SPLIT_STORE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Task: a strip of output tiles, once their rows are in place."""
    first, count = strip_of(ticket, num_row_tiles * num_tiles_n, num_programs, STRIP)
    if tl.load(board + TOTAL, volatile=True) < 0:  # warps may differ here: no barrier inside
        for nth in range(count):
            row_tile, _ = ordered_tile(first + nth * num_programs, order, num_row_tiles, num_tiles_n, GROUP_M)
            entry = tiles + 4 + row_tile * 4
            row = tl.load(entry + 1)
            last_row = tl.minimum(row + BLOCK_M, tl.load(entry + 2)) - 1
            for block in range(row // BLOCK_M, last_row // BLOCK_M + 1):
                need(board + COUNTERS + block, BLOCK_M, control, block, TARGET)
    dl.fence(TARGET)
    dl.fence_async_proxy(TARGET)
    for tile in tl.range(first, first + count * num_programs, num_programs, flatten=True):
        row_tile, col_tile = ordered_tile(tile, order, num_row_tiles, num_tiles_n, GROUP_M)
        entry = tiles + 4 + row_tile * 4
        place = tl.load(places + tl.load(entry))
        row = tl.load(entry + 1)
        valid = tl.minimum(tl.load(entry + 2) - row, BLOCK_M)
        col = col_tile * BLOCK_N
        acc = group_product(a_desc, b_desc, place, row, col, num_k_tiles, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSE_B)
        store_block(c_desc, acc, row + valid, BLOCK_M - valid, col, BLOCK_M, BLOCK_N, SPLIT_STORE)


@triton.jit(do_not_specialize=["num_tokens"])
def dispatch_gemm_kernel(
    x, rows, row_probs, kept, origins, dest_slots, send_list, chunk_entries, list_base, entry_base, recv_offsets,
    buffer, buffer_addresses, arrived, entry_addresses, signals, signal_addresses, ready, ready_addresses,
    signature, tickets, control, limits, a_desc, b_desc, c_desc, places, tiles, order, board,
    num_tokens, chunk_tokens, hidden, N,
    WITH_ENTRIES: tl.constexpr, ZERO_PROBS: tl.constexpr, TRANSPOSE_B: tl.constexpr, WORLD_SIZE: tl.constexpr,
    RANKS: tl.constexpr, NUM_CHUNKS: tl.constexpr, SEND_ROWS: tl.constexpr, PLACE_ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
    NUM_SENDERS: tl.constexpr, NUM_PLACERS: tl.constexpr, STRIP: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_STORE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """rows[row(t, e)] = x[t] as ``push_tokens`` does, and C[r, :] = rows[r, :] @ B[e(r)] as ``group_gemm_kernel``
    does.

    Queues: chunks to send (programs below NUM_SENDERS), chunks that arrive (programs below NUM_SENDERS + NUM_PLACERS),
    strips of tiles (all: those that sent and placed join when these queues are empty).

    Waits: senders for every rank's start signal; placers for a chunk's flag (acquire, system scope) before they read
    its slots; a strip for the counters of its blocks of rows (acquire), then a fence for the descriptor loads that
    follow.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    epoch = dl.next_epoch(tickets)
    rank = dl.rank(control)
    num_rows = tl.load(limits)
    entry_capacity = tl.load(limits + 1)
    slot_capacity = tl.load(limits + 2)
    if program == 0:
        dl.announce(ready_addresses, signature, epoch, rank, WORLD_SIZE, TARGET)
    dl.verify_peers(ready, signature, epoch, control, rank, WORLD_SIZE, TARGET)
    if program < NUM_SENDERS:
        for peer in tl.static_range(WORLD_SIZE):
            dl.await_ready(ready, epoch, control, peer, WORLD_SIZE, TARGET)
        serve(board + HEAD_FIRST, tl.cdiv(num_tokens, chunk_tokens), _send_chunk, (
            x, dest_slots, send_list, chunk_entries, list_base, entry_base, buffer_addresses, entry_addresses,
            signal_addresses, rank, epoch, entry_capacity, slot_capacity, num_tokens, chunk_tokens, hidden, WITH_ENTRIES,
            WORLD_SIZE, RANKS, NUM_CHUNKS, SEND_ROWS, BLOCK_H, TARGET,
        ))  # fmt: skip
    if program < NUM_SENDERS + NUM_PLACERS:
        serve(board + HEAD_SECOND, WORLD_SIZE * NUM_CHUNKS, _place_chunk, (
            x, buffer, rows, row_probs, arrived, kept, origins, recv_offsets, signals, control, board, rank, epoch, num_tokens,
            num_rows, slot_capacity, hidden, WITH_ENTRIES, ZERO_PROBS, WORLD_SIZE, NUM_CHUNKS, PLACE_ROWS, BLOCK_H,
            BLOCK_M, TARGET,
        ))  # fmt: skip
    num_tiles_n = tl.cdiv(N, BLOCK_N)
    num_row_tiles = tl.load(tiles)
    serve(board + HEAD_THIRD, num_strips(num_row_tiles * num_tiles_n, num_programs, STRIP), _gemm_strip, (
        a_desc, b_desc, c_desc, places, tiles, order, board, control, num_row_tiles, num_tiles_n, tl.cdiv(hidden, BLOCK_K),
        num_programs, STRIP, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSE_B, SPLIT_STORE, TARGET,
    ))  # fmt: skip


@triton.jit
def _return_tile(
    task, y, row_grads, origins, tiles, order, board, buffer_addresses, grad_addresses, signal_addresses, control, rank, epoch,
    num_row_tiles, num_tiles_n, place_capacity, hidden, WITH_GRADS: tl.constexpr, WORLD_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_M: tl.constexpr, TILE_COUNT: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """Task: rows of one row tile to their tokens, once all its columns are there; the last one tells every rank."""
    tile = tl.load(order + task)
    need(board + COUNTERS + tile, num_tiles_n * TILE_COUNT, control, tile, TARGET)
    first = tl.load(tiles + 4 + tile * 4 + 1)
    end = tl.minimum(first + BLOCK_M, tl.load(tiles + 4 + tile * 4 + 2))
    for start in range(first, end, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = row < end
        source = tl.load(origins + row * 2, mask=inside, other=-1)
        place = tl.load(origins + row * 2 + 1, mask=inside, other=-1)
        held = inside & (source >= 0) & (source < WORLD_SIZE) & (place >= 0) & (place < place_capacity)
        if WITH_GRADS:
            grad = tl.load(row_grads + row, mask=held, other=0.0).to(tl.float32)
            grad_target = tl.load(grad_addresses + source, mask=held, other=0).to(tl.pointer_type(tl.float32))
            tl.store(grad_target + place, grad, mask=held)
        target = tl.load(buffer_addresses + source, mask=held, other=0).to(tl.pointer_type(y.dtype.element_ty))
        target = tl.multiple_of(target, 16)
        target += tl.cast(place, tl.int64) * hidden
        line = y + tl.cast(row, tl.int64) * hidden
        for column in range(0, hidden, BLOCK_H):
            offsets = column + tl.arange(0, BLOCK_H)
            valid = held[:, None] & (offsets < hidden)[None, :]
            values = tl.load(line[:, None] + offsets[None, :], mask=valid)
            tl.store(target[:, None] + offsets[None, :], values, mask=valid)
    if complete(board + TOTAL, 1, TARGET) == num_row_tiles - 1:
        for step in tl.static_range(WORLD_SIZE):
            peer = (rank + step) % WORLD_SIZE
            dl.notify(dl.symm_at(signal_addresses, peer, tl.int32) + rank * NUM_CHUNKS, epoch, TARGET)


@triton.jit
def _sum_tokens(
    item, out, prob_grads, expert_ids, token_places, buffer, grad_buffer, num_tokens, hidden, num_experts,
    WITH_GRADS: tl.constexpr, RAGGED: tl.constexpr, TOPK: tl.constexpr, TOPK_LANES: tl.constexpr, ROUND_EACH: tl.constexpr,
    DESCENDING: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, ITEM_TOKENS: tl.constexpr,
):  # fmt: skip
    """Task: the sums of some tokens."""
    first = item * ITEM_TOKENS
    last = tl.minimum(first + ITEM_TOKENS, num_tokens)
    sum_rows(
        buffer,
        out,
        expert_ids,
        token_places,
        first,
        last,
        hidden,
        RAGGED,
        TOPK,
        TOPK_LANES,
        ROUND_EACH,
        DESCENDING,
        ROWS,
        BLOCK_H,
    )
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
def gemm_combine_kernel(
    y, row_grads, out, prob_grads, origins, chunk_entries, expert_ids, token_places, buffer, buffer_addresses, grad_buffer,
    grad_addresses, signals, signal_addresses, ready, ready_addresses, signature, tickets, control, limits,
    a_desc, b_desc, c_desc, places, tiles, order, board, num_tokens, hidden, K, num_experts,
    WITH_GRADS: tl.constexpr, TRANSPOSE_B: tl.constexpr, RAGGED: tl.constexpr, TOPK: tl.constexpr, TOPK_LANES: tl.constexpr,
    ROUND_EACH: tl.constexpr, DESCENDING: tl.constexpr, WORLD_SIZE: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    ROWS: tl.constexpr, SUM_ROWS: tl.constexpr, BLOCK_H: tl.constexpr, ITEM_TOKENS: tl.constexpr, NUM_SENDERS: tl.constexpr,
    TILE_COUNT: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_STORE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """y[r, :] = A[r, :] @ B[e(r)] as ``group_gemm_kernel`` does, and out[t] = sum over e of y[row(t, e)] as
    ``return_rows``.

    All but the last NUM_SENDERS programs compute tiles, in one pipelined loop as the grouped GEMM alone; a finished
    tile adds TILE_COUNT to its row tile's counter while the next one is being computed (``complete_stored``). Queues:
    row tiles to return (those programs first, the others when they have no tiles left), tokens to sum (all). Nearly
    every token has a row in the last tiles, so a rank is told once, when all of a peer's rows have left: one flag a
    source. Tiles are dealt out, not drawn: it ends as long as no more than NUM_SENDERS multiprocessors are withheld
    for good.

    Waits: returning programs for every rank's start signal, then for a row tile's counter (acquire; its tiles are
    stored through descriptors and waited for before they count); sums (acquire, system scope) for the flag of every
    rank that has rows of this one. The counter of returned tiles chains their releases into that flag.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    epoch = dl.next_epoch(tickets)
    rank = dl.rank(control)
    place_capacity = tl.load(limits + 3)
    num_row_tiles = tl.load(tiles)
    num_tiles_n = tl.cdiv(hidden, BLOCK_N)
    if program == 0:
        dl.announce(ready_addresses, signature, epoch, rank, WORLD_SIZE, TARGET)
    if program < num_programs - NUM_SENDERS:
        num_k_tiles = tl.cdiv(K, BLOCK_K)
        stored = tl.cast(
            0, tl.int64
        )  # counter of the tile before: its stores are complete by the time this one is computed
        for tile in tl.range(program, num_row_tiles * num_tiles_n, num_programs - NUM_SENDERS, flatten=True):
            row_tile, col_tile = ordered_tile(tile, order, num_row_tiles, num_tiles_n, GROUP_M)
            entry = tiles + 4 + row_tile * 4
            place = tl.load(places + tl.load(entry))
            row = tl.load(entry + 1)
            valid = tl.minimum(tl.load(entry + 2) - row, BLOCK_M)
            col = col_tile * BLOCK_N
            acc = group_product(a_desc, b_desc, place, row, col, num_k_tiles, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSE_B)
            complete_stored(stored, TARGET)
            store_block(c_desc, acc, row + valid, BLOCK_M - valid, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
            stored = (board + COUNTERS + row_tile).to(tl.int64)
        complete_stored(stored, TARGET)
    for peer in tl.static_range(WORLD_SIZE):
        dl.await_ready(ready, epoch, control, peer, WORLD_SIZE, TARGET)
    serve(board + HEAD_SECOND, num_row_tiles, _return_tile, (
        y, row_grads, origins, tiles, order, board, buffer_addresses, grad_addresses, signal_addresses, control, rank, epoch,
        num_row_tiles, num_tiles_n, place_capacity, hidden, WITH_GRADS, WORLD_SIZE, NUM_CHUNKS, ROWS, BLOCK_H, BLOCK_M,
        TILE_COUNT, TARGET,
    ))  # fmt: skip
    dl.verify_peers(ready, signature, epoch, control, rank, WORLD_SIZE, TARGET)
    for step in tl.static_range(WORLD_SIZE):
        peer = (rank + step) % WORLD_SIZE
        if tl.load(chunk_entries + peer * (NUM_CHUNKS + 1) + NUM_CHUNKS) > 0:
            dl.wait(signals + peer * NUM_CHUNKS, epoch, control, peer, 0, TARGET)
    serve(board + HEAD_THIRD, tl.cdiv(num_tokens, ITEM_TOKENS), _sum_tokens, (
        out, prob_grads, expert_ids, token_places, buffer, grad_buffer, num_tokens, hidden, num_experts, WITH_GRADS, RAGGED,
        TOPK, TOPK_LANES, ROUND_EACH, DESCENDING, SUM_ROWS, BLOCK_H, ITEM_TOKENS,
    ))  # fmt: skip
