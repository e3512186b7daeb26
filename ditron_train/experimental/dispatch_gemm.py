"""Host side of ``dispatch_gemm_kernel``: dispatch with the grouped GEMM of its rows behind it, in one kernel.

It was never faster than the two apart (docs/measurements/ep.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ditron_train.ep.arguments import Placed, TileTasks
from ditron_train.ep.context import EPContext
from ditron_train.ep.fused import PLAN_BLOCK, layout_tiles, new_board, num_programs
from ditron_train.ep.group_gemm import gemm_operands
from ditron_train.ep.launch import Kind, check_tokens, launch, move_sizes, pointers
from ditron_train.ep.layout import Layout
from ditron_train.ep.row_tiles import RowTiles
from ditron_train.experimental.dispatch_gemm_kernels import dispatch_gemm_kernel, plan_arrival
from ditron_train.runtime.errors import NotSupportedError


@dataclass(frozen=True)
class DispatchGemmConfig:
    """Launch constants. They change the time, never the bits.

    Attributes:
        num_senders: Programs that send before they compute.
        num_placers: Further programs that move what arrived to its rows before they compute.
        strip: Output tiles of a task.
        phases: Parts of the dispatch by which tiles are sorted.
        send_elements: Elements of a tile on its way to a peer.
        place_elements: Elements of a tile from its slot to its row.
    """

    num_senders: int = 16
    num_placers: int = 24
    strip: int = 2
    phases: int = 4
    send_elements: int = 16384
    place_elements: int = 16384


def _plan(layout: Layout, context: EPContext, tiles: RowTiles, phases: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of the row tiles, and a fresh board."""
    shape = layout.shape
    order, board, num_blocks = new_board(tiles)
    sources, sizes = layout.tables.sources, dict(WORLD_SIZE=shape.world_size, SLOTS=shape.slots, PHASES=phases)
    constants = dict(NUM_EXPERTS=tiles.num_experts, **sizes, BLOCK_M=tiles.block_m, BLOCK=PLAN_BLOCK)
    launch(context, plan_arrival, num_blocks, constants, 8)(tiles.tiles, sources, order, board, tiles.max_tiles)
    return order, board


def dispatch_gemm(
    x: torch.Tensor,
    layout: Layout,
    context: EPContext,
    weights: Sequence[torch.Tensor],
    *,
    transpose: bool = True,
    probs_dtype: torch.dtype = torch.float32,
    zero_probs: bool = False,
    fused: DispatchGemmConfig = DispatchGemmConfig(),
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
        fused: Launch constants.

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
    context.enter_move(channel, layout)
    hidden, first = x.shape[1], layout.send_list is not None
    x, tiles = x.contiguous(), layout_tiles(layout)
    rows = torch.empty(layout.num_rows, hidden, dtype=x.dtype, device=x.device)
    row_probs = torch.empty(layout.num_rows if first else 0, dtype=probs_dtype, device=x.device)
    operands = gemm_operands("dispatch_gemm", rows, weights, tiles, transpose=transpose)
    order, board = _plan(layout, context, tiles, fused.phases)
    buffers = context.token_buffers(layout.slot_capacity, layout.entry_capacity, hidden, x.dtype)
    placed = Placed(rows, row_probs, layout.entries, layout.origins)
    send, place = (
        move_sizes(context, hidden, elements, with_entries=first, zero_probs=zero_probs)
        for elements in (fused.send_elements, fused.place_elements)
    )
    send = send._replace(NUM_SENDERS=fused.num_senders)
    constants = dict(NUM_PLACERS=fused.num_placers, STRIP=fused.strip, SEND=send, PLACE=place, GEMM=operands.sizes)
    kind = Kind.DISPATCH_GEMM if first else Kind.DISPATCH_DGRAD
    config, programs, tables, dtypes = operands.config, num_programs(context), layout.tables, (x.dtype, probs_dtype)
    given = pointers(context, channel, hidden, x.dtype, kind)
    descriptors, tasks = (operands.a, operands.b, operands.c), TileTasks(operands.places, tiles.tiles, order, board)
    sizes_of_call = (layout.num_tokens, layout.chunk_tokens, hidden, operands.n)
    launch(
        context, dispatch_gemm_kernel, programs, constants, config.num_warps, *dtypes, num_stages=config.num_stages
    )(
        x,
        placed,
        layout.destinations,
        tables.recv_offsets,
        buffers,
        given,
        tables.limits,
        *descriptors,
        tasks,
        *sizes_of_call,
    )
    layout.send_list = None
    return operands.y, rows, row_probs if first else None
