"""The experts' second grouped GEMM fused with combine: one persistent kernel whose finished row tiles leave at once.

    # equivalent
    y = group_gemm(h, weights, tiles)              # [num_rows, hidden]
    out = combine(y, handle, context, order=order)[0]

    most programs:  tile 0 | tile 1 | tile 2 | ...           | return rows | add up tokens
    NUM_SENDERS:    return the rows of each finished row tile ............ | add up tokens

Rows, bits and the use of buffers and flags are those of ``combine`` and ``grouped_gemm``; the only difference is when
work begins. A combine waits for links, so it overlaps with a GEMM at the cost of few multiprocessors; a dispatch does
not (docs/measurements/ep.md, dead ends).

The task level: a layer as queues of tasks in one persistent kernel, held together by a scoreboard.

A *queue* is a tile function, the number of its tasks and their order. A kernel is a sequence of queues: each of its
programs serves one after the other (``serve``), drawing tasks until the queue is empty; which programs skip a queue,
or serve it first, decides how many multiprocessors a kind of work gets. A *dependency* is a counter of the scoreboard:
the task that produces adds to it (``complete``), the task that consumes waits for an amount (``need``). Counters only
grow; the board is filled anew before every launch.

    @triton.jit
    def _add_tile(task, x, y, board, control, TARGET: tl.constexpr):
        need(board + COUNTERS + task, 1, control, task, TARGET)  # what the queue before has made
        ...

    serve(board, num_tasks, _make_tile, (x, board, TARGET))      # every program makes tiles until there are none left,
    serve(board + 32, num_tasks, _add_tile, (x, y, board, control, TARGET))  # then adds

The arguments are written in the call itself: a tuple with a name would lose its constants.

It cannot deadlock as long as a task waits only for tasks of earlier queues, for earlier tasks of its own queue, or for
what another rank's tasks do under the same rule: whichever programs are resident draw all tasks, in order. So nothing
waits for a program that finds no multiprocessor. In the interpreter one program serves all queues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.ep.combine import SumOrder, Sums, sum_sizes, sum_tokens
from ditron_train.ep.context import EPContext, Kind, check_tokens, launch, pointers
from ditron_train.ep.grouped_gemm import RowTiles, gemm_operands, group_product, row_tiles, store_block, tile_at
from ditron_train.ep.handle import EPHandle
from ditron_train.schedule.tiles import ordered_tile


class Produced(NamedTuple):
    """What a grouped GEMM produces to be returned: rows, one gradient for each, and where each row came from."""

    rows: torch.Tensor
    grads: torch.Tensor
    origins: torch.Tensor


class TileTasks(NamedTuple):
    """Tiles of a grouped GEMM as tasks: each expert's weight, the row tiles, their order, the board."""

    places: torch.Tensor
    tiles: torch.Tensor
    order: torch.Tensor
    board: torch.Tensor


@triton.jit
def draw(head):
    """The next task of a queue (int32); ``head`` is its word, 0 before the launch."""
    return tl.atomic_add(head, 1, sem="relaxed", scope="gpu")


@triton.jit
def serve(head, num_tasks, TASK: tl.constexpr, args):
    """Calls ``TASK(task, *args)`` for tasks drawn from the queue until ``num_tasks`` have been; the next one is drawn
    while this one runs."""
    task = draw(head)
    while task < num_tasks:
        following = draw(head)
        TASK(task, *args)
        task = following


@triton.jit
def need(counter, amount, control, task, TARGET: tl.constexpr):
    """Waits (acquire, bounded) until ``*counter >= amount``; before descriptor loads add ``dl.fence_async_proxy``.

    ``task`` names what was waited for in the record of a wait that ends at its deadline.
    """
    dl.wait(counter, amount, control, dl.rank(control), task, TARGET)


@triton.jit
def complete(counter, amount, TARGET: tl.constexpr):
    """Adds to a counter of the board what this task has finished; all stores of the program before it are released.

    Descriptor stores need ``dl.bulk_store_wait`` before. Returns what the counter held before.
    """
    tl.debug_barrier()
    return tl.atomic_add(counter, amount, sem="acq_rel", scope="sys")


