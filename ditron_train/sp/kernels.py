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

import triton
import triton.language as tl

import ditron_train.lang as dl

__all__ = ["arrived_kernel", "next_work", "push_item", "push_kernel", "receive_kernel", "start_epoch"]


@triton.jit
def start_epoch(
    ready_addresses, signature_ptr, tickets_ptr, epoch, rank, WORLD_SIZE: tl.constexpr, TARGET: tl.constexpr
):
    """The first program sends this rank's start signals and clears the counter on which the next launch counts its
    work."""
    if tl.program_id(0) == 0:
        dl.announce(ready_addresses, signature_ptr, epoch, rank, WORLD_SIZE, TARGET)
        tl.store(tickets_ptr + 2 + ((epoch + 1) & 1), tl.cast(0, tl.int64))


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
    """For every group: ``width`` columns of a block of rows; the pointers are [ROWS] and point at column 0 of the
    part.

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
def _copy_part(
    part_ptr, buffer_ptr, first_col, rows, rows_mask, part_groups, first_group, num_groups, width, group_stride,
    BLOCK_G: tl.constexpr, BLOCK_W: tl.constexpr, INTO_PART: tl.constexpr,
):  # fmt: skip
    """Between ``rows`` of a part, [rows, part_groups * width], and its columns, from ``first_col``, of rows of a
    buffer."""
    part = part_ptr + rows * (part_groups * width) + first_group * width
    if INTO_PART:
        _copy_columns(
            part, buffer_ptr + first_col, rows_mask, num_groups, width, width, group_stride, BLOCK_G, BLOCK_W
        )
    else:
        _copy_columns(
            buffer_ptr + first_col, part, rows_mask, num_groups, width, group_stride, width, BLOCK_G, BLOCK_W
        )


@triton.jit
def _copy_parts(
    part0_ptr, part1_ptr, part2_ptr, buffer_ptr, rows, mask, part_groups, first_group, num_groups,
    width0, width1, width2, group_stride,
    NUM_PARTS: tl.constexpr, BLOCK_G0: tl.constexpr, BLOCK_G1: tl.constexpr, BLOCK_G2: tl.constexpr,
    BLOCK_W0: tl.constexpr, BLOCK_W1: tl.constexpr, BLOCK_W2: tl.constexpr, INTO_PARTS: tl.constexpr,
):  # fmt: skip
    """Copies a block of rows, [ROWS] pointers into a buffer, into ``rows`` of all parts, or from there."""
    _copy_part(
        part0_ptr, buffer_ptr, 0, rows, mask, part_groups, first_group, num_groups, width0, group_stride,
        BLOCK_G0, BLOCK_W0, INTO_PARTS,
    )  # fmt: skip
    if NUM_PARTS > 1:
        _copy_part(
            part1_ptr, buffer_ptr, width0, rows, mask, part_groups, first_group, num_groups, width1, group_stride,
            BLOCK_G1, BLOCK_W1, INTO_PARTS,
        )  # fmt: skip
    if NUM_PARTS > 2:
        _copy_part(
            part2_ptr, buffer_ptr, width0 + width1, rows, mask, part_groups, first_group, num_groups, width2, group_stride,
            BLOCK_G2, BLOCK_W2, INTO_PARTS,
        )  # fmt: skip


@triton.jit
def next_work(counter_ptr):
    """Draws the next piece of work that several programs, or launches, share."""
    return tl.atomic_add(counter_ptr, tl.cast(1, tl.int64), sem="relaxed", scope="gpu").to(tl.int32)


@triton.jit
def _receive_item(
    item, buffer_addresses, part0_ptr, part1_ptr, part2_ptr, signals_ptr, table_ptr, control_ptr, rank, epoch,
    M, half_rows, slot_rows, buffer_stride, num_groups, width0, width1, width2, flags_per_granule,
    GRANULE_ROWS: tl.constexpr, ROWS: tl.constexpr, NUM_PARTS: tl.constexpr,
    BLOCK_G0: tl.constexpr, BLOCK_G1: tl.constexpr, BLOCK_G2: tl.constexpr,
    BLOCK_W0: tl.constexpr, BLOCK_W1: tl.constexpr, BLOCK_W2: tl.constexpr,
    FLAGS: tl.constexpr, TO_HEADS: tl.constexpr, PULL: tl.constexpr, HAS_TABLE: tl.constexpr,
    WORLD_SIZE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Waits for ROWS rows of one source and takes them apart; ``receive_kernel`` says which."""
    BLOCKS: tl.constexpr = GRANULE_ROWS // ROWS
    num_granules = tl.cdiv(M, GRANULE_ROWS)
    group_stride = width0 + width1 + width2
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
    buffer = dl.symm_at(buffer_addresses, source if PULL else rank, part0_ptr.dtype.element_ty)
    if TO_HEADS:
        slot = rank if PULL else source
        arrived = buffer + (slot * slot_rows + rows).to(tl.int64) * buffer_stride
        out_rows = global_row(rows, mask, source, M, half_rows, table_ptr, WORLD_SIZE, HAS_TABLE).to(tl.int64)
        out_groups = num_groups
        first_group = 0
    else:
        arrived = buffer + rows.to(tl.int64) * buffer_stride + source * num_groups * group_stride
        out_rows = rows.to(tl.int64)
        out_groups = num_groups * WORLD_SIZE
        first_group = source * num_groups
    _copy_parts(
        part0_ptr, part1_ptr, part2_ptr, arrived, out_rows, mask, out_groups, first_group, num_groups,
        width0, width1, width2, group_stride, NUM_PARTS, BLOCK_G0, BLOCK_G1, BLOCK_G2, BLOCK_W0, BLOCK_W1, BLOCK_W2, True,
    )  # fmt: skip


