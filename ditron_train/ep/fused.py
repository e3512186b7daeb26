"""Host side of the grouped GEMM with combine behind it, one kernel at task level."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ditron_train.ep.context import EPContext
from ditron_train.ep.fused_kernels import gemm_combine_kernel, plan_tiles
from ditron_train.ep.group_gemm import GemmOperands, RowTiles, gemm_operands, row_tiles
from ditron_train.ep.launch import Kind, check_tokens, launch, move_tile, signature, sum_constants
from ditron_train.ep.layout import Layout
from ditron_train.ep.orders import SumOrder

__all__ = ["gemm_combine", "gemm_constants", "layout_tiles", "new_board", "num_programs"]

_BOARD_WORDS = 128  # in front of the counters, see fused_kernels
#: Row tiles that a program of a plan orders.
PLAN_BLOCK = 128


def layout_tiles(layout: Layout) -> RowTiles:
    """The row tiles of a layout's experts; listed once, forward and backward use them."""
    if layout.tiles is None:
        layout.tiles = row_tiles(layout.expert_tokens, layout.num_rows)
    return layout.tiles


def new_board(tiles: RowTiles) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Memory for the order of the row tiles and for a board, and how many programs fill both."""
    memory = torch.empty(2 * tiles.max_tiles + _BOARD_WORDS, dtype=torch.int32, device=tiles.tiles.device)
    return memory[: tiles.max_tiles], memory[tiles.max_tiles :], tiles.max_tiles // PLAN_BLOCK


def _plan(layout: Layout, context: EPContext, tiles: RowTiles) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of the row tiles, and a fresh board."""
    shape = layout.shape
    order, board, num_blocks = new_board(tiles)
    constants = dict(WORLD_SIZE=shape.world_size, SLOTS=shape.slots, BLOCK_M=tiles.block_m, BLOCK=PLAN_BLOCK)
    launch(context, plan_tiles, num_blocks, constants, 8)(
        tiles.tiles, layout.sources, order, board, context.dispatch_channel.control, tiles.max_tiles
    )
    return order, board


def gemm_constants(operands: GemmOperands, tiles: RowTiles, context: EPContext) -> dict[str, object]:
    """Of the grouped GEMM inside a kernel at task level."""
    config = operands.config
    return dict(
        GROUP_M=config.group_m, BLOCK_M=tiles.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        SPLIT_STORE=config.split_store, TARGET=context.target,
    )  # fmt: skip


def num_programs(context: EPContext) -> int:
    """Programs of a kernel at task level: in the interpreter one serves all queues."""
    return 1 if context.target == "interpreter" else context.move.num_programs


def _combine_constants(
    layout: Layout, context: EPContext, operands: GemmOperands, tiles: RowTiles, order: SumOrder, *, with_grads: bool,
    transpose: bool,
) -> dict[str, object]:  # fmt: skip
    """Of ``gemm_combine_kernel``."""
    rows, columns = move_tile(operands.n, context.fused.place_elements)
    return dict(
        WITH_GRADS=with_grads, TRANSPOSE_B=transpose, **sum_constants(layout, order), ROWS=rows,
        SUM_ROWS=move_tile(operands.n, context.move.sum_elements)[0], BLOCK_H=columns, ITEM_TOKENS=context.move.item_tokens,
        NUM_SENDERS=0 if num_programs(context) == 1 else context.fused.num_senders,
        TILE_COUNT=operands.config.num_warps if context.target.startswith("sm_") else 1,
        **gemm_constants(operands, tiles, context),
    )  # fmt: skip


def gemm_combine(
    x: torch.Tensor,
    layout: Layout,
    context: EPContext,
    weights: Sequence[torch.Tensor],
    *,
    order: SumOrder,
    transpose: bool = True,
    row_grads: torch.Tensor | None = None,
    probs_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``group_gemm``, then ``combine`` of its rows, in one kernel whose finished row tiles leave at once.

    Args:
        x: [num_rows, K], bf16 or fp16 (fp32 too in the interpreter).
        layout: Of a routing that was dispatched.
        context: Of the group.
        weights: As ``group_gemm``: [hidden, K] each, with ``transpose=False`` [K, hidden].
        order: As ``combine``.
        transpose: Whether weights are stored [hidden, K].
        row_grads: As ``combine``.
        probs_dtype: As ``combine``.

    Returns:
        out [num_tokens, hidden]; the gradients [num_tokens, num_experts], or None.

    Raises:
        NotSupportedError: What ``group_gemm`` or ``combine`` does not take.
        PeerTimeoutError, MismatchError: Of an earlier call.
    """
    check_tokens("gemm_combine", x, context)
    channel, shape = context.combine_channel, layout.shape
    context.enter_move(channel, layout)
    x, tiles, with_grads = x.contiguous(), layout_tiles(layout), row_grads is not None
    operands = gemm_operands("gemm_combine", x, weights, tiles, transpose=transpose)
    y, hidden = operands.y, operands.n
    tile_order, board = _plan(layout, context, tiles)
    out = torch.empty(layout.num_tokens, hidden, dtype=x.dtype, device=x.device)
    prob_grads = torch.zeros(
        layout.num_tokens if with_grads else 0, shape.num_experts, dtype=probs_dtype, device=x.device
    )
    buffer = context.rows_buffer(layout.place_capacity, layout.place_capacity, hidden, x.dtype)
    grads = context.grads_buffer(layout.place_capacity)
    constants = _combine_constants(layout, context, operands, tiles, order, with_grads=with_grads, transpose=transpose)
    grads_like = row_grads.contiguous() if with_grads else x
    config = operands.config
    launch(
        context, gemm_combine_kernel, num_programs(context), constants, config.num_warps, x.dtype, grads_like.dtype, probs_dtype,
        num_stages=config.num_stages,
    )(
        y, grads_like, out, prob_grads, layout.origins, layout.chunk_entries, layout.expert_ids, layout.token_places,
        buffer.local, buffer.addresses, grads.local, grads.addresses, channel.signals.local, channel.signals.addresses,
        channel.ready.local, channel.ready.addresses,
        signature(context, channel, hidden, x.dtype, Kind.DGRAD_COMBINE if with_grads else Kind.GEMM_COMBINE),
        channel.tickets, channel.control, layout.limits,
        operands.a, operands.b, operands.c, operands.places, tiles.tiles, tile_order, board,
        layout.num_tokens, hidden, operands.k, shape.num_experts,
    )  # fmt: skip
    return out, prob_grads if with_grads else None
