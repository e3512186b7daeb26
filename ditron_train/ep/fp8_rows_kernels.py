"""Kernels that bring rows of experts to FP8, with one scale an expert (current scaling)."""

import triton
import triton.language as tl


@triton.jit
def _first_row(ends, expert):
    return tl.load(ends + expert - 1, mask=expert > 0, other=0)


@triton.jit
def largest_of_experts(
    values, tiles, largest, columns, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr
):
    """largest[e] = max |values| over the rows of expert e, as the bits of an fp32 number; it was 0 before.

    A program takes one of PARTS parts of a tile of ``list_tiles``, so that the rows of one expert are the work of all
    multiprocessors, however many they are. Of numbers that are not negative the larger one has the larger bits, in
    whatever order they arrive. What is not a number counts as nothing, as in Transformer Engine's.
    """
    for index in range(tl.program_id(0), tl.load(tiles) * PARTS, tl.num_programs(0)):
        entry = tiles + 4 + 4 * (index // PARTS)
        first = tl.load(entry + 1)
        last = tl.minimum(first + BLOCK_M, tl.load(entry + 2))
        begin, end = tl.cast(first, tl.int64) * columns, tl.cast(last, tl.int64) * columns
        most = tl.zeros((BLOCK,), tl.float32)
        for block in range(index % PARTS, tl.cast(tl.cdiv(end - begin, BLOCK), tl.int32), PARTS):
            place = begin + tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            size = tl.abs(tl.load(values + place, mask=place < end, other=0.0).to(tl.float32))
            most = tl.maximum(most, tl.where(size == size, size, 0.0))
        # Relaxed: the next kernel reads it.
        tl.atomic_max(largest + tl.load(entry), tl.max(most, axis=0).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def scale_of_amax(amax, MAX_FP8: tl.constexpr, EPSILON: tl.constexpr, POWER_OF_2: tl.constexpr):
    """MAX_FP8 / max(amax, EPSILON), rounded once; of POWER_OF_2 its exponent alone. 1 where amax is 0 or infinite, the
    largest number where the quotient is."""
    bounded = tl.maximum(amax, EPSILON)
    is_usual = (bounded > 0.0) & (bounded < float("inf"))
    scale = tl.div_rn(tl.zeros_like(bounded) + MAX_FP8, tl.where(is_usual, bounded, 1.0))
    scale = tl.where(scale < float("inf"), scale, 3.4028234663852886e38)
    if POWER_OF_2:
        scale = (scale.to(tl.uint32, bitcast=True) & 0xFF800000).to(tl.float32, bitcast=True)
    return tl.where(is_usual, scale, 1.0)


@triton.jit
def _inverse(scale):
    return tl.div_rn(tl.zeros_like(scale) + 1.0, scale)


@triton.jit
def _bytes_of(values, MAX_FP8: tl.constexpr):
    """``values`` in the format whose largest number is MAX_FP8."""
    dtype = tl.float8e4nv if MAX_FP8 == 448.0 else tl.float8e5
    return values.to(dtype).to(tl.uint8, bitcast=True)


@triton.jit
def cast_rows(
    rows,
    tiles,
    ends,
    largest,
    numbers,
    data,
    transposes,
    inverses,
    columns,
    MAX_FP8: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    KEEPS: tl.constexpr,
    STEP: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """data[r] = FP8(rows[r] * scale[e(r)]), as bytes; the same of expert e transposed, [columns, its rows], from
    ``transposes[columns * first row]`` on; inverses[e * ALIGNED] = 1 / scale[e].

    scale[e] is that of amax[e], which ``largest_of_experts`` found; where KEEPS they go to the addresses
    ``numbers[e, 1]`` and ``numbers[e, 0]``. An expert without rows leaves all of them as they are. STEP divides every
    expert's rows and ``columns``. A program takes tiles of ``list_tiles``, all columns of one after the other.
    """
    column_tiles = tl.cdiv(columns, BLOCK_K)
    for index in range(tl.program_id(0), tl.load(tiles) * column_tiles, tl.num_programs(0)):
        entry = tiles + 4 + 4 * (index // column_tiles)
        expert, row, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        first = _first_row(ends, expert)
        amax = tl.load(largest + expert).to(tl.float32, bitcast=True)
        scale = scale_of_amax(amax, MAX_FP8, EPSILON, POWER_OF_2)
        column = (index % column_tiles) * BLOCK_K
        if (row == first) & (column == 0):
            if KEEPS:
                tl.store(tl.load(numbers + 2 * expert).to(tl.pointer_type(tl.float32)), amax)
                tl.store(tl.load(numbers + 2 * expert + 1).to(tl.pointer_type(tl.float32)), scale)
            tl.store(inverses + expert * ALIGNED, _inverse(scale))
        num_rows, width = tl.multiple_of(end - first, STEP), tl.multiple_of(columns, STEP)
        within = tl.multiple_of(row - first, STEP) + tl.arange(0, BLOCK_M)
        across = column + tl.arange(0, BLOCK_K)
        inside = (within < num_rows)[:, None] & (across < width)[None, :]
        start = tl.cast(first, tl.int64) * width
        place = start + tl.cast(within, tl.int64)[:, None] * width + across[None, :]
        values = tl.load(rows + place, mask=inside, other=0.0).to(tl.float32) * scale
        cast = _bytes_of(values, MAX_FP8)
        tl.store(data + place, cast, mask=inside)
        turned = start + tl.cast(across, tl.int64)[:, None] * num_rows + within[None, :]
        tl.store(transposes + turned, tl.trans(cast), mask=tl.trans(inside))
