"""Kernels of a Muon step: half-computed symmetric products, a product with addmm's epilogue, fused elementwise
work."""

import triton
import triton.language as tl

from ditron_train.gemm.kernels import tile_product
from ditron_train.schedule.tiles import grouped_tile


@triton.jit
def _epilogue(acc, add_desc, row, col, alpha, beta, HAS_ADD: tl.constexpr):
    """alpha * acc + beta * add, rounded as cuBLAS's addmm rounds: beta's product first, then one fused
    multiply-add."""
    if HAS_ADD:
        scaled = add_desc.load([row, col]).to(tl.float32) * beta
        acc = tl.fma(acc, tl.full(acc.shape, alpha, tl.float32), scaled)
    return acc


@triton.jit
def _store_and_mirror(c_desc, add_desc, acc, row, col, alpha, beta, HAS_ADD: tl.constexpr):
    """Stores a square block and, mirrored, its transpose.

    On the diagonal both are the same block, and a block above it (the right half of a wide tile) is the mirror of
    another tile's: these are stored twice, with equal bits. Branches around the stores would cost more: they keep the
    loop from being flattened.
    """
    block = _epilogue(acc, add_desc, row, col, alpha, beta, HAS_ADD).to(c_desc.dtype)
    c_desc.store([row, col], block)
    c_desc.store([col, row], block.T)


