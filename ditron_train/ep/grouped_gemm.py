"""Grouped GEMM: the products of all experts of a rank in one persistent kernel, for rows in Megatron's order; forward,
dgrad and wgrad without a host sync.

    # equivalent, splits = tokens_per_expert.tolist()
    y  = cat([rows @ w.T for rows, w in zip(x.split(splits), weights)])          # group_gemm(x, weights, tiles)
    dx = cat([grad @ w for grad, w in zip(dy.split(splits), weights)])           # ... transpose=False
    dw = [grad.T @ rows for grad, rows in zip(dy.split(splits), x.split(splits))]  # group_wgrad(dy, x, tiles)

The weights of experts are separate tensors. One descriptor spans them all: its first coordinate counts units of some
elements from the lowest address, so that ``load([places[e], n, k])`` reads expert e's block wherever it is.

Blocks of rows that end inside a tile are *clipped* by a descriptor [rows + 1, BLOCK, columns] whose first two strides
are both one row: element (i, j) is row ``i + j``. The block at (row + valid - BLOCK, BLOCK - valid) begins at ``row``,
and since j ends at BLOCK only its first ``valid`` rows exist: the others load as zeros and are dropped when stored. So
no tile needs a mask. i must not be negative: results have BLOCK rows of padding in front, and operands of the weight
gradient, which have none, are read by masked loads for experts that end within the first BLOCK rows.

Tiles are chosen by a tuning table, else by rule. They change the time, never the bits. docs/measurements/ep.md has
times beside Transformer Engine's, and the tiles and last waves that were tried.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch.utils.dlpack import from_dlpack, to_dlpack
from triton.tools.tensor_descriptor import TensorDescriptor

from ditron_train.data.tuning_table import active_table, class_of_size
from ditron_train.gemm.configs import GemmConfig, choose_config, config_of_entry
from ditron_train.gemm.operands import addresses_of, make_descriptor
from ditron_train.gemm.ops import on_device
from ditron_train.runtime.device import device_name, kernel_target, num_sms
from ditron_train.runtime.errors import NotSupportedError, SettingError
from ditron_train.runtime.launch import kept_launch
from ditron_train.runtime.sizes import next_power_of_2
from ditron_train.schedule.tiles import compute_tiles, grouped_tile
from ditron_train.stream.cached_tensors import int32_table, int64_table


class GemmSizes(NamedTuple):
    """Constants of the grouped GEMMs."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP_M: int
    SPLIT_STORE: bool
    TRANSPOSE_B: bool = False


GroupOp = Literal["group_gemm", "group_dgrad", "group_wgrad"]


def group_class(num_experts: int, rows: int, n: int, k: int) -> str:
    """The class of shapes that share a choice: experts of a rank, their rows together, N and K, such as
    ``64 experts 65536x4096x7168``."""
    return f"{num_experts} experts " + "x".join(str(class_of_size(size)) for size in (rows, n, k))


def default_group_config(
    op: GroupOp, num_experts: int, rows: int, n: int, k: int, dtype: torch.dtype, target: str, device: torch.device
) -> GemmConfig:
    """The tile if there is no table; arguments as of ``choose_group_config``."""
    if op == "group_wgrad":
        return choose_config(n * num_experts, k, rows, dtype, target, num_sms(device))
    return choose_config(max(rows, 1), n, k, dtype, target, num_sms(device))