@triton.jit
def receive_kernel(
    buffer_addresses,
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
    PULL: tl.constexpr,
    BEHIND: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Takes the parts apart that arrive in this rank's buffer (``push_kernel``'s inverse), or, with PULL, in the
    peers'.

    It runs beside the kernel that sends, on SMs that one leaves free. With PULL the work is drawn from a counter
    (ticket slot 2 or 3 by epoch parity; the sender resets the other one), so that a second launch on all SMs BEHIND
    the sender can join in for what is left: the few SMs beside a GEMM of 0.9 ms were 0.12 ms behind it.

    TO_HEADS: part [W * M, num_groups * width], global rows of own heads, from the slots (with PULL each source's slot
    of this rank, in its own memory). Else: part [M, W * num_groups * width], local rows of all heads, from the columns
    of the sources.

    Waits (acquire), for every block of ROWS rows of one source, for the ``flags_per_granule <= FLAGS`` flags of its
    granule. Sources in the order rank - 1, rank - 2, ..., own: those that send to this rank first come first.
    """
    epoch = dl.last_epoch(tickets_ptr) if BEHIND else dl.next_epoch(tickets_ptr + 1)
    rank = dl.rank(control_ptr)
    num_items = WORLD_SIZE * tl.cdiv(M, GRANULE_ROWS) * (GRANULE_ROWS // ROWS)
    counter_ptr = tickets_ptr + 2 + (epoch & 1)
    item = next_work(counter_ptr) if PULL else tl.program_id(0)
    while item < num_items:
        _receive_item(
            item, buffer_addresses, part0_ptr, part1_ptr, part2_ptr, signals_ptr, table_ptr, control_ptr, rank, epoch,
            M, half_rows, slot_rows, buffer_stride, num_groups, width0, width1, width2, flags_per_granule,
            GRANULE_ROWS, ROWS, NUM_PARTS, BLOCK_G0, BLOCK_G1, BLOCK_G2, BLOCK_W0, BLOCK_W1, BLOCK_W2,
            FLAGS, TO_HEADS, PULL, HAS_TABLE, WORLD_SIZE, TARGET,
        )  # fmt: skip
        item = next_work(counter_ptr) if PULL else item + tl.num_programs(0)


@triton.jit(do_not_specialize=["num_granules"])
def arrived_kernel(
    signals_ptr, tickets_ptr, control_ptr, num_granules, WORLD_SIZE: tl.constexpr, TARGET: tl.constexpr
):
    """One program behind a push whose rows are read where they arrive: waits (acquire) for all granules of all
    sources.

    What follows on the stream reads them plainly.
    """
    epoch = dl.next_epoch(tickets_ptr + 1)
    for source in range(WORLD_SIZE):
        dl.wait_many(signals_ptr + source * num_granules, num_granules, epoch, control_ptr, source, 0, 32, TARGET)


@triton.jit
def push_item(
    item, part0_ptr, part1_ptr, part2_ptr, buffer_addresses, signals_addresses, table_ptr, rank, epoch,
    M, half_rows, slot_rows, buffer_stride, num_groups, width0, width1, width2,
    GRANULE_ROWS: tl.constexpr, ROWS: tl.constexpr, NUM_PARTS: tl.constexpr,
    BLOCK_G0: tl.constexpr, BLOCK_G1: tl.constexpr, BLOCK_G2: tl.constexpr,
    BLOCK_W0: tl.constexpr, BLOCK_W1: tl.constexpr, BLOCK_W2: tl.constexpr,
    TO_HEADS: tl.constexpr, HAS_TABLE: tl.constexpr, WORLD_SIZE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Stores one granule of one peer's share into its buffer, then releases its flag; ``push_kernel`` says which."""
    num_granules = tl.cdiv(M, GRANULE_ROWS)
    group_stride = width0 + width1 + width2
    granule = item // WORLD_SIZE
    peer = (rank + 1 + item % WORLD_SIZE) % WORLD_SIZE
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
        _copy_parts(
            part0_ptr, part1_ptr, part2_ptr, destination, in_rows, mask, in_groups, first_group, num_groups,
            width0, width1, width2, group_stride, NUM_PARTS, BLOCK_G0, BLOCK_G1, BLOCK_G2, BLOCK_W0, BLOCK_W1, BLOCK_W2, False,
        )  # fmt: skip
    flags = dl.symm_at(signals_addresses, peer, tl.int32)
    dl.notify(flags + rank * num_granules + granule, epoch, TARGET)


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

    TO_HEADS: the parts hold local rows of all heads, [M, W * num_groups * width]; rank d gets its groups of every row,
    in slot ``rank``. Else: they hold global rows of this rank's heads, [W * M, num_groups * width]; rank d gets the
    rows of its two chunks, in its columns ``rank * num_groups * (width0 + width1 + width2)``, since it multiplies
    them.

    All ranks send a granule to everybody before the next (a consumer needs it from all sources), starting with rank +
    1, so no two send to the same one. Before the first store: all start signals. A granule's flag is released once its
    rows are stored.
    """
    epoch = dl.next_epoch(tickets_ptr)
    rank = dl.rank(control_ptr)
    start_epoch(ready_addresses, signature_ptr, tickets_ptr, epoch, rank, WORLD_SIZE, TARGET)
    dl.await_peers(ready_ptr, epoch, control_ptr, rank, WORLD_SIZE, TARGET)
    for item in range(tl.program_id(0), tl.cdiv(M, GRANULE_ROWS) * WORLD_SIZE, tl.num_programs(0)):
        push_item(
            item, part0_ptr, part1_ptr, part2_ptr, buffer_addresses, signals_addresses, table_ptr, rank, epoch,
            M, half_rows, slot_rows, buffer_stride, num_groups, width0, width1, width2,
            GRANULE_ROWS, ROWS, NUM_PARTS, BLOCK_G0, BLOCK_G1, BLOCK_G2, BLOCK_W0, BLOCK_W1, BLOCK_W2,
            TO_HEADS, HAS_TABLE, WORLD_SIZE, TARGET,
        )  # fmt: skip
    dl.verify_peers(ready_ptr, signature_ptr, epoch, control_ptr, rank, WORLD_SIZE, TARGET)