@triton.jit
def symmetric_kernel(
    a_desc,
    b_desc,
    add_desc,
    c_desc,
    quarter_a_desc,
    quarter_b_desc,
    quarter_add_desc,
    quarter_c_desc,
    order_ptr,
    num_tiles,
    num_quarters,
    K,
    alpha,
    beta,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_ADD: tl.constexpr,
    SPLIT_STORE: tl.constexpr,
    HAS_QUARTERS: tl.constexpr,
):
    """C = alpha * A @ A^T + beta * ADD for a symmetric ADD: tiles that touch the lower triangle, each stored twice.

    A @ A^T is symmetric bit for bit, since element (j, i) sums the same products in the same order as (i, j); so is
    A @ A for a symmetric A, which is A @ A^T. ``order_ptr``: int32 [num_tiles + num_quarters, 2], ``triangle_tiles``.
    ``a_desc`` and ``b_desc`` describe A in blocks of BLOCK_M and BLOCK_N rows; blocks of C and ADD are square,
    BLOCK_M by BLOCK_M, which is half of a tile if SPLIT_STORE (BLOCK_N = 2 * BLOCK_M).

    With HAS_QUARTERS ``num_quarters`` square blocks of half a (square) tile's side follow, read and written through
    the ``quarter`` descriptors (else they stand in and are not used): together they are the tiles of the last wave.
    Their steps are twice as deep: a step of a small tile takes as long as its synchronisation.

    Nobody waits: no signals. A block that two programs store gets the same bits from both.
    """
    num_k_tiles = tl.cdiv(K, BLOCK_K)
    for index in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        row = tl.load(order_ptr + 2 * index) * BLOCK_M
        col = tl.load(order_ptr + 2 * index + 1) * BLOCK_N
        acc = tile_product(a_desc, b_desc, row, col, num_k_tiles, BLOCK_M, BLOCK_N, BLOCK_K, True)
        if SPLIT_STORE:
            left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
            _store_and_mirror(c_desc, add_desc, left, row, col, alpha, beta, HAS_ADD)
            _store_and_mirror(c_desc, add_desc, right, row, col + BLOCK_N // 2, alpha, beta, HAS_ADD)
        else:
            _store_and_mirror(c_desc, add_desc, acc, row, col, alpha, beta, HAS_ADD)
    if HAS_QUARTERS:
        SIDE: tl.constexpr = BLOCK_M // 2
        DEPTH: tl.constexpr = BLOCK_K * 2
        for index in range(tl.program_id(0), num_quarters, tl.num_programs(0)):
            row = tl.load(order_ptr + 2 * (num_tiles + index)) * SIDE
            col = tl.load(order_ptr + 2 * (num_tiles + index) + 1) * SIDE
            acc = tile_product(quarter_a_desc, quarter_b_desc, row, col, tl.cdiv(K, DEPTH), SIDE, SIDE, DEPTH, True)
            _store_and_mirror(quarter_c_desc, quarter_add_desc, acc, row, col, alpha, beta, HAS_ADD)


@triton.jit
def addmm_kernel(
    a_desc,
    b_desc,
    half_b_desc,
    add_desc,
    c_desc,
    M,
    N,
    K,
    num_whole_tiles,
    alpha,
    beta,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPLIT_STORE: tl.constexpr,
    SPLIT_LAST_WAVE: tl.constexpr,
):
    """C [M, N] = alpha * A [M, K] @ B [K, N] + beta * ADD, persistent, rounded as cuBLAS's addmm rounds.

    Tiles and the halved tail as in ``gemm_kernel``; blocks of C and ADD are what one store takes. Nobody waits.
    """
    num_tiles_m = tl.cdiv(M, BLOCK_M)
    num_tiles_n = tl.cdiv(N, BLOCK_N)
    num_k_tiles = tl.cdiv(K, BLOCK_K)
    for tile_id in tl.range(tl.program_id(0), num_whole_tiles, tl.num_programs(0), flatten=True):
        tile_m, tile_n = grouped_tile(tile_id, num_tiles_m, num_tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        acc = tile_product(a_desc, b_desc, row, col, num_k_tiles, BLOCK_M, BLOCK_N, BLOCK_K, False)
        if SPLIT_STORE:
            left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
            left = _epilogue(left, add_desc, row, col, alpha, beta, True)
            c_desc.store([row, col], left.to(c_desc.dtype))
            right = _epilogue(right, add_desc, row, col + BLOCK_N // 2, alpha, beta, True)
            c_desc.store([row, col + BLOCK_N // 2], right.to(c_desc.dtype))
        else:
            c_desc.store([row, col], _epilogue(acc, add_desc, row, col, alpha, beta, True).to(c_desc.dtype))
    if SPLIT_LAST_WAVE:
        num_halves = 2 * (num_tiles_m * num_tiles_n - num_whole_tiles)
        for half_id in range(tl.program_id(0), num_halves, tl.num_programs(0)):
            tile_m, tile_n = grouped_tile(num_whole_tiles + half_id // 2, num_tiles_m, num_tiles_n, GROUP_M)
            row = tile_m * BLOCK_M
            col = tile_n * BLOCK_N + (half_id % 2) * (BLOCK_N // 2)
            acc = tile_product(a_desc, half_b_desc, row, col, num_k_tiles, BLOCK_M, BLOCK_N // 2, BLOCK_K, False)
            c_desc.store([row, col], _epilogue(acc, add_desc, row, col, alpha, beta, True).to(c_desc.dtype))


@triton.jit
def _lerp(start, end, weight, IS_SMALL: tl.constexpr):
    """torch.lerp's two forms, each with the multiply-add that its compiler fuses; IS_SMALL is ``abs(weight) <
    0.5``."""
    difference = end - start
    if IS_SMALL:
        result = tl.fma(difference, tl.full(difference.shape, weight, tl.float32), start)
    else:
        result = tl.fma(-difference, tl.full(difference.shape, 1.0 - weight, tl.float32), end)
    return result


@triton.jit
def momentum_kernel(
    param_ptr,
    momentum_ptr,
    grad_ptr,
    direction_ptr,
    num_elements,
    decay_alpha,
    momentum_weight,
    nesterov_weight,
    DECAY: tl.constexpr,
    MOMENTUM_SMALL: tl.constexpr,
    NESTEROV: tl.constexpr,
    NESTEROV_SMALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The elementwise work before orthogonalisation, in one pass over fp32 data.

    DECAY "decoupled": p = p + decay_alpha * p; "l2": g = g + decay_alpha * p (not stored); "none".
    m = lerp(m, g, momentum_weight); direction = lerp(g, m, nesterov_weight) with NESTEROV, else m.
    ``direction_ptr`` is written only with NESTEROV: without it the direction is m itself. Each step rounds as torch's
    own kernel for it does. Nobody waits.
    """
    # 64 bits: expert weights pass 2^31 elements when they are stored together
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < num_elements
    grad = tl.load(grad_ptr + offsets, mask=mask)
    momentum = tl.load(momentum_ptr + offsets, mask=mask)
    if DECAY != "none":
        param = tl.load(param_ptr + offsets, mask=mask)
        alpha = tl.full(param.shape, decay_alpha, tl.float32)
        if DECAY == "decoupled":
            tl.store(param_ptr + offsets, tl.fma(param, alpha, param), mask=mask)
        else:
            grad = tl.fma(param, alpha, grad)
    momentum = _lerp(momentum, grad, momentum_weight, MOMENTUM_SMALL)
    tl.store(momentum_ptr + offsets, momentum, mask=mask)
    if NESTEROV:
        tl.store(direction_ptr + offsets, _lerp(grad, momentum, nesterov_weight, NESTEROV_SMALL), mask=mask)


@triton.jit
def normalize_kernel(
    direction_ptr,
    norm_ptr,
    x_ptr,
    rows,
    cols,
    direction_row_stride,
    x_row_stride,
    eps,
    TRANSPOSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """x = direction / max(norm, eps), divided in fp32 and rounded to x's type; x is [cols, rows] with TRANSPOSE.

    ``norm_ptr``: one fp32; a NaN stays one. Nobody waits.
    """
    num_tiles_n = tl.cdiv(cols, BLOCK_N)
    row = (tl.program_id(0) // num_tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = (tl.program_id(0) % num_tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    direction = tl.load(direction_ptr + row[:, None] * direction_row_stride + col[None, :], mask=mask)
    norm = tl.maximum(tl.load(norm_ptr), eps, propagate_nan=tl.PropagateNan.ALL)
    x = tl.div_rn(direction, tl.full(direction.shape, 0.0, tl.float32) + norm).to(x_ptr.dtype.element_ty)
    if TRANSPOSE:
        tl.store(x_ptr + col[:, None] * x_row_stride + row[None, :], x.T, mask=mask.T)
    else:
        tl.store(x_ptr + row[:, None] * x_row_stride + col[None, :], x, mask=mask)


@triton.jit
def update_kernel(
    param_ptr,
    x_ptr,
    rows,
    cols,
    rows_per_group,
    param_group_stride,
    param_row_stride,
    x_row_stride,
    scale,
    extra_scale,
    negative_lr,
    TRANSPOSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """p = p - lr * ((x * scale) * extra_scale), in fp32, as torch's kernels round: two products, one fused
    multiply-add.

    Row r of the [rows, cols] matrix is row ``r % rows_per_group`` of group ``r // rows_per_group`` of the parameter:
    q, k and v of a grouped-query weight are interleaved. x is [cols, rows] with TRANSPOSE. Nobody waits.
    """
    num_tiles_n = tl.cdiv(cols, BLOCK_N)
    row = (tl.program_id(0) // num_tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = (tl.program_id(0) % num_tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    if TRANSPOSE:
        x = tl.load(x_ptr + col[:, None] * x_row_stride + row[None, :], mask=mask.T).T
    else:
        x = tl.load(x_ptr + row[:, None] * x_row_stride + col[None, :], mask=mask)
    update = (x.to(tl.float32) * scale) * extra_scale
    param_row = (row // rows_per_group) * param_group_stride + (row % rows_per_group) * param_row_stride
    pointers = param_ptr + param_row[:, None] + col[None, :]
    param = tl.load(pointers, mask=mask)
    tl.store(pointers, tl.fma(update, tl.full(update.shape, negative_lr, tl.float32), param), mask=mask)
