"""Host side of the movement: dispatch tokens to experts, combine rows back."""

from __future__ import annotations

import torch

from ditron_train.ep.arguments import Inbox, Placed, Returned, RowInbox, Sums, TokenBuffers
from ditron_train.ep.context import EPContext
from ditron_train.ep.kernels import place_arrived, push_ahead, push_tokens
from ditron_train.ep.launch import Kind, check_tokens, launch, move_sizes, pointers, sum_sizes
from ditron_train.ep.layout import Layout
from ditron_train.ep.orders import SumOrder
from ditron_train.ep.planning import PendingLayout, SentAhead
from ditron_train.ep.return_kernels import return_rows, sum_returned
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile


@outside_compile
def dispatch(
    x: torch.Tensor,
    layout: Layout,
    context: EPContext,
    *,
    probs_dtype: torch.dtype = torch.float32,
    zero_probs: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sends tokens to their experts: each once to a rank, fanned out there.

    Args:
        x: [num_tokens, hidden].
        layout: Of the routing; the first dispatch of a layout carries the probabilities, later ones only rows.
        context: Of the group.
        probs_dtype: Type of the returned probabilities.
        zero_probs: Whether rows of probability 0 are zero (the fused native permutation writes them so).

    Returns:
        rows [num_rows, hidden] by local expert, source rank, token; their probabilities [num_rows], or None where it
        is not the layout's first dispatch.

    Raises:
        NotSupportedError: Shape, type or device does not fit.
        PeerTimeoutError, MismatchError: Of an earlier call.
    """
    try:
        return _dispatch(x, layout, context, probs_dtype, zero_probs)
    except BaseException:  # no memory for the rows, say: the side stream must not outlive what it sends ahead
        context.rejoin()
        raise


def _dispatch(
    x: torch.Tensor, layout: Layout, context: EPContext, probs_dtype: torch.dtype, zero_probs: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    check_tokens("dispatch", x, context)
    if x.shape[0] != layout.num_tokens:
        raise NotSupportedError(f"dispatch: {x.shape[0]} tokens, the layout has {layout.num_tokens}")
    channel, tables = context.dispatch_channel, layout.tables
    context.enter_move(channel, layout)
    hidden, first = x.shape[1], layout.send_list is not None
    x = x.contiguous()
    out = torch.empty(layout.num_rows, hidden, dtype=x.dtype, device=x.device)
    out_probs = torch.empty(layout.num_rows if first else 0, dtype=probs_dtype, device=x.device)
    buffers = context.token_buffers(layout.slot_capacity, layout.entry_capacity, hidden, x.dtype)
    placed = Placed(out, out_probs, layout.entries, layout.origins)
    if layout.ahead is not None:
        assert layout.ahead.data_ptr() == x.data_ptr() and layout.ahead.shape == x.shape, (
            "other tokens were sent ahead"
        )
        _place_ahead(x, layout, context, placed, buffers, zero_probs=zero_probs)
    else:
        kind = Kind.DISPATCH if first else Kind.DISPATCH_GRAD
        sizes = move_sizes(context, hidden, context.move.push_elements, with_entries=first, zero_probs=zero_probs)
        given = pointers(context, channel, hidden, x.dtype, kind)
        sizes_of_call = (layout.num_tokens, layout.chunk_tokens, hidden)
        launch(
            context,
            push_tokens,
            context.move.num_programs,
            {"MOVE": sizes},
            context.move.num_warps,
            x.dtype,
            probs_dtype,
        )(x, placed, layout.destinations, tables.recv_offsets, buffers, given, tables.limits, *sizes_of_call)
    layout.send_list = layout.ahead = None
    return out, out_probs if first else None


def _place_ahead(
    x: torch.Tensor, layout: Layout, context: EPContext, placed: Placed, buffers: TokenBuffers, *, zero_probs: bool
) -> None:
    """Moves tokens that were sent ahead, and those of this rank, to their rows; the senders still run beside it."""
    channel, tables, hidden, move = context.dispatch_channel, layout.tables, x.shape[1], context.move
    sizes = move_sizes(context, hidden, move.push_elements, zero_probs=zero_probs)
    inbox = Inbox(tables.recv_offsets, buffers.tokens, buffers.entries, channel.signals.local, channel.control)
    num_programs, dtypes = max(move.num_programs - sizes.NUM_SENDERS, 1), (x.dtype, placed.probs.dtype)
    launch(context, place_arrived, num_programs, {"MOVE": sizes}, move.num_warps, *dtypes)(
        x, placed, inbox, tables.limits, layout.num_tokens, hidden
    )
    context.rejoin()


@outside_compile
def dispatch_ahead(x: torch.Tensor, pending: PendingLayout) -> None:
    """Sends the tokens of a layout before the host knows its sizes, on the side stream; ``dispatch`` then only places
    them.

    They travel while the host waits for the counts and prepares what follows (docs/measurements/ep.md). Where
    the buffers turn out too small nothing is sent, and ``dispatch`` does it all. So it does where rows were moved
    since ``begin_layout``, or last on another stream: the layout may hold another epoch than that of the next
    dispatch. The layout must be finished, and dispatched with the same `x`, before any other op of the context.

    Args:
        x: [num_tokens, hidden] of the routing; nothing happens unless it is contiguous, or before the buffers exist.
        pending: With exact sizes.

    Raises:
        NotSupportedError: As ``dispatch``.
        PeerTimeoutError, MismatchError: Of an earlier call.
    """
    context, tables = pending.context, pending.tables
    check_tokens("dispatch_ahead", x, context)
    if x.shape != (pending.num_tokens, pending.hidden) or x.dtype != pending.dtype:
        raise NotSupportedError(f"dispatch_ahead: {x.dtype} {tuple(x.shape)} are not the layout's tokens")
    slot_room, entry_room = context.room_now(pending.hidden, x.dtype)
    if pending.room is not None or not x.is_contiguous() or not slot_room or not entry_room:
        return
    if pending.moves_before != context.num_moves:
        return
    channel, move, hidden = context.dispatch_channel, context.move, pending.hidden
    context.enter_move(channel)
    buffers = context.token_buffers(slot_room, entry_room, hidden, x.dtype)
    sizes = move_sizes(context, hidden, move.push_elements)
    given = pointers(context, channel, hidden, x.dtype, Kind.DISPATCH)
    sizes_of_call = (pending.num_tokens, pending.chunk_tokens, hidden, slot_room, entry_room)
    push = launch(context, push_ahead, sizes.NUM_SENDERS, {"MOVE": sizes}, move.num_warps, x.dtype)
    stream = context.fork()
    try:
        push(x, pending.destinations, buffers, given, tables.limits, *sizes_of_call, stream=stream)
    except BaseException:  # no memory, a kernel that does not compile
        context.join()
        raise
    pending.ahead = SentAhead(x, slot_room, entry_room)


class PendingCombine:
    """One combine: what it works on, and its two steps."""

    def __init__(
        self,
        y: torch.Tensor,
        layout: Layout,
        context: EPContext,
        order: SumOrder,
        row_grads: torch.Tensor | None,
        probs_dtype: torch.dtype,
    ) -> None:
        check_tokens("combine", y, context)
        if y.shape[0] != layout.num_rows:
            raise NotSupportedError(f"combine: {y.shape[0]} rows, the layout has {layout.num_rows}")
        self._begun_on = context.enter_move(context.combine_channel, layout)
        shape, move, hidden, with_grads = layout.shape, context.move, y.shape[1], row_grads is not None
        self._y, self._layout, self._context, self._with_grads = y.contiguous(), layout, context, with_grads
        self._row_grads = self._y if row_grads is None else row_grads.contiguous()
        self._out = torch.empty(layout.num_tokens, hidden, dtype=y.dtype, device=y.device)
        self._prob_grads = torch.zeros(
            layout.num_tokens if with_grads else 0, shape.num_experts, dtype=probs_dtype, device=y.device
        )
        self._buffers = context.row_buffers(layout.place_capacity, hidden, y.dtype)
        self._sizes_of_call = (layout.num_tokens, layout.chunk_tokens, hidden, shape.num_experts)
        tables = layout.tables
        self._sums = Sums(self._out, self._prob_grads, tables.chunk_entries, layout.expert_ids, layout.token_places)
        sizes = sum_sizes(context, layout, order, hidden, move.return_elements, with_grads=with_grads)
        self._sizes = sizes._replace(ITEM_TOKENS=min(layout.chunk_tokens & -layout.chunk_tokens, move.item_tokens))

    def send(self, *, beside: bool) -> None:
        """Returns the rows: on the side stream, by a few programs, or here, where the others add up what arrives."""
        layout, context, channel, y = self._layout, self._context, self._context.combine_channel, self._y
        move, tables, kind = context.move, layout.tables, Kind.COMBINE_GRAD if self._with_grads else Kind.COMBINE
        num_programs, num_senders = (context.senders_beside,) * 2
        if not beside:
            num_programs, num_senders = move.num_programs, context.senders("combine", y.shape[1])
        shared = context.target == "interpreter" and not beside
        sizes = self._sizes._replace(NUM_SENDERS=num_senders, SHARED=shared)
        dtypes = (y.dtype, self._row_grads.dtype, self._prob_grads.dtype)
        sent = Returned(y, self._row_grads, layout.entries, tables.recv_offsets)
        given = pointers(context, channel, y.shape[1], y.dtype, kind)
        send = launch(context, return_rows, num_programs, {"SUM": sizes}, move.num_warps, *dtypes)
        stream = context.fork() if beside else None
        try:
            send(sent, self._sums, self._buffers, given, tables.limits, *self._sizes_of_call, stream=stream)
        except BaseException:  # no memory, a kernel that does not compile
            context.rejoin()
            raise

    def finish(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Behind ``begin_combine``: adds up on the current stream what arrived meanwhile. Returns what ``combine``
        does."""
        layout, context, channel, y = self._layout, self._context, self._context.combine_channel, self._y
        used = (*layout.memory, y, self._row_grads, self._out, self._prob_grads)
        context.resume(self._begun_on, *used)  # the stream that it was begun on does not wait for the sent rows
        context.rejoin()
        dtypes = (y.dtype, self._prob_grads.dtype)
        inbox = RowInbox(self._buffers.rows, self._buffers.grads, channel.signals.local, channel.control)
        launch(
            context, sum_returned, context.move.num_programs, {"SUM": self._sizes}, context.move.num_warps, *dtypes
        )(self._sums, inbox, channel.tickets, *self._sizes_of_call)
        return self.results

    @property
    def results(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What ``combine`` returns."""
        return self._out, self._prob_grads if self._with_grads else None


@outside_compile
def combine(
    y: torch.Tensor,
    layout: Layout,
    context: EPContext,
    *,
    order: SumOrder,
    row_grads: torch.Tensor | None = None,
    probs_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns rows to their tokens and adds each token's up.

    Args:
        y: [num_rows, hidden] in the layout's order.
        layout: Of a routing that was dispatched.
        context: Of the group.
        order: Order and roundings of the sum.
        row_grads: [num_rows]: gradients of the probabilities, carried along.
        probs_dtype: Type of the returned gradients.

    Returns:
        out [num_tokens, hidden]; the gradients as [num_tokens, num_experts] with zeros where nothing is routed, or
        None.

    Raises:
        NotSupportedError: Shape, type or device does not fit.
        PeerTimeoutError, MismatchError: Of an earlier call.
    """
    pending = PendingCombine(y, layout, context, order, row_grads, probs_dtype)
    pending.send(beside=False)
    return pending.results


def begin_combine(
    y: torch.Tensor,
    layout: Layout,
    context: EPContext,
    *,
    order: SumOrder,
    row_grads: torch.Tensor | None = None,
    probs_dtype: torch.dtype = torch.float32,
) -> PendingCombine:
    """``combine`` in two steps: rows return on the context's side stream, by a few programs, for the time of other
    work on the current stream; ``finish`` adds them up.

    `y` and `row_grads` must live until then, and no other op of the context may come between.

    Raises:
        As ``combine``.
    """
    pending = PendingCombine(y, layout, context, order, row_grads, probs_dtype)
    pending.send(beside=True)
    return pending