@triton.constexpr_function
def _is_cuda(target):
    return target.startswith("sm_")


@triton.jit
def complete_stored(counter_address, TARGET: tl.constexpr):
    """Counts a tile whose descriptor stores were issued a while ago; nothing for address 0 (an int64).

    Adds 1 for each warp (elsewhere than on NVIDIA: 1), since the stores of a tile are issued by several warps: each
    waits for its own, then its first lane releases (fence) and counts. No block barrier, which would drain the
    pipeline of the loop that this stands in.
    """
    if _is_cuda(TARGET):
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred counts, first;
                .reg .b32 lane;
                cp.async.bulk.wait_group 0;
                bar.warp.sync 0xffffffff;
                mov.u32 lane, %laneid;
                setp.ne.s64 counts, $1, 0;
                setp.eq.and.u32 first, lane, 0, counts;
                @first fence.acq_rel.gpu;
                @first red.relaxed.gpu.global.add.s32 [$1], 1;
                mov.u32 $0, 0;
            }
            """,
            "=r,l",
            [counter_address],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        if counter_address != 0:
            complete(counter_address.to(tl.pointer_type(tl.int32)), 1, TARGET)


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
    MIN_ROWS: tl.constexpr,
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
    expert -= (rows_of_expert < MIN_ROWS).to(tl.int32) * SLOTS
    return (expert * WORLD_SIZE + (home + 2 * WORLD_SIZE - rank - 1) % WORLD_SIZE) * max_tiles + index


@triton.jit
def _num_given(tiles, max_tiles, BLOCK_M: tl.constexpr, MIN_ROWS: tl.constexpr):
    """Row tiles of experts of fewer than ``MIN_ROWS`` rows."""
    num_tiles = tl.load(tiles)
    given = tl.zeros((_AT_ONCE,), tl.int32)
    for block in range(0, tl.cdiv(num_tiles, _AT_ONCE)):
        index = block * _AT_ONCE + tl.arange(0, _AT_ONCE)
        inside = index < num_tiles
        _, _, _, rows_of_expert = _tile_span(tiles, index, inside, max_tiles, BLOCK_M)
        given += (inside & (rows_of_expert < MIN_ROWS)).to(tl.int32)
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
    MIN_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """order[i] = the i-th row tile that ``gemm_combine_kernel`` returns; the board as it wants it. Program b does
    block b of both; no program waits. Sorting is counting: the place of a tile is the number of tiles with a smaller
    key, and the keys of any two tiles differ.

    Tiles stand by expert, then by source rank, beginning behind the own: ranks that compute the same expert at the
    same time then return rows to different ranks. Those of experts of fewer than ``MIN_ROWS`` rows, which are there
    already, stand in front. Counters: column tiles done of each row tile, ``tile_count`` if it is there.
    """
    rank = dl.rank(control)
    num_tiles = tl.load(tiles)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_tiles
    key = _return_key(index, inside, tiles, sources, rank, max_tiles, WORLD_SIZE, SLOTS, BLOCK_M, MIN_ROWS)
    place = tl.zeros((BLOCK,), tl.int32)
    for block in range(0, tl.cdiv(num_tiles, _AT_ONCE)):
        others = block * _AT_ONCE + tl.arange(0, _AT_ONCE)
        valid = others < num_tiles
        other_key = _return_key(others, valid, tiles, sources, rank, max_tiles, WORLD_SIZE, SLOTS, BLOCK_M, MIN_ROWS)
        place += tl.sum(((other_key[None, :] < key[:, None]) & valid[None, :]).to(tl.int32), axis=1)
    tl.store(order + place, index, mask=inside)
    counts = tl.zeros((BLOCK,), tl.int32)
    if MIN_ROWS:
        _, _, _, rows_of_expert = _tile_span(tiles, index, inside, max_tiles, BLOCK_M)
        counts += (inside & (rows_of_expert < MIN_ROWS)).to(tl.int32) * tile_count
    tl.store(board + COUNTERS + index, counts, mask=index < max_tiles)
    if tl.program_id(0) == 0:
        words = tl.arange(0, COUNTERS)
        heads = tl.zeros_like(words)
        if MIN_ROWS:
            heads += tl.where(words == GIVEN, _num_given(tiles, max_tiles, BLOCK_M, MIN_ROWS), 0)
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


@triton.jit
def _compute_shares(
    a_desc,
    b_desc,
    c_desc,
    tasks,
    num_row_tiles,
    num_tiles_n,
    num_k_tiles,
    num_shares,
    TARGET: tl.constexpr,
    GEMM: tl.constexpr,
):
    """Computes tiles of the product, share after share, until all are drawn."""
    num_given = tl.load(tasks.board + GIVEN)
    order, num_computed = tasks.order + num_given, num_row_tiles - num_given
    share = draw(tasks.board + HEAD_FIRST)
    while share < num_shares:
        stored = tl.cast(0, tl.int64)  # counter of the tile before, whose stores end while this one is computed
        for tile in tl.range(share, num_computed * num_tiles_n, num_shares, flatten=True):
            row_tile, col_tile = ordered_tile(tile, order, num_computed, num_tiles_n, GEMM.GROUP_M)
            place, row, valid = tile_at(tasks.tiles, tasks.places, row_tile, GEMM.BLOCK_M)
            col = col_tile * GEMM.BLOCK_N
            acc = group_product(a_desc, b_desc, place, row, col, num_k_tiles, GEMM.BLOCK_N, GEMM)
            complete_stored(stored, TARGET)
            store_block(c_desc, acc, row + valid, GEMM.BLOCK_M - valid, col, GEMM.BLOCK_N, GEMM.SPLIT_STORE, GEMM)
            stored = (tasks.board + COUNTERS + row_tile).to(tl.int64)
        complete_stored(stored, TARGET)
        share = draw(tasks.board + HEAD_FIRST)


@triton.jit
def _await_rows(sums, channel, rank, epoch, SUM: tl.constexpr):
    """Waits until every rank that has rows of this one has returned them all."""
    for step in tl.static_range(SUM.WORLD_SIZE):
        peer = (rank + step) % SUM.WORLD_SIZE
        if tl.load(sums.chunk_entries + peer * (SUM.NUM_CHUNKS + 1) + SUM.NUM_CHUNKS) > 0:
            dl.wait(channel.signals + peer * SUM.NUM_CHUNKS, epoch, channel.control, peer, 0, SUM.TARGET)


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
    tiles are left), tokens to sum (all). Nearly every token has a row in the last tiles, so there is one flag for each
    source, set when all of its rows have left. A program that finds no multiprocessor, since NCCL holds it until a
    peer has done its part, leaves its share to the others.

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
        num_k_tiles, num_shares = tl.cdiv(K, GEMM.BLOCK_K), num_programs - SUM.NUM_SENDERS
        _compute_shares(
            a_desc, b_desc, c_desc, tasks, num_row_tiles, num_tiles_n, num_k_tiles, num_shares, SUM.TARGET, GEMM
        )
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
    _await_rows(sums, channel, rank, epoch, SUM)
    serve(
        tasks.board + HEAD_THIRD,
        tl.cdiv(num_tokens, SUM.ITEM_TOKENS),
        sum_tokens,
        (sums, buffers.rows, buffers.grads, num_tokens, hidden, num_experts, SUM),
    )


_BOARD_WORDS = 128  # before the counters
#: (rows by expert, weights, whether these are transposed, the result, experts): multiplies the rows of those experts.
FewProduct = Callable[[torch.Tensor, Sequence[torch.Tensor], bool, torch.Tensor, Sequence[int]], None]
_PLAN_BLOCK = 128  # row tiles that a program of a plan orders


def layout_tiles(handle: EPHandle) -> RowTiles:
    """The row tiles of a handle's experts; computed once and used by forward and backward."""
    if handle.tiles is None:
        handle.tiles = row_tiles(handle.expert_tokens, handle.num_rows)
    return handle.tiles


