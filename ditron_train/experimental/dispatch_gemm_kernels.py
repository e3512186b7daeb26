"""``dispatch_gemm_kernel``: dispatch with the grouped GEMM of its rows behind it, as one launch of queues
(``ep.task_kernels``).

Rows, bits and the use of buffers and flags are those of ``ep.kernels`` and ``ep.group_gemm_kernels``: only when a piece
of work begins is different.
"""

import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.ep.fused_kernels import COUNTERS, HEAD_FIRST, HEAD_SECOND, HEAD_THIRD, TOTAL, sort_tiles, tile_span
from ditron_train.ep.group_gemm_kernels import group_product, store_block
from ditron_train.ep.kernels import place_rows, send_entries, send_tokens
from ditron_train.ep.task_kernels import complete, need, serve
from ditron_train.schedule.tiles import ordered_tile

__all__ = ["dispatch_gemm_kernel", "num_strips", "plan_arrival", "strip_of"]


@triton.jit
def _arrival_key(
    index, inside, tiles, sources, max_tiles,
    WORLD_SIZE: tl.constexpr, SLOTS: tl.constexpr, PHASES: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """By the last part of any source's tokens that the tile needs, in PHASES-ths of them."""
    expert, first, last = tile_span(tiles, index, inside, max_tiles, BLOCK_M)
    low = tl.zeros_like(first)
    phase = tl.zeros_like(first)
    for source in tl.static_range(WORLD_SIZE):
        rows = tl.load(sources + source * SLOTS + expert, mask=inside, other=0)
        top = tl.minimum(last, low + rows)
        part = ((top - low) * PHASES + rows - 1) // tl.maximum(rows, 1)
        phase = tl.maximum(phase, tl.where(top > tl.maximum(first, low), part, 0))
        low += rows
    return phase * max_tiles + index


@triton.jit(do_not_specialize=["max_tiles"])
def plan_arrival(
    tiles, sources, order, board, max_tiles,
    NUM_EXPERTS: tl.constexpr, WORLD_SIZE: tl.constexpr, SLOTS: tl.constexpr, PHASES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """order[i] = the i-th row tile to compute; the board as ``dispatch_gemm_kernel`` wants it. Program b does block b
    of both.

    Tiles that need an early part of their source's tokens come first, those that straddle two sources, and so need the
    last tokens of one, last. Within a part tiles stay by expert, so that neighbours share weights. Counters: rows still
    to be placed in each block of BLOCK_M rows, as BLOCK_M less what is missing; and of all together.
    """
    sort_tiles(tiles, order, _arrival_key, (tiles, sources, max_tiles, WORLD_SIZE, SLOTS, PHASES, BLOCK_M), BLOCK)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    num_rows = tl.load(tiles + 4 + 4 * max_tiles + NUM_EXPERTS - 1)
    missing = tl.minimum(tl.maximum(num_rows - index * BLOCK_M, 0), BLOCK_M)
    tl.store(board + COUNTERS + index, BLOCK_M - missing, mask=index < max_tiles)
    if tl.program_id(0) == 0:
        words = tl.arange(0, COUNTERS)
        tl.store(board + words, tl.where(words == TOTAL, -num_rows, 0))


@triton.jit
def strip_of(ticket, num_tiles, num_programs, STRIP: tl.constexpr):
    """(first tile, number of tiles) of a ticket; a strip's tiles are ``num_programs`` apart.

    Programs that draw tickets one after the other work on neighbouring tiles all along (their operands are in L2), and
    a strip is one pipelined loop. The last two waves or so come in strips of one tile, to end together.
    ``num_strips`` counts the tickets.
    """
    rounds = tl.maximum(num_tiles - 2 * num_programs, 0) // (num_programs * STRIP)
    long_strips = rounds * num_programs
    is_long = ticket < long_strips
    first = tl.where(
        is_long,
        ticket // num_programs * (num_programs * STRIP) + ticket % num_programs,
        ticket + long_strips * (STRIP - 1),
    )
    return first, tl.where(is_long, STRIP, 1)


@triton.jit
def num_strips(num_tiles, num_programs, STRIP: tl.constexpr):
    """How many tickets ``strip_of`` has for ``num_tiles`` tiles."""
    rounds = tl.maximum(num_tiles - 2 * num_programs, 0) // (num_programs * STRIP)
    return num_tiles - rounds * num_programs * (STRIP - 1)


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
