"""``a2a_gemm``: the exchange of heads for tokens, then a projection; kernel, plan and op.

    all_to_all_single(arrived, chunks of ``parts``, those of rank r to rank r)
    y = torch.cat(list(arrived), dim=1) @ weight.t()

Timeline of ``a2a_gemm`` on any rank. Some programs of the kernel push, then join the others:

    native   compute   | reorder |                       | GEMM                                                 |
    native   NCCL      |         | all-to-all            |
    fused    pushes    | flag block 0 to all | block 1 to all | block 2 to all |
    fused    compute   |                     | GEMM: flag block 0 | flag block 1  | flag block 2  |
    fused    waits     |                     | ^ flags of block 0 | ^ of block 1  | ^ of block 2  |

One kernel on the current stream. It gives the bits of reorder, all-to-all and GEMM wherever the tile GEMM gives
cuBLAS's (``policy.gate`` compares them). What else was tried, with times: ``docs/measurements/sp.md``.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.gemm.kernels import store_tile, tile_product
from ditron_train.gemm.operands import aligned_operand, empty_aligned, make_descriptor
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.runtime.sizes import next_power_of_2
from ditron_train.schedule.tiles import grouped_tile
from ditron_train.sp import transfer_sizes
from ditron_train.sp.choices import Product, ProjectionChoice, choose
from ditron_train.sp.context import SPContext
from ditron_train.sp.layouts import HeadsLayout
from ditron_train.sp.transfer import (
    A2A_GEMM,
    TensorKind,
    Transfer,
    WeightLayout,
    check_gemm,
    check_parts,
    kind_of,
    kinds_of,
    memory_of,
    next_work,
    push_item,
    start_epoch,
    table_kind,
)
from ditron_train.stream.events import current_handle


@triton.jit
def _num_behind(signals_ptr, num_flags, epoch):
    """How many of ``num_flags`` flags are not at ``epoch`` yet, the same number in all threads; orders nothing.

    At least as many lanes as threads: no element is loaded twice, so warps cannot see different values.
    """
    lanes = tl.arange(0, 1024)
    behind = tl.cast(0, tl.int32)
    for first in range(0, num_flags, 1024):
        flags = first + lanes
        seen = tl.load(signals_ptr + flags, mask=flags < num_flags, other=epoch, volatile=True)
        behind += tl.sum(((seen - epoch) < 0).to(tl.int32), axis=0)
    return behind


@triton.jit
def _push_drawn(pointers, channel, shape, rank, epoch, COPY: tl.constexpr, TARGET: tl.constexpr):
    """Pushes flag blocks of this rank's share, drawn from the counter of this epoch, until none is left."""
    counter_ptr = channel.tickets + 2 + (epoch & 1)
    num_items = tl.cdiv(shape.M, COPY.flag_block_rows) * COPY.world_size
    work = next_work(counter_ptr)
    while work < num_items:
        item = work
        work = next_work(counter_ptr)
        push_item(item, pointers, channel, shape, rank, epoch, COPY, TARGET)


class _Turns(NamedTuple):
    """The turns of one program: how its early tiles are counted (first, step), its first late tile, all its turns."""

    num_early: Any
    first_early: Any
    step_early: Any
    first_late: Any
    total: Any


@triton.jit
def _deal(num_tiles, num_early_tiles, num_push):
    """The turns of this program: see ``a2a_gemm_kernel``; its twin in NumPy: ``tests/support/orders_of_tiles.py``."""
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    step_early = num_programs - num_push
    first_early = program - num_push
    num_early = tl.where(
        first_early >= 0, tl.cdiv(tl.maximum(num_early_tiles - first_early, 0), tl.maximum(step_early, 1)), 0
    )
    first_late = num_early_tiles + program
    total = num_early + tl.cdiv(tl.maximum(num_tiles - first_late, 0), num_programs)
    return _Turns(num_early, first_early, step_early, first_late, total)


@triton.jit
def _place_of_turn(
    turn, turns, num_tiles_m, num_tiles_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr
):
    """First row and column of a program's tile in its turn ``turn``."""
    num_programs = tl.num_programs(0)
    tile_id = tl.where(
        turn < turns.num_early,
        turns.first_early + turn * turns.step_early,
        turns.first_late + (turn - turns.num_early) * num_programs,
    )
    tile_m, tile_n = grouped_tile(tile_id, num_tiles_m, num_tiles_n, GROUP_M)
    return tile_m * BLOCK_M, tile_n * BLOCK_N


