"""Host side of expert parallelism: make a layout, dispatch tokens to experts, combine rows back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ditron_train.ep.context import EPContext
from ditron_train.ep.kernels import push_tokens, return_rows
from ditron_train.ep.layout import HostCounts, Layout
from ditron_train.ep.layout_kernels import count_chunks, exchange_counts, list_entries
from ditron_train.ep.orders import SumOrder
from ditron_train.runtime.errors import NotSupportedError

__all__ = ["PendingLayout", "begin_layout", "combine", "dispatch"]

_DTYPES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
_KIND_COUNTS, _KIND_DISPATCH, _KIND_DISPATCH_GRAD, _KIND_COMBINE, _KIND_COMBINE_GRAD = range(5)


def _signature(context: EPContext, channel, hidden: int, dtype: torch.dtype, kind: int) -> torch.Tensor:
    shape = context.shape
    return channel.signature((hidden, _DTYPES[dtype], shape.num_experts, shape.topk, kind))


def _check_tokens(name: str, tensor: torch.Tensor, context: EPContext) -> None:
    if tensor.dim() != 2:
        raise NotSupportedError(f"{name}: needs [rows, hidden], got {tuple(tensor.shape)}")
    if tensor.dtype not in _DTYPES:
        raise NotSupportedError(f"{name}: {tensor.dtype}; allowed: {', '.join(map(str, _DTYPES))}")
    if tensor.device != context.device:
        raise NotSupportedError(f"{name}: a tensor on {tensor.device}, the context is on {context.device}")


@dataclass
class PendingLayout:
    """A layout whose counts are still on their way to the host; ``finish`` waits for them (the one host sync)."""

    context: EPContext
    num_tokens: int
    hidden: int
    dtype: torch.dtype
    tables: dict[str, torch.Tensor]
    send_list: torch.Tensor
    dest_slots: torch.Tensor
    expert_ids: torch.Tensor
    host_messages: torch.Tensor
    copied: torch.cuda.Event | None

    def finish(self) -> Layout:
        """Waits for the counts, makes the buffers large enough and returns the layout.

        Raises:
            MismatchError: The ranks called it with different hidden sizes, types, experts or top-k.
            NotSupportedError: A token has more than top-k experts; on every rank alike.
            PeerTimeoutError: A rank did not come.
            ArenaError: The buffers do not fit; on every rank alike.
        """
        context, shape = self.context, self.context.shape
        if self.copied is not None:
            self.copied.synchronize()
        context.counts_channel.check()
        host = HostCounts.from_messages(self.host_messages.numpy(), shape)
        if host.widest > shape.topk:
            raise NotSupportedError(f"expert parallel: a token has {host.widest} experts, top-k is {shape.topk}")
        slots, entries, places = context.reserve(host, self.hidden, self.dtype)
        local = slice(context.rank * shape.experts_per_rank, (context.rank + 1) * shape.experts_per_rank)
        num_rows = int(host.rows(shape)[context.rank])
        return Layout(
            shape=shape,
            num_tokens=self.num_tokens,
            chunk_tokens=shape.chunk_tokens(self.num_tokens),
            num_rows=num_rows,
            tokens_per_expert=torch.from_numpy(host.counts.sum(0)[local].astype("int64")),
            chunk_entries=self.tables["chunk_entries"],
            recv_offsets=self.tables["recv_offsets"],
            list_base=self.tables["list_base"],
            entry_base=self.tables["entry_base"],
            expert_ids=self.expert_ids,
            dest_slots=self.dest_slots,
            send_list=self.send_list,
            entries=torch.empty(num_rows, 4, dtype=torch.int32, device=context.device),
            slot_capacity=slots,
            entry_capacity=entries,
            place_capacity=places,
        )


def _tables(context: EPContext) -> dict[str, torch.Tensor]:
    """int32 tables of one layout, carved from one allocation."""
    shape = context.shape
    sizes = {
        "chunk_counts": shape.num_chunks * shape.columns,
        "chunk_dests": shape.num_chunks * shape.ranks,
        "chunk_widest": shape.num_chunks,
        "chunk_entries": shape.ranks * (shape.num_chunks + 1),
        "recv_offsets": shape.ranks * (shape.num_chunks + 1),
        "row_base": shape.columns,
        "slot_base": shape.ranks,
        "entry_base": shape.ranks,
        "list_base": shape.ranks,
    }
    memory = torch.empty(sum(sizes.values()), dtype=torch.int32, device=context.device)
    return dict(zip(sizes, torch.split(memory, list(sizes.values()))))


def begin_layout(
    routing_map: torch.Tensor, probs: torch.Tensor, hidden: int, dtype: torch.dtype, context: EPContext
) -> PendingLayout:
    """Enqueues the counting of a routing map, the exchange of counts and the listing of what is sent.

    Args:
        routing_map: bool [num_tokens, num_experts]; at most ``topk`` True a row. ``num_tokens`` may differ between ranks.
        probs: [num_tokens, num_experts] of bf16, fp16 or fp32.
        hidden: Elements of a token, the same on every rank.
        dtype: Their type.
        context: Of the group.

    Raises:
        NotSupportedError: Shapes, types or devices that do not fit.
    """
    shape = context.shape
    if routing_map.dim() != 2 or routing_map.shape[1] != shape.num_experts or routing_map.dtype != torch.bool:
        raise NotSupportedError(f"routing map: needs bool [tokens, {shape.num_experts}], got {routing_map.dtype} {tuple(routing_map.shape)}")
    if probs.shape != routing_map.shape:
        raise NotSupportedError(f"probs: shape {tuple(probs.shape)} differs from the routing map's {tuple(routing_map.shape)}")
    _check_tokens("probs", probs, context)
    if dtype not in _DTYPES:
        raise NotSupportedError(f"tokens: {dtype}; allowed: {', '.join(map(str, _DTYPES))}")
    context.check()
    num_tokens, device = routing_map.shape[0], context.device
    chunk_tokens = shape.chunk_tokens(num_tokens)
    if num_tokens * shape.topk * 4 >= 2**31:
        raise NotSupportedError(f"expert parallel: {num_tokens} tokens x top-k {shape.topk} overflow int32 indices")
    routed = routing_map.contiguous().view(torch.uint8)
    tables = _tables(context)
    block_tokens = min(chunk_tokens, max(8192 // shape.columns, 1), 16 if context.target != "interpreter" else 64)
    blocks = dict(
        EXPERTS_PER_RANK=shape.experts_per_rank,
        WORLD_SIZE=shape.world_size,
        RANKS=shape.ranks,
        SLOTS=shape.slots,
        BLOCK_T=block_tokens,
    )
    channel = context.counts_channel
    count_chunks[(shape.num_chunks,)](
        routed, tables["chunk_counts"], tables["chunk_dests"], tables["chunk_widest"], num_tokens, chunk_tokens, **blocks
    )
    exchange_counts[(1,)](
        *(tables[name] for name in ("chunk_counts", "chunk_dests", "chunk_widest", "chunk_entries", "row_base")),
        *(tables[name] for name in ("slot_base", "entry_base", "list_base", "recv_offsets")),
        context.messages.local, context.messages.addresses, channel.signals.local, channel.signals.addresses,
        channel.ready.local, channel.ready.addresses, _signature(context, channel, hidden, dtype, _KIND_COUNTS),
        channel.tickets, channel.control, num_tokens, 0, 0,
        WORLD_SIZE=shape.world_size, RANKS=shape.ranks, SLOTS=shape.slots, NUM_CHUNKS=shape.num_chunks,
        MESSAGE_WORDS=shape.message_words, CHECK_CAPACITY=False, TARGET=context.target, num_warps=8,
    )  # fmt: skip
    host_messages, copied = _copy_to_host(context.messages.local)
    send_list = torch.empty(num_tokens * shape.topk, 4, dtype=torch.int32, device=device)
    dest_slots = torch.empty(num_tokens, shape.ranks, dtype=torch.int32, device=device)
    expert_ids = torch.empty(num_tokens, shape.topk_lanes, dtype=torch.int32, device=device)
    list_entries[(shape.num_chunks,)](
        routed, probs.detach().contiguous(),
        *(tables[name] for name in ("chunk_counts", "chunk_dests", "chunk_entries", "row_base", "slot_base", "list_base")),
        send_list, dest_slots, expert_ids, num_tokens, chunk_tokens,
        TOPK=shape.topk, NUM_CHUNKS=shape.num_chunks, TOPK_LANES=shape.topk_lanes, **blocks,
    )  # fmt: skip
    return PendingLayout(
        context, num_tokens, hidden, dtype, tables, send_list, dest_slots, expert_ids, host_messages, copied
    )


def _copy_to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    if tensor.device.type != "cuda":
        return tensor.clone(), None
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event


def _tile(hidden: int, elements: int) -> tuple[int, int]:
    """Rows and columns of a tile of about ``elements`` elements."""
    columns = min(1 << max(hidden - 1, 0).bit_length(), 8192)
    return max(elements // columns, 1), columns


def _launch_options(context: EPContext) -> dict:
    interpreted = context.target == "interpreter"
    return dict(
        NUM_SENDERS=context.move.num_senders,
        SHARED=interpreted,
        WORLD_SIZE=context.shape.world_size,
        NUM_CHUNKS=context.shape.num_chunks,
        TARGET=context.target,
        num_warps=context.move.num_warps,
    )


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
        rows [num_rows, hidden] by local expert, source rank, token; their probabilities [num_rows], or None where it is
        not the layout's first dispatch.

    Raises:
        NotSupportedError: Shape, type or device does not fit.
        PeerTimeoutError, MismatchError: Of an earlier call.
    """
    _check_tokens("dispatch", x, context)
    if x.shape[0] != layout.num_tokens:
        raise NotSupportedError(f"dispatch: {x.shape[0]} tokens, the layout has {layout.num_tokens}")
    channel, shape = context.dispatch_channel, layout.shape
    channel.check()
    hidden, first = x.shape[1], layout.send_list is not None
    x = x.contiguous()
    out = torch.empty(layout.num_rows, hidden, dtype=x.dtype, device=x.device)
    out_probs = torch.empty(layout.num_rows if first else 0, dtype=probs_dtype, device=x.device)
    buffer = context.rows_buffer(layout.slot_capacity, layout.slot_capacity, hidden, x.dtype)
    arrived = context.entries_buffer(layout.entry_capacity, layout.entry_capacity)
    rows, columns = _tile(hidden, context.move.push_elements)
    push_tokens[(context.move.num_programs,)](
        x, out, out_probs, layout.entries, layout.dest_slots, layout.send_list if first else layout.entries,
        layout.chunk_entries, layout.list_base, layout.entry_base, layout.recv_offsets,
        buffer.local, buffer.addresses, arrived.local, arrived.addresses, channel.signals.local, channel.signals.addresses,
        channel.ready.local, channel.ready.addresses,
        _signature(context, channel, hidden, x.dtype, _KIND_DISPATCH if first else _KIND_DISPATCH_GRAD),
        channel.tickets, channel.control, layout.num_tokens, layout.chunk_tokens, hidden, layout.num_rows,
        layout.entry_capacity, layout.slot_capacity,
        WITH_ENTRIES=first, ZERO_PROBS=zero_probs, RANKS=shape.ranks, ROWS=rows, BLOCK_H=columns,
        **_launch_options(context),
    )  # fmt: skip
    layout.send_list = None
    return out, out_probs if first else None


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
        out [num_tokens, hidden]; the gradients as [num_tokens, num_experts] with zeros where nothing is routed, or None.

    Raises:
        NotSupportedError: Shape, type or device does not fit.
        PeerTimeoutError, MismatchError: Of an earlier call.
    """
    _check_tokens("combine", y, context)
    if y.shape[0] != layout.num_rows:
        raise NotSupportedError(f"combine: {y.shape[0]} rows, the layout has {layout.num_rows}")
    channel, shape = context.combine_channel, layout.shape
    channel.check()
    hidden, with_grads = y.shape[1], row_grads is not None
    y = y.contiguous()
    out = torch.empty(layout.num_tokens, hidden, dtype=y.dtype, device=y.device)
    prob_grads = torch.zeros(
        layout.num_tokens if with_grads else 0, shape.num_experts, dtype=probs_dtype, device=y.device
    )
    buffer = context.rows_buffer(layout.place_capacity, layout.place_capacity, hidden, y.dtype)
    grads = context.grads_buffer(layout.place_capacity)
    rows, columns = _tile(hidden, context.move.return_elements)
    return_rows[(context.move.num_programs,)](
        y, row_grads.contiguous() if with_grads else y, out, prob_grads, layout.entries, layout.recv_offsets,
        layout.chunk_entries, layout.expert_ids, buffer.local, buffer.addresses, grads.local, grads.addresses,
        channel.signals.local, channel.signals.addresses, channel.ready.local, channel.ready.addresses,
        _signature(context, channel, hidden, y.dtype, _KIND_COMBINE_GRAD if with_grads else _KIND_COMBINE),
        channel.tickets, channel.control, layout.num_tokens, layout.chunk_tokens, hidden, layout.num_rows,
        shape.num_experts, layout.place_capacity,
        WITH_GRADS=with_grads, TOPK=shape.topk, TOPK_LANES=shape.topk_lanes, ROUND_EACH=order == "ascending_rounded",
        DESCENDING=order == "descending", ROWS=rows, SUM_ROWS=_tile(hidden, context.move.sum_elements)[0], BLOCK_H=columns,
        ITEM_TOKENS=min(layout.chunk_tokens, context.move.item_tokens), **_launch_options(context),
    )  # fmt: skip
    return out, prob_grads if with_grads else None
