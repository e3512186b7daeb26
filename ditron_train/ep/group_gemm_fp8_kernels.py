"""Grouped GEMM of FP8 operands: the rows of each expert, its weight and the scales of both lie anywhere in memory.

Rows are quantised expert by expert into allocations of their own. One descriptor spans them all, and another one the
weights, as in ``group_gemm_kernels``. No block reads behind an expert's rows, where no memory may be: the last tile of
an expert begins early enough to end with it. It computes some rows a second time, which two programs then write with
the same bits. So every expert has no rows, or as many as a tile.

Against Transformer Engine's calls: docs/measurements/fp8.md.
"""

import triton
import triton.language as tl

from ditron_train.gemm.kernels import store_tile
from ditron_train.schedule.tiles import compute_tiles


@triton.jit
def _scale_at(addresses, expert):
    return tl.cast(tl.load(addresses + expert), tl.pointer_type(tl.float32))


@triton.jit
def _product(
    a_desc,
    b_desc,
    experts,
    expert,
    row,
    col,
    num_k_tiles,
    BLOCK_N: tl.constexpr,
    CHAIN: tl.constexpr,
    GEMM: tl.constexpr,
):
    """One tile of A[expert] @ B[expert].T from ``row`` of the expert's on, scaled, in fp32."""
    a_place = tl.load(experts.rows + expert).to(tl.int32)
    b_place = tl.load(experts.weights + expert).to(tl.int32)
    a_scale = _scale_at(experts.row_scales, expert)
    b_scale = _scale_at(experts.weight_scales, expert)
    acc = tl.zeros((GEMM.BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k_tile in range(num_k_tiles):
        k = k_tile * GEMM.BLOCK_K
        a = a_desc.load([a_place, row, k]).reshape(GEMM.BLOCK_M, GEMM.BLOCK_K)
        b = b_desc.load([b_place, col, k]).reshape(BLOCK_N, GEMM.BLOCK_K).T
        acc = tl.dot(a, b, acc, max_num_imprecise_acc=CHAIN)
    return acc * (tl.load(a_scale) * tl.load(b_scale))


@triton.jit
def _tile_at(tiles, experts, row_tile, BLOCK_M: tl.constexpr):
    """Of a row tile: its expert, its first row among the expert's and among all, moved up to where BLOCK_M rows are
    left."""
    entry = tiles + 4 + row_tile * 4
    expert = tl.load(entry)
    row = tl.minimum(tl.load(entry + 1), tl.load(entry + 2) - BLOCK_M)
    return expert, row - tl.load(experts.starts + expert).to(tl.int32), row


@triton.jit
def _compute_tile(
    row_tile,
    col_tile,
    HALF: tl.constexpr,
    a_desc,
    b_desc,
    c_desc,
    experts,
    tiles,
    num_k_tiles,
    CHAIN: tl.constexpr,
    GEMM: tl.constexpr,
):
    """One tile of C, or of half as many columns; ``b_desc``: (whole, half)."""
    BLOCK_N: tl.constexpr = GEMM.BLOCK_N // 2 if HALF else GEMM.BLOCK_N
    expert, row, out_row = _tile_at(tiles, experts, row_tile, GEMM.BLOCK_M)
    col = col_tile * BLOCK_N
    acc = _product(a_desc, b_desc[HALF], experts, expert, row, col, num_k_tiles, BLOCK_N, CHAIN, GEMM)
    store_tile(c_desc, acc, out_row, col, GEMM.BLOCK_M, BLOCK_N, GEMM.SPLIT_STORE and not HALF)


@triton.jit(do_not_specialize=["N", "K"])
def group_gemm_fp8_kernel(
    a_desc, b_desc, half_b_desc, c_desc, experts, tiles, N, K, CHAIN: tl.constexpr, GEMM: tl.constexpr
):
    """C[rows of e] = (A[e] @ B[e].T) * scales: bf16, rounded once.

    An expert has one scale for all its rows and one for its weight. K is one chain of the tensor cores, cuBLAS's fast
    accumulation, where CHAIN is None; 128, with blocks as deep, is its split accumulator.

    a_desc: rows of all experts in blocks [1, BLOCK_M, BLOCK_K]. b_desc: weights [N, K] in blocks [1, BLOCK_N,
    BLOCK_K]. c_desc: C [rows, N]. experts: an ``ExpertPlaces``. tiles: see ``list_tiles``.
    Nobody waits: no signals. SPLIT_STORE: as in ``group_gemm_kernel``.
    """
    compute_tiles(
        tl.load(tiles),
        tl.cdiv(N, GEMM.BLOCK_N),
        _compute_tile,
        (a_desc, (b_desc, half_b_desc), c_desc, experts, tiles, tl.cdiv(K, GEMM.BLOCK_K), CHAIN, GEMM),
        GEMM.GROUP_M,
        GEMM.SPLIT_STORE,
    )
