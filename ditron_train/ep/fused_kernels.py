"""A grouped GEMM with combine behind it, as one launch of queues (``task_kernels``).

Rows, bits and the use of buffers and flags are those of ``return_kernels`` and ``group_gemm_kernels``: only when a
piece of work begins is different. A combine waits for links, so it hides under a GEMM for few of the multiprocessors;
a dispatch does not (docs/measurements/ep.md, dead ends).
"""

import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.ep.group_gemm_kernels import group_product, store_block, tile_at
from ditron_train.ep.return_kernels import sum_tokens
from ditron_train.ep.task_kernels import complete, complete_stored, draw, need, serve
from ditron_train.schedule.tiles import ordered_tile

# Words of a board: a head for each queue, a counter of the whole, how many row tiles are there before the launch, then
# one counter for each tile or block of rows.
HEAD_FIRST = tl.constexpr(0)
HEAD_SECOND = tl.constexpr(32)
HEAD_THIRD = tl.constexpr(64)
TOTAL = tl.constexpr(96)
GIVEN = tl.constexpr(97)
COUNTERS = tl.constexpr(128)
_AT_ONCE = tl.constexpr(32)  # keys that plan_tiles compares at a time: more spill


@triton.jit
def _tile_span(tiles, index, inside, max_tiles, BLOCK_M: tl.constexpr):
    """Expert, first row and end row of row tiles, and rows of the expert; rows are counted from the expert's first."""
    entry = tiles + 4 + index * 4
    expert = tl.load(entry, mask=inside, other=0)
    row = tl.load(entry + 1, mask=inside, other=0)
    end = tl.load(entry + 2, mask=inside, other=0)
    start = tl.load(tiles + 4 + 4 * max_tiles + expert - 1, mask=inside & (expert > 0), other=0)
    return expert, row - start, tl.minimum(row + BLOCK_M, end) - start, end - start


@triton.jit
def _return_key(
    index,
    inside,
    tiles,
    sources,
    rank,
    max_tiles,
    WORLD_SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FEWEST: tl.constexpr,
):
    """Tiles that are given first; by expert, then by the source of the tile's first row, beginning behind ``rank``."""
    expert, first, last, rows_of_expert = _tile_span(tiles, index, inside, max_tiles, BLOCK_M)
    low = tl.zeros_like(first)
    home = tl.zeros_like(first) - 1
    for source in tl.static_range(WORLD_SIZE):
        rows = tl.load(sources + source * SLOTS + expert, mask=inside, other=0)
        overlaps = tl.minimum(last, low + rows) > tl.maximum(first, low)
        home = tl.where(overlaps & (home < 0), source, home)
        low += rows
    expert -= (rows_of_expert < FEWEST).to(tl.int32) * SLOTS
    return (expert * WORLD_SIZE + (home + 2 * WORLD_SIZE - rank - 1) % WORLD_SIZE) * max_tiles + index


@triton.jit
def _num_given(tiles, max_tiles, BLOCK_M: tl.constexpr, FEWEST: tl.constexpr):
    """Row tiles of experts of fewer than ``FEWEST`` rows."""
    num_tiles = tl.load(tiles)
    given = tl.zeros((_AT_ONCE,), tl.int32)
    for block in range(0, tl.cdiv(num_tiles, _AT_ONCE)):
        index = block * _AT_ONCE + tl.arange(0, _AT_ONCE)
        inside = index < num_tiles
        _, _, _, rows_of_expert = _tile_span(tiles, index, inside, max_tiles, BLOCK_M)
        given += (inside & (rows_of_expert < FEWEST)).to(tl.int32)
    return tl.sum(given)


