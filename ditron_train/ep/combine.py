"""Combine: rows back to their tokens, added up in the native order. The kernel ``return_rows``, the kernel
``sum_returned`` that can do its sums later, and their host side.

    # equivalent
    returned = all_to_all(y[by_source_then_expert], output_split_sizes, input_split_sizes)
    out = zeros(num_tokens, hidden).index_add_(0, token_of_row, returned)    # in a fixed order: ``SumOrder``

    senders:    wait for start signals -> write rows of chunk 0, 1, ... to their places at the source, flag each chunk
    receivers:                            wait for the flags of a chunk -> add up the rows of each token

Roles, tiles and masks are those of ``dispatch``.

Senders also copy the rows that stay on this rank, which is no slower: docs/measurements/ep.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.ep.context import EPContext, Kind, check_tokens, launch, move_tile, pointers
from ditron_train.ep.dispatch import start
from ditron_train.ep.handle import EPHandle
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.runtime.values import normal_values
from ditron_train.symm import control as control_layout

#: ``ascending_rounded``: by ascending expert, rounded to the rows' type after each addition. ``ascending``: the same
#: in fp32 with one rounding at the end. ``descending``: by descending expert in fp32, one rounding: Transformer
#: Engine's fused permutation. ``by_rank_``: each rank adds the rows of its experts up so and sends the sum, rounded to
#: the rows' type; sums are added up by ascending rank in fp32 with one rounding at the end: DeepEP's combine.
SumOrder = Literal[
    "ascending_rounded",
    "ascending",
    "descending",
    "by_rank_ascending_rounded",
    "by_rank_ascending",
    "by_rank_descending",
]


@contextmanager
def deterministic(*, warn_only: bool) -> Iterator[None]:
    """PyTorch's deterministic mode, in which Megatron's sums are reproducible."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@cache
def index_add_order(dtype: torch.dtype, device: torch.device) -> SumOrder | None:
    """The order in which ``index_add_`` adds rows of one index in deterministic mode (rows come by ascending expert).

    It differs between devices, so it is found by adding eight random rows at one index. None if it is neither of the
    two orders that the fused path has. The first call for a type and device waits for the device.
    """
    rows = normal_values((8, 512), dtype, device, 1)
    with deterministic(warn_only=False):
        added = torch.zeros(2, 512, dtype=dtype, device=device)
        added.index_add_(0, torch.ones(8, dtype=torch.int64, device=device), rows)
    rounded = torch.zeros(512, dtype=dtype, device=device)
    total = torch.zeros(512, dtype=torch.float32, device=device)
    for row in rows:
        rounded = (rounded.float() + row.float()).to(dtype)
        total = total + row.float()
    if torch.equal(added[1], rounded):
        return "ascending_rounded"
    return "ascending" if torch.equal(added[1], total.to(dtype)) else None


class Returned(NamedTuple):
    """What a combine sends: rows, one gradient for each, their kept entries, and the first entry of each chunk."""

    rows: torch.Tensor
    grads: torch.Tensor
    entries: torch.Tensor
    recv_offsets: torch.Tensor


class RowInbox(NamedTuple):
    """What a combine's receivers read: rows, gradients, flags."""

    rows: torch.Tensor
    grads: torch.Tensor
    signals: torch.Tensor
    control: torch.Tensor


class Sums(NamedTuple):
    """What a combine writes, and where each token's rows are."""

    out: torch.Tensor
    prob_grads: torch.Tensor
    chunk_entries: torch.Tensor
    expert_ids: torch.Tensor
    token_places: torch.Tensor


class SumSizes(NamedTuple):
    """Constants of the kernels that return rows."""

    WITH_GRADS: bool
    RAGGED: bool
    TOPK: int
    TOPK_LANES: int
    ROUND_EACH: bool
    DESCENDING: bool
    WORLD_SIZE: int
    NUM_CHUNKS: int
    ROWS: int
    SUM_ROWS: int
    BLOCK_H: int
    ITEM_TOKENS: int
    TARGET: str
    NUM_SENDERS: int = 0
    SHARED: bool = False
    TILE_COUNT: int = 1
    BY_RANK: bool = False
    EXPERTS_PER_RANK: int = 1


TICKET_UNIT_LOG2 = tl.constexpr(control_layout.TICKET_UNIT_LOG2)


