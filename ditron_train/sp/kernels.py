"""Kernels of Ulysses sequence parallelism: GEMM-A2A, A2A-GEMM, and the exchanges without a GEMM.

Rows are (position, batch) pairs. Rank r of a group of W holds two of the 2 W chunks of the sequence (or of each of several
packed ones), r and 2 W - 1 - r: its rows before attention ("local rows"); around attention it holds all positions, in order ("global rows"), of its heads.
Columns of one rank's heads: ``num_groups`` groups, each with one slice of every part (q, k, v; or one part).

Two single buffers a rank, each with a channel: ``to_heads`` [W * slot_rows, columns] (source rank, local row) and
``to_sequence`` [local rows, W * columns] (what the projection multiplies). A rank writes into a peer's buffer only after
the peer's start signal of this epoch (``dl.announce``: everything that its stream had before is done). Arrival is told by
flags that hold the epoch, one for each (source rank, granule of rows) or (source rank, tile).

Ticket roles of a channel: 0 for the kernel that sends, 1 for the kernel that waits.
"""

import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.gemm.kernels import store_tile, tile_product
from ditron_train.gemm.peers import store_tile_to_peer
from ditron_train.schedule.tiles import grouped_tile
from ditron_train.symm import control as layout

__all__ = ["a2a_gemm_kernel", "gemm_a2a_kernel", "push_kernel", "receive_kernel"]

TICKET_UNIT_LOG2 = tl.constexpr(layout.TICKET_UNIT_LOG2)


@triton.jit
def global_row(row, mask, owner, M, half_rows, table_ptr, WORLD_SIZE: tl.constexpr, HAS_TABLE: tl.constexpr):
    """Global row of rank ``owner``'s local row: its first half is chunk ``owner``, its second 2 W - 1 - ``owner``.

    Packed sequences are each cut so; their rows are in a table, int32 [W, M]. Twins: ``layouts.global_rows`` and
    ``layouts.packed_rows``.
    """
    if HAS_TABLE:
        return tl.load(table_ptr + owner * M + row, mask=mask, other=0)
    else:
        second = (2 * WORLD_SIZE - 2 - owner) * half_rows + row
        return tl.where(row < half_rows, owner * half_rows + row, second)


