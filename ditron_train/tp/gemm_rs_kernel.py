"""The kernel of a GEMM-RS that stores to peers from its epilogue. What was tried, with its times:
``docs/measurements/tp.md``.

The partials ``[world * slot_rows, N]`` are a single buffer of a rank: a peer stores into it only after this rank's
start signal of the epoch (``dl.announce``). Arrival is told by flags that hold the epoch, one for each (source rank,
tile).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.gemm.configs import Tile
from ditron_train.gemm.kernels import scaled, tile_product
from ditron_train.gemm.peers import PeerTiles, store_tile_to_peer
from ditron_train.schedule.tiles import ordered_tile, scatter_tile


class Slots(NamedTuple):
    """Where peers store partial tiles: this rank's slots, and the addresses of every rank's, int64."""

    local: Any
    addresses: Any


class GemmRsConstants(NamedTuple):
    """What ``gemm_rs_kernel`` is compiled for; see there."""

    tile: Tile
    fold_rows: int
    world_size: int
    ranks_pow2: int
    even: bool
    use_descriptors: bool


class _Reduction(NamedTuple):
    """What does not change while a GEMM-RS runs.

    Attributes:
        tables: ``RowTables``.
        M, N: Sizes of the product.
        slot_rows: Rows of one source in a rank's slots.
        slot_stride: Elements between rows of the slots.
        flags_per_rank: Flags of one source.
        epoch, rank: Of this launch.
    """

    tables: Any
    M: Any
    N: Any
    slot_rows: Any
    slot_stride: Any
    flags_per_rank: Any
    epoch: Any
    rank: Any


@triton.jit
def _next_work(counter_ptr):
    return tl.atomic_add(counter_ptr, tl.cast(1, tl.int64), sem="relaxed", scope="gpu").to(tl.int32)


@triton.jit
def _fold(
    work, num_tiles, counter_ptr, slots_ptr, out_ptr, channel, reduction, OP: tl.constexpr, TARGET: tl.constexpr
):
    """out = ((x[rank + 1] + x[rank + 2]) + ...) + x[rank]: NCCL's ring order, each + in fp32, rounded at every hop.

    Waits for the partial tiles of all ranks that cover a block of ``fold_rows`` rows, then reads them from own memory.
    """
    TILE: tl.constexpr = OP.tile
    rank, N, slot_stride = reduction.rank, reduction.N, reduction.slot_stride
    first_row = tl.load(reduction.tables.starts + rank)
    end_row = tl.load(reduction.tables.starts + rank + 1)
    first_tile = first_row // TILE.block_m
    num_tiles_n = tl.cdiv(N, TILE.block_n)
    num_blocks = tl.cdiv(end_row - first_row, OP.fold_rows) * num_tiles_n
    while work < num_tiles + num_blocks:
        block = work - num_tiles
        work = _next_work(counter_ptr)
        tile_n = block % num_tiles_n
        row = first_row + (block // num_tiles_n) * OP.fold_rows
        last_row = tl.minimum(row + OP.fold_rows, end_row) - 1
        for tile in range(row // TILE.block_m - first_tile, last_row // TILE.block_m - first_tile + 1):
            flag = tile * num_tiles_n + tile_n
            dl.wait_ranks(
                channel.signals + flag,
                reduction.flags_per_rank,
                reduction.epoch,
                channel.control,
                flag,
                OP.world_size,
                OP.ranks_pow2,
                TARGET,
            )
        rows = row + tl.arange(0, OP.fold_rows)
        cols = tile_n * TILE.block_n + tl.arange(0, TILE.block_n)
        mask = (rows[:, None] <= last_row) & (cols[None, :] < N)
        offsets = (rows[:, None] - first_tile * TILE.block_m).to(tl.int64) * slot_stride + cols[None, :]
        slot_elements = reduction.slot_rows.to(tl.int64) * slot_stride
        source = (rank + 1) % OP.world_size
        total = tl.load(slots_ptr + source * slot_elements + offsets, mask=mask).to(tl.float32)
        for step in tl.static_range(2, OP.world_size + 1):
            source = (rank + step) % OP.world_size
            partial = tl.load(slots_ptr + source * slot_elements + offsets, mask=mask).to(tl.float32)
            total = (total + partial).to(slots_ptr.dtype.element_ty).to(tl.float32)
        out_offsets = (rows[:, None] - first_row).to(tl.int64) * N + cols[None, :]
        tl.store(out_ptr + out_offsets, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _slot_row(reduction, local_tile, TILE: tl.constexpr):
    """Row of an owner's slots in which this rank's partial of its row tile ``local_tile`` begins."""
    return reduction.rank * reduction.slot_rows + local_tile * TILE.block_m


@triton.jit
def _flag_of(reduction, channel, owner, local_tile, tile_n, TILE: tl.constexpr):
    """Where ``owner`` waits for this rank's partial of a tile."""
    flags = dl.symm_at(channel.signals_addresses, owner, tl.int32)
    num_tiles_n = tl.cdiv(reduction.N, TILE.block_n)
    return flags + reduction.rank * reduction.flags_per_rank + local_tile * num_tiles_n + tile_n