@triton.jit
def _send_rows(sent, begin, end, target, grad_target, hidden, num_rows, place_capacity, SUM: tl.constexpr):
    """target[place] = rows[row] for entries ``begin .. end - 1``, all of one source rank."""
    for first_entry in range(begin, end, SUM.ROWS):
        index = first_entry + tl.arange(0, SUM.ROWS)
        inside = (index < end) & (index < num_rows)
        entry = tl.cast(index, tl.int64) * 4
        row = tl.load(sent.entries + entry, mask=inside, other=-1)
        place = tl.load(sent.entries + entry + 2, mask=inside, other=-1)
        held = inside & (row >= 0) & (row < num_rows) & (place >= 0) & (place < place_capacity)
        if SUM.WITH_GRADS:
            grad = tl.load(sent.grads + row, mask=held, other=0.0)
            tl.store(grad_target + place, grad.to(tl.float32), mask=held)
        for column in range(0, hidden, SUM.BLOCK_H):
            offsets = column + tl.arange(0, SUM.BLOCK_H)
            valid = held[:, None] & (offsets < hidden)[None, :]
            tile = tl.load(sent.rows + tl.cast(row, tl.int64)[:, None] * hidden + offsets[None, :], mask=valid)
            tl.store(target + tl.cast(place, tl.int64)[:, None] * hidden + offsets[None, :], tile, mask=valid)


