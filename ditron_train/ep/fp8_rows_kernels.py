"""Kernels that bring rows of experts to FP8, with one scale an expert (current scaling)."""

import triton
import triton.language as tl


@triton.jit
def _rows_of(ends, expert):
    """An expert's first row and the row behind its last one."""
    return tl.load(ends + expert - 1, mask=expert > 0, other=0), tl.load(ends + expert)


@triton.jit
def largest_of_parts(values, ends, largest, columns, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """largest[e * PARTS + p] = max |values| over part p of expert e's rows, which end at ``ends[e]``.

    What is not a number counts as nothing, as in Transformer Engine's.
    """
    first, last = _rows_of(ends, tl.program_id(0) // PARTS)
    begin, end = tl.cast(first, tl.int64) * columns, tl.cast(last, tl.int64) * columns
    most = tl.zeros((BLOCK,), tl.float32)
    for block in range(tl.program_id(0) % PARTS, tl.cast(tl.cdiv(end - begin, BLOCK), tl.int32), PARTS):
        place = begin + tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        size = tl.abs(tl.load(values + place, mask=place < end, other=0.0).to(tl.float32))
        most = tl.maximum(most, tl.where(size == size, size, 0.0))
    tl.store(largest + tl.program_id(0), tl.max(most, axis=0))


@triton.jit
def scale_of_amax(amax, MAX_FP8: tl.constexpr, EPSILON: tl.constexpr, POWER_OF_2: tl.constexpr):
    """MAX_FP8 / max(amax, EPSILON), rounded once; of POWER_OF_2 its exponent alone. 1 where amax is 0 or infinite, the
    largest number where the quotient is."""
    bounded = tl.maximum(amax, EPSILON)
    is_usual = (bounded > 0.0) & (bounded < float("inf"))
    scale = tl.div_rn(tl.full((), MAX_FP8, tl.float32), tl.where(is_usual, bounded, 1.0))
    scale = tl.minimum(scale, 3.4028234663852886e38)
    if POWER_OF_2:
        scale = (scale.to(tl.uint32, bitcast=True) & 0xFF800000).to(tl.float32, bitcast=True)
    return tl.where(is_usual, scale, 1.0)


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
    PARTS: tl.constexpr,
    STEP: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """data[r] = FP8(rows[r] * scale[e(r)]), as bytes; the same of expert e transposed, [columns, its rows], from
    ``transposes[columns * first row]`` on; inverses[e * ALIGNED] = 1 / scale[e].

    scale[e] is that of amax[e] = max(largest[e, :]); they go to the addresses ``numbers[e, 1]`` and ``numbers[e, 0]``.
    An expert without rows leaves all of them as they are. STEP divides every expert's rows and ``columns``. A program
    takes tiles of ``list_tiles``, all columns of one after the other.
    """
    column_tiles = tl.cdiv(columns, BLOCK_K)
    for index in range(tl.program_id(0), tl.load(tiles) * column_tiles, tl.num_programs(0)):
        entry = tiles + 4 + 4 * (index // column_tiles)
        expert, row, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        first, _ = _rows_of(ends, expert)
        amax = tl.max(tl.load(largest + expert * PARTS + tl.arange(0, PARTS)), axis=0)
        scale = scale_of_amax(amax, MAX_FP8, EPSILON, POWER_OF_2)
        column = (index % column_tiles) * BLOCK_K
        if (row == first) & (column == 0):
            tl.store(tl.load(numbers + 2 * expert).to(tl.pointer_type(tl.float32)), amax)
            tl.store(tl.load(numbers + 2 * expert + 1).to(tl.pointer_type(tl.float32)), scale)
            tl.store(inverses + expert * ALIGNED, tl.div_rn(tl.full((), 1.0, tl.float32), scale))
        num_rows, width = tl.multiple_of(end - first, STEP), tl.multiple_of(columns, STEP)
        within = tl.multiple_of(row - first, STEP) + tl.arange(0, BLOCK_M)
        across = column + tl.arange(0, BLOCK_K)
        inside = (within < num_rows)[:, None] & (across < width)[None, :]
        start = tl.cast(first, tl.int64) * width
        place = start + tl.cast(within, tl.int64)[:, None] * width + across[None, :]
        values = tl.load(rows + place, mask=inside, other=0.0).to(tl.float32) * scale
        dtype = tl.float8e4nv if MAX_FP8 == 448.0 else tl.float8e5
        cast = values.to(dtype).to(tl.uint8, bitcast=True)
        tl.store(data + place, cast, mask=inside)
        turned = start + tl.cast(across, tl.int64)[:, None] * num_rows + within[None, :]
        tl.store(transposes + turned, tl.trans(cast), mask=tl.trans(inside))