@triton.jit
def _store_to_owners(acc, tile_m, tile_n, peers, channel, reduction, OP: tl.constexpr, TARGET: tl.constexpr):
    """Stores a tile to every rank that owns rows of it, and signals it at once: it may go to several."""
    TILE: tl.constexpr = OP.tile
    row = tile_m * TILE.block_m
    last_row = tl.minimum(row + TILE.block_m, reduction.M) - 1
    for owner in range(0, OP.world_size):
        start = tl.load(reduction.tables.starts + owner)
        end = tl.load(reduction.tables.starts + owner + 1)
        if tl.maximum(start, row) < tl.minimum(end, last_row + 1):
            dl.await_ready(channel.ready, reduction.epoch, channel.control, owner, OP.world_size, TARGET)
            local_tile = tile_m - start // TILE.block_m
            slot_row, col = _slot_row(reduction, local_tile, TILE), tile_n * TILE.block_n
            store_tile_to_peer(owner, acc, slot_row, col, peers, TILE, OP.world_size, OP.use_descriptors)
            dl.bulk_store_wait(TARGET)
            dl.notify(_flag_of(reduction, channel, owner, local_tile, tile_n, TILE), reduction.epoch, TARGET)


@triton.jit
def _store_to_owner(
    acc, tile_m, tile_n, owner, ready_owner, peers, channel, reduction, OP: tl.constexpr, TARGET: tl.constexpr
):
    """Begins to store a tile to its only owner, first waiting for it unless it is ``ready_owner``: the address of its
    flag."""
    TILE: tl.constexpr = OP.tile
    if owner != ready_owner:
        dl.await_ready(channel.ready, reduction.epoch, channel.control, owner, OP.world_size, TARGET)
    local_tile = tile_m % (tl.cdiv(reduction.M, TILE.block_m) // OP.world_size)
    slot_row, col = _slot_row(reduction, local_tile, TILE), tile_n * TILE.block_n
    store_tile_to_peer(owner, acc, slot_row, col, peers, TILE, OP.world_size, OP.use_descriptors)
    return _flag_of(reduction, channel, owner, local_tile, tile_n, TILE).to(tl.int64)


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
    slots,
    channel,
    out_ptr,
    tables,
    scales,
    M,
    N,
    K,
    slot_rows,
    slot_stride,
    flags_per_rank,
    OP: tl.constexpr,
    TARGET: tl.constexpr,
):
    """out [rows of this rank, N] = reduce-scatter over ranks of A [M, K] @ B, persistent, one launch.

    Tiles are computed in scatter order and stored straight into their owner's slots (slot ``rank``, rows aligned down
    to the tile grid, so a tile that straddles two owners goes whole to both). Before the first store to an owner: its
    start signal. A tile is signalled one tile later, when its asynchronous stores are complete (``bulk_store_wait``),
    by a release after a block barrier; so the store of one tile runs under the products of the next. At the end every
    program folds blocks of its own rank's rows (``_fold``).

    Programs draw tiles, then blocks to fold, from a counter (ticket slots 2 and 3 by epoch parity; the other one is
    reset for the next launch). So the programs that run do all the work: one that finds no SM, because another
    stream's kernel holds it, is not waited for, and two ranks cannot block each other that way.

    Args:
        a_desc, b_desc: The operands.
        slots0 to slots7: Every rank's slots (a tuple of descriptors is no kernel's argument); this rank's alone where
            ranks are written to through pointers.
        slots: ``Slots``.
        channel: ``ChannelPointers``.
        out_ptr: The result.
        tables: ``RowTables``.
        scales: ``TensorScales`` of FP8 operands, else None.
        M, N, K: Sizes of the product.
        slot_rows, slot_stride, flags_per_rank: As of ``_Reduction``.
        OP: ``GemmRsConstants``. ``even``: every rank owns the same whole number of row tiles. ``fold_rows``: rows of a
            block that is added up at once. ``ranks_pow2``: ranks, as the next power of two.
        TARGET: See ``runtime.device.kernel_target``.
    """
    TILE: tl.constexpr = OP.tile
    epoch = dl.next_epoch(channel.tickets)
    rank = dl.rank(channel.control)
    if tl.program_id(0) == 0:
        dl.announce(channel.ready_addresses, channel.signature, epoch, rank, OP.world_size, TARGET)
    reduction = _Reduction(tables, M, N, slot_rows, slot_stride, flags_per_rank, epoch, rank)
    descs = (slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7)
    peers = PeerTiles(descs, slots.addresses, slot_stride, OP.world_size * slot_rows, N)
    num_tiles_m = tl.cdiv(M, TILE.block_m)
    num_tiles_n = tl.cdiv(N, TILE.block_n)
    num_k_tiles = tl.cdiv(K, TILE.block_k)
    num_tiles = num_tiles_m * num_tiles_n
    scale = None
    if scales is not None:
        scale = tl.load(scales.a) * tl.load(scales.b)
    counter_ptr = _work_counter(channel.tickets, epoch)
    ready_owner = rank
    pending = tl.cast(0, tl.int64)  # address of the flag of the tile that is still being stored
    work = _next_work(counter_ptr)
    while work < num_tiles:
        tile_id = work
        work = _next_work(counter_ptr)  # drawn early: its latency lies under this tile's products
        if OP.even:
            tile_m, tile_n, owner = scatter_tile(
                tile_id, rank, num_tiles_m, num_tiles_n, OP.world_size, OP.world_size, TILE.group_m
            )
        else:
            tile_m, tile_n = ordered_tile(tile_id, tables.order, num_tiles_m, num_tiles_n, TILE.group_m)
        acc = tile_product(
            a_desc,
            b_desc,
            tile_m * TILE.block_m,
            tile_n * TILE.block_n,
            num_k_tiles,
            TILE.block_m,
            TILE.block_n,
            TILE.block_k,
            TILE.transpose_b,
        )
        acc = scaled(acc, scale)
        _signal_stored(pending, epoch, TARGET)
        if OP.even:
            pending = _store_to_owner(acc, tile_m, tile_n, owner, ready_owner, peers, channel, reduction, OP, TARGET)
            ready_owner = owner
        else:
            _store_to_owners(acc, tile_m, tile_n, peers, channel, reduction, OP, TARGET)
    _signal_stored(pending, epoch, TARGET)
    dl.verify_peers(channel.ready, channel.signature, epoch, channel.control, rank, OP.world_size, TARGET)
    _fold(work, num_tiles, counter_ptr, slots.local, out_ptr, channel, reduction, OP, TARGET)
