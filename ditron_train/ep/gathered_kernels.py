"""Kernels of gathered experts: every rank has all tokens of the group and computes its experts' rows of them.

``rows_of_token`` [tokens, PLACES] lists the rows that a token has at the local experts, the last one first, and -1
behind them. Few experts of a rank have a token, so a list of its rows is read, not a table of all experts.
"""

import triton
import triton.language as tl


@triton.jit
def _rows_held(rows_of_token, token, inside, PLACES: tl.constexpr, PLACE_LANES: tl.constexpr):
    """How many rows each of these tokens has."""
    lanes = tl.arange(0, PLACE_LANES)
    known = inside[:, None] & (lanes < PLACES)[None, :]
    listed = tl.load(rows_of_token + token[:, None] * PLACES + lanes[None, :], mask=known, other=-1)
    return tl.sum((listed >= 0).to(tl.int32), axis=1)


@triton.jit(do_not_specialize=["num_tokens"])
def place_tokens(
    tokens,
    rows,
    rows_of_token,
    num_tokens,
    hidden,
    PLACES: tl.constexpr,
    PLACE_LANES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """rows[row] = tokens[t] for every row that token t has; a token is read once."""
    for block in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0)):
        token = block * BLOCK_T + tl.arange(0, BLOCK_T)
        inside = token < num_tokens
        held = _rows_held(rows_of_token, token, inside, PLACES, PLACE_LANES)
        for column in range(0, hidden, BLOCK_H):
            offsets = column + tl.arange(0, BLOCK_H)
            narrow = (offsets < hidden)[None, :]
            source = tokens + tl.cast(token, tl.int64)[:, None] * hidden + offsets[None, :]
            tile = tl.load(source, mask=inside[:, None] & narrow)
            for place in range(0, tl.max(held, axis=0)):
                has = place < held
                row = tl.load(rows_of_token + token * PLACES + place, mask=has, other=0)
                target = rows + tl.cast(row, tl.int64)[:, None] * hidden + offsets[None, :]
                tl.store(target, tile, mask=has[:, None] & narrow)


@triton.jit(do_not_specialize=["num_tokens"])
def sum_rows(
    rows,
    out,
    rows_of_token,
    num_tokens,
    hidden,
    PLACES: tl.constexpr,
    PLACE_LANES: tl.constexpr,
    DESCENDING: tl.constexpr,
    ROUND_EACH: tl.constexpr,
    FROM_ZERO: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """out[t] = ((0 + r_0) + r_1) + ..., r_j token t's rows by expert, ascending or descending; without FROM_ZERO, and
    with one place, r_0 as it is.

    In fp32 with one rounding to the rows' type at the end, or (ROUND_EACH) one after every addition; ``out`` may be of
    a wider type. What a token with fewer rows than its neighbours adds in their place is 0, which changes no sum that
    began at 0.
    """
    dtype = rows.dtype.element_ty
    for block in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0)):
        token = block * BLOCK_T + tl.arange(0, BLOCK_T)
        inside = token < num_tokens
        held = _rows_held(rows_of_token, token, inside, PLACES, PLACE_LANES)
        for column in range(0, hidden, BLOCK_H):
            offsets = column + tl.arange(0, BLOCK_H)
            narrow = (offsets < hidden)[None, :]
            total = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
            if not FROM_ZERO:  # -0 + -0 is -0; a unary minus is 0 - x up to Triton 3.7
                total = tl.where((held > 0)[:, None], total * -1.0, total)
            for step in range(0, tl.max(held, axis=0)):
                has = step < held
                place = step if DESCENDING else held - 1 - step
                row = tl.load(rows_of_token + token * PLACES + place, mask=has, other=0)
                source = rows + tl.cast(row, tl.int64)[:, None] * hidden + offsets[None, :]
                total += tl.load(source, mask=has[:, None] & narrow, other=0.0).to(tl.float32)
                if ROUND_EACH:
                    total = total.to(dtype).to(tl.float32)
            target = out + tl.cast(token, tl.int64)[:, None] * hidden + offsets[None, :]
            tl.store(target, total.to(dtype).to(out.dtype.element_ty), mask=inside[:, None] & narrow)