@triton.jit
def _send_sums(sent, begin, end, target, grad_target, hidden, num_rows, place_capacity, SUM: tl.constexpr):
    """target[place of a token's first entry] = ((0 + r_0) + r_1) + ..., r_j the token's rows here by expert, ascending
    or descending, for entries ``begin .. end - 1``, all of one source rank; those of a token are consecutive.

    In fp32 with one rounding at the end, or (ROUND_EACH) one after every addition. One token at a time: all of its
    rows are loaded before the first addition.
    """
    dtype = sent.rows.dtype.element_ty
    most: tl.constexpr = SUM.TOPK if SUM.TOPK < SUM.EXPERTS_PER_RANK else SUM.EXPERTS_PER_RANK
    lanes = tl.arange(0, SUM.TOPK_LANES)
    end = tl.minimum(end, num_rows)
    index = begin
    while index < end:
        entries = sent.entries + tl.cast(index, tl.int64) * 4
        first = tl.load(entries + 2)
        place = tl.load(entries + lanes * 4 + 2, mask=index + lanes < end, other=-1)
        is_same = (index + lanes < end) & (place // SUM.TOPK == first // SUM.TOPK)
        count = tl.sum(is_same.to(tl.int32), axis=0)
        held = (first >= 0) & (first < place_capacity)
        if SUM.WITH_GRADS:
            source = tl.load(entries + lanes * 4, mask=is_same, other=-1)
            valid = is_same & (source >= 0) & (source < num_rows) & (place >= 0) & (place < place_capacity)
            grad = tl.load(sent.grads + source, mask=valid, other=0.0)
            tl.store(grad_target + place, grad.to(tl.float32) + 0.0, mask=valid)  # a sum from 0 has no -0
        for column in range(0, hidden, SUM.BLOCK_H):
            offsets = column + tl.arange(0, SUM.BLOCK_H)
            total = tl.zeros((SUM.BLOCK_H,), tl.float32)
            for step in tl.static_range(most):
                nth = count - 1 - step if SUM.DESCENDING else step
                row = tl.load(entries + nth * 4, mask=step < count, other=-1)
                inside = (row >= 0) & (row < num_rows) & (offsets < hidden)
                tile = tl.load(sent.rows + tl.cast(row, tl.int64) * hidden + offsets, mask=inside, other=0.0)
                total += tile.to(tl.float32)
                if SUM.ROUND_EACH:
                    total = total.to(dtype).to(tl.float32)
            line = target + tl.cast(first, tl.int64) * hidden + offsets
            tl.store(line, total.to(dtype), mask=held & (offsets < hidden))
        index += count


@triton.jit
def _is_sent(sums, tokens, inside, nth: tl.constexpr, SUM: tl.constexpr):
    """Which of the tokens have an ``nth`` expert; BY_RANK: one that is the first at its rank."""
    expert = tl.load(sums.expert_ids + tokens * SUM.TOPK_LANES + nth, mask=inside, other=-1)
    is_sent = expert >= 0
    if SUM.BY_RANK and nth > 0:
        before = tl.load(sums.expert_ids + tokens * SUM.TOPK_LANES + nth - 1, mask=inside, other=-1)
        is_sent = is_sent & (before // SUM.EXPERTS_PER_RANK != expert // SUM.EXPERTS_PER_RANK)
    return is_sent


@triton.jit
def _sum_rows(buffer, sums, first, last, hidden, SUM: tl.constexpr):
    """out[t] = ((0 + r_0) + r_1) + ..., r_j token t's rows by expert, ascending or descending; BY_RANK: the sums of
    ranks, ascending.

    In fp32 with one rounding at the end, or (ROUND_EACH, but not of ranks' sums) rounded to the rows' type after every
    addition. RAGGED: a token has as many rows as are between its ``token_places`` and the next one's.
    """
    dtype = sums.out.dtype.element_ty
    for first_token in range(first, last, SUM.SUM_ROWS):
        tokens = first_token + tl.arange(0, SUM.SUM_ROWS)
        inside = tokens < last
        for column in range(0, hidden, SUM.BLOCK_H):
            offsets = column + tl.arange(0, SUM.BLOCK_H)
            narrow = (offsets < hidden)[None, :]
            total = tl.zeros((SUM.SUM_ROWS, SUM.BLOCK_H), tl.float32)
            if SUM.RAGGED:
                places = tl.load(sums.token_places + tokens, mask=inside, other=0)
                count = tl.load(sums.token_places + tokens + 1, mask=inside, other=0) - places
                for step in range(0, tl.max(count, axis=0)):
                    nth = count - 1 - step if SUM.DESCENDING else step
                    source = buffer + tl.cast(places + nth, tl.int64)[:, None] * hidden + offsets[None, :]
                    total += tl.load(source, mask=(step < count)[:, None] & narrow, other=0.0).to(tl.float32)
                    if SUM.ROUND_EACH:
                        total = total.to(dtype).to(tl.float32)
            else:
                for step in tl.static_range(SUM.TOPK):
                    nth = SUM.TOPK - 1 - step if SUM.DESCENDING and not SUM.BY_RANK else step
                    held = _is_sent(sums, tokens, inside, nth, SUM)
                    source = buffer + (tl.cast(tokens, tl.int64) * SUM.TOPK + nth)[:, None] * hidden + offsets[None, :]
                    total += tl.load(source, mask=held[:, None] & narrow, other=0.0).to(tl.float32)
                    if SUM.ROUND_EACH and not SUM.BY_RANK:
                        total = total.to(dtype).to(tl.float32)
            target = sums.out + tl.cast(tokens, tl.int64)[:, None] * hidden + offsets[None, :]
            tl.store(target, total.to(dtype), mask=inside[:, None] & narrow)


@triton.jit
def _scatter_grads(grad_buffer, sums, first, last, num_experts, SUM: tl.constexpr):
    """prob_grads[t, e] = grad_buffer[place of (t, j)] if e is token t's j-th expert; the rest stays as it was."""
    for first_token in range(first, last, SUM.ITEM_TOKENS):
        tokens = first_token + tl.arange(0, SUM.ITEM_TOKENS)
        inside = tokens < last
        line = sums.prob_grads + tl.cast(tokens, tl.int64)[:, None] * num_experts
        if SUM.RAGGED:
            places = tl.load(sums.token_places + tokens, mask=inside, other=0)
            count = tl.load(sums.token_places + tokens + 1, mask=inside, other=0) - places
            for done in range(0, tl.max(count, axis=0), SUM.TOPK_LANES):
                nth = done + tl.arange(0, SUM.TOPK_LANES)
                valid = nth[None, :] < count[:, None]
                place = places[:, None] + nth[None, :]
                expert = tl.load(sums.expert_ids + place, mask=valid, other=0)
                grad = tl.load(grad_buffer + place, mask=valid)
                tl.store(line + expert, grad.to(sums.prob_grads.dtype.element_ty), mask=valid)
        else:
            nth = tl.arange(0, SUM.TOPK_LANES)
            valid = inside[:, None] & (nth < SUM.TOPK)[None, :]
            expert = tl.load(sums.expert_ids + tokens[:, None] * SUM.TOPK_LANES + nth[None, :], mask=valid, other=-1)
            valid = valid & (expert >= 0)
            grad = tl.load(grad_buffer + tokens[:, None] * SUM.TOPK + nth[None, :], mask=valid)
            tl.store(line + expert, grad.to(sums.prob_grads.dtype.element_ty), mask=valid)


@triton.jit
def _sum(sums, buffer, grad_buffer, first, last, hidden, num_experts, SUM: tl.constexpr):
    """The sums of tokens ``first .. last - 1``, and their probabilities' gradients."""
    _sum_rows(buffer, sums, first, last, hidden, SUM)
    if SUM.WITH_GRADS:
        _scatter_grads(grad_buffer, sums, first, last, num_experts, SUM)


@triton.jit
def sum_tokens(item, sums, buffer, grad_buffer, num_tokens, hidden, num_experts, SUM: tl.constexpr):
    """Task: the sums of ITEM_TOKENS tokens whose rows are there."""
    first = item * SUM.ITEM_TOKENS
    last = tl.minimum(first + SUM.ITEM_TOKENS, num_tokens)
    _sum(sums, buffer, grad_buffer, first, last, hidden, num_experts, SUM)


@triton.jit
def _sum_arrived(
    program, num_programs, sums, inbox, rank, epoch, num_tokens, chunk_tokens, hidden, num_experts, SUM: tl.constexpr
):
    """Sums ITEM_TOKENS tokens at a time once every rank that has rows of their chunk has set its flag."""
    for item in range(program, tl.cdiv(num_tokens, SUM.ITEM_TOKENS), num_programs):
        first = item * SUM.ITEM_TOKENS
        last = tl.minimum(first + SUM.ITEM_TOKENS, num_tokens)
        chunk = first // chunk_tokens
        for step in tl.static_range(SUM.WORLD_SIZE):
            peer = (rank + step) % SUM.WORLD_SIZE
            counted = sums.chunk_entries + peer * (SUM.NUM_CHUNKS + 1) + chunk
            if tl.load(counted + 1) > tl.load(counted):
                flag = inbox.signals + peer * SUM.NUM_CHUNKS + chunk
                dl.wait(flag, epoch, inbox.control, peer, chunk, SUM.TARGET)
        _sum(sums, inbox.rows, inbox.grads, first, last, hidden, num_experts, SUM)


@triton.jit(do_not_specialize=["num_tokens"])
def return_rows(
    sent, sums, buffers, channel, limits, num_tokens, chunk_tokens, hidden, num_experts, SUM: tl.constexpr
):
    """out[t] = sum over token t's experts of rows[row(t, e)], in the order and with the roundings of the native
    unpermute.

    Every (token, expert) row goes back to place ``t * TOPK + j`` at its source: adding the rows of one rank's experts
    before sending them would change bits. BY_RANK does so, and sends the sum to the first of their places. Senders
    take (chunk of a source, source) items, consecutive ones to different sources, so that all links are busy; then
    they set flag [rank, chunk] there. Receivers sum a chunk's tokens once every rank that has rows of it has set its
    flag. A launch of NUM_SENDERS programs has no receivers: ``sum_returned`` follows it. WITH_GRADS sends one fp32
    with each row (the gradient of the probability), which is scattered into ``prob_grads[t, expert]``.

    Waits: senders for all start signals, receivers (acquire) for the flags of ranks that hold rows of the chunk.
    """
    program = tl.program_id(0)
    epoch = dl.next_epoch(channel.tickets)
    rank = dl.rank(channel.control)
    num_rows = tl.load(limits)
    place_capacity = tl.load(limits + 3)
    start(channel, epoch, rank, SUM)
    if program < SUM.NUM_SENDERS:
        for item in range(program, SUM.WORLD_SIZE * SUM.NUM_CHUNKS, SUM.NUM_SENDERS):
            chunk = item // SUM.WORLD_SIZE
            source = (rank + 1 + item % SUM.WORLD_SIZE) % SUM.WORLD_SIZE
            begin = tl.load(sent.recv_offsets + source * (SUM.NUM_CHUNKS + 1) + chunk)
            end = tl.load(sent.recv_offsets + source * (SUM.NUM_CHUNKS + 1) + chunk + 1)
            if end > begin:
                target = dl.symm_at(buffers.row_addresses, source, sent.rows.dtype.element_ty)
                grad_target = dl.symm_at(buffers.grad_addresses, source, tl.float32)
                if SUM.BY_RANK:
                    _send_sums(sent, begin, end, target, grad_target, hidden, num_rows, place_capacity, SUM)
                else:
                    _send_rows(sent, begin, end, target, grad_target, hidden, num_rows, place_capacity, SUM)
                flag = dl.symm_at(channel.signals_addresses, source, tl.int32) + rank * SUM.NUM_CHUNKS + chunk
                dl.notify(flag, epoch, SUM.TARGET)
    if SUM.SHARED or program >= SUM.NUM_SENDERS:
        first: tl.constexpr = 0 if SUM.SHARED else SUM.NUM_SENDERS
        inbox = RowInbox(buffers.rows, buffers.grads, channel.signals, channel.control)
        receiver = program - first
        num_receivers = tl.num_programs(0) - first
        _sum_arrived(
            receiver, num_receivers, sums, inbox, rank, epoch, num_tokens, chunk_tokens, hidden, num_experts, SUM
        )


@triton.jit(do_not_specialize=["num_tokens"])
def sum_returned(sums, inbox, tickets, num_tokens, chunk_tokens, hidden, num_experts, SUM: tl.constexpr):
    """The receivers' half of ``return_rows``, by all programs, if that was launched with senders alone.

    Runs after that launch, whose epoch is the number of launches that drew tickets. Waits (acquire) for the flags of
    ranks that hold rows of a chunk: they may still be sending.
    """
    epoch = (tl.load(tickets) >> TICKET_UNIT_LOG2).to(tl.int32)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    rank = dl.rank(inbox.control)
    _sum_arrived(program, num_programs, sums, inbox, rank, epoch, num_tokens, chunk_tokens, hidden, num_experts, SUM)


def sum_sizes(
    context: EPContext, handle: EPHandle, order: SumOrder, hidden: int, elements: int, *, with_grads: bool
) -> SumSizes:
    """Constants of a kernel that returns rows of ``hidden`` elements, about ``elements`` at a time."""
    shape, (rows, columns), by_rank = handle.shape, move_tile(hidden, elements), order.startswith("by_rank_")
    assert not (by_rank and handle.ragged), "padded maps are combined row by row"
    return SumSizes(
        WITH_GRADS=with_grads,
        RAGGED=handle.ragged,
        TOPK=shape.topk,
        TOPK_LANES=shape.topk_lanes,
        ROUND_EACH=order.endswith("ascending_rounded"),
        DESCENDING=order.endswith("descending"),
        WORLD_SIZE=shape.world_size,
        NUM_CHUNKS=shape.num_chunks,
        ROWS=rows,
        SUM_ROWS=move_tile(hidden, context.move.sum_elements)[0],
        BLOCK_H=columns,
        ITEM_TOKENS=context.move.item_tokens,
        TARGET=context.target,
        BY_RANK=by_rank,
        EXPERTS_PER_RANK=shape.experts_per_rank if by_rank else 1,
    )


class PendingCombine:
    """One combine: its operands, and its two steps ``send`` and ``finish``."""

    def __init__(
        self,
        y: torch.Tensor,
        handle: EPHandle,
        context: EPContext,
        order: SumOrder,
        row_grads: torch.Tensor | None,
        probs_dtype: torch.dtype,
    ) -> None:
        check_tokens("combine", y, context)
        if y.shape[0] != handle.num_rows:
            raise NotSupportedError(f"combine: {y.shape[0]} rows, the handle has {handle.num_rows}")
        self._begun_on = context.enter_move(context.combine_channel, handle)
        shape, move, hidden, with_grads = handle.shape, context.move, y.shape[1], row_grads is not None
        self._y, self._handle, self._context, self._with_grads = y.contiguous(), handle, context, with_grads
        self._row_grads = self._y if row_grads is None else row_grads.contiguous()
        self._out = torch.empty(handle.num_tokens, hidden, dtype=y.dtype, device=y.device)
        self._prob_grads = torch.zeros(
            handle.num_tokens if with_grads else 0, shape.num_experts, dtype=probs_dtype, device=y.device
        )
        self._buffers = context.buffers.row_buffers(handle.place_capacity, hidden, y.dtype)
        self._by_rank = order.startswith("by_rank_")
        self._sizes_of_call = (handle.num_tokens, handle.chunk_tokens, hidden, shape.num_experts)
        tables = handle.tables
        self._sums = Sums(self._out, self._prob_grads, tables.chunk_entries, handle.expert_ids, handle.token_places)
        sizes = sum_sizes(context, handle, order, hidden, move.return_elements, with_grads=with_grads)
        self._sizes = sizes._replace(ITEM_TOKENS=min(handle.chunk_tokens & -handle.chunk_tokens, move.item_tokens))

    def send(self, *, beside: bool) -> None:
        """Returns the rows: ``beside``, on the side stream by a few programs; else on the current stream, where the
        other programs add up what arrives."""
        handle, context, channel, y = self._handle, self._context, self._context.combine_channel, self._y
        move, tables, kind = context.move, handle.tables, Kind.COMBINE_GRAD if self._with_grads else Kind.COMBINE
        if self._by_rank:
            kind = Kind.COMBINE_BY_RANK_GRAD if self._with_grads else Kind.COMBINE_BY_RANK
        num_programs, num_senders = (context.senders_beside,) * 2
        if not beside:  # by rank, senders read every row, receivers one sum a rank
            num_programs, by_rank = move.num_programs, max(move.num_programs * 3 // 4, 1)
            num_senders = by_rank if self._by_rank else context.senders("combine", y.shape[1])
        shared = context.target == "interpreter" and not beside
        sizes = self._sizes._replace(NUM_SENDERS=num_senders, SHARED=shared)
        dtypes = (y.dtype, self._row_grads.dtype, self._prob_grads.dtype)
        sent = Returned(y, self._row_grads, handle.entries, tables.recv_offsets)
        given = pointers(context, channel, y.shape[1], y.dtype, kind)
        send = launch(context, return_rows, num_programs, {"SUM": sizes}, move.num_warps, *dtypes)
        stream = context.fork() if beside else None
        try:
            send(sent, self._sums, self._buffers, given, tables.limits, *self._sizes_of_call, stream=stream)
        except BaseException:  # no memory, a kernel that does not compile
            context.rejoin()
            raise

    def finish(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """After ``begin_combine``: adds up on the current stream what has arrived. Returns what ``combine``
        returns."""
        handle, context, channel, y = self._handle, self._context, self._context.combine_channel, self._y
        used = (*handle.memory, y, self._row_grads, self._out, self._prob_grads)
        context.resume(self._begun_on, *used)  # the stream that began it does not wait for the sent rows
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
    handle: EPHandle,
    context: EPContext,
    *,
    order: SumOrder,
    row_grads: torch.Tensor | None = None,
    probs_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns rows to their tokens and adds up the rows of each token.

    Args:
        y: [num_rows, hidden] in the handle's order.
        handle: Handle of a routing that was dispatched.
        context: The group's context.
        order: Order and roundings of the sum.
        row_grads: [num_rows], gradients of the probabilities, returned with the rows.
        probs_dtype: Type of the returned gradients.

    Returns:
        out [num_tokens, hidden]; the gradients as [num_tokens, num_experts] with zeros where nothing is routed, or
        None.

    Raises:
        NotSupportedError: Shape, type or device does not fit.
        PeerTimeoutError, MismatchError: An earlier call failed.
    """
    pending = PendingCombine(y, handle, context, order, row_grads, probs_dtype)
    pending.send(beside=False)
    return pending.results


def begin_combine(
    y: torch.Tensor,
    handle: EPHandle,
    context: EPContext,
    *,
    order: SumOrder,
    row_grads: torch.Tensor | None = None,
    probs_dtype: torch.dtype = torch.float32,
) -> PendingCombine:
    """``combine`` in two steps: a few programs return the rows on the context's side stream, concurrent with other
    work on the current stream; ``finish`` adds the rows up.

    `y` and `row_grads` must live until then, and no other op of the context may come between.

    Raises:
        As ``combine``.
    """
    pending = PendingCombine(y, handle, context, order, row_grads, probs_dtype)
    pending.send(beside=True)
    return pending
