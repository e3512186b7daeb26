"""The kernels behind reduce-scatters by copy engines: they add up what peers sent, in NCCL's ring order."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import ditron_train.lang as dl


class _Sources(NamedTuple):
    """Partial sums: this rank's own rows, the slots of all ranks, and what a slot has of them."""

    own: Any
    slots: Any
    slot_elements: Any
    num_elements: Any
    rank: Any


@triton.jit
def _add_up(
    sources,
    out_ptr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    GOES_ON: tl.constexpr,
    BLOCK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):
    """Adds the sources ``rank + FIRST`` to ``rank + LAST``, in this order; ``rank + WORLD_SIZE`` is this one's own.
    The sum so far is read from ``out_ptr`` if it GOES_ON: it has been rounded there as it would be here, and each
    thread reads what it wrote."""
    lanes = tl.arange(0, BLOCK)
    for block in range(tl.program_id(0), tl.cdiv(sources.num_elements, BLOCK), tl.num_programs(0)):
        offsets = tl.cast(block, tl.int64) * BLOCK + lanes
        mask = offsets < sources.num_elements
        if GOES_ON:
            total = tl.load(out_ptr + offsets, mask=mask).to(tl.float32)
        for step in tl.static_range(FIRST, LAST + 1):
            if step == WORLD_SIZE:
                values = tl.load(sources.own + offsets, mask=mask).to(tl.float32)
            else:
                source = (sources.rank + step) % WORLD_SIZE
                values = tl.load(sources.slots + source * sources.slot_elements + offsets, mask=mask).to(tl.float32)
            if step == FIRST and not GOES_ON:
                total = values
            else:
                total = (total + values).to(sources.slots.dtype.element_ty).to(tl.float32)
        tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["slot_rows"])
def fold_rows_kernel(
    partial_ptr,
    slots_ptr,
    channel,
    out_ptr,
    row_starts_ptr,
    N,
    slot_rows,
    FIRST_PART: tl.constexpr,
    BLOCK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """out = ((x[rank + 1] + x[rank + 2]) + ...) + x[rank] for this rank's rows, each + in fp32, rounded at every hop.

    ``x[rank]`` is read from ``partial_ptr`` [total rows, N], the others from slots [world, slot_rows, N] in own
    memory, once the flag of their source holds this epoch (acquire). Elementwise over one contiguous range, since rows
    of a slot follow each other.

    FIRST_PART: so many sources are added up, into ``out``, while the others are still on their way (0: all when all
        are there).
    """
    epoch = dl.next_epoch(channel.tickets + 1)
    rank = dl.rank(channel.control)
    first_row = tl.load(row_starts_ptr + rank)
    num_elements = (tl.load(row_starts_ptr + rank + 1) - first_row).to(tl.int64) * N
    own_ptr = partial_ptr + first_row.to(tl.int64) * N
    slot_elements = tl.cast(slot_rows, tl.int64) * N
    sources = _Sources(own_ptr, slots_ptr, slot_elements, num_elements, rank)
    if FIRST_PART > 0:
        dl.wait_peers(channel.signals, 1, epoch, channel.control, rank, 0, 1, FIRST_PART, WORLD_SIZE, TARGET)
        _add_up(sources, out_ptr, 1, FIRST_PART, False, BLOCK, WORLD_SIZE)
    if WORLD_SIZE > 1:
        LAST: tl.constexpr = WORLD_SIZE - 1
        dl.wait_peers(channel.signals, 1, epoch, channel.control, rank, 0, FIRST_PART + 1, LAST, WORLD_SIZE, TARGET)
    _add_up(sources, out_ptr, FIRST_PART + 1, WORLD_SIZE, FIRST_PART > 0, BLOCK, WORLD_SIZE)


@triton.jit(do_not_specialize=["slot_rows", "first", "count"])
def fold_onto_kernel(
    partial_ptr,
    slots_ptr,
    channel,
    total_ptr,
    out_ptr,
    row_starts_ptr,
    N,
    slot_rows,
    first,
    count,
    STEP: tl.constexpr,
    GOES_ON: tl.constexpr,
    BLOCK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """out = ((total + x[first]) + x[first + STEP]) + ... of ``count`` ranks, for this rank's rows, each + in fp32,
    rounded at every hop: a node's part of a sum that goes from node to node. None: nothing is added or written.

    ``x[rank]`` is read from ``partial_ptr`` [total rows, N], the others from slots [world, slot_rows, N] in own
    memory, once the flags of all peers hold this epoch (acquire); of ranks that are not added up nothing has come.

    GOES_ON: ``total_ptr`` holds the sum so far; else it begins with ``x[first]``.
    """
    epoch = dl.next_epoch(channel.tickets + 1)
    rank = dl.rank(channel.control)
    dl.wait_peers(channel.signals, 1, epoch, channel.control, rank, 0, 1, WORLD_SIZE - 1, WORLD_SIZE, TARGET)
    first_row = tl.load(row_starts_ptr + rank)
    num_elements = (tl.load(row_starts_ptr + rank + 1) - first_row).to(tl.int64) * N
    own_ptr = partial_ptr + first_row.to(tl.int64) * N
    slot_elements = tl.cast(slot_rows, tl.int64) * N
    dtype = slots_ptr.dtype.element_ty
    lanes = tl.arange(0, BLOCK)
    num_blocks = tl.where(count > 0, tl.cdiv(num_elements, BLOCK), 0)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        offsets = tl.cast(block, tl.int64) * BLOCK + lanes
        mask = offsets < num_elements
        if GOES_ON:
            total = tl.load(total_ptr + offsets, mask=mask).to(tl.float32)
        else:
            total = tl.zeros([BLOCK], tl.float32)
        for index in range(0, count):
            source = first + index * STEP
            if source == rank:
                values = tl.load(own_ptr + offsets, mask=mask).to(tl.float32)
            else:
                values = tl.load(slots_ptr + source * slot_elements + offsets, mask=mask).to(tl.float32)
            if GOES_ON:
                total = (total + values).to(dtype).to(tl.float32)
            else:
                total = tl.where(index == 0, values, (total + values).to(dtype).to(tl.float32))
        tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)