@triton.jit(do_not_specialize=["num_push", "num_early_tiles"])
def a2a_gemm_kernel(
    a_desc,
    b_desc,
    c_desc,
    pointers,
    channel,
    shape,
    N,
    K,
    num_push,
    num_early_tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TRANSPOSE_B: tl.constexpr,
    SPLIT_STORE: tl.constexpr,
    COPY: tl.constexpr,
    RANKS_POW2: tl.constexpr,
    TARGET: tl.constexpr,
):
    """C [M, N] = ``to_sequence`` buffer A [M, K] @ B, persistent; a row tile starts when all ranks' columns of it
    arrived.

    The first ``num_push`` programs push this rank's share to every rank (``push_item``) before they multiply. They
    draw their work from a counter (ticket slots 2 and 3 by epoch parity; the other one is reset for the next launch),
    so those that run do it all; and programs start in their order: no program waits for one that finds no SM, because
    another stream's kernel holds it.

    The sums run over K in order, so a tile needs every source. It waits for the flags of its flag block, which is one
    row tile or several. Once a program has seen that everything is there, it goes on without waits, in one flattened
    loop of tiles and K blocks: there the loads of a tile run under the stores of the one before.

    The first ``num_early_tiles`` tiles are dealt to the programs that do not push, the others to all: so the push
    takes its SMs for as long as it lasts.
    """
    WORLD_SIZE: tl.constexpr = COPY.world_size
    FLAG_BLOCK_ROWS: tl.constexpr = COPY.flag_block_rows
    epoch = dl.next_epoch(channel.tickets)
    dl.next_epoch(channel.tickets + 1)  # the exchange's receiving kernel counts there: in step
    rank = dl.rank(channel.control)
    num_flag_blocks = tl.cdiv(shape.M, FLAG_BLOCK_ROWS)
    start_epoch(channel, epoch, rank, WORLD_SIZE, TARGET)
    if tl.program_id(0) < num_push:
        dl.await_peers(channel.ready, epoch, channel.control, rank, WORLD_SIZE, TARGET)
        _push_drawn(pointers, channel, shape, rank, epoch, COPY, TARGET)
    num_tiles_m = tl.cdiv(shape.M, BLOCK_M)
    num_tiles_n = tl.cdiv(N, BLOCK_N)
    num_k_tiles = tl.cdiv(K, BLOCK_K)
    turns = _deal(num_tiles_m * num_tiles_n, num_early_tiles, num_push)
    turn = tl.cast(0, tl.int32)
    behind = tl.cast(1, tl.int32)  # flags of all flag blocks of all ranks that were not seen yet
    while (turn < turns.total) & (behind > 0):
        row, col = _place_of_turn(turn, turns, num_tiles_m, num_tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        flag_block = row // FLAG_BLOCK_ROWS
        flags = channel.signals + flag_block
        dl.wait_ranks(flags, num_flag_blocks, epoch, channel.control, flag_block, WORLD_SIZE, RANKS_POW2, TARGET)
        dl.fence_async_proxy(TARGET)
        acc = tile_product(a_desc, b_desc, row, col, num_k_tiles, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSE_B)
        store_tile(c_desc, acc, row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
        turn += 1
        behind = _num_behind(channel.signals, WORLD_SIZE * num_flag_blocks, epoch)
    dl.fence(TARGET)  # the acquire of what _num_behind saw
    dl.fence_async_proxy(TARGET)
    for late_turn in tl.range(turn, turns.total, 1, flatten=True):
        row, col = _place_of_turn(late_turn, turns, num_tiles_m, num_tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        acc = tile_product(a_desc, b_desc, row, col, num_k_tiles, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSE_B)
        store_tile(c_desc, acc, row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
    dl.verify_peers(channel.ready, channel.signature, epoch, channel.control, rank, WORLD_SIZE, TARGET)


class A2AGemmPlan(Transfer):
    """All heads of the local rows times a weight, the push of this rank's share in the same kernel."""

    def __init__(
        self,
        context: SPContext,
        layout: HeadsLayout,
        m: int,
        n: int,
        dtype: torch.dtype,
        weight_layout: WeightLayout,
        choice: ProjectionChoice,
        packed: bool,
    ) -> None:
        config = choice.config
        self.config, self.n = config, n
        self.k = k = context.world_size * layout.num_columns
        flag_block_rows = transfer_sizes.flag_block_rows(m, config.block_m, layout.num_columns * dtype.itemsize)
        super().__init__(context, A2A_GEMM, layout, m, dtype, k=n, flag_block_rows=flag_block_rows, packed=packed)
        self._a = make_descriptor(self.buffer.local[:, :k], (config.block_m, config.block_k))
        self._b_block = config.b_block(weight_layout == "nt")
        num_tiles, world = config.num_tiles(m, n), context.world_size
        if context.is_cuda:
            num_programs = context.num_sms
            self._deal = transfer_sizes.deal_of(m, n, k, world, config, num_programs, dtype.itemsize, choice.programs)
        else:
            num_programs, self._deal = 2, (1, num_tiles // 3)
        self._launch = context.launch(
            a2a_gemm_kernel,
            num_programs,
            {
                **config.tile_constants(transpose_b=weight_layout == "nt"),
                "COPY": self.blocks,
                "RANKS_POW2": next_power_of_2(world),
                "TARGET": context.target,
            },
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )

    def borrowed(self) -> torch.Tensor:
        """The rows [m, k] that the last call multiplied; without padding a view of the buffer, valid until the next
        op of the context."""
        return self.buffer.local[:, : self.k].contiguous()

    def run(
        self, parts: Sequence[torch.Tensor], weight: torch.Tensor, keep: bool, table: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """([m, n], what was multiplied [m, k] or None)."""
        context = self.context
        parts = [part.contiguous() for part in parts]
        out = empty_aligned(self.m, self.n, self.dtype, context.device)
        key = (weight.stride(), *memory_of(weight, out, *parts, table))
        if not self._launch.repeat(key, current_handle(context.device)):
            operand = aligned_operand(weight)
            self._launch(
                self._a,
                make_descriptor(operand, self._b_block),
                make_descriptor(out, self.config.store_block),
                *self.copy_arguments(parts, table),
                self.n,
                self.k,
                *self._deal,
                key=key if operand is weight else None,
            )
        context.leave(self.channel)
        return out.contiguous(), self.buffer.local[:, : self.k].clone() if keep else None


def _plan_a2a_gemm(
    context: SPContext,
    kinds: tuple[tuple, ...],
    weight_kind: tuple,
    layout: HeadsLayout,
    weight_layout: WeightLayout,
    choice: ProjectionChoice | None,
    table: tuple | None,
) -> A2AGemmPlan:
    """What ``a2a_gemm`` needs for operands of these kinds (collective)."""
    first, world = check_parts("a2a_gemm", context, layout, kinds, table, whole_sequence=True), context.world_size
    weight, k, dtype = TensorKind(*weight_kind), world * layout.num_columns, first.dtype
    check_gemm("a2a_gemm", context, first, k, -1, weight, weight_layout)
    m, n = first.shape[:-2].numel() // world, weight.shape[0 if weight_layout == "nt" else 1]
    chosen = choice or choose(Product("a2a_gemm", weight_layout, m, n, k, dtype), context)
    return A2AGemmPlan(context, layout, m, n, dtype, weight_layout, chosen, table is not None)


@outside_compile
def a2a_gemm(
    parts: Sequence[torch.Tensor],
    weight: torch.Tensor,
    *,
    context: SPContext,
    layout: HeadsLayout,
    weight_layout: WeightLayout = "nt",
    return_gathered: Literal["no", "copy", "borrow"] = "no",
    row_table: torch.Tensor | None = None,
    choice: ProjectionChoice | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Gives every rank all heads of its chunks and projects them: the output projection's forward, QKV's dgrad.

    The bits are those of the reorder and all-to-all of each part, then the GEMM over all heads.

    Args:
        parts: One tensor a part, [s, ..., heads of this rank, head size], in the order of the sequence.
        weight: [N, world * layout.num_columns] (``nt``) or its transpose (``nn``).
        context: The group's context.
        layout: Columns of one rank.
        weight_layout: How ``weight`` is.
        return_gathered: ``copy``: also return what was multiplied, [local rows, world * layout.num_columns];
            ``borrow``: the same, which may be in the context's buffer: until the next op of the context.
        row_table: As ``gemm_a2a``.
        choice: Tile sizes and programs that move data; by the shape if None. They do not change bits.

    Returns:
        [s / world, ..., N], and the gathered rows if asked for.

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``gemm_a2a``.
    """
    context.enter("a2a_gemm", parts[0].shape, weight.shape, weight.dtype)
    kinds, table = kinds_of(parts), table_kind(row_table)
    plan = context.plan(_plan_a2a_gemm, kinds, kind_of(weight), layout, weight_layout, choice, table)
    out, gathered = plan.run(parts, weight, return_gathered == "copy", row_table)
    if return_gathered == "borrow":
        gathered = plan.borrowed()
    lead = parts[0].shape[:-2]
    y = out.view(lead[0] // context.world_size, *lead[1:], plan.n)
    return (y, gathered) if gathered is not None else y
