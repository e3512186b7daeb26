"""The kernel behind a reduce-scatter by copy engines: adds up what peers sent, in NCCL's ring order."""

import triton
import triton.language as tl

import ditron_train.lang as dl

__all__ = ["fold_rows_kernel"]


@triton.jit
def _add_up(
    blocks, num_elements, own_ptr, slots_ptr, out_ptr, slot_elements, rank,
    FIRST: tl.constexpr, LAST: tl.constexpr, GOES_ON: tl.constexpr, BLOCK: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Adds the sources ``rank + FIRST`` to ``rank + LAST``, in this order; ``rank + WORLD_SIZE`` is this one's own.
    The sum so far is read from ``out_ptr`` if it GOES_ON: it has been rounded there as it would be here, and each
    thread reads what it wrote."""
    lanes = tl.arange(0, BLOCK)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        offsets = tl.cast(block, tl.int64) * BLOCK + lanes
        mask = offsets < num_elements
        if GOES_ON:
            total = tl.load(out_ptr + offsets, mask=mask).to(tl.float32)
        for step in tl.static_range(FIRST, LAST + 1):
            if step == WORLD_SIZE:
                values = tl.load(own_ptr + offsets, mask=mask).to(tl.float32)
            else:
                source = (rank + step) % WORLD_SIZE
                values = tl.load(slots_ptr + source * slot_elements + offsets, mask=mask).to(tl.float32)
            if step == FIRST and not GOES_ON:
                total = values
            else:
                total = (total + values).to(slots_ptr.dtype.element_ty).to(tl.float32)
        tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["slot_rows"])
def fold_rows_kernel(
    partial_ptr,
    slots_ptr,
    signals_ptr,
    out_ptr,
    row_starts_ptr,
    tickets_ptr,
    control_ptr,
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
    epoch = dl.next_epoch(tickets_ptr + 1)
    rank = dl.rank(control_ptr)
    first_row = tl.load(row_starts_ptr + rank)
    num_elements = (tl.load(row_starts_ptr + rank + 1) - first_row).to(tl.int64) * N
    own_ptr = partial_ptr + first_row.to(tl.int64) * N
    slot_elements = tl.cast(slot_rows, tl.int64) * N
    blocks = tl.cdiv(num_elements, BLOCK)
    if FIRST_PART > 0:
        dl.wait_peers(signals_ptr, 1, epoch, control_ptr, rank, 0, 1, FIRST_PART, WORLD_SIZE, TARGET)
        _add_up(
            blocks,
            num_elements,
            own_ptr,
            slots_ptr,
            out_ptr,
            slot_elements,
            rank,
            1,
            FIRST_PART,
            False,
            BLOCK,
            WORLD_SIZE,
        )
    if WORLD_SIZE > 1:
        dl.wait_peers(signals_ptr, 1, epoch, control_ptr, rank, 0, FIRST_PART + 1, WORLD_SIZE - 1, WORLD_SIZE, TARGET)
    _add_up(
        blocks, num_elements, own_ptr, slots_ptr, out_ptr, slot_elements, rank, FIRST_PART + 1, WORLD_SIZE, FIRST_PART > 0,
        BLOCK, WORLD_SIZE,
    )  # fmt: skip