@triton.jit
def _copy_columns(
    destination_ptr,
    source_ptr,
    rows_mask,
    num_groups,
    width,
    destination_group_stride,
    source_group_stride,
    BLOCK_G: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """For every group: ``width`` columns of a block of rows; the pointers are [ROWS] and point at column 0 of the part.

    BLOCK_G groups at a time where they are narrow: what one program has in flight decides its rate.
    """
    lanes = tl.arange(0, BLOCK_G * BLOCK_W)
    for first_group in range(0, num_groups, BLOCK_G):
        groups = first_group + lanes // BLOCK_W
        for first in range(0, width, BLOCK_W):
            cols = first + lanes % BLOCK_W
            mask = rows_mask[:, None] & ((cols < width) & (groups < num_groups))[None, :]
            values = tl.load(source_ptr[:, None] + (groups * source_group_stride + cols)[None, :], mask=mask)
            tl.store(destination_ptr[:, None] + (groups * destination_group_stride + cols)[None, :], values, mask=mask)


@triton.jit
def gemm_a2a_kernel(
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
    slot_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TRANSPOSE_B: tl.constexpr,
    SPLIT_STORE: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    USE_DESCRIPTORS: tl.constexpr,
    TARGET: tl.constexpr,
):
    """slot[rank] at rank d [M, N] = A [M, K] @ B[:, d * columns_per_rank :][:, :N], for every d; persistent.

    Order: all tiles of rank + 1, then of rank + 2, ..., own ones last, so at any time each rank stores to another one.
    Before the first store to a rank: its start signal. A tile is signalled one tile later, when its asynchronous stores
    are complete (``bulk_store_wait``), by a release after a block barrier: its way over the link runs under the next
    tile's products. Waits for nothing but start signals, which every rank sends first: all launches make progress.
    """
    epoch = dl.next_epoch(tickets_ptr)
    rank = dl.rank(control_ptr)
    if tl.program_id(0) == 0:
        dl.announce(ready_addresses, signature_ptr, epoch, rank, WORLD_SIZE, TARGET)
    num_tiles_m = tl.cdiv(M, BLOCK_M)
    num_tiles_n = tl.cdiv(N, BLOCK_N)
    num_k_tiles = tl.cdiv(K, BLOCK_K)
    tiles_per_rank = num_tiles_m * num_tiles_n
    num_slot_rows = WORLD_SIZE * slot_rows
    ready_peer = rank
    pending = tl.cast(0, tl.int64)  # address of the flag of the tile that is still being stored
    for tile_id in tl.range(tl.program_id(0), tiles_per_rank * WORLD_SIZE, tl.num_programs(0)):
        peer = (rank + 1 + tile_id // tiles_per_rank) % WORLD_SIZE
        tile_m, tile_n = grouped_tile(tile_id % tiles_per_rank, num_tiles_m, num_tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        acc = tile_product(
            a_desc, b_desc, row, peer * columns_per_rank + col, num_k_tiles, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSE_B
        )
        if pending != 0:
            dl.bulk_store_wait(TARGET)
            dl.notify(pending.to(tl.pointer_type(tl.int32)), epoch, TARGET)
        if peer != ready_peer:
            dl.await_ready(ready_ptr, epoch, control_ptr, peer, WORLD_SIZE, TARGET)
            dl.fence_async_proxy(TARGET)
            ready_peer = peer
        store_tile_to_peer(
            peer, acc, rank * slot_rows + row, col,
            slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7,
            slots_addresses, slot_stride, num_slot_rows, N,
            BLOCK_M, BLOCK_N, SPLIT_STORE, WORLD_SIZE, USE_DESCRIPTORS,
        )  # fmt: skip
        flags = dl.symm_at(signals_addresses, peer, tl.int32)
        pending = (flags + rank * tiles_per_rank + tile_m * num_tiles_n + tile_n).to(tl.int64)
    if pending != 0:
        dl.bulk_store_wait(TARGET)
        dl.notify(pending.to(tl.pointer_type(tl.int32)), epoch, TARGET)
    if tl.program_id(0) == 0:
        for step in tl.static_range(1, WORLD_SIZE):
            peer = (rank + step) % WORLD_SIZE
            dl.verify_ready(ready_ptr, signature_ptr, epoch, control_ptr, peer, WORLD_SIZE, TARGET)


@triton.jit
def receive_kernel(
    buffer_ptr,
    part0_ptr,
    part1_ptr,
    part2_ptr,
    signals_ptr,
    table_ptr,
    tickets_ptr,
    control_ptr,
    M,
    half_rows,
    slot_rows,
    buffer_stride,
    num_groups,
    width0,
    width1,
    width2,
    flags_per_granule,
    GRANULE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_G0: tl.constexpr,
    BLOCK_G1: tl.constexpr,
    BLOCK_G2: tl.constexpr,
    BLOCK_W0: tl.constexpr,
    BLOCK_W1: tl.constexpr,
    BLOCK_W2: tl.constexpr,
    FLAGS: tl.constexpr,
    TO_HEADS: tl.constexpr,
    BEHIND_PUSH: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Takes the parts apart that arrive in this rank's buffer (``push_kernel``'s inverse).

    It runs beside the kernel that sends, on SMs that one leaves free, and counts its own launches (role 1); or, with
    BEHIND_PUSH, after the push on the same stream, whose epoch it takes: then role 1 is the GEMM that multiplies the buffer.

    TO_HEADS: part [W * M, num_groups * width], global rows of own heads, from the slots. Else: part
    [M, W * num_groups * width], local rows of all heads, from the columns of the sources.

    Waits (acquire), for every block of ROWS rows of one source, for the ``flags_per_granule <= FLAGS`` flags of its
    granule. Sources in the order rank - 1, rank - 2, ..., own: those that send to this rank first come first.
    """
    if BEHIND_PUSH:
        epoch = (tl.load(tickets_ptr) >> TICKET_UNIT_LOG2).to(tl.int32)
    else:
        epoch = dl.next_epoch(tickets_ptr + 1)
    rank = dl.rank(control_ptr)
    BLOCKS: tl.constexpr = GRANULE_ROWS // ROWS
    num_granules = tl.cdiv(M, GRANULE_ROWS)
    group_stride = width0 + width1 + width2
    for item in range(tl.program_id(0), WORLD_SIZE * num_granules * BLOCKS, tl.num_programs(0)):
        if TO_HEADS:
            turn = item // (num_granules * BLOCKS)
            granule = (item // BLOCKS) % num_granules
        else:
            turn = (item // BLOCKS) % WORLD_SIZE
            granule = item // (BLOCKS * WORLD_SIZE)
        source = (rank + 2 * WORLD_SIZE - 1 - turn) % WORLD_SIZE
        flags = signals_ptr + (source * num_granules + granule) * flags_per_granule
        dl.wait_many(flags, flags_per_granule, epoch, control_ptr, source, granule * flags_per_granule, FLAGS, TARGET)
        rows = granule * GRANULE_ROWS + (item % BLOCKS) * ROWS + tl.arange(0, ROWS)
        mask = rows < M
        if TO_HEADS:
            arrived = buffer_ptr + (source * slot_rows + rows).to(tl.int64) * buffer_stride
            out_rows = global_row(rows, mask, source, M, half_rows, table_ptr, WORLD_SIZE, HAS_TABLE).to(tl.int64)
            out_groups = num_groups
            first_group = 0
        else:
            arrived = buffer_ptr + rows.to(tl.int64) * buffer_stride + source * num_groups * group_stride
            out_rows = rows.to(tl.int64)
            out_groups = num_groups * WORLD_SIZE
            first_group = source * num_groups
        destination = part0_ptr + out_rows * (out_groups * width0) + first_group * width0
        _copy_columns(destination, arrived, mask, num_groups, width0, width0, group_stride, BLOCK_G0, BLOCK_W0)
        if NUM_PARTS > 1:
            destination = part1_ptr + out_rows * (out_groups * width1) + first_group * width1
            _copy_columns(destination, arrived + width0, mask, num_groups, width1, width1, group_stride, BLOCK_G1, BLOCK_W1)
        if NUM_PARTS > 2:
            destination = part2_ptr + out_rows * (out_groups * width2) + first_group * width2
            _copy_columns(
                destination, arrived + (width0 + width1), mask, num_groups, width2, width2, group_stride, BLOCK_G2, BLOCK_W2
            )


@triton.jit
def push_kernel(
    part0_ptr,
    part1_ptr,
    part2_ptr,
    buffer_addresses,
    signals_addresses,
    ready_addresses,
    ready_ptr,
    signature_ptr,
    table_ptr,
    tickets_ptr,
    control_ptr,
    M,
    half_rows,
    slot_rows,
    buffer_stride,
    num_groups,
    width0,
    width1,
    width2,
    GRANULE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_G0: tl.constexpr,
    BLOCK_G1: tl.constexpr,
    BLOCK_G2: tl.constexpr,
    BLOCK_W0: tl.constexpr,
    BLOCK_W1: tl.constexpr,
    BLOCK_W2: tl.constexpr,
    TO_HEADS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Pushes to every rank its share of the parts, granule by granule of M local rows.

    TO_HEADS: the parts hold local rows of all heads, [M, W * num_groups * width]; rank d gets its groups of every row, in
    slot ``rank``. Else: they hold global rows of this rank's heads, [W * M, num_groups * width]; rank d gets the rows of
    its two chunks, in its columns ``rank * num_groups * (width0 + width1 + width2)``, since it multiplies them.

    All ranks send a granule to everybody before the next (a consumer needs it from all sources), starting with rank + 1,
    so no two send to the same one. Before the first store to a rank: its start signal. A granule's flag is released once
    its rows are stored.
    """
    epoch = dl.next_epoch(tickets_ptr)
    rank = dl.rank(control_ptr)
    if tl.program_id(0) == 0:
        dl.announce(ready_addresses, signature_ptr, epoch, rank, WORLD_SIZE, TARGET)
    num_granules = tl.cdiv(M, GRANULE_ROWS)
    group_stride = width0 + width1 + width2
    ready_peer = rank
    for item in range(tl.program_id(0), num_granules * WORLD_SIZE, tl.num_programs(0)):
        granule = item // WORLD_SIZE
        peer = (rank + 1 + item % WORLD_SIZE) % WORLD_SIZE
        if peer != ready_peer:
            dl.await_ready(ready_ptr, epoch, control_ptr, peer, WORLD_SIZE, TARGET)
            ready_peer = peer
        buffer = dl.symm_at(buffer_addresses, peer, part0_ptr.dtype.element_ty)
        for block in range(0, GRANULE_ROWS, ROWS):
            rows = granule * GRANULE_ROWS + block + tl.arange(0, ROWS)
            mask = rows < M
            if TO_HEADS:
                in_rows = rows.to(tl.int64)
                in_groups = num_groups * WORLD_SIZE
                first_group = peer * num_groups
                destination = buffer + (rank * slot_rows + rows).to(tl.int64) * buffer_stride
            else:
                in_rows = global_row(rows, mask, peer, M, half_rows, table_ptr, WORLD_SIZE, HAS_TABLE).to(tl.int64)
                in_groups = num_groups
                first_group = 0
                destination = buffer + rows.to(tl.int64) * buffer_stride + rank * num_groups * group_stride
            source = part0_ptr + in_rows * (in_groups * width0) + first_group * width0
            _copy_columns(destination, source, mask, num_groups, width0, group_stride, width0, BLOCK_G0, BLOCK_W0)
            if NUM_PARTS > 1:
                source = part1_ptr + in_rows * (in_groups * width1) + first_group * width1
                _copy_columns(destination + width0, source, mask, num_groups, width1, group_stride, width1, BLOCK_G1, BLOCK_W1)
            if NUM_PARTS > 2:
                source = part2_ptr + in_rows * (in_groups * width2) + first_group * width2
                _copy_columns(
                    destination + (width0 + width1), source, mask, num_groups, width2, group_stride, width2, BLOCK_G2, BLOCK_W2
                )
        flags = dl.symm_at(signals_addresses, peer, tl.int32)
        dl.notify(flags + rank * num_granules + granule, epoch, TARGET)
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TRANSPOSE_B: tl.constexpr,
    SPLIT_STORE: tl.constexpr,
    GRANULE_ROWS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    RANKS_POW2: tl.constexpr,
    TARGET: tl.constexpr,
):
    """C [M, N] = ``to_sequence`` buffer A [M, K] @ B, persistent; a row tile starts when all ranks' columns of it arrived.

    Its sums run over K in order, so it needs every source: one granule of the pushes is one row tile or several. It waits
    (acquire, then a fence for the descriptor loads) for pushes of this epoch; this rank's own push was enqueued before on
    another stream, and the grid leaves its SMs free. Once a program has seen that everything is there, it goes on without
    waits, in one flattened loop of tiles and K blocks: there the loads of a tile run under the stores of the one before.
    """
    epoch = dl.next_epoch(tickets_ptr + 1)
    num_tiles_m = tl.cdiv(M, BLOCK_M)
    num_tiles_n = tl.cdiv(N, BLOCK_N)
    num_k_tiles = tl.cdiv(K, BLOCK_K)
    num_granules = tl.cdiv(M, GRANULE_ROWS)
    num_tiles = num_tiles_m * num_tiles_n
    tile_id = tl.program_id(0)
    behind = tl.cast(1, tl.int32)
    while (tile_id < num_tiles) & (behind > 0):
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
        tile_id += tl.num_programs(0)
        behind = _num_behind(signals_ptr, WORLD_SIZE * num_granules, epoch)
    dl.fence(TARGET)  # the acquire of what _num_behind saw
    dl.fence_async_proxy(TARGET)
    for late_tile in tl.range(tile_id, num_tiles, tl.num_programs(0), flatten=True):
        tile_m, tile_n = grouped_tile(late_tile, num_tiles_m, num_tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        acc = tile_product(a_desc, b_desc, row, col, num_k_tiles, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSE_B)
        store_tile(c_desc, acc, row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