def choose_group_config(
    op: GroupOp, num_experts: int, rows: int, n: int, k: int, dtype: torch.dtype, target: str, device: torch.device
) -> GemmConfig:
    """The tile of a product of ``num_experts`` experts with ``rows`` rows together.

    Args:
        op: Which product.
        num_experts: Experts of this rank.
        rows: Rows of all experts.
        n: Columns of the result; for a weight gradient its rows.
        k: Length of the sums; for a weight gradient its columns.
        dtype, target, device: As ``gemm.configs.choose_config``.

    Raises:
        SettingError: The table or its entry cannot be read.
    """
    setting = os.environ.get("DITRON_TUNING")
    own = class_of_size(rows)
    # Rows change from step to step and differ between ranks: the next class's tile is nearer than the rule's.
    for size_class in (own, class_of_size(own + 1), class_of_size(2 * own // 3)):
        found = _of_table(setting, op, num_experts, size_class, n, k, device)
        if found is not None:
            return found
    return default_group_config(op, num_experts, rows, n, k, dtype, target, device)


@lru_cache(maxsize=4096)
def _of_table(
    setting: str | None, op: GroupOp, num_experts: int, rows: int, n: int, k: int, device: torch.device
) -> GemmConfig | None:
    """The tile of a table, cached; ``setting``: names the table, so that another one is read again."""
    table, name = active_table(device_name(device)), group_class(num_experts, rows, n, k)
    entry = None if table is None else table.find(op, 1, name)
    try:
        return None if entry is None else config_of_entry(entry)
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise SettingError(f"the tuning table's entry of {op}, {name} cannot be read: {error!r}") from None


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

    Each expert takes whole tiles, one without rows none. ``row_ends[e]`` follows the tiles. If experts have more rows
    than there is room for (a fixed capacity that was too small, which is an error elsewhere), the first ``num_rows``
    count, so that no tile is outside the buffers.
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


@triton.jit(do_not_specialize=["max_tiles", "min_rows"])
def list_tiles_of_groups(
    counts,
    groups,
    tiles,
    max_tiles,
    min_rows,
    NUM_SOURCES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    LAST: tl.constexpr,
    SLACK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``list_tiles`` of ``counts`` [sources, experts], for experts of at least ``min_rows`` rows, divided by groups of
    sources. Program g writes the tiles of group g, in their order, into a table of its own.

    Source s belongs to group ``groups[s]``. A tile belongs to the last group (LAST), or to the first, with a row in
    it.
    """
    group = tl.program_id(0)
    table = tiles + group * (4 * (max_tiles + 1) + SLACK)
    lanes = tl.arange(0, EXPERTS)
    known = lanes < NUM_EXPERTS
    rows = tl.zeros((EXPERTS,), tl.int32)
    for source in range(NUM_SOURCES):
        rows += tl.load(counts + source * NUM_EXPERTS + lanes, mask=known, other=0).to(tl.int32)
    ends = tl.cumsum(rows, 0)
    num_tiles = tl.where(rows >= min_rows, (rows + BLOCK_M - 1) // BLOCK_M, 0)
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
    """A row tile's place of its expert's weight, its first row, and its number of valid rows."""
    entry = tiles + 4 + row_tile * 4
    place = tl.load(places + tl.load(entry))
    row = tl.load(entry + 1)
    return place, row, tl.minimum(tl.load(entry + 2) - row, BLOCK_M)


@triton.jit
def group_product(a_desc, b_desc, place, row, col, num_k_tiles, BLOCK_N: tl.constexpr, GEMM: tl.constexpr):
    """One tile of A @ B[e] in fp32, K blocks in ascending order; ``place`` is where expert e's weight is."""
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
    (TRANSPOSE_B: weights [N, K]) or [1, BLOCK_K, BLOCK_N] (weights [K, N]). c_desc: C after BLOCK_M rows of padding,
    as clipped blocks. A tile at the end of an expert reads on into the next one's rows; their results are clipped.
    There are no signals and no waits.

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
    """Writes a quarter of a tile's columns: a whole tile's addresses and values need too many registers."""
    rows = tl.arange(0, GEMM.BLOCK_M)[:, None]
    columns = tl.arange(0, GEMM.BLOCK_N // 4)[None, :]
    at = address + (tl.cast(row, tl.int64) * K + col) + (rows * K + columns)
    inside = (rows < N - row) & (columns < K - col)
    if TO == 1:
        acc += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, acc.to(address.dtype.element_ty), mask=inside)


@triton.jit
def _leave_block(w, acc, expert, row, col, N, K, element_type: tl.constexpr, TO: tl.constexpr, GEMM: tl.constexpr):
    """Writes a tile of an expert's weight gradient: through the descriptor ``w`` (TO is 0), or at the address
    ``w[expert]``, where it is added in fp32 (1) or overwrites (2). No other program writes there."""
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
def _count_steps(row_ends, tiles_of_expert, num_programs, EXPERTS: tl.constexpr, LANES: tl.constexpr, GEMM):
    """How many experts end within the first BLOCK_K rows; this program's first tile of the others, and its steps."""
    lanes = tl.arange(0, LANES)
    ends = tl.load(row_ends + lanes, mask=lanes < EXPERTS, other=GEMM.BLOCK_K)
    num_short = tl.sum((ends < GEMM.BLOCK_K).to(tl.int32), axis=0)
    first_tile = num_short * tiles_of_expert + tl.program_id(0)
    starts = tl.load(row_ends + lanes - 1, mask=(lanes > 0) & (lanes < EXPERTS), other=0)
    depths = tl.maximum((ends - starts + GEMM.BLOCK_K - 1) // GEMM.BLOCK_K, 1)  # without rows: one block of zeros
    before = tl.maximum(lanes * tiles_of_expert - first_tile + num_programs - 1, 0) // num_programs
    behind = tl.maximum((lanes + 1) * tiles_of_expert - first_tile + num_programs - 1, 0) // num_programs
    return num_short, first_tile, tl.sum(tl.where(lanes < EXPERTS, (behind - before) * depths, 0), axis=0)


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
    """W[e] = G[rows of e].T @ X[rows of e] for every expert: sums over its rows in order in fp32, rounded once; with
    TO = 1 W[e] += that sum.

    g_desc, x_desc: G [rows, N] and X [rows, K] as clipped blocks of BLOCK_K rows: rows after an expert's last read as
    zero. w: W [experts, N, K] as a descriptor of blocks [1, BLOCK_M, BLOCK_N]; with TO = 1 or 2 (overwritten) the
    addresses of the experts' W [N, K], int64, of fp32 if WIDE, else of G's type. An expert without rows gets zeros, or
    nothing added. There are no signals and no waits.

    Tiles and blocks of rows are one loop of steps, so that the loads of the next tile overlap with the epilogue of
    this one. Experts differ in depth, so the compiler cannot make that loop itself (``flatten``). The few experts that
    end within the first BLOCK_K rows come after the loop, by masked loads.
    """
    element_type: tl.constexpr = tl.float32 if WIDE else g_pointer.dtype.element_ty
    num_tiles_m, num_tiles_n = tl.cdiv(N, GEMM.BLOCK_M), tl.cdiv(K, GEMM.BLOCK_N)
    tiles_of_expert = num_tiles_m * num_tiles_n
    num_programs = tl.num_programs(0)
    counted = _count_steps(row_ends, tiles_of_expert, num_programs, NUM_EXPERTS, EXPERTS, GEMM)
    num_short, first_tile, num_steps = counted
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


_TILE_WORDS = 4
_LIST_BLOCK = 128  # tiles that a program lists
_MOST_LANES = 4096  # of tiles times experts: more do not fit the registers of a program
_SLACK_WORDS = 1024  # a loop that runs ahead may look at entries behind the last, whose values it then drops


@dataclass(frozen=True)
class RowTiles:
    """How the rows of a rank are cut into tiles that hold one expert each; made once a layer, on the device.

    Attributes:
        tiles: int32, as written by ``list_tiles``.
        num_rows: Rows of all experts together (with a capacity: the most).
        num_experts: Experts of this rank.
        block_m: Rows of a tile.
        max_tiles: The most tiles.
        has_row_ends: Whether there are ``row_ends``: for tiles of all rows, not of a part.
    """

    tiles: torch.Tensor
    num_rows: int
    num_experts: int
    block_m: int
    max_tiles: int
    has_row_ends: bool = True

    @property
    def row_ends(self) -> torch.Tensor:
        """int32 [num_experts]: the row after each expert's last."""
        assert self.has_row_ends, "tiles of a part"
        return self.tiles[_TILE_WORDS * (self.max_tiles + 1) :]


def block_rows(device: torch.device) -> int:
    """Rows of a tile of grouped GEMMs of 16 bits."""
    return 32 if kernel_target(device) == "interpreter" else 128


def row_tiles(tokens_per_expert: torch.Tensor, num_rows: int, block_m: int | None = None) -> RowTiles:
    """Lists the tiles of ``tokens_per_expert`` (integers on the device, [num_experts], with a sum of at most
    ``num_rows``), of ``block_m`` rows each; None: as many as 16-bit grouped GEMMs take."""
    num_experts, block_m = tokens_per_expert.numel(), block_m or block_rows(tokens_per_expert.device)
    num_programs = -(-(-(-num_rows // block_m) + num_experts) // _LIST_BLOCK)
    max_tiles = num_programs * _LIST_BLOCK  # few different numbers, whatever the rows: launches are kept by number
    words = _TILE_WORDS * (max_tiles + 1) + num_experts
    tiles = torch.empty(words + _SLACK_WORDS, dtype=torch.int32, device=tokens_per_expert.device)
    constants = dict(NUM_EXPERTS=num_experts, EXPERTS=next_power_of_2(num_experts), BLOCK_M=block_m, BLOCK=_LIST_BLOCK)
    launch = kept_launch(list_tiles, num_programs, tokens_per_expert.dtype, **constants)
    with on_device(tokens_per_expert.device):
        launch(tokens_per_expert, tiles, max_tiles, num_rows)
    return RowTiles(tiles, num_rows, num_experts, block_m, max_tiles)


def row_tiles_of_groups(
    counts: torch.Tensor, groups: Sequence[Sequence[int]], num_rows: int, *, last: bool, min_rows: int = 0
) -> list[RowTiles]:
    """Row tiles of each of some groups of source ranks, for products that are computed part by part.

    Tiles begin at an expert's first row, whatever sources its rows are from, so that no tile is cut. A tile with rows
    of several groups belongs to one of them.

    Args:
        counts: int64 [sources, experts] on the device: rows, which are stored by expert, then by source.
        groups: Groups of sources, which together are all sources.
        num_rows: The sum of ``counts``.
        last: Whether a tile belongs to the last group with rows in it, so that all have arrived; else to the first.
        min_rows: Experts with fewer rows are in no group.
    """
    (num_sources, num_experts), device = counts.shape, counts.device
    block_m = block_rows(device)
    max_tiles = -(-(num_rows // block_m + num_experts) // _LIST_BLOCK) * _LIST_BLOCK
    tiles = torch.empty(len(groups), _TILE_WORDS * (max_tiles + 1) + _SLACK_WORDS, dtype=torch.int32, device=device)
    of_source = {source: number for number, group in enumerate(groups) for source in group}
    table = int32_table(tuple(of_source[source] for source in range(num_sources)), device)
    sizes = dict(NUM_SOURCES=num_sources, NUM_EXPERTS=num_experts, EXPERTS=next_power_of_2(num_experts))
    block = min(_LIST_BLOCK, max(_MOST_LANES // sizes["EXPERTS"], 1))
    constants = dict(**sizes, LAST=last, SLACK=_SLACK_WORDS, BLOCK_M=block_m, BLOCK=block)
    launch = kept_launch(list_tiles_of_groups, len(groups), counts.dtype, **constants)
    with on_device(device):
        launch(counts, table, tiles, max_tiles, max(min_rows, 1))
    return [RowTiles(one, num_rows, num_experts, block_m, max_tiles, has_row_ends=False) for one in tiles.unbind(0)]


_ALIGNMENT_BYTES = 16  # of addresses and strides in a descriptor
_MAX_STRIDE_BYTES = 1 << 40
_TO_DESCRIPTOR, _TO_ADDED, _TO_WRITTEN = 0, 1, 2  # of ``group_wgrad_kernel``
# A wider tile's old values and sums do not fit the registers of a program (tests/compile).
_INTO_CONFIG = GemmConfig(128, 128, 64, 8, 4)


def _clipped_rows(matrix: torch.Tensor, block_rows: int, block_columns: int) -> TensorDescriptor:
    """A descriptor of ``matrix`` [rows, columns] for blocks that end at any row (see the module's docstring)."""
    rows, columns = matrix.shape
    return TensorDescriptor(matrix, [rows, block_rows, columns], [columns, columns, 1], [1, block_rows, block_columns])


def _own_storage(part: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor whose storage begins where ``part`` does.

    ``torch.compile`` makes other code for another storage offset, which may add up in another order, so Megatron's
    compiled activations must get the same offset as after native GEMMs. The allocator does not know the new storage,
    and ``record_stream`` has no effect on it: a user on another stream must keep it until the stream that it was made
    on has waited for that use.
    """
    return from_dlpack(to_dlpack(part))


@lru_cache(maxsize=4096)
def reach_of(addresses: tuple[int, ...]) -> tuple[tuple[int, ...], int] | None:
    """For tensors at these addresses, the distance of each from the lowest, in units, and the unit in bytes; None if
    one descriptor cannot span them."""
    lowest = min(addresses)
    unit = math.gcd(*(address - lowest for address in addresses)) or 4096
    distances = tuple((address - lowest) // unit for address in addresses)
    if (
        lowest % _ALIGNMENT_BYTES
        or unit % _ALIGNMENT_BYTES
        or unit >= _MAX_STRIDE_BYTES
        or max(distances) >= 2**31 - 1
    ):
        return None
    return distances, unit


def are_whole(columns: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether rows of these numbers of elements are multiples of 16 bytes, as descriptors require."""
    return not any(width * dtype.itemsize % _ALIGNMENT_BYTES for width in columns)


def _check(name: str, rows: torch.Tensor, tiles: RowTiles, columns: Sequence[int]) -> str:
    if rows.dim() != 2 or rows.shape[0] != tiles.num_rows:
        raise NotSupportedError(f"{name}: needs [{tiles.num_rows}, columns], got {tuple(rows.shape)}")
    if not are_whole(columns, rows.dtype):
        raise NotSupportedError(f"{name}: rows of {tuple(columns)} elements are not whole 16 bytes")
    target = kernel_target(rows.device)
    if target != "interpreter" and rows.dtype not in (torch.bfloat16, torch.float16):
        raise NotSupportedError(f"{name}: {rows.dtype}; only bfloat16 and float16")
    return target


def _sizes(config: GemmConfig, block_m: int) -> GemmSizes:
    return GemmSizes(block_m, config.block_n, config.block_k, config.group_m, config.split_store)


@dataclass(frozen=True)
class GemmOperands:
    """Operands of a grouped GEMM kernel: descriptors of rows, weights and result, and the place of each expert's
    weight."""

    a: TensorDescriptor
    b: TensorDescriptor
    half_b: TensorDescriptor
    c: TensorDescriptor
    places: torch.Tensor
    y: torch.Tensor
    n: int
    k: int
    config: GemmConfig
    sizes: GemmSizes


def gemm_operands(
    name: str,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    tiles: RowTiles,
    *,
    transpose: bool,
    config: GemmConfig | None = None,
) -> GemmOperands:
    """Checks the operands of ``group_gemm`` and describes them; allocates the result ``y`` [num_rows, N].

    Raises:
        NotSupportedError: Shapes, types, strides or a device that are not covered.
    """
    if len(weights) != tiles.num_experts:
        raise NotSupportedError(f"{name}: {len(weights)} weights for {tiles.num_experts} experts")
    first = weights[0]
    addresses = addresses_of(weights, first.shape, x.dtype, x.device)
    if addresses is None:
        raise NotSupportedError(f"{name}: weights must be contiguous and alike, of {x.dtype} on {x.device}")
    n, k = first.shape if transpose else first.shape[::-1]
    if x.dim() != 2 or x.shape[1] != k:
        raise NotSupportedError(f"{name}: rows of {tuple(x.shape)} for weights of {tuple(first.shape)}")
    target = _check(name, x, tiles, (n, k))
    x = x.contiguous()
    padded = torch.empty(tiles.block_m + tiles.num_rows, n, dtype=x.dtype, device=x.device)
    reach = reach_of(addresses)
    if reach is None:  # allocations too far apart, or not aligned to each other: copies side by side
        weights = torch.stack(tuple(weights)).unbind(0)
        reach = reach_of(tuple(map(torch.Tensor.data_ptr, weights)))
    assert reach is not None, "slices of one allocation"
    distances, unit = reach
    if config is None:
        op: GroupOp = "group_gemm" if transpose else "group_dgrad"
        sizes = (tiles.num_experts, tiles.num_rows, n, k)
        # A kernel that does more beside the product has its own need of memory: only the product alone was tuned.
        choose = choose_group_config if name == "group_gemm" else default_group_config
        config = choose(op, *sizes, x.dtype, target, x.device)
    block_n, block_k = config.block_n, config.block_k
    spanning, half = (
        TensorDescriptor(
            weights[distances.index(0)],
            [max(distances) + 1, *first.shape],
            [unit // x.element_size(), first.shape[1], 1],
            [1, width, block_k] if transpose else [1, block_k, width],
        )
        for width in (block_n, block_n // 2 if config.split_store else block_n)
    )
    return GemmOperands(
        make_descriptor(x if tiles.num_rows else first, (tiles.block_m, block_k)),  # no rows: any memory will do
        spanning,
        half,
        _clipped_rows(padded, tiles.block_m, config.store_block[1]),
        int32_table(distances, x.device),
        _own_storage(padded[tiles.block_m :]),
        n,
        k,
        config,
        _sizes(config, tiles.block_m)._replace(TRANSPOSE_B=transpose),
    )


def group_gemm(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    tiles: RowTiles,
    *,
    transpose: bool = True,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """y[r] = x[r] @ weights[e(r)].T (``transpose``: forward), or x[r] @ weights[e(r)] (dgrad).

    Args:
        x: [num_rows, K], rows by expert; bf16 or fp16 (fp32 too in the interpreter).
        weights: One [N, K] (dgrad: [K, N]) for each expert, of one shape and type; contiguous, anywhere in memory.
        tiles: Row tiles of ``x``.
        transpose: Whether weights are stored [N, K].
        config: Tile sizes; None: by the shape.

    Returns:
        [num_rows, N].

    Raises:
        NotSupportedError: Shapes, types, strides or a device that are not covered.
    """
    operands = gemm_operands("group_gemm", x, weights, tiles, transpose=transpose, config=config)
    multiply(operands, tiles)
    return operands.y


def multiply(operands: GemmOperands, tiles: RowTiles) -> None:
    """Computes the rows of ``tiles``, which may be a part of all, of the product that ``gemm_operands`` described."""
    if 0 in operands.y.shape:
        return
    chosen, y = operands.config, operands.y
    num_programs = min(num_sms(y.device), tiles.max_tiles * -(-operands.n // chosen.block_n))
    launch = kept_launch(group_gemm_kernel, num_programs, y.dtype, GEMM=operands.sizes, **chosen.launch_options)
    with on_device(y.device):
        launch(
            operands.a, operands.b, operands.half_b, operands.c, operands.places, tiles.tiles, operands.n, operands.k
        )  # fmt: skip


def group_wgrad(
    grad: torch.Tensor, x: torch.Tensor, tiles: RowTiles, *, spare_sms: int = 0, config: GemmConfig | None = None
) -> torch.Tensor:
    """dw[e] = grad[rows of e].T @ x[rows of e]: one sum over the expert's rows in order; zeros if it has none.

    Args:
        grad: [num_rows, N].
        x: [num_rows, K] of the same type.
        tiles: Row tiles of ``x``.
        spare_sms: Multiprocessors that another kernel occupies meanwhile; the grid is smaller by as many programs: one
            that had to wait for a multiprocessor would end last.
        config: As of ``group_gemm``.

    Returns:
        [num_experts, N, K].

    Raises:
        NotSupportedError: As ``group_gemm``.
    """
    target = _check_wgrad("group_wgrad", grad, x, tiles)
    n, k = grad.shape[1], x.shape[1]
    shape = (tiles.num_experts, n, k)
    if tiles.num_rows == 0 or 0 in shape:
        return torch.zeros(shape, dtype=x.dtype, device=x.device)
    dw = torch.empty(shape, dtype=x.dtype, device=x.device)
    config = config or choose_group_config(
        "group_wgrad", tiles.num_experts, tiles.num_rows, n, k, x.dtype, target, x.device
    )
    store_m, store_n = config.store_block
    result = TensorDescriptor(dw, list(shape), [n * k, k, 1], [1, store_m, store_n])
    _launch_wgrad(grad, x, tiles, result, config, spare_sms, TO=_TO_DESCRIPTOR, WIDE=False)
    return dw


def group_wgrad_into(
    grad: torch.Tensor,
    x: torch.Tensor,
    tiles: RowTiles,
    main_grads: Sequence[torch.Tensor],
    *,
    overwrites: bool = False,
    spare_sms: int = 0,
) -> None:
    """main_grads[e] += grad[rows of e].T @ x[rows of e]: the sum over the rows in fp32, added in fp32, rounded once.

    Args:
        grad: [num_rows, N].
        x: [num_rows, K] of the same type.
        tiles: Row tiles of ``x``.
        main_grads: [N, K] of each expert, of fp32 or of the operands' type; contiguous, anywhere in memory. They must
            not move, since their addresses are cached.
        overwrites: Whether the sum overwrites ``main_grads``, with zeros for an expert without rows.
        spare_sms: As of ``group_wgrad``.

    Raises:
        NotSupportedError: As ``group_gemm``; nothing is changed then.
    """
    name = "group_wgrad_into"
    target = _check_wgrad(name, grad, x, tiles)
    shape, dtype = (grad.shape[1], x.shape[1]), main_grads[0].dtype
    addresses = addresses_of(main_grads, shape, dtype, x.device)
    if len(main_grads) != tiles.num_experts or addresses is None:
        raise NotSupportedError(f"{name}: needs {tiles.num_experts} contiguous buffers {shape} on {x.device}, alike")
    if dtype not in (torch.float32, x.dtype) or math.gcd(*addresses) % _ALIGNMENT_BYTES:
        raise NotSupportedError(f"{name}: buffers of {dtype}, or not at whole 16 bytes, for operands of {x.dtype}")
    if tiles.num_rows == 0 or 0 in shape:
        if overwrites:
            torch._foreach_zero_(list(main_grads))
        return
    config = _INTO_CONFIG
    if target == "interpreter":
        sizes = (tiles.num_experts, tiles.num_rows, *shape)
        config = default_group_config("group_wgrad", *sizes, x.dtype, target, x.device)
    table = int64_table(addresses, x.device)
    to = _TO_WRITTEN if overwrites else _TO_ADDED
    _launch_wgrad(grad, x, tiles, table, config, spare_sms, TO=to, WIDE=dtype == torch.float32)


def _check_wgrad(name: str, grad: torch.Tensor, x: torch.Tensor, tiles: RowTiles) -> str:
    if grad.dtype != x.dtype or grad.device != x.device:
        raise NotSupportedError(f"{name}: {grad.dtype} on {grad.device} and {x.dtype} on {x.device}")
    _check(name, x, tiles, (x.shape[-1],))
    return _check(name, grad, tiles, (grad.shape[-1], x.shape[-1]))


def _launch_wgrad(
    grad: torch.Tensor, x: torch.Tensor, tiles: RowTiles, result: Any, config: GemmConfig, spare_sms: int, **sink: Any
) -> None:
    grad, x = grad.contiguous(), x.contiguous()
    n, k = grad.shape[1], x.shape[1]
    constants = dict(
        NUM_EXPERTS=tiles.num_experts,
        EXPERTS=next_power_of_2(tiles.num_experts),
        **sink,
        GEMM=_sizes(config, config.block_m),
    )
    num_programs = min(max(num_sms(x.device) - spare_sms, 1), tiles.num_experts * config.num_tiles(n, k))
    launch = kept_launch(group_wgrad_kernel, num_programs, x.dtype, **constants, **config.launch_options)
    operands = _clipped_rows(grad, config.block_k, config.block_m), _clipped_rows(x, config.block_k, config.block_n)
    with on_device(x.device):
        launch(*operands, result, grad, x, tiles.row_ends, n, k)
