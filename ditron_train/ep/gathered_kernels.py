"""Kernels of gathered experts: every rank has all tokens of the group and computes its experts' rows of them.

``row_of_token`` [tokens, NUM_EXPERTS] says which row a token has at each local expert, -1 where it has none.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens"])
def place_tokens(
    tokens,
    rows,
    row_of_token,
    num_tokens,
    hidden,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """rows[row_of_token[t, e]] = tokens[t] for every expert e that token t has; a token is read once."""
    for block in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0)):
        token = block * BLOCK_T + tl.arange(0, BLOCK_T)
        inside = token < num_tokens
        for column in range(0, hidden, BLOCK_H):
            offsets = column + tl.arange(0, BLOCK_H)
            narrow = (offsets < hidden)[None, :]
            source = tokens + tl.cast(token, tl.int64)[:, None] * hidden + offsets[None, :]
            tile = tl.load(source, mask=inside[:, None] & narrow)
            for expert in range(NUM_EXPERTS):
                row = tl.load(row_of_token + token * NUM_EXPERTS + expert, mask=inside, other=-1)
                target = rows + tl.cast(row, tl.int64)[:, None] * hidden + offsets[None, :]
                tl.store(target, tile, mask=(row >= 0)[:, None] & narrow)


@triton.jit(do_not_specialize=["num_tokens"])
def sum_rows(
    rows,
    out,
    row_of_token,
    num_tokens,
    hidden,
    NUM_EXPERTS: tl.constexpr,
    DESCENDING: tl.constexpr,
    ROUND_EACH: tl.constexpr,
    FROM_ZERO: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """out[t] = ((0 + r_0) + r_1) + ..., r_j token t's rows by expert, ascending or descending; without FROM_ZERO, and
    with one expert, r_0 as it is.

    In fp32 with one rounding to the rows' type at the end, or (ROUND_EACH) one after every addition; ``out`` may be of
    a wider type.
    """
    dtype = rows.dtype.element_ty
    for block in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0)):
        token = block * BLOCK_T + tl.arange(0, BLOCK_T)
        inside = token < num_tokens
        for column in range(0, hidden, BLOCK_H):
            offsets = column + tl.arange(0, BLOCK_H)
            narrow = (offsets < hidden)[None, :]
            total = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
            if not FROM_ZERO:
                total = total * -1.0  # -0 + -0 is -0; a unary minus is 0 - x up to Triton 3.7
            for step in range(NUM_EXPERTS):
                expert = NUM_EXPERTS - 1 - step if DESCENDING else step
                row = tl.load(row_of_token + token * NUM_EXPERTS + expert, mask=inside, other=-1)
                source = rows + tl.cast(row, tl.int64)[:, None] * hidden + offsets[None, :]
                total += tl.load(source, mask=(row >= 0)[:, None] & narrow, other=0.0).to(tl.float32)
                if ROUND_EACH:
                    total = total.to(dtype).to(tl.float32)
            target = out + tl.cast(token, tl.int64)[:, None] * hidden + offsets[None, :]
            tl.store(target, total.to(dtype).to(out.dtype.element_ty), mask=inside[:, None] & narrow)
