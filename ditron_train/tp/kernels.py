"""Kernels of tensor parallelism: AG-GEMM and GEMM-RS (the gather in front: ``gather_kernels``).

Memory: one gathered activation ``[M, K]`` and one set of partials ``[world * slot_rows, N]`` a rank. They are single
buffers: a rank may write into a peer's only after the peer's start signal of this epoch (``dl.announce``: everything
that its stream had before is done). Arrival is told by flags that hold the epoch, one for each (source rank, granule).

Ticket roles of a channel: 0 for the kernel that sends, 1 for the kernel that waits.
"""

import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.gemm.kernels import store_tile, tile_product
from ditron_train.gemm.peers import store_tile_to_peer
from ditron_train.schedule.tiles import grouped_tile, ordered_tile, scatter_tile

__all__ = ["ag_gemm_kernel", "gemm_rs_kernel"]

# Sizes that change no code are not specialised on (do_not_specialize): a new shape needs no compilation.


@triton.jit
def _gather_tile(
    tile_id,
    order_ptr,
    rank,
    num_tiles_m,
    num_tiles_n,
    GROUP_M: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Tile ``tile_id`` of a gather's order: own rows first, then in the order of arrival. Returns (tile_m, tile_n).

    With EVEN the groups of row tiles that are walked together end with a rank's rows: none waits for two ranks.
    """
    if EVEN:
        shard_tiles_m = num_tiles_m // WORLD_SIZE
        shard_tiles = shard_tiles_m * num_tiles_n
        step = tile_id // shard_tiles
        local_m, tile_n = grouped_tile(tile_id - step * shard_tiles, shard_tiles_m, num_tiles_n, GROUP_M)
        tile_m = (rank + step) % WORLD_SIZE * shard_tiles_m + local_m
    else:
        tile_m, tile_n = ordered_tile(tile_id, order_ptr, num_tiles_m, num_tiles_n, GROUP_M)
    return tile_m, tile_n


@triton.jit
def _rows_token(
    signals_ptr, row_starts_ptr, epoch, control_ptr, rank, row, last_row, num_rows, granule_rows,
    FLAGS_PER_RANK: tl.constexpr, WORLD_SIZE: tl.constexpr, EVEN: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Waits for rows [row, last_row] of the gathered buffer, whichever peers they belong to: a zero, as
    ``dl.wait_token``.

    The loops stand under conditions that only the running kernel knows to hold: beside a bare loop the compiler would
    not flatten the loop of tiles.
    """
    token = tl.cast(0, tl.int32)
    if EVEN:
        shard_rows = num_rows // WORLD_SIZE
        owner = row // shard_rows
        flags = signals_ptr + owner * FLAGS_PER_RANK
        first = row % shard_rows
        last = first + last_row - row
        if (first <= last) & (owner != rank):
            for flag in range(first // granule_rows, last // granule_rows + 1):
                token += dl.wait_token(flags + flag, epoch, control_ptr, owner, flag, TARGET)
    elif row <= last_row:
        for owner in range(0, WORLD_SIZE):
            start = tl.load(row_starts_ptr + owner)
            low = tl.maximum(row, start)
            high = tl.minimum(last_row, tl.load(row_starts_ptr + owner + 1) - 1)
            if (low <= high) & (owner != rank):
                flags = signals_ptr + owner * FLAGS_PER_RANK
                for flag in range((low - start) // granule_rows, (high - start) // granule_rows + 1):
                    token += dl.wait_token(flags + flag, epoch, control_ptr, owner, flag, TARGET)
    return token


@triton.jit
def _gathered_product(
    tile_id, part, a_desc, own_desc, b_desc, signals_ptr, order_ptr, row_starts_ptr, epoch, control_ptr, rank,
    M, N, K, granule_rows,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PART_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    TRANSPOSE_B: tl.constexpr, FLAGS_PER_RANK: tl.constexpr, WORLD_SIZE: tl.constexpr, EVEN: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """Columns ``part * PART_N`` on, PART_N of them, of tile ``tile_id``, once its rows are there: (product, row,
    column)."""
    tile_m, tile_n = _gather_tile(
        tile_id, order_ptr, rank, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M, WORLD_SIZE, EVEN
    )
    row = tile_m * BLOCK_M
    col = tile_n * BLOCK_N + part * PART_N
    source_row = row + _rows_token(
        signals_ptr, row_starts_ptr, epoch, control_ptr, rank, row, tl.minimum(row + BLOCK_M, M) - 1, M, granule_rows,
        FLAGS_PER_RANK, WORLD_SIZE, EVEN, TARGET,
    )  # fmt: skip
    desc = a_desc
    if EVEN:
        shard_rows = M // WORLD_SIZE
        if row // shard_rows == rank:
            source_row -= rank * shard_rows
            desc = own_desc
    acc = tile_product(desc, b_desc, source_row, col, tl.cdiv(K, BLOCK_K), BLOCK_M, PART_N, BLOCK_K, TRANSPOSE_B)
    return acc, row, col


@triton.jit(do_not_specialize=["M", "K", "granule_rows", "num_whole_tiles"])
def ag_gemm_kernel(
    a_desc, own_desc, b_desc, half_b_desc, c_desc, signals_ptr, order_ptr, row_starts_ptr, tickets_ptr, control_ptr,
    M, N, K, granule_rows, num_whole_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    TRANSPOSE_B: tl.constexpr, SPLIT_STORE: tl.constexpr, FLAGS_PER_RANK: tl.constexpr, WORLD_SIZE: tl.constexpr,
    EVEN: tl.constexpr, HALVE_TAIL: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """C [M, N] = gathered A [M, K] @ B, persistent; a tile starts when the rows that it reads have arrived.

    It waits (acquire, then a fence for the descriptor loads) for the peers' pushes or copy engines of this epoch,
    which are enqueued before it and need no SM that this grid could take (the grid leaves theirs free).

    Program p computes tiles p, p + num_programs, ... of the gather's order, own rows first, as one pipelined loop
    (``flatten``): the wait of a tile stands where its first loads are issued, under the last products of the tile
    before, and costs nothing where the rows are there (``dl.wait_token``). With HALVE_TAIL the tiles from
    ``num_whole_tiles`` on, at most half a wave, are computed in halves of BLOCK_N // 2 columns, as in ``gemm_kernel``.

    ``EVEN``: every rank owns the same whole number of row tiles, and own rows are read where the caller has them,
    through ``own_desc``, so that nobody copies them in front of the GEMM. Else the order is a table, a tile may wait
    for several ranks, and own rows have been copied to their place.

    4 H200s, side by side, at N x K = 2752x4096 / 3584x4096 / 7168x8192 / 7392x8192 and 8192 rows: 262 / 323 / 1282 /
    1318 us (cuBLAS alone 252 / 314 / 1277 / 1320); with a loop for every chunk and a wait in front of it 294 / 353 /
    1308 / 1339, since each loop fills and drains its pipeline. Without the waits 258 / 321 / 1277 / 1324, without the
    copies too 253 / 316 / 1274 / 1307: what is left is mostly rows that arrive late, so the first case needs two
    chunks a shard (278 with one). Made no difference: own rows as a loop of their own, 132 programs instead of 131,
    groups of 4 or 16 row tiles, not joining the communication stream. Slower: three stages (270 in the first case),
    tiles of 256x128 (292 for the GEMM alone).
    """
    epoch = dl.next_epoch(tickets_ptr + 1)
    rank = dl.rank(control_ptr)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    for tile_id in tl.range(program, num_whole_tiles, num_programs, flatten=True):
        acc, row, col = _gathered_product(
            tile_id, 0, a_desc, own_desc, b_desc, signals_ptr, order_ptr, row_starts_ptr, epoch, control_ptr, rank,
            M, N, K, granule_rows,
            BLOCK_M, BLOCK_N, BLOCK_N, BLOCK_K, GROUP_M, TRANSPOSE_B, FLAGS_PER_RANK, WORLD_SIZE, EVEN, TARGET,
        )  # fmt: skip
        store_tile(c_desc, acc, row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
    if HALVE_TAIL:
        num_halves = 2 * (tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N) - num_whole_tiles)
        for half_id in range(program, num_halves, num_programs):
            acc, row, col = _gathered_product(
                num_whole_tiles + half_id // 2, half_id % 2, a_desc, own_desc, half_b_desc, signals_ptr, order_ptr,
                row_starts_ptr, epoch, control_ptr, rank, M, N, K, granule_rows,
                BLOCK_M, BLOCK_N, BLOCK_N // 2, BLOCK_K, GROUP_M, TRANSPOSE_B, FLAGS_PER_RANK, WORLD_SIZE, EVEN, TARGET,
            )  # fmt: skip
            store_tile(c_desc, acc, row, col, BLOCK_M, BLOCK_N // 2, False)


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
            dl.wait_ranks(signals_ptr + flag, flags_per_rank, epoch, control_ptr, flag, WORLD_SIZE, RANKS_POW2, TARGET)
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


@triton.jit
def _store_to_owners(
    acc, tile_m, tile_n, rank, slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7, slots_addresses,
    signals_addresses, ready_ptr, row_starts_ptr, epoch, control_ptr, M, N, slot_rows, slot_stride, flags_per_rank,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_STORE: tl.constexpr, WORLD_SIZE: tl.constexpr,
    USE_DESCRIPTORS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Stores a tile to every rank that owns rows of it, and signals it at once: it may go to several."""
    row = tile_m * BLOCK_M
    last_row = tl.minimum(row + BLOCK_M, M) - 1
    for owner in range(0, WORLD_SIZE):
        start = tl.load(row_starts_ptr + owner)
        end = tl.load(row_starts_ptr + owner + 1)
        if tl.maximum(start, row) < tl.minimum(end, last_row + 1):
            dl.await_ready(ready_ptr, epoch, control_ptr, owner, WORLD_SIZE, TARGET)
            local_tile = tile_m - start // BLOCK_M
            store_tile_to_peer(
                owner, acc, rank * slot_rows + local_tile * BLOCK_M, tile_n * BLOCK_N,
                slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7,
                slots_addresses, slot_stride, WORLD_SIZE * slot_rows, N,
                BLOCK_M, BLOCK_N, SPLIT_STORE, WORLD_SIZE, USE_DESCRIPTORS,
            )  # fmt: skip
            dl.bulk_store_wait(TARGET)
            flags = dl.symm_at(signals_addresses, owner, tl.int32)
            dl.notify(flags + rank * flags_per_rank + local_tile * tl.cdiv(N, BLOCK_N) + tile_n, epoch, TARGET)


@triton.jit
def _work_counter(tickets_ptr, epoch):
    """Where this launch draws its work from; sets the next launch's counter, of the other epoch parity, to zero."""
    counter_ptr = tickets_ptr + 2 + (epoch & 1)
    if tl.program_id(0) == 0:
        tl.store(tickets_ptr + 2 + ((epoch + 1) & 1), tl.cast(0, tl.int64))
    return counter_ptr


@triton.jit
def _signal_stored(pending, epoch, TARGET: tl.constexpr):
    """Waits for the stores of the tile whose flag lies at ``pending``, if there is one, and sets the flag."""
    if pending != 0:
        dl.notify_stored(pending, epoch, False, TARGET)


@triton.jit
def _store_to_owner(
    acc, tile_m, tile_n, owner, ready_owner, rank, slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7,
    slots_addresses, signals_addresses, ready_ptr, epoch, control_ptr, M, N, slot_rows, num_slot_rows, slot_stride, flags_per_rank,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_STORE: tl.constexpr, WORLD_SIZE: tl.constexpr,
    USE_DESCRIPTORS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Begins to store a tile to its only owner, first waiting for it unless it is ``ready_owner``: the address of its
    flag."""
    if owner != ready_owner:
        dl.await_ready(ready_ptr, epoch, control_ptr, owner, WORLD_SIZE, TARGET)
    local_tile = tile_m % (tl.cdiv(M, BLOCK_M) // WORLD_SIZE)
    store_tile_to_peer(
        owner, acc, rank * slot_rows + local_tile * BLOCK_M, tile_n * BLOCK_N,
        slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7,
        slots_addresses, slot_stride, num_slot_rows, N,
        BLOCK_M, BLOCK_N, SPLIT_STORE, WORLD_SIZE, USE_DESCRIPTORS,
    )  # fmt: skip
    flags = dl.symm_at(signals_addresses, owner, tl.int32)
    return (flags + rank * flags_per_rank + local_tile * tl.cdiv(N, BLOCK_N) + tile_n).to(tl.int64)


@triton.jit(do_not_specialize=["M", "K", "slot_rows", "flags_per_rank"])
def gemm_rs_kernel(
    a_desc, b_desc, slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7, slots_addresses, slots_ptr,
    signals_addresses, signals_ptr, ready_addresses, ready_ptr, signature_ptr, out_ptr, order_ptr, row_starts_ptr,
    tickets_ptr, control_ptr, M, N, K, slot_rows, slot_stride, flags_per_rank,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    TRANSPOSE_B: tl.constexpr, SPLIT_STORE: tl.constexpr, FOLD_ROWS: tl.constexpr, WORLD_SIZE: tl.constexpr,
    RANKS_POW2: tl.constexpr, EVEN: tl.constexpr, USE_DESCRIPTORS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """out [rows of this rank, N] = reduce-scatter over ranks of A [M, K] @ B, persistent, one launch.

    Tiles are computed in scatter order and stored straight into their owner's slots (slot ``rank``, rows aligned down
    to the tile grid, so a tile that straddles two owners goes whole to both). Before the first store to an owner: its
    start signal. A tile is signalled one tile later, when its asynchronous stores are complete (``bulk_store_wait``),
    by a release after a block barrier; so the store of one tile runs under the products of the next. At the end every
    program folds blocks of its own rank's rows (``_fold``).

    Programs draw tiles, then blocks to fold, from a counter (ticket slots 2 and 3 by epoch parity; the other one is
    reset for the next launch). So the programs that run do all the work: one that finds no SM, because another
    stream's kernel holds it, is not waited for, and two ranks cannot block each other that way.

    Tried on 4 H200s, at 8192x4096x2752 / 8192x4096x3584 / 8192x8192x7168 (this kernel: 347 / 412 / 1404 us, cuBLAS
    alone 250 / 319 / 1297): tiles of an owner as one flattened loop, so that stores wait only in front of the next
    tile's (wait_group.read in the PTX), fold as a launch of its own: 350 / 412 / 1427, of it the fold 25 / 25 / 55,
    equal with 3 stages, whole-tile stores or groups of 4. So it is not the stores' waits: some 65 us are there
    whatever the size. A barrier of the compiler's inside a flattened loop turns its pipelining off: 764 / 1190 / 4504
    us. Folding own tiles in their epilogue, from registers: 255 registers, 728 bytes of spills.
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
    counter_ptr = _work_counter(tickets_ptr, epoch)
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
        acc = tile_product(
            a_desc, b_desc, tile_m * BLOCK_M, tile_n * BLOCK_N, num_k_tiles, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSE_B
        )
        _signal_stored(pending, epoch, TARGET)
        if EVEN:
            pending = _store_to_owner(
                acc, tile_m, tile_n, owner, ready_owner, rank, slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7,
                slots_addresses, signals_addresses, ready_ptr, epoch, control_ptr, M, N, slot_rows, num_slot_rows, slot_stride,
                flags_per_rank, BLOCK_M, BLOCK_N, SPLIT_STORE, WORLD_SIZE, USE_DESCRIPTORS, TARGET,
            )  # fmt: skip
            ready_owner = owner
        else:
            _store_to_owners(
                acc, tile_m, tile_n, rank, slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7, slots_addresses,
                signals_addresses, ready_ptr, row_starts_ptr, epoch, control_ptr, M, N, slot_rows, slot_stride, flags_per_rank,
                BLOCK_M, BLOCK_N, SPLIT_STORE, WORLD_SIZE, USE_DESCRIPTORS, TARGET,
            )  # fmt: skip
    _signal_stored(pending, epoch, TARGET)
    dl.verify_peers(ready_ptr, signature_ptr, epoch, control_ptr, rank, WORLD_SIZE, TARGET)
    _fold(
        work, num_tiles, counter_ptr, slots_ptr, signals_ptr, out_ptr, row_starts_ptr, epoch, control_ptr, rank, N,
        slot_rows, slot_stride, flags_per_rank,
        BLOCK_M, BLOCK_N, FOLD_ROWS, WORLD_SIZE, RANKS_POW2, TARGET,
    )  # fmt: skip
