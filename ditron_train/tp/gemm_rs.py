"""GEMM-RS: a GEMM and the reduce-scatter of its result, as one op. Equivalent PyTorch code:

    partial = x @ weight.T
    out = x.new_empty(len(x) // world_size, weight.shape[0])
    dist.reduce_scatter_tensor(out, partial, group=group)

There are two ways to move the partial sums.

By copy engines, in chunks: a GEMM for the rows that each rank owns, sent while the next one runs. The rows that this
rank owns are last, so that their GEMM hides the last transfer. Then a kernel adds up (``tp.reduce_scatter``). cuBLAS
multiplies in the cases in which it does for ``ag_gemm``.

Timeline of ``gemm_rs`` on rank r of 4, by copy engines:

    native   compute   | GEMM                                                               |
    native   NCCL      |                                                                    | reduce-scatter      |
    fused    copies    |                   | to r-1   |      | to r-2   |      | to r-3   |
    fused    compute   | GEMM: rows of r-1 | rows of r-2     | rows of r-3     | local shard     | sum  |
    fused    waits     |                                                                         | ^ flags of all |

By the GEMM's epilogue: one persistent kernel that stores each tile into its owner's slots, and at the end adds up the
rows that this rank owns. It loses some 60 to 80 us whatever the size, since loads queue behind the stores.

    current         start signals, tiles of rank - 1 | tiles of rank - 2 | ... | own tiles | sum

Who waits for whom: nothing is stored into a peer's receive buffers (slots) before its start signal of this epoch,
since slots are a single buffer of a rank. The sum waits for the arrival flags of all sources: one for each source, or
in the second way one for each (source rank, tile). Flags hold the epoch.

Partial sums are added by the owner of their rows in NCCL's ring order, rounded at every hop. Times, and what was
tried: ``docs/measurements/tp.md``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.gemm.configs import Tile
from ditron_train.gemm.fp8 import check_scaled
from ditron_train.gemm.kernels import scaled, tile_product
from ditron_train.gemm.operands import TensorScales, aligned_operand, make_descriptor, padded_columns, result_dtype
from ditron_train.gemm.ops import GemmLaunch, gemm_launch, library_product
from ditron_train.gemm.peers import MAX_DESCRIPTOR_RANKS, PeerTiles, store_tile_to_peer
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.runtime.sizes import next_power_of_2
from ditron_train.schedule.tiles import ordered_tile, scatter_tile
from ditron_train.stream.agreement import agree, agree_on_nothing
from ditron_train.stream.events import current_handle
from ditron_train.stream.plan import Plan, SumExchange
from ditron_train.tp.choices import (
    Choice,
    Layout,
    Problem,
    ScatterMode,
    first_rows,
    is_short,
    links_are_last,
    sums_in_parts,
)
from ditron_train.tp.context import SLOTS, Operands, RowPartition, TPContext, can_copy, row_partition
from ditron_train.tp.reduce_scatter import ReduceScatter, SumOrder


class Slots(NamedTuple):
    """Where peers store partial tiles: this rank's slots, and the addresses of every rank's, int64."""

    local: Any
    addresses: Any


class GemmRsConstants(NamedTuple):
    """What ``gemm_rs_kernel`` is compiled for; see there."""

    tile: Tile
    reduce_rows: int
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
        epoch, rank: Epoch of this launch, and this rank.
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
def _ring_reduce(
    work, num_tiles, counter_ptr, slots_ptr, out_ptr, channel, reduction, OP: tl.constexpr, TARGET: tl.constexpr
):
    """out = ((x[rank + 1] + x[rank + 2]) + ...) + x[rank]: NCCL's ring order, each + in fp32, rounded at every hop.

    Waits for the partial tiles of all ranks that cover a block of ``reduce_rows`` rows, then reads them from own
    memory.
    """
    TILE: tl.constexpr = OP.tile
    rank, N, slot_stride = reduction.rank, reduction.N, reduction.slot_stride
    first_row = tl.load(reduction.tables.starts + rank)
    end_row = tl.load(reduction.tables.starts + rank + 1)
    first_tile = first_row // TILE.block_m
    num_tiles_n = tl.cdiv(N, TILE.block_n)
    num_blocks = tl.cdiv(end_row - first_row, OP.reduce_rows) * num_tiles_n
    while work < num_tiles + num_blocks:
        block = work - num_tiles
        work = _next_work(counter_ptr)
        tile_n = block % num_tiles_n
        row = first_row + (block // num_tiles_n) * OP.reduce_rows
        last_row = tl.minimum(row + OP.reduce_rows, end_row) - 1
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
        rows = row + tl.arange(0, OP.reduce_rows)
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
    """Stores a tile to every rank that owns rows of it, of which there may be several, and signals it at once."""
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
    """Begins to store a tile to its only owner, after waiting for the owner unless it is ``ready_owner``. Returns the
    address of the tile's flag."""
    TILE: tl.constexpr = OP.tile
    if owner != ready_owner:
        dl.await_ready(channel.ready, reduction.epoch, channel.control, owner, OP.world_size, TARGET)
    local_tile = tile_m % (tl.cdiv(reduction.M, TILE.block_m) // OP.world_size)
    slot_row, col = _slot_row(reduction, local_tile, TILE), tile_n * TILE.block_n
    store_tile_to_peer(owner, acc, slot_row, col, peers, TILE, OP.world_size, OP.use_descriptors)
    return _flag_of(reduction, channel, owner, local_tile, tile_n, TILE).to(tl.int64)


@triton.jit
def _work_counter(tickets_ptr, epoch):
    """The counter that this launch draws its work from. Sets the next launch's counter, of the other epoch parity, to
    zero."""
    counter_ptr = tickets_ptr + 2 + (epoch & 1)
    if tl.program_id(0) == 0:
        tl.store(tickets_ptr + 2 + ((epoch + 1) & 1), tl.cast(0, tl.int64))
    return counter_ptr


@triton.jit
def _signal_stored(pending, epoch, TARGET: tl.constexpr):
    """Waits for the stores of the tile whose flag is at ``pending``, if there is one, and sets the flag."""
    if pending != 0:
        dl.notify_stored(pending, epoch, False, TARGET)


@triton.jit
def _tile_in_order(tile_id, rank, order, num_tiles_m, num_tiles_n, OP: tl.constexpr):
    """Row tile, column tile and owner of the tile that is computed as number ``tile_id``; the owner counts only if
    every rank owns whole row tiles."""
    TILE: tl.constexpr = OP.tile
    if OP.even:
        return scatter_tile(tile_id, rank, num_tiles_m, num_tiles_n, OP.world_size, OP.world_size, TILE.group_m)
    else:
        tile_m, tile_n = ordered_tile(tile_id, order, num_tiles_m, num_tiles_n, TILE.group_m)
        return tile_m, tile_n, rank


@triton.jit
def _scaled_product(a_desc, b_desc, scale, tile_m, tile_n, num_k_tiles, TILE: tl.constexpr):
    """One tile of A @ B; of FP8 operands multiplied by ``scale``."""
    row, col = tile_m * TILE.block_m, tile_n * TILE.block_n
    acc = tile_product(
        a_desc, b_desc, row, col, num_k_tiles, TILE.block_m, TILE.block_n, TILE.block_k, TILE.transpose_b
    )
    return scaled(acc, scale)


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

    Tiles are computed in scatter order and stored directly into their owner's slots (slot ``rank``, rows aligned down
    to the tile grid, so a tile that straddles two owners is sent whole to both). Before its first store to an owner a
    program waits for the owner's start signal. A tile is signalled one tile later, when its asynchronous stores are
    complete (``bulk_store_wait``), by a release after a block barrier; so the store of one tile overlaps with the
    products of the next. At the end every program reduces blocks of its own rank's rows (``_ring_reduce``).

    Programs draw tiles, then blocks to reduce in ring order, from a counter (ticket slots 2 and 3 by epoch parity; the
    other one is reset for the next launch). So the programs that run do all the work: nothing waits for a program that
    finds no SM because another stream's kernel holds it, and two ranks cannot block each other that way.

    Args:
        a_desc, b_desc: The operands.
        slots0 to slots7: Every rank's slots (a kernel takes no tuple of descriptors); only this rank's if peers are
            written to through pointers.
        slots: ``Slots``.
        channel: ``ChannelPointers``.
        out_ptr: The result.
        tables: ``RowTables``.
        scales: ``TensorScales`` of FP8 operands, else None.
        M, N, K: Sizes of the product.
        slot_rows, slot_stride, flags_per_rank: As of ``_Reduction``.
        OP: ``GemmRsConstants``. ``even``: every rank owns the same whole number of row tiles. ``reduce_rows``: rows of
            a block that is added up at once. ``ranks_pow2``: ranks, as the next power of two.
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
        work = _next_work(counter_ptr)  # drawn early: its latency overlaps with this tile's products
        tile_m, tile_n, owner = _tile_in_order(tile_id, rank, tables.order, num_tiles_m, num_tiles_n, OP)
        acc = _scaled_product(a_desc, b_desc, scale, tile_m, tile_n, num_k_tiles, TILE)
        _signal_stored(pending, epoch, TARGET)
        if OP.even:
            pending = _store_to_owner(acc, tile_m, tile_n, owner, ready_owner, peers, channel, reduction, OP, TARGET)
            ready_owner = owner
        else:
            _store_to_owners(acc, tile_m, tile_n, peers, channel, reduction, OP, TARGET)
    _signal_stored(pending, epoch, TARGET)
    dl.verify_peers(channel.ready, channel.signature, epoch, channel.control, rank, OP.world_size, TARGET)
    _ring_reduce(work, num_tiles, counter_ptr, slots.local, out_ptr, channel, reduction, OP, TARGET)


