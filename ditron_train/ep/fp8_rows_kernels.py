"""Kernels of the scales of experts' rows in FP8, one an expert."""

import triton
import triton.language as tl


@triton.jit
def largest_of_parts(values, starts, largest, columns, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """largest[e * PARTS + p] = max |values| over part p of expert e's rows, which end where the next one's begin.

    What is not a number counts as nothing, as in Transformer Engine's.
    """
    expert, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    begin = tl.load(starts + expert) * columns
    end = tl.load(starts + expert + 1) * columns
    most = tl.zeros((BLOCK,), tl.float32)
    for block in range(part, tl.cast(tl.cdiv(end - begin, BLOCK), tl.int32), PARTS):
        place = begin + tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        size = tl.abs(tl.load(values + place, mask=place < end, other=0.0).to(tl.float32))
        most = tl.maximum(most, tl.where(size == size, size, 0.0))
    tl.store(largest + tl.program_id(0), tl.max(most, axis=0))


@triton.jit
def scales_of_largest(
    largest,
    starts,
    amaxes,
    scales,
    MAX_FP8: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    PARTS: tl.constexpr,
):
    """amax[e] = max(largest[e, :]) and scale[e] = MAX_FP8 / max(amax[e], EPSILON), rounded once; of POWER_OF_2 its
    exponent alone. 1 where amax is 0 or infinite, the largest number where the quotient is. An expert without rows
    leaves both as they are.

    ``amaxes``, ``scales``: where each expert's number goes (addresses).
    """
    expert = tl.program_id(0)
    amax = tl.max(tl.load(largest + expert * PARTS + tl.arange(0, PARTS)), axis=0)
    if tl.load(starts + expert + 1) > tl.load(starts + expert):
        tl.store(tl.load(amaxes + expert).to(tl.pointer_type(tl.float32)), amax)
        bounded = tl.maximum(amax, EPSILON)
        is_usual = (bounded > 0.0) & (bounded < float("inf"))
        scale = tl.div_rn(tl.full((), MAX_FP8, tl.float32), tl.where(is_usual, bounded, 1.0))
        scale = tl.minimum(scale, 3.4028234663852886e38)
        if POWER_OF_2:
            scale = (scale.to(tl.uint32, bitcast=True) & 0xFF800000).to(tl.float32, bitcast=True)
        tl.store(tl.load(scales + expert).to(tl.pointer_type(tl.float32)), tl.where(is_usual, scale, 1.0))
