"""AG-GEMM: an all-gather of rows and the GEMM that consumes them, as one op. Equivalent PyTorch code:

    gathered = x.new_empty(world_size * len(x), x.shape[1])
    dist.all_gather_into_tensor(gathered, x, group=group)
    y = gathered @ weight.T

Timeline of ``ag_gemm`` on rank r of 4. It multiplies its local shard first, then the rows of the other ranks as they
arrive:

    native   NCCL      | all-gather of x     |
    native   compute   |                     | GEMM                                                                |
    fused    copies    | to r-1 | to r-2 | to r-3 |
    fused    compute   | GEMM: local shard  | rows of r+1       | rows of r+2       | rows of r+3       |
    fused    waits     |                    | ^ rows of r+1     | ^ rows of r+2     | ^ rows of r+3     |

If a table of ``tune`` says so, or if the policy finds tiles no faster than native or their bits different, cuBLAS
multiplies instead of one kernel's tiles: a product of the local shard, then one of each rank's rows, before which the
stream waits for them.

Who waits for whom: sends wait for the start signals of all peers of this epoch, since the gathered rows ``[M, K]`` are
a single buffer of a rank: a signal says that everything that peer's stream had before is done. A tile of the GEMM
waits for the arrival flags of the rows that it reads. Flags hold the epoch, one for each (source rank, block of rows).
The gather itself, by copy engines or by multiprocessors that push, is in ``tp.gather``.

What was tried, with its times: ``docs/measurements/tp.md``.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.gemm.configs import Tile
from ditron_train.gemm.fp8 import check_bias, check_scaled
from ditron_train.gemm.kernels import biased, store_tile, tile_product
from ditron_train.gemm.operands import (
    TensorScales,
    aligned_operand,
    empty_aligned,
    make_descriptor,
    padded_columns,
    result_dtype,
)
from ditron_train.gemm.ops import library_product
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.schedule.tiles import gather_tile
from ditron_train.stream.agreement import agree_on_nothing
from ditron_train.stream.events import current_handle
from ditron_train.stream.plan import Plan
from ditron_train.tp.choices import Choice, GatherPlan, Layout, Problem, is_short
from ditron_train.tp.context import FLAGS_PER_RANK, Operands, RowPartition, TPContext, can_copy, row_partition
from ditron_train.tp.gather import Gather, sendable_rows


class AgGemmConstants(NamedTuple):
    """What ``ag_gemm_kernel`` is compiled for; see there."""

    tile: Tile
    flags_per_rank: int
    world_size: int
    even: bool
    split_last_wave: bool


class _Gathered(NamedTuple):
    """Rows of all ranks as a tile reads them: from the buffer through ``desc``, or, if every rank owns the same whole
    number of row tiles, this rank's own rows through ``own_desc``."""

    desc: Any
    own_desc: Any
    tables: Any
    num_rows: Any
    flag_block_rows: Any
    epoch: Any
    rank: Any


