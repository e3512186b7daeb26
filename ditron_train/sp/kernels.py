"""Kernels of Ulysses sequence parallelism that move data (those that multiply: ``gemm_kernels``).

Rows are (position, batch) pairs. Rank r of a group of W holds two of the 2 W chunks of the sequence (or of each of
several packed ones), r and 2 W - 1 - r: its rows before attention ("local rows"); around attention it holds all
positions, in order ("global rows"), of its heads.
Columns of one rank's heads: ``num_groups`` groups, each with one slice of every part (q, k, v; or one part).

Three single buffers a rank: ``to_heads`` [W * slot_rows, columns] (slot: source rank, its local rows), ``staged`` of
the same shape (slot: destination rank), which the peers read, and ``to_sequence`` [local rows, W * columns] (what the
projection multiplies). A rank writes into a peer's buffer, or over what a peer has read, only after the peer's start
signal of this epoch (``dl.announce``: everything that its stream had before is done). Arrival is told by flags that
hold the epoch, one for each (source rank, granule of rows) or (source rank, tile).

Ticket roles of a channel: 0 for the kernel that sends, 1 for the kernel that waits; 2 and 3 count work, by epoch
parity.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import ditron_train.lang as dl


class CopyPointers(NamedTuple):
    """What a copy reads and writes.

    Attributes:
        parts: q, k and v; of fewer parts the first stands for those that are not there.
        buffers: Addresses of the buffer of every rank.
        table: Rows of packed sequences, int32 [W, M]; any pointer where there is none.
    """

    parts: tuple[Any, Any, Any]
    buffers: Any
    table: Any


class CopyShape(NamedTuple):
    """Sizes of a copy between parts and a buffer.

    Attributes:
        M: Local rows.
        half_rows: Rows of one of their two chunks.
        slot_rows: Rows of one slot of a buffer.
        stride: Elements from one row of a buffer to the next.
        num_groups: Groups of one rank.
        widths: Columns of each part in one group, 0 of those that are not there.
    """

    M: int
    half_rows: int
    slot_rows: int
    stride: int
    num_groups: int
    widths: tuple[int, int, int]


class CopyBlocks(NamedTuple):
    """How a kernel cuts a copy into blocks, and what it knows of it when it is compiled.

    Attributes:
        granule_rows: Rows that one flag (or ``flags_per_granule``) stands for.
        rows: Rows of a block, which divide a granule.
        groups: Groups of each part in a block.
        widths: Columns of each part in a block.
        to_heads: Whether the copy is on its way to the attention.
        has_table: Whether a table says where in the whole sequence a row lies.
        world_size: Ranks.
    """

    granule_rows: int
    rows: int
    groups: tuple[int, ...]
    widths: tuple[int, ...]
    to_heads: bool
    has_table: bool
    world_size: int


@triton.jit
def start_epoch(channel, epoch, rank, WORLD_SIZE: tl.constexpr, TARGET: tl.constexpr):
    """The first program sends this rank's start signals and clears the counter on which the next launch counts its
    work."""
    if tl.program_id(0) == 0:
        dl.announce(channel.ready_addresses, channel.signature, epoch, rank, WORLD_SIZE, TARGET)
        tl.store(channel.tickets + 2 + ((epoch + 1) & 1), tl.cast(0, tl.int64))


@triton.jit
def _global_row(row, mask, owner, table_ptr, shape, COPY: tl.constexpr):
    """Global row of rank ``owner``'s local row: its first half is chunk ``owner``, its second 2 W - 1 - ``owner``.

    Packed sequences are each cut so; their rows are in a table, int32 [W, M]. Twins: ``layouts.global_rows`` and
    ``layouts.packed_rows``.
    """
    if COPY.has_table:
        return tl.load(table_ptr + owner * shape.M + row, mask=mask, other=0).to(tl.int64)
    else:
        second = (2 * COPY.world_size - 2 - owner) * shape.half_rows + row
        return tl.where(row < shape.half_rows, owner * shape.half_rows + row, second).to(tl.int64)


@triton.jit
def _group_stride(shape):
    """Columns of one group, all parts."""
    return shape.widths[0] + shape.widths[1] + shape.widths[2]


@triton.jit
def _copy_columns(
    to_ptr, from_ptr, mask, num_groups, width, to_stride, from_stride, BLOCK_G: tl.constexpr, BLOCK_W: tl.constexpr
):
    """For every group: ``width`` columns of a block of rows; the pointers are [ROWS] and point at column 0 of the
    part, the strides go from one group to the next.

    BLOCK_G groups at a time where they are narrow: what one program has in flight decides its rate.
    """
    lanes = tl.arange(0, BLOCK_G * BLOCK_W)
    for first_group in range(0, num_groups, BLOCK_G):
        groups = first_group + lanes // BLOCK_W
        for first in range(0, width, BLOCK_W):
            cols = first + lanes % BLOCK_W
            block = mask[:, None] & ((cols < width) & (groups < num_groups))[None, :]
            values = tl.load(from_ptr[:, None] + (groups * from_stride + cols)[None, :], mask=block)
            tl.store(to_ptr[:, None] + (groups * to_stride + cols)[None, :], values, mask=block)


@triton.jit
def _copy_parts(
    parts,
    buffer_ptr,
    rows,
    mask,
    part_groups,
    first_group,
    group_stride,
    shape,
    COPY: tl.constexpr,
    BACK: tl.constexpr,
):
    """Copies a block of ``rows`` of all parts, each [rows, part_groups * width], from ``first_group`` on, to [ROWS]
    pointers into a buffer, or BACK."""
    NUM_PARTS: tl.constexpr = len(COPY.groups)
    first_col = 0
    for i in tl.static_range(NUM_PARTS):
        width = shape.widths[i]
        part = parts[i] + rows * (part_groups * width) + first_group * width
        place = buffer_ptr + first_col
        if BACK:
            _copy_columns(
                part, place, mask, shape.num_groups, width, width, group_stride, COPY.groups[i], COPY.widths[i]
            )
        else:
            _copy_columns(
                place, part, mask, shape.num_groups, width, group_stride, width, COPY.groups[i], COPY.widths[i]
            )
        first_col += width


@triton.jit
def next_work(counter_ptr):
    """Draws the next piece of work that several programs, or launches, share."""
    return tl.atomic_add(counter_ptr, tl.cast(1, tl.int64), sem="relaxed", scope="gpu").to(tl.int32)


@triton.jit
def _receive_item(
    item,
    pointers,
    channel,
    shape,
    flags_per_granule,
    rank,
    epoch,
    COPY: tl.constexpr,
    FLAGS: tl.constexpr,
    PULL: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Waits for a block of rows of one source and takes them apart; ``receive_kernel`` says which."""
    WORLD_SIZE: tl.constexpr = COPY.world_size
    GRANULE_ROWS: tl.constexpr = COPY.granule_rows
    ROWS: tl.constexpr = COPY.rows
    BLOCKS: tl.constexpr = GRANULE_ROWS // ROWS
    num_granules = tl.cdiv(shape.M, GRANULE_ROWS)
    group_stride = _group_stride(shape)
    if COPY.to_heads:
        turn = item // (num_granules * BLOCKS)
        granule = (item // BLOCKS) % num_granules
    else:
        turn = (item // BLOCKS) % WORLD_SIZE
        granule = item // (BLOCKS * WORLD_SIZE)
    source = (rank + 2 * WORLD_SIZE - 1 - turn) % WORLD_SIZE
    flags = channel.signals + (source * num_granules + granule) * flags_per_granule
    first_flag = granule * flags_per_granule
    dl.wait_many(flags, flags_per_granule, epoch, channel.control, source, first_flag, FLAGS, TARGET)
    rows = granule * GRANULE_ROWS + (item % BLOCKS) * ROWS + tl.arange(0, ROWS)
    mask = rows < shape.M
    buffer = dl.symm_at(pointers.buffers, source if PULL else rank, pointers.parts[0].dtype.element_ty)
    if COPY.to_heads:
        slot = rank if PULL else source
        arrived = buffer + (slot * shape.slot_rows + rows).to(tl.int64) * shape.stride
        out_rows = _global_row(rows, mask, source, pointers.table, shape, COPY)
        out_groups = shape.num_groups
        first_group = 0
    else:
        arrived = buffer + rows.to(tl.int64) * shape.stride + source * shape.num_groups * group_stride
        out_rows = rows.to(tl.int64)
        out_groups = shape.num_groups * WORLD_SIZE
        first_group = source * shape.num_groups
    _copy_parts(pointers.parts, arrived, out_rows, mask, out_groups, first_group, group_stride, shape, COPY, True)


@triton.jit
def receive_kernel(
    pointers,
    channel,
    shape,
    flags_per_granule,
    COPY: tl.constexpr,
    FLAGS: tl.constexpr,
    PULL: tl.constexpr,
    BEHIND: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Takes the parts apart that arrive in this rank's buffer (``push_kernel``'s inverse), or, with PULL, in the
    peers'.

    It runs beside the kernel that sends, on SMs that one leaves free. With PULL the work is drawn from a counter
    (ticket slot 2 or 3 by epoch parity; the sender resets the other one), so that a second launch on all SMs BEHIND
    the sender can join in for what is left.

    To heads: part [W * M, num_groups * width], global rows of own heads, from the slots (with PULL each source's slot
    of this rank, in its own memory). Else: part [M, W * num_groups * width], local rows of all heads, from the columns
    of the sources.

    Waits (acquire), for every block of rows of one source, for the ``flags_per_granule <= FLAGS`` flags of its
    granule. Sources in the order rank - 1, rank - 2, ..., own: those that send to this rank first come first.
    """
    BLOCKS: tl.constexpr = COPY.granule_rows // COPY.rows
    epoch = dl.last_epoch(channel.tickets) if BEHIND else dl.next_epoch(channel.tickets + 1)
    rank = dl.rank(channel.control)
    num_items = COPY.world_size * tl.cdiv(shape.M, COPY.granule_rows) * BLOCKS
    counter_ptr = channel.tickets + 2 + (epoch & 1)
    item = next_work(counter_ptr) if PULL else tl.program_id(0)
    while item < num_items:
        _receive_item(item, pointers, channel, shape, flags_per_granule, rank, epoch, COPY, FLAGS, PULL, TARGET)
        item = next_work(counter_ptr) if PULL else item + tl.num_programs(0)


@triton.jit(do_not_specialize=["num_granules"])
def arrived_kernel(channel, num_granules, WORLD_SIZE: tl.constexpr, TARGET: tl.constexpr):
    """One program behind a push whose rows are read where they arrive: waits (acquire) for all granules of all
    sources.

    What follows on the stream reads them plainly.
    """
    epoch = dl.next_epoch(channel.tickets + 1)
    for source in range(WORLD_SIZE):
        flags = channel.signals + source * num_granules
        dl.wait_many(flags, num_granules, epoch, channel.control, source, 0, 32, TARGET)


@triton.jit
def push_item(item, pointers, channel, shape, rank, epoch, COPY: tl.constexpr, TARGET: tl.constexpr):
    """Stores one granule of one peer's share into its buffer, then releases its flag; ``push_kernel`` says which."""
    WORLD_SIZE: tl.constexpr = COPY.world_size
    GRANULE_ROWS: tl.constexpr = COPY.granule_rows
    ROWS: tl.constexpr = COPY.rows
    num_granules = tl.cdiv(shape.M, GRANULE_ROWS)
    group_stride = _group_stride(shape)
    granule = item // WORLD_SIZE
    peer = (rank + 1 + item % WORLD_SIZE) % WORLD_SIZE
    buffer = dl.symm_at(pointers.buffers, peer, pointers.parts[0].dtype.element_ty)
    for block in range(0, GRANULE_ROWS, ROWS):
        rows = granule * GRANULE_ROWS + block + tl.arange(0, ROWS)
        mask = rows < shape.M
        if COPY.to_heads:
            in_rows = rows.to(tl.int64)
            in_groups = shape.num_groups * WORLD_SIZE
            first_group = peer * shape.num_groups
            destination = buffer + (rank * shape.slot_rows + rows).to(tl.int64) * shape.stride
        else:
            in_rows = _global_row(rows, mask, peer, pointers.table, shape, COPY)
            in_groups = shape.num_groups
            first_group = 0
            destination = buffer + rows.to(tl.int64) * shape.stride + rank * shape.num_groups * group_stride
        _copy_parts(
            pointers.parts, destination, in_rows, mask, in_groups, first_group, group_stride, shape, COPY, False
        )
    flags = dl.symm_at(channel.signals_addresses, peer, tl.int32)
    dl.notify(flags + rank * num_granules + granule, epoch, TARGET)


@triton.jit
def push_kernel(pointers, channel, shape, COPY: tl.constexpr, TARGET: tl.constexpr):
    """Pushes to every rank its share of the parts, granule by granule of M local rows.

    To heads: the parts hold local rows of all heads, [M, W * num_groups * width]; rank d gets its groups of every row,
    in slot ``rank``. Else: they hold global rows of this rank's heads, [W * M, num_groups * width]; rank d gets the
    rows of its two chunks, in its columns ``rank * num_groups * sum(widths)``, since it multiplies them.

    All ranks send a granule to everybody before the next (a consumer needs it from all sources), starting with rank +
    1, so no two send to the same one. Before the first store: all start signals. A granule's flag is released once its
    rows are stored.
    """
    WORLD_SIZE: tl.constexpr = COPY.world_size
    epoch = dl.next_epoch(channel.tickets)
    rank = dl.rank(channel.control)
    start_epoch(channel, epoch, rank, WORLD_SIZE, TARGET)
    dl.await_peers(channel.ready, epoch, channel.control, rank, WORLD_SIZE, TARGET)
    num_items = tl.cdiv(shape.M, COPY.granule_rows) * WORLD_SIZE
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        push_item(item, pointers, channel, shape, rank, epoch, COPY, TARGET)
    dl.verify_peers(channel.ready, channel.signature, epoch, channel.control, rank, WORLD_SIZE, TARGET)
