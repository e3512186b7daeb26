"""The kernels of an all-reduce: every rank adds up the partial sums of all, each element in the order in which NCCL
would."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import ditron_train.lang as dl


class OrderTables(NamedTuple):
    """A ``SumMap`` on the device, int32.

    Attributes:
        ends: [runs], the element behind each run's last.
        order_of_run: [runs].
        orders: [orders, world_size].
        first_runs: [ceil(elements / BLOCK)], the run of the first element of every block.
    """

    ends: Any
    order_of_run: Any
    orders: Any
    first_runs: Any


class _Partials(NamedTuple):
    """Partial sums of all ranks, from element ``first`` on: own ones in ``own``, the others in ``slots``."""

    own: Any
    slots: Any
    slot_elements: Any
    first: Any
    rank: Any


@triton.jit
def _load(partials, source, offsets, mask, SKIPS_OWN: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """Those of ``source`` in fp32. SKIPS_OWN: slots are of rank + 1, rank + 2, ...; else of rank 0, 1, ..."""
    if source == partials.rank:
        values = tl.load(partials.own + offsets, mask=mask)
    else:
        slot = source
        if SKIPS_OWN:
            slot = (source + WORLD_SIZE - partials.rank - 1) % WORLD_SIZE
        values = tl.load(partials.slots + slot * partials.slot_elements + offsets, mask=mask)
    return values.to(tl.float32)


@triton.jit
def _fold_block(
    partials,
    out_ptr,
    tables,
    low,
    limit,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    SKIPS_OWN: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):
    """out = the sums of elements [low, limit) of the whole buffer as far as they are of one block of BLOCK; each + in
    fp32, rounded at every hop.

    VECTOR: what the ends of all runs divide by, so that whole vectors are masked: they are loaded one by one where
    the compiler does not see it. A block has few runs, most have one. 0: there are two ranks, and any order is
    right."""
    dtype = partials.own.dtype.element_ty
    offsets = low - partials.first + tl.arange(0, BLOCK)
    if VECTOR == 0:
        mask = offsets < limit - partials.first
        total = tl.load(partials.own + offsets, mask=mask).to(tl.float32)
        for step in tl.static_range(1, WORLD_SIZE):
            source = (partials.rank + step) % WORLD_SIZE
            total = (total + _load(partials, source, offsets, mask, SKIPS_OWN, WORLD_SIZE)).to(dtype).to(tl.float32)
        tl.store(out_ptr + offsets, total.to(dtype), mask=mask)
    else:
        block = (low // BLOCK).to(tl.int32)
        run = tl.load(tables.first_runs + block)
        begin = low
        end = tl.minimum(tl.cast(block + 1, tl.int64) * BLOCK, limit)
        while begin < end:
            behind = tl.maximum(tl.minimum(tl.load(tables.ends + run).to(tl.int64), end), begin)
            first_lane = (begin - partials.first) // VECTOR * VECTOR
            end_lane = (behind - partials.first) // VECTOR * VECTOR
            mask = (offsets >= first_lane) & (offsets < end_lane)
            order = tables.orders + tl.load(tables.order_of_run + run) * WORLD_SIZE
            total = _load(partials, tl.load(order), offsets, mask, SKIPS_OWN, WORLD_SIZE)
            for step in tl.static_range(1, WORLD_SIZE):
                values = _load(partials, tl.load(order + step), offsets, mask, SKIPS_OWN, WORLD_SIZE)
                total = (total + values).to(dtype).to(tl.float32)
            tl.store(out_ptr + offsets, total.to(dtype), mask=mask)
            begin = behind
            run += 1


@triton.jit
def _num_chunks(behind, num_elements, chunk_elements):
    """Of those that hold the elements in front of ``behind``."""
    return tl.cdiv(tl.maximum(tl.minimum(behind, num_elements), 0), chunk_elements).to(tl.int32)


@triton.jit(do_not_specialize=["chunk_elements"])
def fold_all_kernel(
    partial_ptr,
    slots_ptr,
    channel,
    out_ptr,
    tables,
    num_elements,
    chunk_elements,
    CHUNKS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """out [elements] = the sum over ranks of what each has sent whole, behind copy engines.

    Own ones are read from ``partial_ptr``, the others from slots [world - 1, elements] in own memory, of rank + 1
    first. They come in chunks of ``chunk_elements``, of which each has a flag of every source, ``CHUNKS`` to a source:
    a program waits for a chunk (acquire) before its first block there, so what came early is added up while the last
    chunk is on its way.
    """
    epoch = dl.next_epoch(channel.tickets + 1)
    rank = dl.rank(channel.control)
    num_elements = tl.cast(num_elements, tl.int64)
    chunk_elements = tl.cast(chunk_elements, tl.int64)
    partials = _Partials(partial_ptr, slots_ptr, num_elements, tl.cast(0, tl.int64), rank)
    for block in range(tl.program_id(0), tl.cdiv(num_elements, BLOCK).to(tl.int32), tl.num_programs(0)):
        low = tl.cast(block, tl.int64) * BLOCK
        # Not counted from block to block: Triton loses what a loop carries for the bounds of a loop inside alone (its
        # pull request 9036), and each block would wait for all chunks again.
        num_waited = _num_chunks(low - (tl.num_programs(0) - 1) * BLOCK, num_elements, chunk_elements)
        for chunk in range(num_waited, _num_chunks(low + BLOCK, num_elements, chunk_elements)):
            flags = channel.signals + chunk
            dl.wait_peers(flags, CHUNKS, epoch, channel.control, rank, chunk, 1, WORLD_SIZE - 1, WORLD_SIZE, TARGET)
        _fold_block(partials, out_ptr, tables, low, num_elements, BLOCK, VECTOR, True, WORLD_SIZE)


@triton.jit(do_not_specialize=["slot_rows"])
def fold_own_rows_kernel(
    partial_ptr,
    slots_ptr,
    channel,
    out_ptr,
    row_starts_ptr,
    tables,
    N,
    slot_rows,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """``fold_rows_kernel`` with each element added in the order of an all-reduce of the whole buffer [total rows, N].

    out is this rank's rows; ``partial_ptr`` [total rows, N] its own partial sums, slots [world, slot_rows, N] those of
    the others, read once the flag of their source holds this epoch (acquire).
    """
    epoch = dl.next_epoch(channel.tickets + 1)
    rank = dl.rank(channel.control)
    first = tl.load(row_starts_ptr + rank).to(tl.int64) * N
    behind = tl.load(row_starts_ptr + rank + 1).to(tl.int64) * N
    partials = _Partials(partial_ptr + first, slots_ptr, tl.cast(slot_rows, tl.int64) * N, first, rank)
    dl.wait_peers(channel.signals, 1, epoch, channel.control, rank, 0, 1, WORLD_SIZE - 1, WORLD_SIZE, TARGET)
    first_block = (first // BLOCK).to(tl.int32)
    for block in range(first_block + tl.program_id(0), tl.cdiv(behind, BLOCK).to(tl.int32), tl.num_programs(0)):
        low = tl.maximum(tl.cast(block, tl.int64) * BLOCK, first) // VECTOR * VECTOR
        _fold_block(partials, out_ptr, tables, low, behind, BLOCK, VECTOR, False, WORLD_SIZE)


@triton.jit
def push_and_fold_kernel(
    partial_ptr,
    slots_addresses,
    channel,
    out_ptr,
    tables,
    num_elements,
    AREA: tl.constexpr,
    MOST_PROGRAMS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """A whole all-reduce of a few elements: out = the sum over ranks of ``partial_ptr`` [elements].

    Program p stores blocks p, p + num_programs, ... into the slots of every peer, rank + 1 first, releases its flags
    there, waits for the flags of the peers' programs p (acquire), and adds up the same blocks. All programs run at
    once, and each stores before it waits.

    Slots [2, world, AREA] change with the parity of the epoch, so nobody waits for a start signal before its stores: a
    rank begins epoch e + 2, whose slots are those of e, when it has finished e + 1, for which every peer had to store,
    and a peer stores for e + 1 only when it has finished e. Signatures are compared behind the sum.
    """
    epoch = dl.next_epoch(channel.tickets)
    rank = dl.rank(channel.control)
    program = tl.program_id(0)
    num_elements = tl.cast(num_elements, tl.int64)
    area = tl.cast((epoch & 1) * WORLD_SIZE, tl.int64) * AREA
    lanes = tl.arange(0, BLOCK)
    num_blocks = tl.cdiv(num_elements, BLOCK).to(tl.int32)
    for step in tl.static_range(1, WORLD_SIZE):
        peer = (rank + step) % WORLD_SIZE
        slot = dl.symm_at(slots_addresses, peer, partial_ptr.dtype.element_ty) + area + rank * AREA
        for block in range(program, num_blocks, tl.num_programs(0)):
            offsets = tl.cast(block, tl.int64) * BLOCK + lanes
            mask = offsets < num_elements
            tl.store(slot + offsets, tl.load(partial_ptr + offsets, mask=mask), mask=mask)
    if program == 0:
        dl.announce(channel.ready_addresses, channel.signature, epoch, rank, WORLD_SIZE, TARGET)
    for step in tl.static_range(1, WORLD_SIZE):
        flags = dl.symm_at(channel.signals_addresses, (rank + step) % WORLD_SIZE, tl.int32)
        dl.notify(flags + rank * MOST_PROGRAMS + program, epoch, TARGET)
    flags = channel.signals + program
    dl.wait_peers(flags, MOST_PROGRAMS, epoch, channel.control, rank, program, 1, WORLD_SIZE - 1, WORLD_SIZE, TARGET)
    own_slots = dl.symm_at(slots_addresses, rank, partial_ptr.dtype.element_ty) + area
    partials = _Partials(partial_ptr, own_slots, AREA, tl.cast(0, tl.int64), rank)
    for block in range(program, num_blocks, tl.num_programs(0)):
        low = tl.cast(block, tl.int64) * BLOCK
        _fold_block(partials, out_ptr, tables, low, num_elements, BLOCK, VECTOR, False, WORLD_SIZE)
    dl.verify_peers(channel.ready, channel.signature, epoch, channel.control, rank, WORLD_SIZE, TARGET)


@triton.jit
def push_largest_kernel(
    value_ptr, slots_addresses, channel, MOST_PROGRAMS: tl.constexpr, WORLD_SIZE: tl.constexpr, TARGET: tl.constexpr
):
    """One program: ``value_ptr`` [1] becomes the largest of all ranks'; one that is not a number counts only where all
    are, as in NCCL.

    Slots [2, world] change with the parity of the epoch, as those of ``push_and_fold_kernel``, whose channel this is.
    """
    epoch = dl.next_epoch(channel.tickets)
    rank = dl.rank(channel.control)
    area = (epoch & 1) * WORLD_SIZE
    largest = tl.load(value_ptr)
    for step in tl.static_range(1, WORLD_SIZE):
        peer = (rank + step) % WORLD_SIZE
        tl.store(dl.symm_at(slots_addresses, peer, value_ptr.dtype.element_ty) + area + rank, largest)
    dl.announce(channel.ready_addresses, channel.signature, epoch, rank, WORLD_SIZE, TARGET)
    for step in tl.static_range(1, WORLD_SIZE):
        flags = dl.symm_at(channel.signals_addresses, (rank + step) % WORLD_SIZE, tl.int32)
        dl.notify(flags + rank * MOST_PROGRAMS, epoch, TARGET)
    flags = channel.signals
    dl.wait_peers(flags, MOST_PROGRAMS, epoch, channel.control, rank, 0, 1, WORLD_SIZE - 1, WORLD_SIZE, TARGET)
    slots = dl.symm_at(slots_addresses, rank, value_ptr.dtype.element_ty) + area
    for step in tl.static_range(1, WORLD_SIZE):
        value = tl.load(slots + (rank + step) % WORLD_SIZE)
        # As fmaxf; the interpreter's maximum is not a number where either is none.
        largest = tl.maximum(tl.where(largest != largest, value, largest), tl.where(value != value, largest, value))
    tl.store(value_ptr, largest)
    dl.verify_peers(channel.ready, channel.signature, epoch, channel.control, rank, WORLD_SIZE, TARGET)
