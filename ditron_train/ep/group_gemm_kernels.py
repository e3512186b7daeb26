"""Grouped GEMM: one persistent kernel over the experts of a rank, for rows in Megatron's order.

The weights of experts are separate tensors. One descriptor spans them all: its first coordinate counts units of some
elements from the lowest address, so that ``load([places[e], n, k])`` reads expert e's block wherever it lies.

Blocks of rows that end inside a tile are *clipped* by a descriptor [rows + 1, BLOCK, columns] whose first two strides
are both one row: element (i, j) is row ``i + j``. The block at (row + valid - BLOCK, BLOCK - valid) begins at ``row``,
and since j ends at BLOCK only its first ``valid`` rows exist: the others load as zeros and are dropped when stored. So
no tile needs a mask. i must not be negative: results have BLOCK rows of padding in front, and operands of the weight
gradient, which have none, are read by masked loads for experts that end within the first BLOCK rows.

Measured against Transformer Engine's, with tiles and last waves that were tried: docs/measurements/ep.md.
"""

import triton
import triton.language as tl

from ditron_train.schedule.tiles import compute_tiles, grouped_tile


@triton.jit(do_not_specialize=["max_tiles", "num_rows"])
def list_tiles(
    tokens_per_expert,
    tiles,
    max_tiles,
    num_rows,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """tiles[4 (1 + i) ..] = expert, first row and end row of row tile i; tiles[0] their number. Program b writes block
    b.

    Experts take whole tiles each; one with no rows takes none. ``row_ends[e]`` follows behind the tiles. Of experts
    that have more rows than there is room for (a fixed capacity that was too small, which is an error elsewhere) the
    first ``num_rows`` count: no tile lies outside the buffers.
    """
    lanes = tl.arange(0, EXPERTS)
    counts = tl.load(tokens_per_expert + lanes, mask=lanes < NUM_EXPERTS, other=0).to(tl.int32)
    ends = tl.cumsum(counts, 0)
    starts = tl.minimum(ends - counts, num_rows)
    ends = tl.minimum(ends, num_rows)
    counts = ends - starts
    num_tiles = (counts + BLOCK_M - 1) // BLOCK_M
    tile_ends = tl.cumsum(num_tiles, 0)
    if tl.program_id(0) == 0:
        tl.store(tiles, tl.sum(num_tiles, axis=0))
        tl.store(tiles + 4 + 4 * max_tiles + lanes, ends, mask=lanes < NUM_EXPERTS)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = (index[:, None] >= (tile_ends - num_tiles)[None, :]) & (index[:, None] < tile_ends[None, :])
    expert = tl.sum(tl.where(here, lanes[None, :], 0), axis=1)
    rows = starts[None, :] + (index[:, None] - (tile_ends - num_tiles)[None, :]) * BLOCK_M
    first = tl.sum(tl.where(here, rows, 0), axis=1)
    end = tl.sum(tl.where(here, ends[None, :], 0), axis=1)
    inside = index < max_tiles
    tl.store(tiles + 4 + index * 4, expert, mask=inside)
    tl.store(tiles + 4 + index * 4 + 1, first, mask=inside)
    tl.store(tiles + 4 + index * 4 + 2, end, mask=inside)


@triton.jit(do_not_specialize=["max_tiles", "fewest_rows"])
def list_tiles_of_groups(
    counts,
    groups,
    tiles,
    max_tiles,
    fewest_rows,
    NUM_SOURCES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    LAST: tl.constexpr,
    SLACK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``list_tiles`` of ``counts`` [sources, experts], for experts of at least ``fewest_rows`` rows, parted by groups
    of sources. Program g writes the tiles of group g, in their order, into a table of its own.

    Source s is of group ``groups[s]``. A tile is of the last group (LAST), or of the first, that has a row in it.
    """
    group = tl.program_id(0)
    table = tiles + group * (4 * (max_tiles + 1) + SLACK)
    lanes = tl.arange(0, EXPERTS)
    known = lanes < NUM_EXPERTS
    rows = tl.zeros((EXPERTS,), tl.int32)
    for source in range(NUM_SOURCES):
        rows += tl.load(counts + source * NUM_EXPERTS + lanes, mask=known, other=0).to(tl.int32)
    ends = tl.cumsum(rows, 0)
    num_tiles = tl.where(rows >= fewest_rows, (rows + BLOCK_M - 1) // BLOCK_M, 0)
    tile_ends = tl.cumsum(num_tiles, 0)
    listed = 0
    for block in range(0, tl.sum(num_tiles, axis=0), BLOCK):
        index = block + tl.arange(0, BLOCK)
        here = (index[:, None] >= (tile_ends - num_tiles)[None, :]) & (index[:, None] < tile_ends[None, :])
        expert = tl.sum(tl.where(here, lanes[None, :], 0), axis=1)
        start = tl.sum(tl.where(here, (ends - rows)[None, :], 0), axis=1)
        first = start + (index - tl.sum(tl.where(here, (tile_ends - num_tiles)[None, :], 0), axis=1)) * BLOCK_M
        end = tl.sum(tl.where(here, ends[None, :], 0), axis=1)
        chosen = tl.full((BLOCK,), -1 if LAST else NUM_SOURCES, tl.int32)
        for source in range(NUM_SOURCES):
            behind = start + tl.load(counts + source * NUM_EXPERTS + expert).to(tl.int32)
            has_rows = (start < behind) & (start < first + BLOCK_M) & (behind > first)
            number = tl.load(groups + source)
            better = number > chosen if LAST else number < chosen
            chosen = tl.where(has_rows & better, number, chosen)
            start = behind
        mine = (chosen == group) & (index < tl.sum(num_tiles, axis=0))
        entry = table + 4 * (listed + tl.cumsum(mine.to(tl.int32), 0))  # the first entry is behind the number
        tl.store(entry, expert, mask=mine)
        tl.store(entry + 1, first, mask=mine)
        tl.store(entry + 2, end, mask=mine)
        listed += tl.sum(mine.to(tl.int32), axis=0)
    tl.store(table, listed)
    tl.store(table + 4 * (listed + 1 + tl.arange(0, SLACK // 4)), 0)  # a loop that runs ahead finds an expert there


@triton.jit
def tile_at(tiles, places, row_tile, BLOCK_M: tl.constexpr):
    """Of a row tile: where its expert's weight lies, its first row, how many of its rows there are."""
    entry = tiles + 4 + row_tile * 4
    place = tl.load(places + tl.load(entry))
    row = tl.load(entry + 1)
    return place, row, tl.minimum(tl.load(entry + 2) - row, BLOCK_M)


@triton.jit
def group_product(a_desc, b_desc, place, row, col, num_k_tiles, BLOCK_N: tl.constexpr, GEMM: tl.constexpr):
    """One tile of A @ B[e] in fp32, K blocks in ascending order; ``place`` is where expert e's weight lies."""
    acc = tl.zeros((GEMM.BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k_tile in range(num_k_tiles):
        k = k_tile * GEMM.BLOCK_K
        a = a_desc.load([row, k])
        if GEMM.TRANSPOSE_B:
            b = b_desc.load([place, col, k]).reshape(BLOCK_N, GEMM.BLOCK_K).T
        else:
            b = b_desc.load([place, k, col]).reshape(GEMM.BLOCK_K, BLOCK_N)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def _compute_tile(
    row_tile, col_tile, HALF: tl.constexpr, a_desc, b_desc, c_desc, places, tiles, num_k_tiles, GEMM: tl.constexpr
):
    """One tile of C, or of half as many columns; ``b_desc``: (whole, half)."""
    BLOCK_N: tl.constexpr = GEMM.BLOCK_N // 2 if HALF else GEMM.BLOCK_N
    SPLIT_STORE: tl.constexpr = GEMM.SPLIT_STORE and not HALF
    place, row, valid = tile_at(tiles, places, row_tile, GEMM.BLOCK_M)
    col = col_tile * BLOCK_N
    acc = group_product(a_desc, b_desc[HALF], place, row, col, num_k_tiles, BLOCK_N, GEMM)
    store_block(c_desc, acc, row + valid, GEMM.BLOCK_M - valid, col, BLOCK_N, SPLIT_STORE, GEMM)


@triton.jit
def group_gemm_kernel(a_desc, b_desc, half_b_desc, c_desc, places, tiles, N, K, GEMM: tl.constexpr):
    """C[r, :] = A[r, :] @ B[e(r)], e(r) the expert of row r: fp32 accumulation over K in order, one rounding.

    a_desc: A [rows, K] in blocks [BLOCK_M, BLOCK_K]. b_desc: all experts' weights, blocks [1, BLOCK_N, BLOCK_K]
    (TRANSPOSE_B: weights [N, K]) or [1, BLOCK_K, BLOCK_N] (weights [K, N]). c_desc: C behind BLOCK_M rows of padding,
    as clipped blocks. A tile at the end of an expert reads on into the next one's rows; their results are clipped.
    Nobody waits: no signals.

    With SPLIT_STORE the last wave may be computed in halves (``compute_tiles``); half_b_desc reads the weights in such
    halves (else it is b_desc).
    """
    compute_tiles(
        tl.load(tiles),
        tl.cdiv(N, GEMM.BLOCK_N),
        _compute_tile,
        (a_desc, (b_desc, half_b_desc), c_desc, places, tiles, tl.cdiv(K, GEMM.BLOCK_K), GEMM),
        GEMM.GROUP_M,
        GEMM.SPLIT_STORE,
    )


@triton.jit
def store_block(desc, acc, i, j, col, BLOCK_N: tl.constexpr, SPLIT_STORE: tl.constexpr, GEMM: tl.constexpr):
    """Stores a tile through a rank-3 descriptor, wide tiles in two halves (less shared memory)."""
    if SPLIT_STORE:
        halves = tl.permute(tl.reshape(acc, (GEMM.BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        desc.store([i, j, col], tl.reshape(left.to(desc.dtype), (1, GEMM.BLOCK_M, BLOCK_N // 2)))
        desc.store([i, j, col + BLOCK_N // 2], tl.reshape(right.to(desc.dtype), (1, GEMM.BLOCK_M, BLOCK_N // 2)))
    else:
        desc.store([i, j, col], tl.reshape(acc.to(desc.dtype), (1, GEMM.BLOCK_M, BLOCK_N)))


@triton.jit
def _leave_columns(address, acc, row, col, N, K, TO: tl.constexpr, GEMM: tl.constexpr):
    """A quarter of a tile's columns: a whole tile's addresses and values take more registers than there are."""
    rows = tl.arange(0, GEMM.BLOCK_M)[:, None]
    columns = tl.arange(0, GEMM.BLOCK_N // 4)[None, :]
    at = address + (tl.cast(row, tl.int64) * K + col) + (rows * K + columns)
    inside = (rows < N - row) & (columns < K - col)
    if TO == 1:
        acc += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, acc.to(address.dtype.element_ty), mask=inside)


@triton.jit
def _leave_block(w, acc, expert, row, col, N, K, element_type: tl.constexpr, TO: tl.constexpr, GEMM: tl.constexpr):
    """A tile of an expert's weight gradient: written through the descriptor ``w`` (TO is 0), or at the address
    ``w[expert]``, to which it is added in fp32 (1) or which it is written over (2). Nobody else writes there."""
    if TO == 0:
        store_block(w, acc, expert, row, col, GEMM.BLOCK_N, GEMM.SPLIT_STORE, GEMM)
    else:
        address = tl.multiple_of(tl.load(w + expert), 16).to(tl.pointer_type(element_type))
        halves = tl.permute(tl.reshape(acc, (GEMM.BLOCK_M, 2, GEMM.BLOCK_N // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        for index in tl.static_range(2):
            half = left if index == 0 else right
            quarters = tl.permute(tl.reshape(half, (GEMM.BLOCK_M, 2, GEMM.BLOCK_N // 4)), (0, 2, 1))
            first, second = tl.split(quarters)
            start = col + index * GEMM.BLOCK_N // 2
            _leave_columns(address, first, row, start, N, K, TO, GEMM)
            _leave_columns(address, second, row, start + GEMM.BLOCK_N // 4, N, K, TO, GEMM)


@triton.jit
def _short_product(g_pointer, x_pointer, row_ends, expert, row, col, N, K, GEMM: tl.constexpr):
    """One tile of G.T @ X of an expert that ends within the first BLOCK_K rows, in fp32."""
    start = tl.load(row_ends + expert - 1, mask=expert > 0, other=0)
    rows = (start + tl.arange(0, GEMM.BLOCK_K))[:, None]
    inside = rows < tl.load(row_ends + expert)
    columns = (row + tl.arange(0, GEMM.BLOCK_M))[None, :]
    g = tl.load(g_pointer + rows * N + columns, mask=inside & (columns < N), other=0.0)
    columns = (col + tl.arange(0, GEMM.BLOCK_N))[None, :]
    x = tl.load(x_pointer + rows * K + columns, mask=inside & (columns < K), other=0.0)
    return tl.dot(g.T, x, tl.zeros((GEMM.BLOCK_M, GEMM.BLOCK_N), dtype=tl.float32), input_precision="ieee")


@triton.jit
def group_wgrad_kernel(
    g_desc,
    x_desc,
    w,
    g_pointer,
    x_pointer,
    row_ends,
    N,
    K,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TO: tl.constexpr,
    WIDE: tl.constexpr,
    GEMM: tl.constexpr,
):
    """W[e] = G[rows of e].T @ X[rows of e] for every expert: sums over its rows in order in fp32, one rounding; or
    with TO = 1 W[e] += that sum, in fp32, one rounding.

    g_desc, x_desc: G [rows, N] and X [rows, K] as clipped blocks of BLOCK_K rows: what lies behind an expert's last
    row reads as zero. w: W [experts, N, K] as a descriptor of blocks [1, BLOCK_M, BLOCK_N]; with TO = 1 or 2 (written)
    the addresses of the experts' W [N, K], int64, of fp32 if WIDE, else of G's type. An expert without rows gets
    zeros, or nothing added. Nobody waits: no signals.

    Tiles and blocks of rows are one loop of steps, so that the loads of the next tile run under the epilogue of this
    one. Experts differ in depth, which keeps the compiler from making that loop itself (``flatten``). The few experts
    that end within the first BLOCK_K rows come behind it, through masked loads.
    """
    element_type: tl.constexpr = tl.float32 if WIDE else g_pointer.dtype.element_ty
    num_tiles_m = tl.cdiv(N, GEMM.BLOCK_M)
    num_tiles_n = tl.cdiv(K, GEMM.BLOCK_N)
    tiles_of_expert = num_tiles_m * num_tiles_n
    num_programs = tl.num_programs(0)
    lanes = tl.arange(0, EXPERTS)
    ends = tl.load(row_ends + lanes, mask=lanes < NUM_EXPERTS, other=GEMM.BLOCK_K)
    num_short = tl.sum((ends < GEMM.BLOCK_K).to(tl.int32), axis=0)
    first_tile = num_short * tiles_of_expert + tl.program_id(0)
    starts = tl.load(row_ends + lanes - 1, mask=(lanes > 0) & (lanes < NUM_EXPERTS), other=0)
    depths = tl.maximum((ends - starts + GEMM.BLOCK_K - 1) // GEMM.BLOCK_K, 1)  # without rows: one block of zeros
    before = tl.maximum(lanes * tiles_of_expert - first_tile + num_programs - 1, 0) // num_programs
    behind = tl.maximum((lanes + 1) * tiles_of_expert - first_tile + num_programs - 1, 0) // num_programs
    num_steps = tl.sum(tl.where(lanes < NUM_EXPERTS, (behind - before) * depths, 0), axis=0)

    tile = first_tile - num_programs
    k_tile = -1
    depth = 0
    expert = 0
    first = 0
    end = 0
    row = 0
    col = 0
    acc = tl.zeros((GEMM.BLOCK_M, GEMM.BLOCK_N), dtype=tl.float32)
    for _ in range(num_steps):
        k_tile = tl.where(k_tile == depth - 1, 0, k_tile + 1)
        if k_tile == 0:
            tile += num_programs
            expert = tile // tiles_of_expert
            row_tile, col_tile = grouped_tile(tile % tiles_of_expert, num_tiles_m, num_tiles_n, GEMM.GROUP_M)
            row = row_tile * GEMM.BLOCK_M
            col = col_tile * GEMM.BLOCK_N
            end = tl.load(row_ends + expert)
            first = tl.load(row_ends + expert - 1, mask=expert > 0, other=0)
            depth = tl.maximum(tl.cdiv(end - first, GEMM.BLOCK_K), 1)
        k = first + k_tile * GEMM.BLOCK_K
        valid = tl.minimum(end - k, GEMM.BLOCK_K)
        g = g_desc.load([k + valid - GEMM.BLOCK_K, GEMM.BLOCK_K - valid, row]).reshape(GEMM.BLOCK_K, GEMM.BLOCK_M)
        x = x_desc.load([k + valid - GEMM.BLOCK_K, GEMM.BLOCK_K - valid, col]).reshape(GEMM.BLOCK_K, GEMM.BLOCK_N)
        acc = tl.dot(g.T, x, acc, input_precision="ieee")
        if k_tile == depth - 1:
            _leave_block(w, acc, expert, row, col, N, K, element_type, TO, GEMM)
            acc = tl.zeros((GEMM.BLOCK_M, GEMM.BLOCK_N), dtype=tl.float32)

    for short_tile in range(tl.program_id(0), num_short * tiles_of_expert, num_programs):
        expert = short_tile // tiles_of_expert
        row_tile, col_tile = grouped_tile(short_tile % tiles_of_expert, num_tiles_m, num_tiles_n, GEMM.GROUP_M)
        row = row_tile * GEMM.BLOCK_M
        col = col_tile * GEMM.BLOCK_N
        acc = _short_product(g_pointer, x_pointer, row_ends, expert, row, col, N, K, GEMM)
        _leave_block(w, acc, expert, row, col, N, K, element_type, TO, GEMM)
