"""Kernels of Ulysses sequence parallelism that multiply: GEMM-A2A and A2A-GEMM.

Buffers, flags and ticket roles are those of ``kernels``. Sizes that change no code are not specialised on.
What else was tried, with times: ``docs/measurements/sp.md``.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.gemm.kernels import biased, store_tile, tile_product
from ditron_train.schedule.tiles import grouped_tile
from ditron_train.sp.kernels import next_work, push_item, start_epoch


@triton.jit(do_not_specialize=["M", "slot_rows"])
def gemm_a2a_kernel(
    a_desc,
    b_desc,
    c_desc,
    channel,
    bias,
    M,
    N,
    K,
    columns_per_rank,
    slot_rows,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TRANSPOSE_B: tl.constexpr,
    SPLIT_STORE: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Own slot[d] [M, N] = A [M, K] @ B[:, d * columns_per_rank :][:, :N], for every rank d; persistent.

    Rank d pulls its slot. Order: all tiles of rank + 1, then of rank + 2, ..., own ones last, so that at any time
    every rank is pulled from by another one. Before the first store: the start signals of all ranks, which have then
    read what the last op left here. A tile is signalled to rank d one tile later, when its asynchronous stores are
    complete (``bulk_store_wait``), by a release after a block barrier; tiles and K blocks are one flattened, pipelined
    loop all the same (``dl.notify_stored``). Waits for nothing but start signals, which every rank sends first: all
    launches make progress.

    ``bias`` [columns of all ranks] is added to the product before it is rounded, or it is None.
    """
    epoch = dl.next_epoch(channel.tickets)
    rank = dl.rank(channel.control)
    start_epoch(channel, epoch, rank, WORLD_SIZE, TARGET)
    num_tiles_m = tl.cdiv(M, BLOCK_M)
    num_tiles_n = tl.cdiv(N, BLOCK_N)
    num_k_tiles = tl.cdiv(K, BLOCK_K)
    tiles_per_rank = num_tiles_m * num_tiles_n
    pending = tl.cast(0, tl.int64)  # address of the flag of the tile that is still being stored
    for tile_id in tl.range(tl.program_id(0), tiles_per_rank * WORLD_SIZE, tl.num_programs(0), flatten=True):
        peer = (rank + 1 + tile_id // tiles_per_rank) % WORLD_SIZE
        tile_m, tile_n = grouped_tile(tile_id % tiles_per_rank, num_tiles_m, num_tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        first_col = peer * columns_per_rank + col
        acc = tile_product(a_desc, b_desc, row, first_col, num_k_tiles, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSE_B)
        acc = biased(acc, None, bias, first_col, WORLD_SIZE * columns_per_rank, BLOCK_N)
        if pending != 0:
            dl.notify_stored(pending, epoch, True, TARGET)
        else:
            dl.await_peers(channel.ready, epoch, channel.control, rank, WORLD_SIZE, TARGET, HOLDS_BARRIER=False)
            dl.fence_async_proxy(TARGET)
        store_tile(c_desc, acc, peer * slot_rows + row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
        flags = dl.symm_at(channel.signals_addresses, peer, tl.int32)
        pending = (flags + rank * tiles_per_rank + tile_m * num_tiles_n + tile_n).to(tl.int64)
    if pending != 0:
        dl.notify_stored(pending, epoch, True, TARGET)
    dl.verify_peers(channel.ready, channel.signature, epoch, channel.control, rank, WORLD_SIZE, TARGET)


@triton.jit
def _num_behind(signals_ptr, num_flags, epoch):
    """How many of ``num_flags`` flags are not at ``epoch`` yet, the same number in all threads; orders nothing.

    At least as many lanes as threads: no element is loaded twice, so warps cannot see different values.
    """
    lanes = tl.arange(0, 1024)
    behind = tl.cast(0, tl.int32)
    for first in range(0, num_flags, 1024):
        flags = first + lanes
        seen = tl.load(signals_ptr + flags, mask=flags < num_flags, other=epoch, volatile=True)
        behind += tl.sum(((seen - epoch) < 0).to(tl.int32), axis=0)
    return behind


@triton.jit
def _push_drawn(pointers, channel, shape, rank, epoch, COPY: tl.constexpr, TARGET: tl.constexpr):
    """Pushes granules of this rank's share, drawn from the counter of this epoch, until none is left."""
    counter_ptr = channel.tickets + 2 + (epoch & 1)
    num_items = tl.cdiv(shape.M, COPY.granule_rows) * COPY.world_size
    work = next_work(counter_ptr)
    while work < num_items:
        item = work
        work = next_work(counter_ptr)
        push_item(item, pointers, channel, shape, rank, epoch, COPY, TARGET)


class _Turns(NamedTuple):
    """The turns of one program: how its early tiles are counted (first, step), its first late tile, all its turns."""

    num_early: Any
    first_early: Any
    step_early: Any
    first_late: Any
    total: Any


@triton.jit
def _deal(num_tiles, num_early_tiles, num_push):
    """The turns of this program: see ``a2a_gemm_kernel``; its twin in NumPy: ``tests/support/orders_of_tiles.py``."""
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    step_early = num_programs - num_push
    first_early = program - num_push
    num_early = tl.where(
        first_early >= 0, tl.cdiv(tl.maximum(num_early_tiles - first_early, 0), tl.maximum(step_early, 1)), 0
    )
    first_late = num_early_tiles + program
    total = num_early + tl.cdiv(tl.maximum(num_tiles - first_late, 0), num_programs)
    return _Turns(num_early, first_early, step_early, first_late, total)


@triton.jit
def _place_of_turn(
    turn, turns, num_tiles_m, num_tiles_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr
):
    """First row and column of a program's tile in its turn ``turn``."""
    num_programs = tl.num_programs(0)
    tile_id = tl.where(
        turn < turns.num_early,
        turns.first_early + turn * turns.step_early,
        turns.first_late + (turn - turns.num_early) * num_programs,
    )
    tile_m, tile_n = grouped_tile(tile_id, num_tiles_m, num_tiles_n, GROUP_M)
    return tile_m * BLOCK_M, tile_n * BLOCK_N


@triton.jit(do_not_specialize=["num_push", "num_early_tiles"])
def a2a_gemm_kernel(
    a_desc,
    b_desc,
    c_desc,
    pointers,
    channel,
    shape,
    N,
    K,
    num_push,
    num_early_tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TRANSPOSE_B: tl.constexpr,
    SPLIT_STORE: tl.constexpr,
    COPY: tl.constexpr,
    RANKS_POW2: tl.constexpr,
    TARGET: tl.constexpr,
):
    """C [M, N] = ``to_sequence`` buffer A [M, K] @ B, persistent; a row tile starts when all ranks' columns of it
    arrived.

    The first ``num_push`` programs push this rank's share to every rank (``push_item``) before they multiply. They
    draw their work from a counter (ticket slots 2 and 3 by epoch parity; the other one is reset for the next launch),
    so those that run do it all; and programs start in their order: no program waits for one that finds no SM, because
    another stream's kernel holds it.

    The sums run over K in order, so a tile needs every source. It waits for the flags of its granule, which is one row
    tile or several. Once a program has seen that everything is there, it goes on without waits, in one flattened loop
    of tiles and K blocks: there the loads of a tile run under the stores of the one before.

    The first ``num_early_tiles`` tiles are dealt to the programs that do not push, the others to all: so the push
    takes its SMs for as long as it lasts.
    """
    WORLD_SIZE: tl.constexpr = COPY.world_size
    GRANULE_ROWS: tl.constexpr = COPY.granule_rows
    epoch = dl.next_epoch(channel.tickets)
    dl.next_epoch(channel.tickets + 1)  # the exchange's receiving kernel counts there: in step
    rank = dl.rank(channel.control)
    num_granules = tl.cdiv(shape.M, GRANULE_ROWS)
    start_epoch(channel, epoch, rank, WORLD_SIZE, TARGET)
    if tl.program_id(0) < num_push:
        dl.await_peers(channel.ready, epoch, channel.control, rank, WORLD_SIZE, TARGET)
        _push_drawn(pointers, channel, shape, rank, epoch, COPY, TARGET)
    num_tiles_m = tl.cdiv(shape.M, BLOCK_M)
    num_tiles_n = tl.cdiv(N, BLOCK_N)
    num_k_tiles = tl.cdiv(K, BLOCK_K)
    turns = _deal(num_tiles_m * num_tiles_n, num_early_tiles, num_push)
    turn = tl.cast(0, tl.int32)
    behind = tl.cast(1, tl.int32)  # flags of all granules of all ranks that were not seen yet
    while (turn < turns.total) & (behind > 0):
        row, col = _place_of_turn(turn, turns, num_tiles_m, num_tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        granule = row // GRANULE_ROWS
        flags = channel.signals + granule
        dl.wait_ranks(flags, num_granules, epoch, channel.control, granule, WORLD_SIZE, RANKS_POW2, TARGET)
        dl.fence_async_proxy(TARGET)
        acc = tile_product(a_desc, b_desc, row, col, num_k_tiles, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSE_B)
        store_tile(c_desc, acc, row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
        turn += 1
        behind = _num_behind(channel.signals, WORLD_SIZE * num_granules, epoch)
    dl.fence(TARGET)  # the acquire of what _num_behind saw
    dl.fence_async_proxy(TARGET)
    for late_turn in tl.range(turn, turns.total, 1, flatten=True):
        row, col = _place_of_turn(late_turn, turns, num_tiles_m, num_tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        acc = tile_product(a_desc, b_desc, row, col, num_k_tiles, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSE_B)
        store_tile(c_desc, acc, row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
    dl.verify_peers(channel.ready, channel.signature, epoch, channel.control, rank, WORLD_SIZE, TARGET)
