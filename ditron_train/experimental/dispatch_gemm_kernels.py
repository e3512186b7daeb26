"""``dispatch_gemm_kernel``: dispatch with the grouped GEMM of its rows behind it, as one launch of queues
(``ep.task_kernels``).

Rows, bits and the use of buffers and flags are those of ``ep.kernels`` and ``ep.group_gemm_kernels``: only when a
piece of work begins is different.
"""

import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.ep.arguments import Inbox
from ditron_train.ep.fused_kernels import COUNTERS, HEAD_FIRST, HEAD_SECOND, HEAD_THIRD, TOTAL, sort_tiles, tile_span
from ditron_train.ep.group_gemm_kernels import group_product, store_block, tile_at
from ditron_train.ep.kernels import place_rows, send_chunk, start
from ditron_train.ep.task_kernels import complete, need, serve
from ditron_train.schedule.tiles import ordered_tile


@triton.jit
def _arrival_key(
    index,
    inside,
    tiles,
    sources,
    max_tiles,
    WORLD_SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    PHASES: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """By the last part of any source's tokens that the tile needs, in PHASES-ths of them."""
    expert, first, last, _ = tile_span(tiles, index, inside, max_tiles, BLOCK_M)
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
    tiles,
    sources,
    order,
    board,
    max_tiles,
    NUM_EXPERTS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    PHASES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """order[i] = the i-th row tile to compute; the board as ``dispatch_gemm_kernel`` wants it. Program b does block b
    of both.

    Tiles that need an early part of their source's tokens come first, those that straddle two sources, and so need the
    last tokens of one, last. Within a part tiles stay by expert, so that neighbours share weights. Counters: rows
    still to be placed in each block of BLOCK_M rows, as BLOCK_M less what is missing; and of all together.
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
def _place_chunk(
    item,
    x,
    placed,
    inbox,
    board,
    rank,
    epoch,
    num_tokens,
    num_rows,
    slot_capacity,
    hidden,
    MOVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Task: rows of one source's chunk from their slots to their places; then they count in their blocks."""
    chunk = item // MOVE.WORLD_SIZE
    source = (rank + item % MOVE.WORLD_SIZE) % MOVE.WORLD_SIZE
    begin = tl.load(inbox.recv_offsets + source * (MOVE.NUM_CHUNKS + 1) + chunk)
    end = tl.load(inbox.recv_offsets + source * (MOVE.NUM_CHUNKS + 1) + chunk + 1)
    if end > begin:
        flag = inbox.signals + source * MOVE.NUM_CHUNKS + chunk
        dl.wait(flag, epoch, inbox.control, source, chunk, MOVE.TARGET)
        place_rows(x, placed, inbox, source, rank, begin, end, hidden, num_tokens, num_rows, slot_capacity, MOVE)
        dl.fence(MOVE.TARGET)  # every thread's rows are visible before any thread counts one
        for start in range(begin, end, BLOCK_M):
            index = start + tl.arange(0, BLOCK_M)
            inside = (index < end) & (index < num_rows)
            row = tl.load(placed.entries + tl.cast(index, tl.int64) * 4, mask=inside, other=-1)
            held = inside & (row >= 0) & (row < num_rows)
            tl.atomic_add(board + COUNTERS + row // BLOCK_M, 1, mask=held, sem="release", scope="gpu")
        complete(board + TOTAL, end - begin, MOVE.TARGET)


@triton.jit
def _gemm_strip(
    ticket,
    a_desc,
    b_desc,
    c_desc,
    tasks,
    control,
    num_row_tiles,
    num_tiles_n,
    num_k_tiles,
    num_programs,
    STRIP: tl.constexpr,
    GEMM: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Task: a strip of output tiles, once their rows are in place."""
    first, count = strip_of(ticket, num_row_tiles * num_tiles_n, num_programs, STRIP)
    if tl.load(tasks.board + TOTAL, volatile=True) < 0:  # warps may differ here: no barrier inside
        for nth in range(count):
            row_tile, _ = ordered_tile(
                first + nth * num_programs, tasks.order, num_row_tiles, num_tiles_n, GEMM.GROUP_M
            )
            entry = tasks.tiles + 4 + row_tile * 4
            row = tl.load(entry + 1)
            last_row = tl.minimum(row + GEMM.BLOCK_M, tl.load(entry + 2)) - 1
            for block in range(row // GEMM.BLOCK_M, last_row // GEMM.BLOCK_M + 1):
                need(tasks.board + COUNTERS + block, GEMM.BLOCK_M, control, block, TARGET)
    dl.fence(TARGET)
    dl.fence_async_proxy(TARGET)
    for tile in tl.range(first, first + count * num_programs, num_programs, flatten=True):
        row_tile, col_tile = ordered_tile(tile, tasks.order, num_row_tiles, num_tiles_n, GEMM.GROUP_M)
        place, row, valid = tile_at(tasks.tiles, tasks.places, row_tile, GEMM.BLOCK_M)
        col = col_tile * GEMM.BLOCK_N
        acc = group_product(a_desc, b_desc, place, row, col, num_k_tiles, GEMM.BLOCK_N, GEMM)
        store_block(c_desc, acc, row + valid, GEMM.BLOCK_M - valid, col, GEMM.BLOCK_N, GEMM.SPLIT_STORE, GEMM)


@triton.jit(do_not_specialize=["num_tokens"])
def dispatch_gemm_kernel(
    x,
    placed,
    to,
    recv_offsets,
    buffers,
    channel,
    limits,
    a_desc,
    b_desc,
    c_desc,
    tasks,
    num_tokens,
    chunk_tokens,
    hidden,
    N,
    NUM_PLACERS: tl.constexpr,
    STRIP: tl.constexpr,
    SEND: tl.constexpr,
    PLACE: tl.constexpr,
    GEMM: tl.constexpr,
):
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
    epoch = dl.next_epoch(channel.tickets)
    rank = dl.rank(channel.control)
    num_rows = tl.load(limits)
    room = (tl.load(limits + 1), tl.load(limits + 2))
    start(channel, epoch, rank, SEND)
    if program < SEND.NUM_SENDERS:
        serve(
            tasks.board + HEAD_FIRST,
            tl.cdiv(num_tokens, chunk_tokens),
            send_chunk,
            (x, to, buffers, channel.signals_addresses, rank, epoch, room, num_tokens, chunk_tokens, hidden, SEND),
        )
    if program < SEND.NUM_SENDERS + NUM_PLACERS:
        inbox = Inbox(recv_offsets, buffers.tokens, buffers.entries, channel.signals, channel.control)
        serve(
            tasks.board + HEAD_SECOND,
            PLACE.WORLD_SIZE * PLACE.NUM_CHUNKS,
            _place_chunk,
            (x, placed, inbox, tasks.board, rank, epoch, num_tokens, num_rows, room[1], hidden, PLACE, GEMM.BLOCK_M),
        )
    num_tiles_n = tl.cdiv(N, GEMM.BLOCK_N)
    num_k_tiles = tl.cdiv(hidden, GEMM.BLOCK_K)
    num_row_tiles = tl.load(tasks.tiles)
    serve(
        tasks.board + HEAD_THIRD,
        num_strips(num_row_tiles * num_tiles_n, num_programs, STRIP),
        _gemm_strip,
        (
            a_desc,
            b_desc,
            c_desc,
            tasks,
            channel.control,
            num_row_tiles,
            num_tiles_n,
            num_k_tiles,
            num_programs,
            STRIP,
            GEMM,
            SEND.TARGET,
        ),
    )