class GemmRsStorePlan(Plan[TPContext]):
    """[m, k] times a weight, reduce-scattered by rows; constructed collectively."""

    def __init__(self, context: TPContext, partition: RowPartition, problem: Problem, choice: Choice) -> None:
        n, dtype, transpose_b = problem.n, result_dtype(problem.dtype), problem.layout == "nt"
        super().__init__(context, context.scatter_channel)
        self.m, self.n, self.k = problem.m, n, problem.k
        config, world_size = choice.config, context.world_size
        self._a_block, self._b_block = (config.block_m, config.block_k), config.b_block(transpose_b)
        channel = self.channel
        self._num_own_rows = partition.count(context.rank)
        block = config.block_m
        values = (self.m, partition.fingerprint, n, dtype, block, config.block_n)
        ends = zip(partition.starts, partition.starts[1:])
        num_slot_tiles = max(-(-end // block) - start // block for start, end in ends if end > start)
        self._slot_rows = num_slot_tiles * block
        self._flags_per_rank = num_slot_tiles * -(-n // config.block_n)
        num_flags = world_size * self._flags_per_rank
        num_bytes = world_size * self._slot_rows * padded_columns(n, dtype)
        has_flags = num_flags <= channel.signals.local.numel()
        signature = agree(context, channel, values, buffer=(SLOTS, num_bytes * dtype.itemsize * has_flags))
        room = num_slot_tiles
        if context.varies:  # of a shard that begins and ends inside a tile
            room = max(room, -(-context.rows_with_room(self.m) // (world_size * block)) + 1)
        channel.reserve_signals(num_flags if has_flags else num_flags // num_slot_tiles * room)
        self._pointers = channel.pointers(signature)
        room_rows = world_size * room * block
        slots = context.slots(world_size * self._slot_rows, padded_columns(n, dtype), dtype, room_rows)
        self._slots = Slots(slots.local, slots.addresses)
        use_descriptors = world_size <= MAX_DESCRIPTOR_RANKS
        peers = range(world_size) if use_descriptors else [context.rank]
        made = [make_descriptor(slots.peer(peer)[:, :n], config.store_block) for peer in peers]
        self._peers = made + made[:1] * (MAX_DESCRIPTOR_RANKS - len(made))
        self._tables = context.row_tables("scatter", partition, block)
        self._launch = context.launch(
            gemm_rs_kernel,
            max(1, min(context.num_sms, config.num_tiles(self.m, n))),
            {
                "OP": GemmRsConstants(
                    config.tile(transpose_b=transpose_b),
                    min(choice.reduce_rows, block),
                    world_size,
                    next_power_of_2(world_size),
                    partition.is_even(block),
                    use_descriptors,
                ),
                "TARGET": context.target,
            },
            **config.launch_options,
        )

    @property
    def identity(self) -> tuple:
        """Plans with the same identity share one compiled GEMM kernel."""
        return self._launch.identity

    def run(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, scales: TensorScales | None = None
    ) -> None:
        """``x``: [m, k]; ``out``: this rank's rows, contiguous."""
        addresses = scales.addresses if scales else ()
        key = (x.data_ptr(), x.stride(), weight.data_ptr(), weight.stride(), out.data_ptr(), *addresses)
        if not self._launch.repeat(key, current_handle(self.context.device)):
            operands = aligned_operand(x), aligned_operand(weight)
            is_as_given = operands[0] is x and operands[1] is weight
            self._launch(*self._arguments(*operands, out, scales), key=key if is_as_given else None)
        self.context.leave(self.channel)

    def compile(self, x: torch.Tensor, weight: torch.Tensor, scales: TensorScales | None = None) -> None:
        """Compiles what a call with these operands would run, without running it."""
        out = x.new_empty(self._num_own_rows, self.n, dtype=self._slots.local.dtype)
        self._launch.compile(*self._arguments(aligned_operand(x), aligned_operand(weight), out, scales))

    def _arguments(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, scales: TensorScales | None
    ) -> tuple:
        return (
            make_descriptor(x, self._a_block),
            make_descriptor(weight, self._b_block),
            *self._peers,
            self._slots,
            self._pointers,
            out,
            self._tables,
            scales,
            self.m,
            self.n,
            self.k,
            self._slot_rows,
            self._slots.local.stride(0),
            self._flags_per_rank,
        )


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Rows of one owner, all or one of two parts of them, and the GEMM for them, None if there are no rows, or if
    cuBLAS multiplies. Compared
    by identity, since it is part of a launch's key. ``position``: the owner's among the ranks that rows are sent to;
    None: this rank."""

    rows: slice
    gemm: GemmLaunch | None
    position: int | None
    is_last: bool


def covers(n: int, dtype: torch.dtype) -> bool:
    """Whether partial sums of ``n`` columns can be computed where copy engines send them from."""
    return padded_columns(n, dtype) == n


class ChunkedGemmPlan(Plan[TPContext]):
    """A GEMM in chunks of rows, each sent when it is computed, then the sum: what plans that send by copy engines
    share.

    A short op, for which a step may be CPU-bound, is recorded as a whole once its operands, result and partial sums
    have been at the same addresses a few times, with the same strides: a training step allocates alike each time. The
    graph runs on the current stream, from the start signals to the join, so operands may be freed or overwritten as
    without it. Kernels handle start signals, epochs, deadlines and errors themselves, so these are part of every
    replay; what a call does on the host (``OpContext.enter``) is done before it.

    Args:
        context: The context whose streams are used.
        problem: The op at its shape.
        choice: Tiles.
        exchange: Sends the chunks and adds up.
    """

    def __init__(self, context: TPContext, problem: Problem, choice: Choice, exchange: SumExchange[TPContext]) -> None:
        is_recorded = context.is_cuda and not context.varies and is_short(problem, choice, context.machine)
        super().__init__(context, exchange.channel, is_recorded=is_recorded and not choice.by_library)
        self._by_library, self._transpose_b = choice.by_library, problem.layout == "nt"
        self._out_dtype = result_dtype(problem.dtype)
        self.m, self.n, self.k = problem.m, problem.n, problem.k
        self._exchange = exchange
        self._chunks: list[_Chunk] = []
        tiles = (choice.config, self._transpose_b, context.num_sms)
        self._options = (*tiles, (problem.dtype, problem.dtype), context.device.index)

    def _add_chunk(self, first: int, last: int, position: int | None, *, is_last: bool) -> None:
        by_tiles = last > first and not self._by_library
        gemm = gemm_launch(last - first, self.n, *self._options) if by_tiles else None
        self._chunks.append(_Chunk(slice(first, last), gemm, position, is_last))

    @property
    def identity(self) -> tuple:
        """Plans with the same identity share their compiled kernels."""
        return tuple(chunk.gemm.launch.identity for chunk in self._chunks if chunk.gemm is not None)

    def into(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, scales: TensorScales | None = None
    ) -> None:
        """``x``: [m, k]; ``out``: where the sum goes, contiguous."""
        partial = x.new_empty(self.m, self.n, dtype=self._out_dtype)
        addresses = scales.addresses if scales else ()
        key = (x.data_ptr(), x.stride(), weight.data_ptr(), weight.stride(), partial.data_ptr(), *addresses)
        recorded_as = (self, out.data_ptr(), *key) if self._is_recorded else None
        self.replay(recorded_as, lambda: self._enqueue(x, weight, scales, partial, out, key), (partial.data_ptr(),))

    def _enqueue(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: TensorScales | None,
        partial: torch.Tensor,
        out: torch.Tensor,
        key: tuple,
    ) -> bool:
        """Returns whether the operands are read in place, so that the addresses and strides in ``key`` determine the
        call."""
        context, exchange = self.context, self._exchange
        stream = current_handle(context.device)
        operands, is_as_given = None, not context.varies  # nothing is cached for a length that comes once
        exchange.begin()
        with self.aborting:
            for chunk in self._chunks:
                if self._by_library:
                    rows, transpose_b = chunk.rows, self._transpose_b
                    library_product(x[rows], weight, partial[rows], transpose_b=transpose_b, scales=scales)
                elif chunk.gemm is not None and not chunk.gemm.launch.repeat((chunk, *key), stream):
                    a, b = operands = operands or (aligned_operand(x), aligned_operand(weight))
                    is_as_given = a is x and b is weight and not context.varies
                    arguments = chunk.gemm.arguments(a[chunk.rows], b, partial[chunk.rows], scales)
                    chunk.gemm.launch(*arguments, key=(chunk, *key) if is_as_given else None)
                if chunk.position is not None:
                    context.fork()
                    exchange.send(partial, chunk.position, chunk.rows, signals=chunk.is_last)
        exchange.finish(partial, out)
        return is_as_given

    def compile(self, x: torch.Tensor, weight: torch.Tensor, scales: TensorScales | None = None) -> None:
        """Compiles what a call with these operands would run, without running it."""
        x, weight = aligned_operand(x), aligned_operand(weight)
        partial = x.new_empty(self.m, self.n, dtype=self._out_dtype)
        for gemm, chunk in {chunk.gemm: chunk for chunk in self._chunks if chunk.gemm is not None}.items():
            gemm.launch.compile(*gemm.arguments(x[chunk.rows], weight, partial[chunk.rows], scales))


class GemmRsCopyPlan(ChunkedGemmPlan):
    """[m, k] times a weight, reduce-scattered by rows; constructed collectively.

    Rows of rank - 1 first, in halves if the transfers finish last and would begin earlier that way. The rows that this
    rank owns are last: their GEMM hides the last transfer. Then the sum (``ReduceScatter.finish``), in the order of
    the arrivals: rank + 1 first.
    """

    def __init__(
        self,
        context: TPContext,
        partition: RowPartition,
        problem: Problem,
        choice: Choice,
        *,
        order: SumOrder | None = None,
    ) -> None:
        n, out_dtype = problem.n, result_dtype(problem.dtype)
        assert covers(n, out_dtype), f"rows of {n} x {out_dtype} are not whole 16 bytes"
        in_parts = order is None and context.modelled(sums_in_parts, problem, choice)
        scatter = ReduceScatter(context, partition, n, out_dtype, in_parts=in_parts, order=order)
        super().__init__(context, problem, choice, scatter)
        halves_first = not choice.by_library and context.modelled(links_are_last, problem, choice)
        for position, owner in enumerate([*scatter.peers, context.rank]):
            start, end = edges = partition.starts[owner : owner + 2]
            if halves_first and position == 0:
                num_first = first_rows(end - start, n, choice.config, context.machine)
                edges = edges if num_first == end - start else (start, start + num_first, end)
            sent_to = position if owner != context.rank else None
            for first, last in zip(edges, edges[1:]):
                self._add_chunk(first, last, sent_to, is_last=last == end)

    def run(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, scales: TensorScales | None = None
    ) -> None:
        """``x``: [m, k]; ``out``: this rank's rows, contiguous."""
        self.into(x, weight, out, scales)


GemmRsPlan = GemmRsCopyPlan | GemmRsStorePlan


def gemm_rs_by(context: TPContext, partition: RowPartition, problem: Problem, choice: Choice) -> GemmRsPlan:
    """The plan of a GEMM-RS as ``choice`` says; tiles are stored by the GEMM if they cannot be copied (collective)."""
    by_copy = choice.scatter == "copy" and can_copy(context) and covers(problem.n, result_dtype(problem.dtype))
    kind = GemmRsCopyPlan if by_copy else GemmRsStorePlan
    return kind(context, partition, problem, replace(choice, by_library=choice.by_library and partition.is_even(1)))


def plan_gemm_rs(
    context: TPContext,
    operands: tuple[Any, ...],
    layout: Layout,
    counts: tuple[int, ...] | None,
    scatter: ScatterMode | None,
) -> GemmRsPlan | None:
    """The plan of ``gemm_rs`` for these ``Operands`` (collective); None if there are no rows."""
    shapes = Operands(*operands)
    n, k = shapes.sizes("gemm_rs", context, layout)
    partition = row_partition("gemm_rs", context, shapes.x_shape, counts, total=True)
    if partition.num_rows == 0:
        channels = (context.scatter_channel, context.reduce_channel)
        agree_on_nothing(context, channels, columns=n, dtype=shapes.dtype)
        return None
    problem = Problem("gemm_rs", partition.num_rows, n, k, layout, shapes.dtype, context.world_size)
    choice = context.choose(problem)
    if scatter is not None:
        choice = replace(choice, scatter=scatter, by_library=False)
    return gemm_rs_by(context, partition, problem, choice)


@outside_compile
def gemm_rs(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    context: TPContext,
    layout: Layout = "nt",
    row_counts: Sequence[int] | None = None,
    scatter: ScatterMode | None = None,
    scales: TensorScales | None = None,
) -> torch.Tensor:
    """``x`` times ``weight``, reduce-scattered along dimension 0: Megatron's row-linear forward and column-linear
    dgrad.

    Partials are reduced by their owner in NCCL's ring order, each sum rounded to the dtype.

    Args:
        x: [s, ..., K], all rows, this rank's share of K; bf16, fp16 or, on Hopper, FP8 (on CPU fp32 too), any strides.
        weight: [N, K] (``nt``) or [K, N] (``nn``; not of FP8).
        context: The group's context.
        layout: Layout of ``weight``.
        row_counts: Rows that each rank gets, if they differ.
        scatter: How to move partial sums; None: by the shape (``tp.choices``). Without ``cuda-bindings``, or if rows
        of
            the result are not a multiple of 16 bytes, the GEMM stores them in any case.
        scales: Scales of FP8 operands, this rank's own: partial sums are bf16.

    Returns:
        [s / world, ..., N] ([rows of this rank, N] with ``row_counts``).

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``ag_gemm``.
    """
    counts = None if row_counts is None else tuple(row_counts)
    check_scaled("gemm_rs", x, scales)
    context.enter("gemm_rs", x.shape, weight.shape, x.dtype)
    operands = (x.shape, weight.shape, x.dtype, weight.dtype, x.device, weight.device)
    made, dtype = context.plan(plan_gemm_rs, operands, layout, counts, scatter), result_dtype(x.dtype)
    if made is None:
        shape = (0,) if counts is not None else (x.shape[0] // context.world_size, *x.shape[1:-1])
        return x.new_empty(*shape, weight.shape[0 if layout == "nt" else 1], dtype=dtype)
    if counts is None:
        out = x.new_empty(x.shape[0] // context.world_size, *x.shape[1:-1], made.n, dtype=dtype)
    else:
        out = x.new_empty(counts[context.rank], made.n, dtype=dtype)
    made.run(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]), weight, out, scales)
    return out
