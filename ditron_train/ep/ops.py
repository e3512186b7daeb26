"""Host side of expert parallelism: make a layout, dispatch tokens to experts, combine rows back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ditron_train.ep.context import EPContext, Room
from ditron_train.ep.kernels import push_tokens, return_rows
from ditron_train.ep.layout import HostCounts, Layout
from ditron_train.ep.layout_kernels import count_chunks, exchange_counts, list_entries
from ditron_train.ep.orders import SumOrder
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.launch import KernelLaunch
from ditron_train.symm.channel import Channel

__all__ = [
    "KIND_DGRAD_COMBINE",
    "KIND_DISPATCH_DGRAD",
    "KIND_DISPATCH_GEMM",
    "KIND_GEMM_COMBINE",
    "PendingLayout",
    "begin_layout",
    "check_tokens",
    "combine",
    "dispatch",
    "launch",
    "move_tile",
    "signature",
]

_DTYPES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
_KIND_COUNTS, _KIND_DISPATCH, _KIND_DISPATCH_GRAD, _KIND_COMBINE, _KIND_COMBINE_GRAD = range(5)
KIND_DISPATCH_GEMM, KIND_DISPATCH_DGRAD, KIND_GEMM_COMBINE, KIND_DGRAD_COMBINE = range(5, 9)
_KIND_NAMES = ("counts", "dispatch", "dispatch grad", "combine", "combine grad", "dispatch gemm", "dispatch dgrad",
               "gemm combine", "dgrad combine")  # fmt: skip


def signature(
    context: EPContext, channel: Channel, hidden: int, dtype: torch.dtype, kind: int, row_capacity: int = 0
) -> torch.Tensor:
    """What travels with the start signal of an op of kind ``kind``; every call of an op asks for it once."""
    shape = context.shape
    context.records.record(channel.op_name, _KIND_NAMES[kind], hidden, dtype)
    return channel.signature((hidden, _DTYPES[dtype], shape.num_experts, shape.topk, kind, row_capacity))


def launch(
    context: EPContext,
    kernel: Any,
    num_programs: int,
    constants: dict[str, Any],
    num_warps: int,
    *dtypes: torch.dtype,
    num_stages: int = 3,
) -> KernelLaunch:
    """The launch of a kernel with these constants and types of arguments; kept, so that only the first one goes all the
    way through Triton."""
    key = (kernel.__name__, num_programs, num_warps, num_stages, dtypes, *constants.values())
    launch = context.launches.get(key)
    if launch is None:
        launch = context.launches[key] = KernelLaunch(
            kernel, num_programs, constants, num_warps=num_warps, num_stages=num_stages
        )
    return launch


def check_tokens(name: str, tensor: torch.Tensor, context: EPContext) -> None:
    """Raises ``NotSupportedError`` for rows that no op of the context takes."""
    if tensor.dim() != 2:
        raise NotSupportedError(f"{name}: needs [rows, hidden], got {tuple(tensor.shape)}")
    if tensor.dtype not in _DTYPES:
        raise NotSupportedError(f"{name}: {tensor.dtype}; allowed: {', '.join(map(str, _DTYPES))}")
    if tensor.device != context.device:
        raise NotSupportedError(f"{name}: a tensor on {tensor.device}, the context is on {context.device}")


@dataclass
class PendingLayout:
    """A layout whose counts are still on their way to the host; ``finish`` waits for them (the one host sync).

    With a capacity there is nothing to wait for: ``room`` holds the sizes.
    """

    context: EPContext
    num_tokens: int
    hidden: int
    dtype: torch.dtype
    tables: dict[str, torch.Tensor]
    send_list: torch.Tensor
    dest_slots: torch.Tensor
    expert_ids: torch.Tensor
    room: Room | None
    host_messages: torch.Tensor | None = None
    copied: torch.cuda.Event | None = None

    def finish(self) -> Layout:
        """Waits for the counts, makes the buffers large enough and returns the layout.

        Raises:
            MismatchError: The ranks called it with different hidden sizes, types, experts, top-k or capacities.
            NotSupportedError: A token has more than top-k experts; on every rank alike.
            PeerTimeoutError: A rank did not come.
            ArenaError: The buffers do not fit; on every rank alike.
        """
        context, shape = self.context, self.context.shape
        expert_tokens = self.tables["expert_tokens"][: shape.experts_per_rank]
        if self.room is not None:
            return self._layout(self.room.rows, expert_tokens, self.room)
        if self.copied is not None:
            self.copied.synchronize()
        context.counts_channel.check()
        host = HostCounts.from_messages(self.host_messages.numpy(), shape)
        if host.widest > shape.topk:
            raise NotSupportedError(f"expert parallel: a token has {host.widest} experts, top-k is {shape.topk}")
        slots, entries, places = context.reserve(host, self.hidden, self.dtype)
        local = slice(context.rank * shape.experts_per_rank, (context.rank + 1) * shape.experts_per_rank)
        tokens_per_expert = torch.from_numpy(host.counts.sum(0)[local].astype("int64"))
        return self._layout(int(host.rows(shape)[context.rank]), tokens_per_expert, Room(entries, slots, places))

    def _layout(self, num_rows: int, tokens_per_expert: torch.Tensor, room: Room) -> Layout:
        shape, tables = self.context.shape, self.tables
        return Layout(
            shape=shape,
            num_tokens=self.num_tokens,
            chunk_tokens=shape.chunk_tokens(self.num_tokens),
            num_rows=num_rows,
            tokens_per_expert=tokens_per_expert,
            chunk_entries=tables["chunk_entries"],
            recv_offsets=tables["recv_offsets"],
            list_base=tables["list_base"],
            entry_base=tables["entry_base"],
            expert_ids=self.expert_ids,
            dest_slots=self.dest_slots,
            send_list=self.send_list,
            entries=torch.empty(num_rows, 4, dtype=torch.int32, device=self.context.device),
            origins=torch.empty(num_rows, 2, dtype=torch.int32, device=self.context.device),
            sources=tables["sources"],
            expert_tokens=tables["expert_tokens"][: shape.experts_per_rank],
            limits=tables["limits"],
            slot_capacity=room.slots,
            entry_capacity=room.rows,
            place_capacity=room.places,
        )


def _tables(context: EPContext) -> dict[str, torch.Tensor]:
    """int32 tables of one layout, carved from one allocation in steps of 16 bytes."""
    shape = context.shape
    sizes = {
        "chunk_counts": shape.num_chunks * shape.columns,
        "chunk_dests": shape.num_chunks * shape.ranks,
        "chunk_widest": shape.num_chunks,
        "chunk_entries": shape.ranks * (shape.num_chunks + 1),
        "row_base": shape.columns,
        "slot_base": shape.ranks,
        "entry_base": shape.ranks,
        "list_base": shape.ranks,
        "recv_offsets": shape.ranks * (shape.num_chunks + 1),
        "expert_tokens": shape.slots,
        "sources": shape.ranks * shape.slots,
        "limits": 4,
    }
    padded = [-(-size // 4) * 4 for size in sizes.values()]
    memory = torch.empty(sum(padded), dtype=torch.int32, device=context.device)
    parts = torch.split(memory, padded)
    return {name: part[:size] for (name, size), part in zip(sizes.items(), parts)}


def _check_routing(
    routing_map: torch.Tensor, probs: torch.Tensor, dtype: torch.dtype, context: EPContext
) -> None:
    shape = context.shape
    if routing_map.dim() != 2 or routing_map.shape[1] != shape.num_experts or routing_map.dtype != torch.bool:
        raise NotSupportedError(
            f"routing map: needs bool [tokens, {shape.num_experts}], got {routing_map.dtype} {tuple(routing_map.shape)}"
        )
    if probs.shape != routing_map.shape:
        raise NotSupportedError(f"probs: shape {tuple(probs.shape)} differs from the routing map's {tuple(routing_map.shape)}")
    check_tokens("probs", probs, context)
    if dtype not in _DTYPES:
        raise NotSupportedError(f"tokens: {dtype}; allowed: {', '.join(map(str, _DTYPES))}")
    if routing_map.shape[0] * shape.topk * 4 >= 2**31:
        raise NotSupportedError(f"expert parallel: {routing_map.shape[0]} tokens x top-k {shape.topk} overflow int32 indices")


def begin_layout(
    routing_map: torch.Tensor,
    probs: torch.Tensor,
    hidden: int,
    dtype: torch.dtype,
    context: EPContext,
    *,
    capacity_factor: float | None = None,
) -> PendingLayout:
    """Enqueues the counting of a routing map, the exchange of counts and the listing of what is sent.

    Args:
        routing_map: bool [num_tokens, num_experts]; at most ``topk`` True a row. ``num_tokens`` may differ between ranks
            where there is no capacity.
        probs: [num_tokens, num_experts] of bf16, fp16 or fp32.
        hidden: Elements of a token, the same on every rank.
        dtype: Their type.
        context: Of the group.
        capacity_factor: None: exact sizes, for one host sync in ``finish``. A number: fixed sizes, so many times the rows of
            even routing, no host sync; what does not fit is recorded on the device and raised at the next check.

    Raises:
        NotSupportedError: Shapes, types or devices that do not fit.
    """
    shape = context.shape
    _check_routing(routing_map, probs, dtype, context)
    context.check()
    num_tokens, device = routing_map.shape[0], context.device
    room = None if capacity_factor is None else context.room_for(num_tokens, capacity_factor)
    chunk_tokens = shape.chunk_tokens(num_tokens)
    routed = routing_map.contiguous().view(torch.uint8)
    tables = _tables(context)
    blocks = dict(
        EXPERTS_PER_RANK=shape.experts_per_rank, WORLD_SIZE=shape.world_size, RANKS=shape.ranks, SLOTS=shape.slots
    )
    block_tokens = min(chunk_tokens, max(8192 // shape.columns, 1), 16 if context.target != "interpreter" else 64)
    launch(context, count_chunks, shape.num_chunks, {**blocks, "BLOCK_T": block_tokens}, 4)(
        routed, tables["chunk_counts"], tables["chunk_dests"], tables["chunk_widest"], num_tokens, chunk_tokens
    )
    _exchange(context, tables, num_tokens, hidden, dtype, room)
    host = {} if room else dict(zip(("host_messages", "copied"), _copy_to_host(context.messages.local)))
    send_list = torch.empty(num_tokens * shape.topk, 4, dtype=torch.int32, device=device)
    dest_slots = torch.empty(num_tokens, shape.ranks, dtype=torch.int32, device=device)
    expert_ids = torch.empty(num_tokens, shape.topk_lanes, dtype=torch.int32, device=device)
    constants = dict(
        TOPK=shape.topk, **blocks, NUM_CHUNKS=shape.num_chunks, BLOCK_T=block_tokens, TOPK_LANES=shape.topk_lanes
    )
    launch(context, list_entries, shape.num_chunks, constants, 4, probs.dtype)(
        routed, probs.detach().contiguous(),
        *(tables[name] for name in ("chunk_counts", "chunk_dests", "chunk_entries", "row_base", "slot_base", "list_base")),
        send_list, dest_slots, expert_ids, num_tokens, chunk_tokens,
    )  # fmt: skip
    if room is not None:
        context.reserve_room(room, num_tokens, hidden, dtype)
    return PendingLayout(context, num_tokens, hidden, dtype, tables, send_list, dest_slots, expert_ids, room, **host)


def _exchange(
    context: EPContext, tables: dict[str, torch.Tensor], num_tokens: int, hidden: int, dtype: torch.dtype, room: Room | None
) -> None:
    """Launches ``exchange_counts``, which fills the tables."""
    shape, channel = context.shape, context.counts_channel
    constants = dict(
        WORLD_SIZE=shape.world_size, RANKS=shape.ranks, SLOTS=shape.slots, NUM_CHUNKS=shape.num_chunks, TOPK=shape.topk,
        MESSAGE_WORDS=shape.message_words, HAS_CAPACITY=room is not None, TARGET=context.target,
    )  # fmt: skip
    rows, slots, places = (room.rows, room.slots, room.places) if room else (0, 0, 0)
    launch(context, exchange_counts, 1, constants, 8)(
        *tables.values(), context.messages.local, context.messages.addresses,
        channel.signals.local, channel.signals.addresses, channel.ready.local, channel.ready.addresses,
        signature(context, channel, hidden, dtype, _KIND_COUNTS, rows), channel.tickets, channel.control,
        num_tokens, rows, slots, places,
    )  # fmt: skip


def _copy_to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    if tensor.device.type != "cuda":
        return tensor.clone(), None
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event


def move_tile(hidden: int, elements: int) -> tuple[int, int]:
    """Rows and columns of a tile of about ``elements`` elements."""
    columns = min(1 << max(hidden - 1, 0).bit_length(), 8192)
    return max(elements // columns, 1), columns


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
    check_tokens("dispatch", x, context)
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
    rows, columns = move_tile(hidden, context.move.push_elements)
    constants = dict(
        WITH_ENTRIES=first, ZERO_PROBS=zero_probs, TOPK=shape.topk, WORLD_SIZE=shape.world_size, RANKS=shape.ranks,
        NUM_CHUNKS=shape.num_chunks, ROWS=rows, BLOCK_H=columns, NUM_SENDERS=context.move.num_senders,
        SHARED=context.target == "interpreter", TARGET=context.target,
    )  # fmt: skip
    launch(context, push_tokens, context.move.num_programs, constants, context.move.num_warps, x.dtype, probs_dtype)(
        x, out, out_probs, layout.entries, layout.origins, layout.dest_slots, layout.send_list if first else layout.entries,
        layout.chunk_entries, layout.list_base, layout.entry_base, layout.recv_offsets,
        buffer.local, buffer.addresses, arrived.local, arrived.addresses, channel.signals.local, channel.signals.addresses,
        channel.ready.local, channel.ready.addresses,
        signature(context, channel, hidden, x.dtype, _KIND_DISPATCH if first else _KIND_DISPATCH_GRAD),
        channel.tickets, channel.control, layout.limits, layout.num_tokens, layout.chunk_tokens, hidden,
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
    beside: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns rows to their tokens and adds each token's up.

    Args:
        y: [num_rows, hidden] in the layout's order.
        layout: Of a routing that was dispatched.
        context: Of the group.
        order: Order and roundings of the sum.
        row_grads: [num_rows]: gradients of the probabilities, carried along.
        probs_dtype: Type of the returned gradients.
        beside: Run on the context's side stream with few programs (``context.beside``), for the time of other work on the
            current stream. `y` and `row_grads` must live, and the results be left alone, until ``context.join_side``.

    Returns:
        out [num_tokens, hidden]; the gradients as [num_tokens, num_experts] with zeros where nothing is routed, or None.

    Raises:
        NotSupportedError: Shape, type or device does not fit.
        PeerTimeoutError, MismatchError: Of an earlier call.
    """
    check_tokens("combine", y, context)
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
    move = context.beside if beside else context.move
    rows, columns = move_tile(hidden, move.return_elements)
    constants = dict(
        WITH_GRADS=with_grads, TOPK=shape.topk, TOPK_LANES=shape.topk_lanes, ROUND_EACH=order == "ascending_rounded",
        DESCENDING=order == "descending", WORLD_SIZE=shape.world_size, NUM_CHUNKS=shape.num_chunks, ROWS=rows,
        SUM_ROWS=move_tile(hidden, move.sum_elements)[0], BLOCK_H=columns,
        ITEM_TOKENS=min(layout.chunk_tokens & -layout.chunk_tokens, move.item_tokens), NUM_SENDERS=move.num_senders,
        SHARED=context.target == "interpreter", TARGET=context.target,
    )  # fmt: skip
    grads_like = row_grads.contiguous() if with_grads else y
    dtypes = (y.dtype, grads_like.dtype, probs_dtype)
    stream = context.fork_side() if beside else None
    launch(context, return_rows, move.num_programs, constants, move.num_warps, *dtypes)(
        y, grads_like, out, prob_grads, layout.entries, layout.recv_offsets,
        layout.chunk_entries, layout.expert_ids, buffer.local, buffer.addresses, grads.local, grads.addresses,
        channel.signals.local, channel.signals.addresses, channel.ready.local, channel.ready.addresses,
        signature(context, channel, hidden, y.dtype, _KIND_COMBINE_GRAD if with_grads else _KIND_COMBINE),
        channel.tickets, channel.control, layout.limits, layout.num_tokens, layout.chunk_tokens, hidden,
        shape.num_experts, stream=stream,
    )  # fmt: skip
    return out, prob_grads if with_grads else None
