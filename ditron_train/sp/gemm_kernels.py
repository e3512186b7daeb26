"""Kernels of Ulysses sequence parallelism that multiply: GEMM-A2A and A2A-GEMM.

Buffers, flags and ticket roles are those of ``kernels``. Sizes that change no code are not specialised on.
"""

import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.gemm.kernels import store_tile, tile_product
from ditron_train.schedule.tiles import grouped_tile
from ditron_train.sp.kernels import next_work, push_item, start_epoch

__all__ = ["a2a_gemm_kernel", "gemm_a2a_kernel"]


# Tried (4 H200, m x n x k a rank 8192 x 10240 x 8192, the GEMM alone 1.76 ms, as this kernel; with the last pulls by 4
# SMs 1.88 to 1.97 ms, by all of them behind the GEMM 1.84): tiles stored to the peers by the epilogue, whose bursts
# stall the loop at every tile: 2.03 ms, flattened 2.51 ms; local stores in a loop that is not flattened 2.03 ms; pulls
# by small programs (4 warps, 64 registers) that share all SMs with the GEMM: 1.91 ms, no better than 4 SMs, and the
# GEMM's programs may find no registers left.
@triton.jit(do_not_specialize=["M", "slot_rows"])
def gemm_a2a_kernel(
    a_desc,
    b_desc,
    c_desc,
    signals_addresses,
    ready_addresses,
    ready_ptr,
    signature_ptr,
    tickets_ptr,
    control_ptr,
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
    """
    epoch = dl.next_epoch(tickets_ptr)
    rank = dl.rank(control_ptr)
    start_epoch(ready_addresses, signature_ptr, tickets_ptr, epoch, rank, WORLD_SIZE, TARGET)
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
        acc = tile_product(
            a_desc, b_desc, row, peer * columns_per_rank + col, num_k_tiles, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSE_B
        )
        if pending != 0:
            dl.notify_stored(pending, epoch, True, TARGET)
        else:
            dl.await_peers(ready_ptr, epoch, control_ptr, rank, WORLD_SIZE, TARGET, HOLDS_BARRIER=False)
            dl.fence_async_proxy(TARGET)
        store_tile(c_desc, acc, peer * slot_rows + row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
        flags = dl.symm_at(signals_addresses, peer, tl.int32)
        pending = (flags + rank * tiles_per_rank + tile_m * num_tiles_n + tile_n).to(tl.int64)
    if pending != 0:
        dl.notify_stored(pending, epoch, True, TARGET)
    dl.verify_peers(ready_ptr, signature_ptr, epoch, control_ptr, rank, WORLD_SIZE, TARGET)


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
def _push_drawn(
    part0_ptr, part1_ptr, part2_ptr, buffer_addresses, signals_addresses, table_ptr, tickets_ptr, rank, epoch,
    M, half_rows, buffer_stride, num_groups, width0, width1, width2,
    GRANULE_ROWS: tl.constexpr, ROWS: tl.constexpr, NUM_PARTS: tl.constexpr,
    BLOCK_G0: tl.constexpr, BLOCK_G1: tl.constexpr, BLOCK_G2: tl.constexpr,
    BLOCK_W0: tl.constexpr, BLOCK_W1: tl.constexpr, BLOCK_W2: tl.constexpr,
    HAS_TABLE: tl.constexpr, WORLD_SIZE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Pushes granules of this rank's share, drawn from the counter of this epoch, until none is left."""
    counter_ptr = tickets_ptr + 2 + (epoch & 1)
    num_items = tl.cdiv(M, GRANULE_ROWS) * WORLD_SIZE
    work = next_work(counter_ptr)
    while work < num_items:
        item = work
        work = next_work(counter_ptr)
        push_item(
            item, part0_ptr, part1_ptr, part2_ptr, buffer_addresses, signals_addresses, table_ptr, rank, epoch,
            M, half_rows, M, buffer_stride, num_groups, width0, width1, width2,
            GRANULE_ROWS, ROWS, NUM_PARTS, BLOCK_G0, BLOCK_G1, BLOCK_G2, BLOCK_W0, BLOCK_W1, BLOCK_W2,
            False, HAS_TABLE, WORLD_SIZE, TARGET,
        )  # fmt: skip


@triton.jit
def _deal(num_tiles, num_early_tiles, num_push):
    """A program's early turns and how their tiles are counted (first, step), its first late tile and the number of all
    turns."""
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    num_early = num_programs - num_push
    first_early = program - num_push
    early_turns = tl.where(
        first_early >= 0, tl.cdiv(tl.maximum(num_early_tiles - first_early, 0), tl.maximum(num_early, 1)), 0
    )
    first_late = num_early_tiles + program
    num_turns = early_turns + tl.cdiv(tl.maximum(num_tiles - first_late, 0), num_programs)
    return early_turns, first_early, num_early, first_late, num_turns


@triton.jit
def _place_of_turn(
    turn, early_turns, first_early, num_early, first_late, num_programs, num_tiles_m, num_tiles_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """First row and column of a program's tile in its turn ``turn``: see ``a2a_gemm_kernel``; twin:
    ``tuning.tiles_of_program``."""
    tile_id = tl.where(
        turn < early_turns, first_early + turn * num_early, first_late + (turn - early_turns) * num_programs
    )
    tile_m, tile_n = grouped_tile(tile_id, num_tiles_m, num_tiles_n, GROUP_M)
    return tile_m * BLOCK_M, tile_n * BLOCK_N


@triton.jit
def _multiply_arriving(
    a_desc, b_desc, c_desc, signals_ptr, control_ptr, epoch, num_granules,
    early_turns, first_early, num_early, first_late, num_turns, num_tiles_m, num_tiles_n, num_k_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    TRANSPOSE_B: tl.constexpr, SPLIT_STORE: tl.constexpr, GRANULE_ROWS: tl.constexpr,
    WORLD_SIZE: tl.constexpr, RANKS_POW2: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Takes turns, each behind a wait for its granule, until all granules of all ranks were seen; returns the next
    turn."""
    turn = tl.cast(0, tl.int32)
    behind = tl.cast(1, tl.int32)
    while (turn < num_turns) & (behind > 0):
        row, col = _place_of_turn(
            turn, early_turns, first_early, num_early, first_late, tl.num_programs(0), num_tiles_m, num_tiles_n,
            BLOCK_M, BLOCK_N, GROUP_M,
        )  # fmt: skip
        granule = row // GRANULE_ROWS
        dl.wait_ranks(signals_ptr + granule, num_granules, epoch, control_ptr, granule, WORLD_SIZE, RANKS_POW2, TARGET)
        dl.fence_async_proxy(TARGET)
        acc = tile_product(a_desc, b_desc, row, col, num_k_tiles, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSE_B)
        store_tile(c_desc, acc, row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
        turn += 1
        behind = _num_behind(signals_ptr, WORLD_SIZE * num_granules, epoch)
    dl.fence(TARGET)  # the acquire of what _num_behind saw
    dl.fence_async_proxy(TARGET)
    return turn


# Tried (4 H200, m x n x k a rank 8192 x 8192 x 8192, the GEMM alone 1.43 to 1.48 ms, this kernel 1.60 to 1.62): a push
# kernel beside the GEMM, with SMs of its own to the end, 1.68 ms, and with less room than it needs, ranks that wait
# for one another; a push by small programs (4 warps, 64 registers) that share SMs with the GEMM's: they can take the
# registers that a program of the GEMM needs, and then ranks hang; the copy of what arrived by the pushing programs,
# 1.81 to 2.37 ms (a program of 8 warps moves 13 GB/s, of 32 warps 45): it is made behind the GEMM. A push by copy
# engines, one 2-D copy (4 KB rows, 200 GB/s a rank while all send; 80 GB/s at 256 B) for each peer and 1, 2, 4 or 8
# granules of a half, bits equal: 1613, 1558, 1534 and 1588 us at m = 8192 where this kernel took 1618 to 1757 us in
# the same run; at m = 4096 841, 809, 858 and 940 against 813 to 822; at 32768 x 2048 x 2048 565 at best against 519 to
# 544. It takes 32 driver calls, fits one part without a table only, and is not worth a second way yet.
@triton.jit(do_not_specialize=["num_push", "num_early_tiles"])
def a2a_gemm_kernel(
    a_desc, b_desc, c_desc, part0_ptr, part1_ptr, part2_ptr, buffer_addresses, signals_addresses, signals_ptr,
    ready_addresses, ready_ptr, signature_ptr, table_ptr, tickets_ptr, control_ptr,
    M, N, K, half_rows, buffer_stride, num_groups, width0, width1, width2, num_push, num_early_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    TRANSPOSE_B: tl.constexpr, SPLIT_STORE: tl.constexpr,
    GRANULE_ROWS: tl.constexpr, ROWS: tl.constexpr, NUM_PARTS: tl.constexpr,
    BLOCK_G0: tl.constexpr, BLOCK_G1: tl.constexpr, BLOCK_G2: tl.constexpr,
    BLOCK_W0: tl.constexpr, BLOCK_W1: tl.constexpr, BLOCK_W2: tl.constexpr,
    HAS_TABLE: tl.constexpr, WORLD_SIZE: tl.constexpr, RANKS_POW2: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
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
    epoch = dl.next_epoch(tickets_ptr)
    dl.next_epoch(tickets_ptr + 1)  # the exchange's receiving kernel counts there: in step
    rank = dl.rank(control_ptr)
    num_granules = tl.cdiv(M, GRANULE_ROWS)
    start_epoch(ready_addresses, signature_ptr, tickets_ptr, epoch, rank, WORLD_SIZE, TARGET)
    if tl.program_id(0) < num_push:
        dl.await_peers(ready_ptr, epoch, control_ptr, rank, WORLD_SIZE, TARGET)
        _push_drawn(
            part0_ptr, part1_ptr, part2_ptr, buffer_addresses, signals_addresses, table_ptr, tickets_ptr, rank, epoch,
            M, half_rows, buffer_stride, num_groups, width0, width1, width2,
            GRANULE_ROWS, ROWS, NUM_PARTS, BLOCK_G0, BLOCK_G1, BLOCK_G2, BLOCK_W0, BLOCK_W1, BLOCK_W2,
            HAS_TABLE, WORLD_SIZE, TARGET,
        )  # fmt: skip
    num_tiles_m = tl.cdiv(M, BLOCK_M)
    num_tiles_n = tl.cdiv(N, BLOCK_N)
    num_k_tiles = tl.cdiv(K, BLOCK_K)
    early_turns, first_early, num_early, first_late, num_turns = _deal(
        num_tiles_m * num_tiles_n, num_early_tiles, num_push
    )
    turn = _multiply_arriving(
        a_desc, b_desc, c_desc, signals_ptr, control_ptr, epoch, num_granules,
        early_turns, first_early, num_early, first_late, num_turns, num_tiles_m, num_tiles_n, num_k_tiles,
        BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, TRANSPOSE_B, SPLIT_STORE, GRANULE_ROWS, WORLD_SIZE, RANKS_POW2, TARGET,
    )  # fmt: skip
    for late_turn in tl.range(turn, num_turns, 1, flatten=True):
        row, col = _place_of_turn(
            late_turn, early_turns, first_early, num_early, first_late, tl.num_programs(0), num_tiles_m, num_tiles_n,
            BLOCK_M, BLOCK_N, GROUP_M,
        )  # fmt: skip
        acc = tile_product(a_desc, b_desc, row, col, num_k_tiles, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSE_B)
        store_tile(c_desc, acc, row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
    dl.verify_peers(ready_ptr, signature_ptr, epoch, control_ptr, rank, WORLD_SIZE, TARGET)
