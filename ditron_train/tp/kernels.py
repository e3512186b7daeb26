"""Kernels of tensor parallelism: AG-GEMM and GEMM-RS (the gather in front: ``gather_kernels``).

Memory: one gathered activation ``[M, K]`` and one set of partials ``[world * slot_rows, N]`` a rank. They are single
buffers: a rank may write into a peer's only after the peer's start signal of this epoch (``dl.announce``: everything that
its stream had before is done). Arrival is told by flags that hold the epoch, one for each (source rank, granule).

Ticket roles of a channel: 0 for the kernel that sends, 1 for the kernel that waits.
"""

import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.gemm.kernels import store_tile, tile_product
from ditron_train.gemm.peers import store_tile_to_peer
from ditron_train.schedule.tiles import grouped_tile, ordered_tile, scatter_tile

__all__ = ["ag_gemm_kernel", "gemm_rs_kernel"]

_FLAGS_AT_ONCE = tl.constexpr(32)
# Sizes that change no code are not specialised on (do_not_specialize): a new shape needs no compilation.


@triton.jit
def _wait_rows(
    signals_ptr,
    row_starts_ptr,
    epoch,
    control_ptr,
    rank,
    row,
    last_row,
    granule_rows,
    FLAGS_PER_RANK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    OWN_FLAGS: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Waits for rows [row, last_row] of the gathered buffer, whichever ranks they belong to."""
    for owner in range(0, WORLD_SIZE):
        start = tl.load(row_starts_ptr + owner)
        low = tl.maximum(row, start)
        high = tl.minimum(last_row, tl.load(row_starts_ptr + owner + 1) - 1)
        if (low <= high) & (OWN_FLAGS | (owner != rank)):
            first = (low - start) // granule_rows
            count = (high - start) // granule_rows - first + 1
            flags = signals_ptr + owner * FLAGS_PER_RANK + first
            dl.wait_many(flags, count, epoch, control_ptr, owner, first, _FLAGS_AT_ONCE, TARGET)


@triton.jit(do_not_specialize=["M", "K", "granule_rows", "num_chunks", "num_whole_tiles"])
def ag_gemm_kernel(
    a_desc,
    own_desc,
    b_desc,
    half_b_desc,
    c_desc,
    signals_ptr,
    order_ptr,
    row_starts_ptr,
    tickets_ptr,
    control_ptr,
    M,
    N,
    K,
    granule_rows,
    num_chunks,
    num_whole_tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TRANSPOSE_B: tl.constexpr,
    SPLIT_STORE: tl.constexpr,
    FLAGS_PER_RANK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    EVEN: tl.constexpr,
    OWN_FLAGS: tl.constexpr,
    READS_OWN: tl.constexpr,
    HALVE_TAIL: tl.constexpr,
    TARGET: tl.constexpr,
):
    """C [M, N] = gathered A [M, K] @ B, persistent; tiles start when the rows that they read have arrived.

    It waits (acquire, then a fence for the descriptor loads) for the peers' pushes or copy engines of this epoch, which
    are enqueued before it and need no SM that this grid could take (the grid leaves theirs free).

    ``EVEN``: every rank owns the same whole number of row tiles, in ``num_chunks`` chunks of whole tiles. Then the work is a
    sequence of phases, one a chunk: own rows first, then in the order of arrival. A program waits once a phase, so the
    tiles of a phase form one pipelined loop in which the loads of the next tile run under the epilogue of this one
    (with a wait before every tile that cost 4 to 6 % of the GEMM). Programs go from phase to phase without a barrier:
    program p takes tiles p, p + num_programs, ... of the whole sequence. Otherwise: a table's order, a wait a tile.

    ``HALVE_TAIL`` (with ``EVEN``): tiles of the sequence from ``num_whole_tiles`` on, at most half a wave, are computed in
    halves of BLOCK_N // 2 columns, as in ``gemm_kernel``; every program has waited for all phases by then.

    ``OWN_FLAGS``: whether this rank's own rows are signalled too (push) or were there before the launch (copy engine).

    ``READS_OWN`` (with ``EVEN``, without ``OWN_FLAGS``): own rows are read where the caller has them, through ``own_desc``,
    so that no copy of the own shard stands in front of the GEMM (4 H200s, between two runs: 1 to 7 % less time at five of the
    six published shapes, 2 % more at one whose times spread by 14 %). Tiles in halves are never own ones then.
    """
    epoch = dl.next_epoch(tickets_ptr + 1)
    rank = dl.rank(control_ptr)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    num_tiles_m = tl.cdiv(M, BLOCK_M)
    num_tiles_n = tl.cdiv(N, BLOCK_N)
    num_k_tiles = tl.cdiv(K, BLOCK_K)
    if EVEN:
        chunk_tiles_m = num_tiles_m // (WORLD_SIZE * num_chunks)
        chunk_tiles = chunk_tiles_m * num_tiles_n
        chunk_flags = tl.cdiv(chunk_tiles_m * BLOCK_M, granule_rows)
        first_phase = 0
        if READS_OWN:
            first_phase = num_chunks
            own_tiles_m = num_tiles_m // WORLD_SIZE
            for tile_id in tl.range(program, own_tiles_m * num_tiles_n, num_programs, flatten=True):
                tile_m, tile_n = grouped_tile(tile_id, own_tiles_m, num_tiles_n, GROUP_M)
                row = tile_m * BLOCK_M
                col = tile_n * BLOCK_N
                acc = tile_product(own_desc, b_desc, row, col, num_k_tiles, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSE_B)
                store_tile(c_desc, acc, rank * own_tiles_m * BLOCK_M + row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
        for phase in range(first_phase, WORLD_SIZE * num_chunks):
            owner = (rank + phase // num_chunks) % WORLD_SIZE
            chunk = phase % num_chunks
            if OWN_FLAGS | (owner != rank):
                first_flag = chunk * chunk_flags
                flags = signals_ptr + owner * FLAGS_PER_RANK + first_flag
                dl.wait_many(flags, chunk_flags, epoch, control_ptr, owner, first_flag, _FLAGS_AT_ONCE, TARGET)
            dl.fence_async_proxy(TARGET)
            first_tile = phase * chunk_tiles
            skipped = tl.cdiv(tl.maximum(first_tile - program, 0), num_programs)
            first_row_tile = (owner * num_chunks + chunk) * chunk_tiles_m
            for tile_id in tl.range(
                program + skipped * num_programs - first_tile,
                tl.minimum(chunk_tiles, num_whole_tiles - first_tile),
                num_programs,
                flatten=True,
            ):
                tile_m, tile_n = grouped_tile(tile_id, chunk_tiles_m, num_tiles_n, GROUP_M)
                row = (first_row_tile + tile_m) * BLOCK_M
                col = tile_n * BLOCK_N
                acc = tile_product(a_desc, b_desc, row, col, num_k_tiles, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSE_B)
                store_tile(c_desc, acc, row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
        if HALVE_TAIL:
            num_halves = 2 * (num_tiles_m * num_tiles_n - num_whole_tiles)
            for half_id in range(program, num_halves, num_programs):
                tile_id = num_whole_tiles + half_id // 2
                phase = tile_id // chunk_tiles
                owner = (rank + phase // num_chunks) % WORLD_SIZE
                first_row_tile = (owner * num_chunks + phase % num_chunks) * chunk_tiles_m
                tile_m, tile_n = grouped_tile(tile_id % chunk_tiles, chunk_tiles_m, num_tiles_n, GROUP_M)
                row = (first_row_tile + tile_m) * BLOCK_M
                col = tile_n * BLOCK_N + (half_id % 2) * (BLOCK_N // 2)
                acc = tile_product(
                    a_desc, half_b_desc, row, col, num_k_tiles, BLOCK_M, BLOCK_N // 2, BLOCK_K, TRANSPOSE_B
                )
                store_tile(c_desc, acc, row, col, BLOCK_M, BLOCK_N // 2, False)
    else:
        for tile_id in tl.range(program, num_tiles_m * num_tiles_n, num_programs):
            tile_m, tile_n = ordered_tile(tile_id, order_ptr, num_tiles_m, num_tiles_n, GROUP_M)
            row = tile_m * BLOCK_M
            col = tile_n * BLOCK_N
            last_row = tl.minimum(row + BLOCK_M, M) - 1
            _wait_rows(
                signals_ptr, row_starts_ptr, epoch, control_ptr, rank, row, last_row, granule_rows,
                FLAGS_PER_RANK, WORLD_SIZE, OWN_FLAGS, TARGET,
            )  # fmt: skip
            dl.fence_async_proxy(TARGET)
            acc = tile_product(a_desc, b_desc, row, col, num_k_tiles, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSE_B)
            store_tile(c_desc, acc, row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)


@triton.jit
def _next_work(counter_ptr):
    return tl.atomic_add(counter_ptr, tl.cast(1, tl.int64), sem="relaxed", scope="gpu").to(tl.int32)


@triton.jit
def _fold(
    work, num_tiles, counter_ptr, slots_ptr, signals_ptr, out_ptr, row_starts_ptr, epoch, control_ptr, rank, N,
    slot_rows, slot_stride, flags_per_rank,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FOLD_ROWS: tl.constexpr, WORLD_SIZE: tl.constexpr,
    RANKS_POW2: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """out = ((x[rank + 1] + x[rank + 2]) + ...) + x[rank]: NCCL's ring order, each + in fp32, rounded at every hop.

    Waits for the partial tiles of all ranks that cover a block of FOLD_ROWS rows, then reads them from own memory.
    """
    first_row = tl.load(row_starts_ptr + rank)
    end_row = tl.load(row_starts_ptr + rank + 1)
    first_tile = first_row // BLOCK_M
    num_tiles_n = tl.cdiv(N, BLOCK_N)
    num_blocks = tl.cdiv(end_row - first_row, FOLD_ROWS) * num_tiles_n
    while work < num_tiles + num_blocks:
        block = work - num_tiles
        work = _next_work(counter_ptr)
        tile_n = block % num_tiles_n
        row = first_row + (block // num_tiles_n) * FOLD_ROWS
        last_row = tl.minimum(row + FOLD_ROWS, end_row) - 1
        for tile in range(row // BLOCK_M - first_tile, last_row // BLOCK_M - first_tile + 1):
            flag = tile * num_tiles_n + tile_n
            dl.wait_ranks(
                signals_ptr + flag, flags_per_rank, epoch, control_ptr, flag, WORLD_SIZE, RANKS_POW2, TARGET
            )
        rows = row + tl.arange(0, FOLD_ROWS)
        cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (rows[:, None] <= last_row) & (cols[None, :] < N)
        offsets = (rows[:, None] - first_tile * BLOCK_M).to(tl.int64) * slot_stride + cols[None, :]
        slot_elements = slot_rows.to(tl.int64) * slot_stride
        source = (rank + 1) % WORLD_SIZE
        total = tl.load(slots_ptr + source * slot_elements + offsets, mask=mask).to(tl.float32)
        for step in tl.static_range(2, WORLD_SIZE + 1):
            source = (rank + step) % WORLD_SIZE
            partial = tl.load(slots_ptr + source * slot_elements + offsets, mask=mask).to(tl.float32)
            total = (total + partial).to(slots_ptr.dtype.element_ty).to(tl.float32)
        out_offsets = (rows[:, None] - first_row).to(tl.int64) * N + cols[None, :]
        tl.store(out_ptr + out_offsets, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "K", "slot_rows", "flags_per_rank"])
def gemm_rs_kernel(
    a_desc,
    b_desc,
    slots0,
    slots1,
    slots2,
    slots3,
    slots4,
    slots5,
    slots6,
    slots7,
    slots_addresses,
    slots_ptr,
    signals_addresses,
    signals_ptr,
    ready_addresses,
    ready_ptr,
    signature_ptr,
    out_ptr,
    order_ptr,
    row_starts_ptr,
    tickets_ptr,
    control_ptr,
    M,
    N,
    K,
    slot_rows,
    slot_stride,
    flags_per_rank,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TRANSPOSE_B: tl.constexpr,
    SPLIT_STORE: tl.constexpr,
    FOLD_ROWS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    RANKS_POW2: tl.constexpr,
    EVEN: tl.constexpr,
    USE_DESCRIPTORS: tl.constexpr,
    TARGET: tl.constexpr,
):
    """out [rows of this rank, N] = reduce-scatter over ranks of A [M, K] @ B, persistent, one launch.

    Tiles are computed in scatter order and stored straight into their owner's slots (slot ``rank``, rows aligned down to
    the tile grid, so a tile that straddles two owners goes whole to both). Before the first store to an owner: its start
    signal. A tile is signalled one tile later, when its asynchronous stores are complete (``bulk_store_wait``), by a
    release after a block barrier; so the store of one tile runs under the products of the next. At the end every program
    folds blocks of its own rank's rows (``_fold``).

    Programs draw tiles, then blocks to fold, from a counter (ticket slots 2 and 3 by epoch parity; the other one is reset
    for the next launch). So the programs that run do all the work: one that finds no SM, because another stream's kernel
    holds it, is not waited for, and two ranks cannot block each other that way.

    Tried on 4 H200s, at 8192x4096x2752 / 8192x4096x3584 / 8192x8192x7168 (this kernel: 347 / 412 / 1404 us, cuBLAS alone
    250 / 319 / 1297): tiles of an owner as one flattened loop, so that stores wait only in front of the next tile's
    (wait_group.read in the PTX), fold as a launch of its own: 350 / 412 / 1427, of it the fold 25 / 25 / 55, equal with 3
    stages, whole-tile stores or groups of 4. So it is not the stores' waits: some 65 us are there whatever the size. A barrier
    of the compiler's inside a flattened loop turns its pipelining off: 764 / 1190 / 4504 us. Folding own tiles in their
    epilogue, from registers: 255 registers, 728 bytes of spills.
    """
    epoch = dl.next_epoch(tickets_ptr)
    rank = dl.rank(control_ptr)
    if tl.program_id(0) == 0:
        dl.announce(ready_addresses, signature_ptr, epoch, rank, WORLD_SIZE, TARGET)
    num_tiles_m = tl.cdiv(M, BLOCK_M)
    num_tiles_n = tl.cdiv(N, BLOCK_N)
    num_k_tiles = tl.cdiv(K, BLOCK_K)
    num_slot_rows = WORLD_SIZE * slot_rows
    num_tiles = num_tiles_m * num_tiles_n
    counter_ptr = tickets_ptr + 2 + (epoch & 1)
    if tl.program_id(0) == 0:
        tl.store(tickets_ptr + 2 + ((epoch + 1) & 1), tl.cast(0, tl.int64))
    ready_owner = rank
    pending = tl.cast(0, tl.int64)  # address of the flag of the tile that is still being stored
    work = _next_work(counter_ptr)
    while work < num_tiles:
        tile_id = work
        work = _next_work(counter_ptr)  # drawn early: its latency lies under this tile's products
        if EVEN:
            tile_m, tile_n, owner = scatter_tile(
                tile_id, rank, num_tiles_m, num_tiles_n, WORLD_SIZE, WORLD_SIZE, GROUP_M
            )
        else:
            tile_m, tile_n = ordered_tile(tile_id, order_ptr, num_tiles_m, num_tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        acc = tile_product(a_desc, b_desc, row, col, num_k_tiles, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSE_B)
        if pending != 0:
            dl.bulk_store_wait(TARGET)
            dl.notify(pending.to(tl.pointer_type(tl.int32)), epoch, TARGET)
        if EVEN:
            if owner != ready_owner:
                dl.await_ready(ready_ptr, epoch, control_ptr, owner, WORLD_SIZE, TARGET)
                ready_owner = owner
            local_tile = tile_m % (num_tiles_m // WORLD_SIZE)
            store_tile_to_peer(
                owner, acc, rank * slot_rows + local_tile * BLOCK_M, col,
                slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7,
                slots_addresses, slot_stride, num_slot_rows, N,
                BLOCK_M, BLOCK_N, SPLIT_STORE, WORLD_SIZE, USE_DESCRIPTORS,
            )  # fmt: skip
            flags = dl.symm_at(signals_addresses, owner, tl.int32)
            pending = (flags + rank * flags_per_rank + local_tile * num_tiles_n + tile_n).to(tl.int64)
        else:
            last_row = tl.minimum(row + BLOCK_M, M) - 1
            for owner in range(0, WORLD_SIZE):
                start = tl.load(row_starts_ptr + owner)
                end = tl.load(row_starts_ptr + owner + 1)
                if tl.maximum(start, row) < tl.minimum(end, last_row + 1):
                    dl.await_ready(ready_ptr, epoch, control_ptr, owner, WORLD_SIZE, TARGET)
                    local_tile = tile_m - start // BLOCK_M
                    store_tile_to_peer(
                        owner, acc, rank * slot_rows + local_tile * BLOCK_M, col,
                        slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7,
                        slots_addresses, slot_stride, num_slot_rows, N,
                        BLOCK_M, BLOCK_N, SPLIT_STORE, WORLD_SIZE, USE_DESCRIPTORS,
                    )  # fmt: skip
                    dl.bulk_store_wait(TARGET)
                    flags = dl.symm_at(signals_addresses, owner, tl.int32)
                    flag = flags + rank * flags_per_rank + local_tile * num_tiles_n + tile_n
                    dl.notify(flag, epoch, TARGET)
    if pending != 0:
        dl.bulk_store_wait(TARGET)
        dl.notify(pending.to(tl.pointer_type(tl.int32)), epoch, TARGET)
    if tl.program_id(0) == 0:
        for step in tl.static_range(1, WORLD_SIZE):
            peer = (rank + step) % WORLD_SIZE
            dl.verify_ready(ready_ptr, signature_ptr, epoch, control_ptr, peer, WORLD_SIZE, TARGET)
    _fold(
        work, num_tiles, counter_ptr, slots_ptr, signals_ptr, out_ptr, row_starts_ptr, epoch, control_ptr, rank, N,
        slot_rows, slot_stride, flags_per_rank,
        BLOCK_M, BLOCK_N, FOLD_ROWS, WORLD_SIZE, RANKS_POW2, TARGET,
    )  # fmt: skip