def _plan(
    handle: EPHandle, context: EPContext, tiles: RowTiles, min_rows: int, tile_count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of the row tiles, and a fresh board; ``tile_count``: what a row tile's counter ends at."""
    shape = handle.shape
    memory = torch.empty(2 * tiles.max_tiles + _BOARD_WORDS, dtype=torch.int32, device=tiles.tiles.device)
    order, board = memory[: tiles.max_tiles], memory[tiles.max_tiles :]
    constants = dict(
        WORLD_SIZE=shape.world_size, SLOTS=shape.slots, BLOCK_M=tiles.block_m, MIN_ROWS=min_rows, BLOCK=_PLAN_BLOCK
    )
    control = context.dispatch_channel.control
    launch(context, plan_tiles, tiles.max_tiles // _PLAN_BLOCK, constants, 8)(
        tiles.tiles, handle.tables.sources, order, board, control, tiles.max_tiles, tile_count
    )
    return order, board


def num_programs(context: EPContext) -> int:
    """Programs of a kernel at task level: in the interpreter one serves all queues."""
    return 1 if context.target == "interpreter" else context.move.num_programs


def gemm_combine(
    x: torch.Tensor,
    handle: EPHandle,
    context: EPContext,
    weights: Sequence[torch.Tensor],
    *,
    order: SumOrder,
    min_rows: int = 0,
    few: FewProduct | None = None,
) -> torch.Tensor:
    """``group_gemm``, then ``combine`` of its rows, in one kernel whose finished row tiles leave at once.

    Args:
        x: [num_rows, K], bf16 or fp16 (fp32 too in the interpreter).
        handle: Handle of a routing that was dispatched.
        context: The group's context.
        weights: As ``group_gemm``: [hidden, K] each.
        order: As ``combine``.
        min_rows: Experts with fewer rows are multiplied by ``few``, before the kernel.
        few: (x, weights, True, result, those experts) -> writes their rows of the result.

    Returns:
        out [num_tokens, hidden].

    Raises:
        NotSupportedError: What ``group_gemm`` or ``combine`` does not take.
        PeerTimeoutError, MismatchError: An earlier call failed.
    """
    check_tokens("gemm_combine", x, context)
    channel, shape = context.combine_channel, handle.shape
    context.enter_move(channel, handle)
    x, tiles = x.contiguous(), layout_tiles(handle)
    operands = gemm_operands("gemm_combine", x, weights, tiles, transpose=True)
    y, hidden = operands.y, operands.n
    out = torch.empty(handle.num_tokens, hidden, dtype=x.dtype, device=x.device)
    no_grads = torch.empty(0, shape.num_experts, dtype=torch.float32, device=x.device)
    buffers = context.buffers.row_buffers(handle.place_capacity, hidden, x.dtype)
    sizes = sum_sizes(context, handle, order, hidden, context.fused.place_elements, with_grads=False)
    config = operands.config
    programs = num_programs(context)
    sizes = sizes._replace(
        NUM_SENDERS=min(context.fused.num_senders, programs // 2),
        TILE_COUNT=config.num_warps if context.target.startswith("sm_") else 1,
    )
    if few is not None:
        few(x, weights, True, y, handle.experts_below(min_rows))
    tile_count = -(-hidden // config.block_n) * sizes.TILE_COUNT
    tile_order, board = _plan(handle, context, tiles, 0 if few is None else min_rows, tile_count)
    constants = {"SUM": sizes, "GEMM": operands.sizes}
    dtypes = (x.dtype, no_grads.dtype)
    tables = handle.tables
    sums = Sums(out, no_grads, tables.chunk_entries, handle.expert_ids, handle.token_places)
    given = pointers(context, channel, hidden, x.dtype, Kind.GEMM_COMBINE)
    descriptors = (operands.a, operands.b, operands.c)
    tasks = TileTasks(operands.places, tiles.tiles, tile_order, board)
    sizes_of_call = (handle.num_tokens, hidden, operands.k, shape.num_experts)
    launch(context, gemm_combine_kernel, programs, constants, config.num_warps, *dtypes, num_stages=config.num_stages)(
        Produced(y, x, handle.origins), sums, buffers, given, tables.limits, *descriptors, tasks, *sizes_of_call
    )
    return out
