"""Tile GEMM: the building blocks that overlapped kernels inline, and the plain persistent kernel made of them."""

import triton
import triton.language as tl

from ditron_train.schedule.tiles import grouped_tile


@triton.jit
def tile_product(
    a_desc,
    b_desc,
    row,
    col,
    num_k_tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRANSPOSE_B: tl.constexpr,
    FP8_CHAIN: tl.constexpr = None,
):
    """acc[i, j] = sum over k of a[row + i, k] * b[k, col + j], in fp32, K blocks in ascending order.

    That order, one accumulator and one rounding at the end are what cuBLAS does if it does not split K: the tile
    sizes do not change a bit. Beyond the edges of a matrix descriptors read zeros, so any K is right.

    Descriptor blocks: a [BLOCK_M, BLOCK_K] of A [M, K]; b [BLOCK_K, BLOCK_N] of B [K, N] (with TRANSPOSE_B [BLOCK_N,
    BLOCK_K] of B^T [N, K], a weight as Linear stores it).

    FP8_CHAIN: of FP8 operands, how many products are summed by the tensor cores alone, whose sums are shorter than
    fp32; None: all of K, cuBLAS's fast accumulation. 128, with blocks as deep, is cuBLAS's split accumulator.

    It waits for nobody. What a peer wrote must have been acquired before (and, since descriptors read through the
    async proxy, fenced): keep waits out of the K loop, which the compiler pipelines.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k_tile in range(num_k_tiles):
        k = k_tile * BLOCK_K
        a = a_desc.load([row, k])
        if TRANSPOSE_B:
            b = b_desc.load([col, k]).T
        else:
            b = b_desc.load([k, col])
        acc = tl.dot(a, b, acc, input_precision="ieee", max_num_imprecise_acc=FP8_CHAIN)
    return acc


@triton.jit
def scaled(acc, scale):
    """acc * scale, in fp32, as cuBLAS scales FP8 operands: ``scale`` is the product of both scales, or None."""
    if scale is not None:
        acc = acc * scale
    return acc


@triton.jit
def biased(acc, scale, bias, col, num_columns, BLOCK_N: tl.constexpr):
    """acc * scale + bias[col + j], each rounded to fp32, as cuBLAS's epilogue does; without ``bias`` (None) as
    ``scaled``, and without ``scale`` the sum alone. ``num_columns``: how many ``bias`` has."""
    if bias is None:
        acc = scaled(acc, scale)
    else:
        columns = col + tl.arange(0, BLOCK_N)
        if scale is not None:  # with the sum behind it a plain product would become one instruction, rounded once
            acc = tl.fma(acc, scale, 0.0)
        acc += tl.load(bias + columns, mask=columns < num_columns, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def store_tile(c_desc, acc, row, col, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_STORE: tl.constexpr):
    """c[row + i, col + j] = acc[i, j], rounded once to c's type; what is beyond the edges of c is dropped.

    With SPLIT_STORE the tile leaves in two halves, left first, through a descriptor of [BLOCK_M, BLOCK_N // 2]: half
    the shared memory, which buys the K loop a stage. The stores are asynchronous: a kernel that signals them must wait
    for them (``dl.bulk_store_wait``) and then notify.
    """
    if SPLIT_STORE:
        halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        c_desc.store([row, col], left.to(c_desc.dtype))
        c_desc.store([row, col + BLOCK_N // 2], right.to(c_desc.dtype))
    else:
        c_desc.store([row, col], acc.to(c_desc.dtype))


# Sizes change no code: a new shape needs no compilation.
@triton.jit(do_not_specialize=["M", "N", "K", "num_whole_tiles"])
def gemm_kernel(
    a_desc,
    b_desc,
    half_b_desc,
    c_desc,
    scales,
    M,
    N,
    K,
    num_whole_tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TRANSPOSE_B: tl.constexpr,
    SPLIT_STORE: tl.constexpr,
    SPLIT_LAST_WAVE: tl.constexpr,
    FP8_CHAIN: tl.constexpr,
):
    """C [M, N] = A @ B, of FP8 operands times their ``scales`` (else None), persistent: program p computes tiles p,
    p + num_programs, ... of the grouped order.

    With SPLIT_LAST_WAVE only the first ``num_whole_tiles`` are computed whole; the rest, at most half a wave, is
    computed in halves of BLOCK_N // 2 columns, so that the last wave takes half the time. ``half_b_desc`` reads B in
    such halves (else it is ``b_desc``). It needs SPLIT_STORE.

    Nobody waits: no signals, no memory order. ``flatten`` makes one loop of tiles and K blocks, so that the loads of
    the next tile run under the epilogue of this one.
    """
    num_tiles_m = tl.cdiv(M, BLOCK_M)
    num_tiles_n = tl.cdiv(N, BLOCK_N)
    num_k_tiles = tl.cdiv(K, BLOCK_K)
    scale = None
    if scales is not None:
        scale = tl.load(scales.a) * tl.load(scales.b)
    for tile_id in tl.range(tl.program_id(0), num_whole_tiles, tl.num_programs(0), flatten=True):
        tile_m, tile_n = grouped_tile(tile_id, num_tiles_m, num_tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        acc = tile_product(a_desc, b_desc, row, col, num_k_tiles, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSE_B, FP8_CHAIN)
        acc = scaled(acc, scale)
        store_tile(c_desc, acc, row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
    if SPLIT_LAST_WAVE:
        num_halves = 2 * (num_tiles_m * num_tiles_n - num_whole_tiles)
        for half_id in range(tl.program_id(0), num_halves, tl.num_programs(0)):
            tile_m, tile_n = grouped_tile(num_whole_tiles + half_id // 2, num_tiles_m, num_tiles_n, GROUP_M)
            row = tile_m * BLOCK_M
            col = tile_n * BLOCK_N + (half_id % 2) * (BLOCK_N // 2)
            acc = tile_product(
                a_desc, half_b_desc, row, col, num_k_tiles, BLOCK_M, BLOCK_N // 2, BLOCK_K, TRANSPOSE_B, FP8_CHAIN
            )
            acc = scaled(acc, scale)
            store_tile(c_desc, acc, row, col, BLOCK_M, BLOCK_N // 2, False)
