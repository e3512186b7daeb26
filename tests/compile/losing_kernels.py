"""Kernels whose count Triton loses (``tests.support.carried_bounds``), and one that counts beside it."""

import triton
import triton.language as tl


@triton.jit
def counts(out, num_blocks, later):
    """The bounds of the loop inside are the count; another loop has its names."""
    count = tl.cast(0, tl.int32)
    for block in range(0, num_blocks):
        needed = block // 3 + 1
        more = count + 1
        for chunk in range(more, needed):
            tl.atomic_add(out + chunk, 1)
        count = tl.maximum(count, needed)
    for block in range(0, later):
        more = tl.load(out + block)
        tl.store(out + block + more, more)


@triton.jit
def counts_at_times(out, num_blocks, later):
    """As ``counts``, where a condition holds."""
    count = tl.cast(0, tl.int32)
    for block in range(0, num_blocks):
        needed = block // 3 + 1
        first = tl.cast(0, tl.int32)
        if tl.load(out + block) > later:
            first = count + tl.load(out + block)
        for chunk in range(first, needed):
            tl.atomic_add(out + chunk, 1)
        count = tl.maximum(count, needed)


@triton.jit
def counts_in_a_loop(out, num_blocks, later):
    """As ``counts``, with what a loop before it has added."""
    count = tl.cast(0, tl.int32)
    for block in range(0, num_blocks):
        needed = block // 3 + 1
        first = count
        for step in range(0, later):
            first += tl.load(out + step)
        for chunk in range(first, needed):
            tl.atomic_add(out + chunk, 1)
        count = tl.maximum(count, needed)


@triton.jit
def counts_behind(out, num_blocks, later):
    """What a loop has counted bounds the next one, which is not inside."""
    count = tl.cast(0, tl.int32)
    for block in range(0, num_blocks):
        count += tl.load(out + block)
    for block in range(0, count):
        for chunk in range(block, later):
            tl.atomic_add(out + chunk, 1)