@triton.jit
def _rows_token(gathered, channel, row, last_row, OP: tl.constexpr, TARGET: tl.constexpr):
    """Waits for rows [row, last_row] of the gathered buffer, whichever peers they belong to. Returns zero, as
    ``dl.wait_token`` does.

    The loops are inside conditions that are known at run time only: with an unconditional loop here the compiler would
    not flatten the loop over tiles.
    """
    rank, flag_block_rows = gathered.rank, gathered.flag_block_rows
    token = tl.cast(0, tl.int32)
    if OP.even:
        shard_rows = gathered.num_rows // OP.world_size
        owner = row // shard_rows
        flags = channel.signals + owner * OP.flags_per_rank
        first = row % shard_rows
        last = first + last_row - row
        if (first <= last) & (owner != rank):
            for flag in range(first // flag_block_rows, last // flag_block_rows + 1):
                token += dl.wait_token(flags + flag, gathered.epoch, channel.control, owner, flag, TARGET)
    elif row <= last_row:
        for owner in range(0, OP.world_size):
            start = tl.load(gathered.tables.starts + owner)
            low = tl.maximum(row, start)
            high = tl.minimum(last_row, tl.load(gathered.tables.starts + owner + 1) - 1)
            if (low <= high) & (owner != rank):
                flags = channel.signals + owner * OP.flags_per_rank
                for flag in range((low - start) // flag_block_rows, (high - start) // flag_block_rows + 1):
                    token += dl.wait_token(flags + flag, gathered.epoch, channel.control, owner, flag, TARGET)
    return token


@triton.jit
def _gathered_product(
    tile_id,
    part,
    gathered,
    b_desc,
    scale,
    bias,
    channel,
    N,
    K,
    PART_N: tl.constexpr,
    OP: tl.constexpr,
    TARGET: tl.constexpr,
):
    """PART_N columns of tile ``tile_id``, from ``part * PART_N`` on, once its rows have arrived: (product, row,
    column)."""
    TILE: tl.constexpr = OP.tile
    M, rank = gathered.num_rows, gathered.rank
    tiles_m, tiles_n = tl.cdiv(M, TILE.block_m), tl.cdiv(N, TILE.block_n)
    tile_m, tile_n = gather_tile(
        tile_id, gathered.tables.order, rank, tiles_m, tiles_n, TILE.group_m, OP.world_size, OP.even
    )
    row = tile_m * TILE.block_m
    col = tile_n * TILE.block_n + part * PART_N
    last_row = tl.minimum(row + TILE.block_m, M) - 1
    source_row = row + _rows_token(gathered, channel, row, last_row, OP, TARGET)
    desc = gathered.desc
    if OP.even:
        shard_rows = M // OP.world_size
        if row // shard_rows == rank:
            source_row -= rank * shard_rows
            desc = gathered.own_desc
    num_k_tiles = tl.cdiv(K, TILE.block_k)
    acc = tile_product(
        desc, b_desc, source_row, col, num_k_tiles, TILE.block_m, PART_N, TILE.block_k, TILE.transpose_b
    )
    return biased(acc, scale, bias, col, N, PART_N), row, col


@triton.jit(do_not_specialize=["M", "K", "flag_block_rows", "num_whole_tiles"])
def ag_gemm_kernel(
    a_desc,
    own_desc,
    b_desc,
    half_b_desc,
    c_desc,
    channel,
    tables,
    scales,
    bias,
    M,
    N,
    K,
    flag_block_rows,
    num_whole_tiles,
    OP: tl.constexpr,
    TARGET: tl.constexpr,
):
    """C [M, N] = gathered A [M, K] @ B, persistent; a tile starts when the rows that it reads have arrived.

    It waits (acquire, then a fence for the descriptor loads) for the peers' pushes or copy engines of this epoch. Each
    rank enqueues its own sends before this kernel, and they need no SM that this grid could take (it leaves theirs
    free), so every rank's rows arrive whatever the others' grids wait for.

    Program p computes tiles p, p + num_programs, ... of the gather's order, this rank's own rows first, as one
    pipelined loop (``flatten``): a tile waits when its first loads are issued, during the last products of the tile
    before, and the wait costs nothing if the rows have arrived (``dl.wait_token``).

    Args:
        a_desc, own_desc: The gathered rows, and this rank's own rows in the caller's tensor.
        b_desc, half_b_desc, c_desc: B in whole tiles and in halves of them, and the result.
        channel: ``ChannelPointers``.
        tables: ``RowTables``.
        scales: ``TensorScales`` of FP8 operands (of A one for the rows of all ranks), else None.
        bias: [N], added before the result is rounded, or None.
        M, N, K, flag_block_rows, num_whole_tiles: Sizes; a flag stands for ``flag_block_rows`` rows.
        OP: ``AgGemmConstants``. ``even``: every rank owns the same whole number of row tiles, and this rank's own rows
            are read through ``own_desc``, so that they need not be copied before the GEMM; else the order is a table,
            a tile may wait for several ranks, and this rank's own rows have been copied to their place.
            ``split_last_wave``: the tiles from ``num_whole_tiles`` on, at most half a wave, are computed in halves of
            columns, as in ``gemm_kernel``.
        TARGET: See ``runtime.device.kernel_target``.
    """
    TILE: tl.constexpr = OP.tile
    HALF_N: tl.constexpr = TILE.block_n // 2
    epoch = dl.next_epoch(channel.tickets + 1)  # slot 1: the role that waits
    rank = dl.rank(channel.control)
    scale = None
    if scales is not None:
        scale = tl.load(scales.a) * tl.load(scales.b)
    gathered = _Gathered(a_desc, own_desc, tables, M, flag_block_rows, epoch, rank)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    for tile_id in tl.range(program, num_whole_tiles, num_programs, flatten=True):
        acc, row, col = _gathered_product(
            tile_id, 0, gathered, b_desc, scale, bias, channel, N, K, TILE.block_n, OP, TARGET
        )
        store_tile(c_desc, acc, row, col, TILE.block_m, TILE.block_n, TILE.split_store)
    if OP.split_last_wave:
        num_halves = 2 * (tl.cdiv(M, TILE.block_m) * tl.cdiv(N, TILE.block_n) - num_whole_tiles)
        for half_id in range(program, num_halves, num_programs):
            tile_id = num_whole_tiles + half_id // 2
            acc, row, col = _gathered_product(
                tile_id, half_id % 2, gathered, half_b_desc, scale, bias, channel, N, K, HALF_N, OP, TARGET
            )
            store_tile(c_desc, acc, row, col, TILE.block_m, HALF_N, False)


class AgGemmPlan(Plan[TPContext]):
    """Gathered [m, k] times a weight [n, k] (``nt``) or [k, n] (``nn``); constructed collectively. Calls are
    recorded if they are short and send by copy engines.

    Args:
        context: Whose buffers and streams are used.
        partition: The rows of all ranks.
        problem: The op at its shape.
        choice: Tiles and the way to move rows.
        keeps_gathered: Whether ``gathered`` must hold all rows after a call, not only the peers'.
    """

    def __init__(
        self,
        context: TPContext,
        partition: RowPartition,
        problem: Problem,
        choice: Choice,
        keeps_gathered: bool = False,
    ) -> None:
        (n, k), dtype = (problem.n, problem.k), problem.dtype
        self.m, self.n, self.k, self._out_dtype = problem.m, n, k, result_dtype(dtype)
        self.config = config = choice.config
        self._a_block, transpose_b = (config.block_m, config.block_k), problem.layout == "nt"
        self.gather = gather = Gather(
            context, partition, padded_columns(k, dtype), dtype, choice.gather, config.block_m
        )
        is_recorded = (
            context.is_cuda
            and not context.varies
            and not gather.by_push
            and is_short(problem, choice, context.machine)
        )
        super().__init__(context, gather.channel, is_recorded=is_recorded)
        even = partition.is_even(config.block_m)
        self._tables = context.row_tables("gather", partition, config.block_m)
        self.gathered = gather.buffer.local[:, :k]
        self._a = make_descriptor(self.gathered, self._a_block)
        num_programs = max(1, min(context.num_sms - gather.reserved_sms, config.num_tiles(self.m, n)))
        self._out_columns = padded_columns(n, self._out_dtype)
        self._reads_own = even
        self._keeps_gathered = keeps_gathered
        self._num_whole_tiles = config.num_whole_tiles(self.m, n, num_programs)
        split_last_wave = self._num_whole_tiles < config.num_tiles(self.m, n)
        self._b_block = config.b_block(transpose_b)
        self._half_b_block = config.b_block(transpose_b, halved=split_last_wave)
        self._launch = context.launch(
            ag_gemm_kernel,
            num_programs,
            {
                "OP": AgGemmConstants(
                    config.tile(transpose_b=transpose_b), FLAGS_PER_RANK, context.world_size, even, split_last_wave
                ),
                "TARGET": context.target,
            },
            **config.launch_options,
        )

    @property
    def identity(self) -> tuple:
        """Plans with the same identity share one compiled GEMM kernel."""
        return self._launch.identity

    def run(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: TensorScales | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``x``: this rank's rows, contiguous, with ``padded_columns``. Returns [m, n], contiguous."""
        out = x.new_empty(self.m, self._out_columns, dtype=self._out_dtype)
        added = 0 if bias is None else bias.data_ptr()
        scaled_by = scales.addresses if scales else ()
        key = (x.data_ptr(), weight.data_ptr(), weight.stride(), out.data_ptr(), added, *scaled_by)
        recorded_as = (self, *key) if self._is_recorded else None
        self.replay(recorded_as, lambda: self._enqueue(x, weight, scales, bias, out, key), (x.data_ptr(),))
        return out if self._out_columns == self.n else out[:, : self.n].contiguous()

    def _enqueue(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: TensorScales | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        key: tuple,
    ) -> bool:
        """Returns whether the weight is read in place, so that the addresses and strides in ``key`` determine the
        call."""
        is_as_given = True
        self.gather.start(x, copies_own=not self._reads_own)
        with self.aborting:
            if not self._launch.repeat(key, current_handle(self.context.device)):
                operand = aligned_operand(weight)
                is_as_given = operand is weight
                arguments = self._arguments(x, operand, scales, bias, out[:, : self.n])
                self._launch(*arguments, key=key if is_as_given else None)
            if self._keeps_gathered and self._reads_own:
                self.gather.copy_own(x)
        self.gather.finish()
        return is_as_given

    def _arguments(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: TensorScales | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> tuple:
        return (
            self._a,
            make_descriptor(x[:, : self.k], self._a_block) if self._reads_own else self._a,
            make_descriptor(weight, self._b_block),
            make_descriptor(weight, self._half_b_block),
            make_descriptor(out, self.config.store_block),
            self.gather.pointers,
            self._tables,
            scales,
            bias,
            self.m,
            self.n,
            self.k,
            self.gather.flag_block_rows,
            self._num_whole_tiles,
        )

    def compile(self, x: torch.Tensor, weight: torch.Tensor, scales: TensorScales | None = None) -> None:
        """Compiles what a call with these operands would run, without running it; nothing is sent."""
        out = empty_aligned(self.m, self.n, self._out_dtype, x.device)
        self._launch.compile(*self._arguments(x, aligned_operand(weight), scales, None, out))
        self.gather.compile(x)


class LibraryAgGemmPlan(Plan[TPContext]):
    """As ``AgGemmPlan``, by cuBLAS; constructed collectively. All ranks have as many rows, sent by copy engines."""

    def __init__(
        self, context: TPContext, partition: RowPartition, problem: Problem, keeps_gathered: bool = False
    ) -> None:
        k, dtype, self.m, self.n = problem.k, problem.dtype, problem.m, problem.n
        self.gather = Gather(context, partition, padded_columns(k, dtype), dtype, GatherPlan("copy"), block_m=1)
        super().__init__(context, self.gather.channel)
        self.gathered = self.gather.buffer.local[:, :k]
        self._rows = [slice(*ends) for ends in zip(partition.starts, partition.starts[1:])]
        self._transpose_b, self._keeps_gathered = problem.layout == "nt", keeps_gathered

    @property
    def identity(self) -> tuple:
        """There is no kernel of its own."""
        return ("cuBLAS", self._transpose_b)

    def run(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: TensorScales | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As of ``AgGemmPlan``."""
        out = x.new_empty(self.m, self.n, dtype=result_dtype(x.dtype))

        def multiply(ranks: Sequence[int]) -> None:
            (rank,) = ranks
            is_local, rows = rank == self.context.rank, self._rows[rank]
            given = x[:, : self.gathered.shape[1]] if is_local else self.gathered[rows]
            library_product(given, weight, out[rows], transpose_b=self._transpose_b, scales=scales, bias=bias)
            if is_local and self._keeps_gathered:
                self.gather.copy_own(x)

        self.gather.start(x, copies_own=False)
        self.gather.consume([[rank] for rank in self.gather.arrival_order], multiply)
        return out

    def compile(self, x: torch.Tensor, weight: torch.Tensor, scales: TensorScales | None = None) -> None:
        """There is nothing to compile."""


def ag_gemm_by(
    context: TPContext, partition: RowPartition, problem: Problem, choice: Choice, keeps_gathered: bool = False
) -> AgGemmPlan | LibraryAgGemmPlan:
    """The plan of an AG-GEMM as ``choice`` says (collective)."""
    if choice.by_library and partition.is_even(1) and can_copy(context):
        return LibraryAgGemmPlan(context, partition, problem, keeps_gathered)
    return AgGemmPlan(context, partition, problem, choice, keeps_gathered)


def plan_ag_gemm(
    context: TPContext,
    operands: tuple[Any, ...],
    layout: Layout,
    counts: tuple[int, ...] | None,
    gather: GatherPlan | None,
    keeps_gathered: bool,
) -> AgGemmPlan | LibraryAgGemmPlan | None:
    """The plan of ``ag_gemm`` for these ``Operands`` (collective); None if no rank has rows."""
    shapes = Operands(*operands)
    n, k = shapes.sizes("ag_gemm", context, layout)
    partition = row_partition("ag_gemm", context, shapes.x_shape, counts, total=False)
    if partition.num_rows == 0:
        columns = padded_columns(k, shapes.dtype)
        agree_on_nothing(context, (context.gather_channel,), columns=columns, dtype=shapes.dtype)
        return None
    problem = Problem("ag_gemm", partition.num_rows, n, k, layout, shapes.dtype, context.world_size)
    choice = context.choose(problem)
    if gather is not None:
        choice = replace(choice, gather=gather, by_library=False)
    return ag_gemm_by(context, partition, problem, choice, keeps_gathered)


@outside_compile
def ag_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    context: TPContext,
    layout: Layout = "nt",
    row_counts: Sequence[int] | None = None,
    return_gathered: bool = False,
    plan: GatherPlan | None = None,
    scales: TensorScales | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """All-gather of ``x`` along dimension 0, times ``weight``: Megatron's column-linear forward and row-linear dgrad.

    Args:
        x: [s / world, ..., K], this rank's rows; bf16, fp16 or, on Hopper, FP8 (on CPU fp32 too), any strides.
        weight: [N, K] (``nt``: gathered @ weight.T) or [K, N] (``nn``: gathered @ weight; not of FP8).
        context: The group's context.
        layout: Layout of ``weight``.
        row_counts: Rows (all leading dimensions multiplied) of each rank, if they differ.
        return_gathered: Also return the gathered rows [total rows, K]: a view that the next gather of this context
            overwrites.
        plan: How to move the rows; None: by the shape (``tp.choices``).
        scales: Scales of FP8 operands; the scale of ``x`` is the same on all ranks.
        bias: [N], of the result's type: added in fp32 to the (scaled) product before that is rounded, as in cuBLAS's
            epilogue.

    Returns:
        [s, ..., N] ([total rows, N] with ``row_counts``), bf16 of FP8 operands (``torch._scaled_mm`` with fast
        accumulation), and the gathered rows if requested.

    Raises:
        NotSupportedError: An argument of this rank does not fit.
        MismatchError: The ranks' calls differ (at the first call of a shape here, else at the next ``check``).
        PeerTimeoutError: A peer did not arrive (CPU: here, GPU: at a later call or ``context.synchronize()``).
    """
    counts = None if row_counts is None else tuple(row_counts)
    check_scaled("ag_gemm", x, scales)
    if bias is not None:
        check_bias("ag_gemm", x, bias, weight.shape[0 if layout == "nt" else -1] if weight.dim() else 0)
    context.enter("ag_gemm", x.shape if counts is None else counts, weight.shape, x.dtype)
    operands = (x.shape, weight.shape, x.dtype, weight.dtype, x.device, weight.device)
    made = context.plan(plan_ag_gemm, operands, layout, counts, plan, return_gathered)
    if made is None:
        n, k = weight.shape if layout == "nt" else weight.shape[::-1]
        shape = (0,) if counts is not None else (x.shape[0] * context.world_size, *x.shape[1:-1])
        empty = x.new_empty(*shape, n, dtype=result_dtype(x.dtype))
        return (empty, x.new_empty(0, k)) if return_gathered else empty
    y = made.run(sendable_rows(x), weight, scales, bias)
    if counts is None and x.dim() > 2:
        y = y.view(x.shape[0] * context.world_size, *x.shape[1:-1], made.n)
    return (y, made.gathered) if return_gathered else y
