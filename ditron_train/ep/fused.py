"""Host side of the grouped GEMM with combine behind it, one kernel at task level."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ditron_train.ep.arguments import Produced, Sums, TileTasks
from ditron_train.ep.context import EPContext
from ditron_train.ep.fused_kernels import gemm_combine_kernel, plan_tiles
from ditron_train.ep.group_gemm import gemm_operands
from ditron_train.ep.launch import Kind, check_tokens, launch, pointers, sum_sizes
from ditron_train.ep.layout import Layout
from ditron_train.ep.orders import SumOrder
from ditron_train.ep.row_tiles import RowTiles, row_tiles

_BOARD_WORDS = 128  # in front of the counters, see fused_kernels
#: Rows by expert, weights, whether these are transposed, the result and some experts: multiplies the rows of those.
FewProduct = Callable[[torch.Tensor, Sequence[torch.Tensor], bool, torch.Tensor, Sequence[int]], None]
_PLAN_BLOCK = 128  # row tiles that a program of a plan orders


def layout_tiles(layout: Layout) -> RowTiles:
    """The row tiles of a layout's experts; listed once, forward and backward use them."""
    if layout.tiles is None:
        layout.tiles = row_tiles(layout.expert_tokens, layout.num_rows)
    return layout.tiles


def _plan(
    layout: Layout, context: EPContext, tiles: RowTiles, fewest_rows: int, tile_count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of the row tiles, and a fresh board; ``tile_count``: what a row tile's counter ends at."""
    shape = layout.shape
    memory = torch.empty(2 * tiles.max_tiles + _BOARD_WORDS, dtype=torch.int32, device=tiles.tiles.device)
    order, board = memory[: tiles.max_tiles], memory[tiles.max_tiles :]
    constants = dict(
        WORLD_SIZE=shape.world_size, SLOTS=shape.slots, BLOCK_M=tiles.block_m, FEWEST=fewest_rows, BLOCK=_PLAN_BLOCK
    )
    control = context.dispatch_channel.control
    launch(context, plan_tiles, tiles.max_tiles // _PLAN_BLOCK, constants, 8)(
        tiles.tiles, layout.tables.sources, order, board, control, tiles.max_tiles, tile_count
    )
    return order, board


def gemm_combine(
    x: torch.Tensor,
    layout: Layout,
    context: EPContext,
    weights: Sequence[torch.Tensor],
    *,
    order: SumOrder,
    fewest_rows: int = 0,
    few: FewProduct | None = None,
) -> torch.Tensor:
    """``group_gemm``, then ``combine`` of its rows, in one kernel whose finished row tiles leave at once.

    Args:
        x: [num_rows, K], bf16 or fp16 (fp32 too in the interpreter).
        layout: Of a routing that was dispatched.
        context: Of the group.
        weights: As ``group_gemm``: [hidden, K] each.
        order: As ``combine``.
        fewest_rows: Experts of fewer rows are multiplied by ``few``, in front of the kernel.
        few: (x, weights, True, result, those experts) -> writes their rows of the result.

    Returns:
        out [num_tokens, hidden].

    Raises:
        NotSupportedError: What ``group_gemm`` or ``combine`` does not take.
        PeerTimeoutError, MismatchError: Of an earlier call.
    """
    check_tokens("gemm_combine", x, context)
    channel, shape = context.combine_channel, layout.shape
    context.enter_move(channel, layout)
    x, tiles = x.contiguous(), layout_tiles(layout)
    operands = gemm_operands("gemm_combine", x, weights, tiles, transpose=True)
    y, hidden = operands.y, operands.n
    out = torch.empty(layout.num_tokens, hidden, dtype=x.dtype, device=x.device)
    no_grads = torch.empty(0, shape.num_experts, dtype=torch.float32, device=x.device)
    buffers = context.row_buffers(layout.place_capacity, hidden, x.dtype)
    sizes = sum_sizes(context, layout, order, hidden, context.fused.place_elements, with_grads=False)
    config = operands.config
    programs = 1 if context.target == "interpreter" else context.move.num_programs  # the interpreter: one serves all
    sizes = sizes._replace(
        NUM_SENDERS=min(context.fused.num_senders, programs // 2),
        TILE_COUNT=config.num_warps if context.target.startswith("sm_") else 1,
    )
    if few is not None:
        few(x, weights, True, y, layout.experts_below(fewest_rows))
    tile_count = -(-hidden // config.block_n) * sizes.TILE_COUNT
    tile_order, board = _plan(layout, context, tiles, 0 if few is None else fewest_rows, tile_count)
    constants = {"SUM": sizes, "GEMM": operands.sizes}
    dtypes = (x.dtype, no_grads.dtype)
    tables = layout.tables
    sums = Sums(out, no_grads, tables.chunk_entries, layout.expert_ids, layout.token_places)
    given = pointers(context, channel, hidden, x.dtype, Kind.GEMM_COMBINE)
    descriptors, tasks = (
        (operands.a, operands.b, operands.c),
        TileTasks(operands.places, tiles.tiles, tile_order, board),
    )
    sizes_of_call = (layout.num_tokens, hidden, operands.k, shape.num_experts)
    launch(context, gemm_combine_kernel, programs, constants, config.num_warps, *dtypes, num_stages=config.num_stages)(
        Produced(y, x, layout.origins), sums, buffers, given, tables.limits, *descriptors, tasks, *sizes_of_call
    )
    return out
