"""Host side of the kernels at task level: dispatch with the grouped GEMM behind it, a grouped GEMM with combine behind
it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ditron_train.ep.context import EPContext
from ditron_train.ep.fused_kernels import dispatch_gemm_kernel, gemm_combine_kernel, plan_tiles
from ditron_train.ep.group_gemm import GemmOperands, RowTiles, gemm_operands, row_tiles
from ditron_train.ep.launch import Kind, check_tokens, launch, move_tile, signature, sum_constants
from ditron_train.ep.layout import Layout
from ditron_train.ep.orders import SumOrder
from ditron_train.runtime.errors import NotSupportedError

__all__ = ["dispatch_gemm", "gemm_combine", "layout_tiles"]

_BOARD_WORDS = 128  # in front of the counters, see fused_kernels
_PLAN_BLOCK = 128


def layout_tiles(layout: Layout) -> RowTiles:
    """The row tiles of a layout's experts; listed once, forward and backward use them."""
    if layout.tiles is None:
        layout.tiles = row_tiles(layout.expert_tokens, layout.num_rows)
    return layout.tiles


def _plan(
    layout: Layout, context: EPContext, tiles: RowTiles, *, by_arrival: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of the row tiles, and a fresh board."""
    shape, device = layout.shape, context.device
    memory = torch.empty(2 * tiles.max_tiles + _BOARD_WORDS, dtype=torch.int32, device=device)
    order, board = memory[: tiles.max_tiles], memory[tiles.max_tiles :]
    constants = dict(
        NUM_EXPERTS=tiles.num_experts, WORLD_SIZE=shape.world_size, SLOTS=shape.slots, PHASES=context.fused.phases,
        BY_ARRIVAL=by_arrival, BLOCK_M=tiles.block_m, BLOCK=_PLAN_BLOCK,
    )  # fmt: skip
    launch(context, plan_tiles, tiles.max_tiles // _PLAN_BLOCK, constants, 8)(
        tiles.tiles, layout.sources, order, board, context.dispatch_channel.control, tiles.max_tiles
    )
    return order, board


def _gemm_constants(operands: GemmOperands, tiles: RowTiles, context: EPContext) -> dict[str, object]:
    config = operands.config
    return dict(
        GROUP_M=config.group_m, BLOCK_M=tiles.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        SPLIT_STORE=config.split_store, TARGET=context.target,
    )  # fmt: skip


def _num_programs(context: EPContext) -> int:
    return 1 if context.target == "interpreter" else context.move.num_programs


def _dispatch_constants(
    layout: Layout, context: EPContext, operands: GemmOperands, tiles: RowTiles, *, with_entries: bool, zero_probs: bool,
    transpose: bool,
) -> dict[str, object]:  # fmt: skip
    """Of ``dispatch_gemm_kernel``."""
    shape, fused = layout.shape, context.fused
    send_rows, columns = move_tile(operands.k, fused.send_elements)
    return dict(
        WITH_ENTRIES=with_entries, ZERO_PROBS=zero_probs, TRANSPOSE_B=transpose, WORLD_SIZE=shape.world_size,
        RANKS=shape.ranks, NUM_CHUNKS=shape.num_chunks, SEND_ROWS=send_rows,
        PLACE_ROWS=move_tile(operands.k, fused.place_elements)[0], BLOCK_H=columns, NUM_SENDERS=fused.num_senders,
        NUM_PLACERS=fused.num_placers, STRIP=fused.strip, **_gemm_constants(operands, tiles, context),
    )  # fmt: skip


def _combine_constants(
    layout: Layout, context: EPContext, operands: GemmOperands, tiles: RowTiles, order: SumOrder, *, with_grads: bool,
    transpose: bool,
) -> dict[str, object]:  # fmt: skip
    """Of ``gemm_combine_kernel``."""
    rows, columns = move_tile(operands.n, context.fused.place_elements)
    return dict(
        WITH_GRADS=with_grads, TRANSPOSE_B=transpose, **sum_constants(layout, order), ROWS=rows,
        SUM_ROWS=move_tile(operands.n, context.move.sum_elements)[0], BLOCK_H=columns, ITEM_TOKENS=context.move.item_tokens,
        NUM_SENDERS=0 if _num_programs(context) == 1 else context.fused.num_senders,
        TILE_COUNT=operands.config.num_warps if context.target.startswith("sm_") else 1,
        **_gemm_constants(operands, tiles, context),
    )  # fmt: skip


def dispatch_gemm(
    x: torch.Tensor,
    layout: Layout,
    context: EPContext,
    weights: Sequence[torch.Tensor],
    *,
    transpose: bool = True,
    probs_dtype: torch.dtype = torch.float32,
    zero_probs: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``dispatch``, then ``group_gemm`` of the rows, in one kernel whose tiles start when their rows have arrived.

    Args:
        x: [num_tokens, hidden], bf16 or fp16 (fp32 too in the interpreter).
        layout: As ``dispatch``.
        context: Of the group.
        weights: As ``group_gemm``: [N, hidden] each, with ``transpose=False`` [hidden, N].
        transpose: Whether weights are stored [N, hidden].
        probs_dtype: As ``dispatch``.
        zero_probs: As ``dispatch``.

    Returns:
        y [num_rows, N], rows [num_rows, hidden], and of a layout's first dispatch the rows' probabilities, else None.

    Raises:
        NotSupportedError: What ``dispatch`` or ``group_gemm`` does not take.
        PeerTimeoutError, MismatchError: Of an earlier call.
    """
    check_tokens("dispatch_gemm", x, context)
    if x.shape[0] != layout.num_tokens:
        raise NotSupportedError(f"dispatch_gemm: {x.shape[0]} tokens, the layout has {layout.num_tokens}")
    assert layout.ahead is None, "sent ahead: only to be placed"
    channel = context.dispatch_channel
    context.enter(channel, layout)
    hidden, first = x.shape[1], layout.send_list is not None
    x, tiles = x.contiguous(), layout_tiles(layout)
    rows = torch.empty(layout.num_rows, hidden, dtype=x.dtype, device=x.device)
    row_probs = torch.empty(layout.num_rows if first else 0, dtype=probs_dtype, device=x.device)
    operands = gemm_operands("dispatch_gemm", rows, weights, tiles, transpose=transpose)
    order, board = _plan(layout, context, tiles, by_arrival=True)
    buffer = context.rows_buffer(layout.slot_capacity, layout.slot_capacity, hidden, x.dtype)
    arrived = context.entries_buffer(layout.entry_capacity, layout.entry_capacity)
    kind = dict(with_entries=first, zero_probs=zero_probs, transpose=transpose)
    constants = _dispatch_constants(layout, context, operands, tiles, **kind)
    config = operands.config
    launch(
        context, dispatch_gemm_kernel, _num_programs(context), constants, config.num_warps, x.dtype, probs_dtype,
        num_stages=config.num_stages,
    )(
        x, rows, row_probs, layout.entries, layout.origins, layout.dest_slots, layout.send_list if first else layout.entries,
        layout.chunk_entries, layout.list_base, layout.entry_base, layout.recv_offsets,
        buffer.local, buffer.addresses, arrived.local, arrived.addresses, channel.signals.local, channel.signals.addresses,
        channel.ready.local, channel.ready.addresses,
        signature(context, channel, hidden, x.dtype, Kind.DISPATCH_GEMM if first else Kind.DISPATCH_DGRAD),
        channel.tickets, channel.control, layout.limits,
        operands.a, operands.b, operands.c, operands.places, tiles.tiles, order, board,
        layout.num_tokens, layout.chunk_tokens, hidden, operands.n,
    )  # fmt: skip
    layout.send_list = None
    return operands.y, rows, row_probs if first else None


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
    context.enter(channel, layout)
    x, tiles, with_grads = x.contiguous(), layout_tiles(layout), row_grads is not None
    operands = gemm_operands("gemm_combine", x, weights, tiles, transpose=transpose)
    y, hidden = operands.y, operands.n
    tile_order, board = _plan(layout, context, tiles, by_arrival=False)
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
        context, gemm_combine_kernel, _num_programs(context), constants, config.num_warps, x.dtype, grads_like.dtype, probs_dtype,
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