@triton.jit(do_not_specialize=["max_tiles", "tile_count"])
def plan_tiles(
    tiles,
    sources,
    order,
    board,
    control,
    max_tiles,
    tile_count,
    WORLD_SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FEWEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """order[i] = the i-th row tile that ``gemm_combine_kernel`` returns; the board as it wants it. Program b does
    block b of both; no program waits. Sorting is counting: the place of a tile is the number of tiles with a smaller
    key, and the keys of any two tiles differ.

    Tiles stand by expert, then by source rank, beginning behind the own: ranks that compute the same expert at the
    same time then return rows to different ranks. Those of experts of fewer than ``FEWEST`` rows, which are there
    already, stand in front. Counters: column tiles done of each row tile, ``tile_count`` where it is there.
    """
    rank = dl.rank(control)
    num_tiles = tl.load(tiles)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_tiles
    key = _return_key(index, inside, tiles, sources, rank, max_tiles, WORLD_SIZE, SLOTS, BLOCK_M, FEWEST)
    place = tl.zeros((BLOCK,), tl.int32)
    for block in range(0, tl.cdiv(num_tiles, _AT_ONCE)):
        others = block * _AT_ONCE + tl.arange(0, _AT_ONCE)
        valid = others < num_tiles
        other_key = _return_key(others, valid, tiles, sources, rank, max_tiles, WORLD_SIZE, SLOTS, BLOCK_M, FEWEST)
        place += tl.sum(((other_key[None, :] < key[:, None]) & valid[None, :]).to(tl.int32), axis=1)
    tl.store(order + place, index, mask=inside)
    counts = tl.zeros((BLOCK,), tl.int32)
    if FEWEST:
        _, _, _, rows_of_expert = _tile_span(tiles, index, inside, max_tiles, BLOCK_M)
        counts += (inside & (rows_of_expert < FEWEST)).to(tl.int32) * tile_count
    tl.store(board + COUNTERS + index, counts, mask=index < max_tiles)
    if tl.program_id(0) == 0:
        words = tl.arange(0, COUNTERS)
        heads = tl.zeros_like(words)
        if FEWEST:
            heads += tl.where(words == GIVEN, _num_given(tiles, max_tiles, BLOCK_M, FEWEST), 0)
        tl.store(board + words, heads)


@triton.jit
def _return_tile(
    task,
    sent,
    tasks,
    buffers,
    channel,
    rank,
    epoch,
    num_row_tiles,
    num_tiles_n,
    place_capacity,
    hidden,
    SUM: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Task: rows of one row tile to their tokens, once all its columns are there; the last one tells every rank."""
    tile = tl.load(tasks.order + task)
    need(tasks.board + COUNTERS + tile, num_tiles_n * SUM.TILE_COUNT, channel.control, tile, SUM.TARGET)
    first = tl.load(tasks.tiles + 4 + tile * 4 + 1)
    end = tl.minimum(first + BLOCK_M, tl.load(tasks.tiles + 4 + tile * 4 + 2))
    for start in range(first, end, SUM.ROWS):
        row = start + tl.arange(0, SUM.ROWS)
        inside = row < end
        source = tl.load(sent.origins + row * 2, mask=inside, other=-1)
        place = tl.load(sent.origins + row * 2 + 1, mask=inside, other=-1)
        held = inside & (source >= 0) & (source < SUM.WORLD_SIZE) & (place >= 0) & (place < place_capacity)
        target = tl.load(buffers.row_addresses + source, mask=held, other=0)
        target = tl.multiple_of(target.to(tl.pointer_type(sent.rows.dtype.element_ty)), 16)
        target += tl.cast(place, tl.int64) * hidden
        line = sent.rows + tl.cast(row, tl.int64) * hidden
        for column in range(0, hidden, SUM.BLOCK_H):
            offsets = column + tl.arange(0, SUM.BLOCK_H)
            valid = held[:, None] & (offsets < hidden)[None, :]
            values = tl.load(line[:, None] + offsets[None, :], mask=valid)
            tl.store(target[:, None] + offsets[None, :], values, mask=valid)
    if complete(tasks.board + TOTAL, 1, SUM.TARGET) == num_row_tiles - 1:
        for step in tl.static_range(SUM.WORLD_SIZE):
            peer = (rank + step) % SUM.WORLD_SIZE
            flag = dl.symm_at(channel.signals_addresses, peer, tl.int32) + rank * SUM.NUM_CHUNKS
            dl.notify(flag, epoch, SUM.TARGET)


@triton.jit(do_not_specialize=["num_tokens"])
def gemm_combine_kernel(
    sent,
    sums,
    buffers,
    channel,
    limits,
    a_desc,
    b_desc,
    c_desc,
    tasks,
    num_tokens,
    hidden,
    K,
    num_experts,
    SUM: tl.constexpr,
    GEMM: tl.constexpr,
):
    """rows[r, :] = A[r, :] @ B[e(r)] as ``group_gemm_kernel`` does, and out[t] = sum over e of rows[row(t, e)] as
    ``return_rows``. The first row tiles of ``order``, as many as the board's GIVEN, are in ``rows`` already.

    All but the last NUM_SENDERS programs compute tiles, in one pipelined loop as the grouped GEMM alone; a finished
    tile adds TILE_COUNT to its row tile's counter while the next one is being computed (``complete_stored``). Queues:
    shares of the tiles, one for each of those programs, row tiles to return (the other programs first, these when no
    tiles are left), tokens to sum (all). Nearly every token has a row in the last tiles, so a rank is told once, when
    all of a peer's rows have left: one flag a source. A program that finds no multiprocessor, since NCCL holds it
    until a peer has done its part, leaves its share to the others.

    Waits: returning programs for every rank's start signal, then for a row tile's counter (acquire; its tiles are
    stored through descriptors and waited for before they count); sums (acquire, system scope) for the flag of every
    rank that has rows of this one. The counter of returned tiles chains their releases into that flag.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    epoch = dl.next_epoch(channel.tickets)
    rank = dl.rank(channel.control)
    place_capacity = tl.load(limits + 3)
    num_row_tiles = tl.load(tasks.tiles)
    num_tiles_n = tl.cdiv(hidden, GEMM.BLOCK_N)
    if program == 0:
        dl.announce(channel.ready_addresses, channel.signature, epoch, rank, SUM.WORLD_SIZE, SUM.TARGET)
    if program < num_programs - SUM.NUM_SENDERS:
        num_k_tiles = tl.cdiv(K, GEMM.BLOCK_K)
        num_given = tl.load(tasks.board + GIVEN)
        order, num_computed = tasks.order + num_given, num_row_tiles - num_given
        share = draw(tasks.board + HEAD_FIRST)
        while share < num_programs - SUM.NUM_SENDERS:
            stored = tl.cast(0, tl.int64)  # counter of the tile before, whose stores end while this one is computed
            for tile in tl.range(share, num_computed * num_tiles_n, num_programs - SUM.NUM_SENDERS, flatten=True):
                row_tile, col_tile = ordered_tile(tile, order, num_computed, num_tiles_n, GEMM.GROUP_M)
                place, row, valid = tile_at(tasks.tiles, tasks.places, row_tile, GEMM.BLOCK_M)
                col = col_tile * GEMM.BLOCK_N
                acc = group_product(a_desc, b_desc, place, row, col, num_k_tiles, GEMM.BLOCK_N, GEMM)
                complete_stored(stored, SUM.TARGET)
                store_block(c_desc, acc, row + valid, GEMM.BLOCK_M - valid, col, GEMM.BLOCK_N, GEMM.SPLIT_STORE, GEMM)
                stored = (tasks.board + COUNTERS + row_tile).to(tl.int64)
            complete_stored(stored, SUM.TARGET)
            share = draw(tasks.board + HEAD_FIRST)
    for peer in tl.static_range(SUM.WORLD_SIZE):
        dl.await_ready(channel.ready, epoch, channel.control, peer, SUM.WORLD_SIZE, SUM.TARGET)
    serve(
        tasks.board + HEAD_SECOND,
        num_row_tiles,
        _return_tile,
        (
            sent,
            tasks,
            buffers,
            channel,
            rank,
            epoch,
            num_row_tiles,
            num_tiles_n,
            place_capacity,
            hidden,
            SUM,
            GEMM.BLOCK_M,
        ),
    )
    dl.verify_peers(channel.ready, channel.signature, epoch, channel.control, rank, SUM.WORLD_SIZE, SUM.TARGET)
    for step in tl.static_range(SUM.WORLD_SIZE):
        peer = (rank + step) % SUM.WORLD_SIZE
        if tl.load(sums.chunk_entries + peer * (SUM.NUM_CHUNKS + 1) + SUM.NUM_CHUNKS) > 0:
            dl.wait(channel.signals + peer * SUM.NUM_CHUNKS, epoch, channel.control, peer, 0, SUM.TARGET)
    serve(
        tasks.board + HEAD_THIRD,
        tl.cdiv(num_tokens, SUM.ITEM_TOKENS),
        sum_tokens,
        (sums, buffers.rows, buffers.grads, num_tokens, hidden, num_experts, SUM),
    )
