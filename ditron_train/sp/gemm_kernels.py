"""Kernels of Ulysses sequence parallelism that multiply: GEMM-A2A and A2A-GEMM.

Buffers, flags and ticket roles are those of ``kernels``. Sizes that change no code are not specialised on.
"""

import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.gemm.kernels import store_tile, tile_product
from ditron_train.schedule.tiles import grouped_tile
from ditron_train.symm import control as layout

__all__ = ["a2a_gemm_kernel", "gemm_a2a_kernel"]

TICKET_UNIT_LOG2 = tl.constexpr(layout.TICKET_UNIT_LOG2)


@triton.constexpr_function
def _has_bulk_stores(target):
    return target.startswith("sm_") and int(target[3:]) >= 90


@triton.jit
def _notify_stored(signal_address, epoch, TARGET: tl.constexpr):
    """``dl.bulk_store_wait`` and ``dl.notify`` of the flag at ``signal_address`` (int64) in one asm block.

    The compiler does not pipeline a loop in which it sees a barrier, so here it sees none.
    """
    if _has_bulk_stores(TARGET):
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred %first;
            .reg .u32 %thread;
            cp.async.bulk.wait_group 0;
            bar.sync 0;
            mov.u32 %thread, %tid.x;
            setp.eq.u32 %first, %thread, 0;
            @%first st.release.sys.global.u32 [$1], $2;
            mov.u32 $0, 0;
            }
            """,
            "=r,l,r",
            [signal_address, epoch],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        dl.notify(signal_address.to(tl.pointer_type(tl.int32)), epoch, TARGET)


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

    Rank d pulls its slot. Order: all tiles of rank + 1, then of rank + 2, ..., own ones last, so that at any time every
    rank is pulled from by another one. Before the first store: the start signals of all ranks, which have then read what
    the last op left here. A tile is signalled to rank d one tile later, when its asynchronous stores are complete
    (``bulk_store_wait``), by a release after a block barrier; tiles and K blocks are one flattened, pipelined loop all the
    same (``_notify_stored``). Waits for nothing but start signals, which every rank sends first: all launches make progress.

    Tried (4 H200, m x n x k a rank 8192 x 10240 x 8192, the GEMM alone 1.76 ms, as this kernel; 1.88 to 1.97 ms with the last
    pulls): tiles stored to the peers by the epilogue, whose bursts stall the loop at every tile: 2.03 ms, flattened 2.51 ms;
    local stores in a loop that is not flattened 2.03 ms; pulls by small programs (4 warps, 64 registers) that share all SMs
    with the GEMM: 1.91 ms, no better than 4 SMs, and the GEMM's programs may find no registers left.
    """
    epoch = dl.next_epoch(tickets_ptr)
    rank = dl.rank(control_ptr)
    if tl.program_id(0) == 0:
        dl.announce(ready_addresses, signature_ptr, epoch, rank, WORLD_SIZE, TARGET)
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
            _notify_stored(pending, epoch, TARGET)
        else:
            for step in tl.static_range(1, WORLD_SIZE):
                dl.await_ready(ready_ptr, epoch, control_ptr, (rank + step) % WORLD_SIZE, WORLD_SIZE, TARGET)
            dl.fence_async_proxy(TARGET)
        store_tile(c_desc, acc, peer * slot_rows + row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
        flags = dl.symm_at(signals_addresses, peer, tl.int32)
        pending = (flags + rank * tiles_per_rank + tile_m * num_tiles_n + tile_n).to(tl.int64)
    if pending != 0:
        _notify_stored(pending, epoch, TARGET)
    if tl.program_id(0) == 0:
        for step in tl.static_range(1, WORLD_SIZE):
            peer = (rank + step) % WORLD_SIZE
            dl.verify_ready(ready_ptr, signature_ptr, epoch, control_ptr, peer, WORLD_SIZE, TARGET)


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
def _tile_of_turn(turn, early_turns, program, num_early, num_early_tiles, num_programs):
    """Tile that ``program`` computes in its turn ``turn``: see ``a2a_gemm_kernel``; twin: ``tuning.tiles_of_program``."""
    early = program + turn * num_early
    shared = num_early_tiles + program + (turn - early_turns) * num_programs
    return tl.where(turn < early_turns, early, shared)


@triton.jit(do_not_specialize=["first_program", "num_early", "num_programs", "num_early_tiles"])
def a2a_gemm_kernel(
    a_desc,
    b_desc,
    c_desc,
    signals_ptr,
    tickets_ptr,
    control_ptr,
    M,
    N,
    K,
    first_program,
    num_early,
    num_programs,
    num_early_tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TRANSPOSE_B: tl.constexpr,
    SPLIT_STORE: tl.constexpr,
    GRANULE_ROWS: tl.constexpr,
    BEHIND_PUSH: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    RANKS_POW2: tl.constexpr,
    TARGET: tl.constexpr,
):
    """C [M, N] = ``to_sequence`` buffer A [M, K] @ B, persistent; a row tile starts when all ranks' columns of it arrived.

    Its sums run over K in order, so it needs every source: one granule of the pushes is one row tile or several. It waits
    (acquire, then a fence for the descriptor loads) for pushes of this epoch; this rank's own push was enqueued before on
    another stream, and the grid leaves its SMs free. Once a program has seen that everything is there, it goes on without
    waits, in one flattened loop of tiles and K blocks: there the loads of a tile run under the stores of the one before.

    One product is two launches: ``num_early`` programs beside the push, and, with BEHIND_PUSH, the rest of ``num_programs``
    behind it on its stream, on the SMs that it has left (they take the push's epoch). The first ``num_early_tiles`` tiles
    are dealt to the early programs, the others to all: a push that keeps its SMs to itself costs a long GEMM 6 %.

    Tried (4 H200, m x n x k a rank 8192 x 8192 x 8192, the GEMM alone 1.45 ms): the push as one launch with 8 SMs kept to the
    end, 1.68 ms; in the first 16 programs of this kernel, which multiply when it is done: 1.62 ms, but 1.81 to 2.37 ms with
    a copy of what arrived, since a program of 8 warps moves 13 GB/s (of 32 warps 45); by small programs (4 warps, 64 registers)
    that share SMs with the GEMM's: they can take the registers that a program of the GEMM needs, and then ranks hang.
    """
    if BEHIND_PUSH:
        epoch = (tl.load(tickets_ptr) >> TICKET_UNIT_LOG2).to(tl.int32)
    else:
        epoch = dl.next_epoch(tickets_ptr + 1)
    num_tiles_m = tl.cdiv(M, BLOCK_M)
    num_tiles_n = tl.cdiv(N, BLOCK_N)
    num_k_tiles = tl.cdiv(K, BLOCK_K)
    num_granules = tl.cdiv(M, GRANULE_ROWS)
    num_tiles = num_tiles_m * num_tiles_n
    program = first_program + tl.program_id(0)
    early_turns = tl.where(program < num_early, tl.cdiv(tl.maximum(num_early_tiles - program, 0), num_early), 0)
    num_turns = early_turns + tl.cdiv(tl.maximum(num_tiles - num_early_tiles - program, 0), num_programs)
    turn = tl.cast(0, tl.int32)
    behind = tl.cast(1, tl.int32)
    while (turn < num_turns) & (behind > 0):
        tile_id = _tile_of_turn(turn, early_turns, program, num_early, num_early_tiles, num_programs)
        tile_m, tile_n = grouped_tile(tile_id, num_tiles_m, num_tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        granule = row // GRANULE_ROWS
        dl.wait_ranks(
            signals_ptr + granule, num_granules, epoch, control_ptr, granule, WORLD_SIZE, RANKS_POW2, TARGET
        )
        dl.fence_async_proxy(TARGET)
        acc = tile_product(a_desc, b_desc, row, col, num_k_tiles, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSE_B)
        store_tile(c_desc, acc, row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
        turn += 1
        behind = _num_behind(signals_ptr, WORLD_SIZE * num_granules, epoch)
    dl.fence(TARGET)  # the acquire of what _num_behind saw
    dl.fence_async_proxy(TARGET)
    for late_turn in tl.range(turn, num_turns, 1, flatten=True):
        tile_id = _tile_of_turn(late_turn, early_turns, program, num_early, num_early_tiles, num_programs)
        tile_m, tile_n = grouped_tile(tile_id, num_tiles_m, num_tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        acc = tile_product(a_desc, b_desc, row, col, num_k_tiles, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSE_B)
        store_tile(c_desc, acc, row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
