"""``EPContext``: the symmetric memory and the channels of expert parallelism on one group, and how its ops are
launched.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ditron_train.data.tuning_table import class_of_size, tuned_count
from ditron_train.ep.handle import EPHandle, LayoutShape, LayoutSizes, Room
from ditron_train.runtime.device import device_name, is_capturing, is_interpreter, kernel_target, with_index
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.groups import GroupCache, check_member, unwrapped
from ditron_train.runtime.launch import compiled_together, kept_launch
from ditron_train.runtime.logs import log_once
from ditron_train.stream.call_order import CallOrder
from ditron_train.stream.op_context import OpContext
from ditron_train.symm.arena import SymmetricArena, SymmetricTensor
from ditron_train.symm.channel import Channel, ChannelPointers


class TokenBuffers(NamedTuple):
    """Symmetric buffers of a dispatch: own memory, and the addresses of every rank's."""

    tokens: torch.Tensor
    token_addresses: torch.Tensor
    entries: torch.Tensor
    entry_addresses: torch.Tensor


class RowBuffers(NamedTuple):
    """Symmetric buffers of a combine: own memory, and the addresses of every rank's."""

    rows: torch.Tensor
    row_addresses: torch.Tensor
    grads: torch.Tensor
    grad_addresses: torch.Tensor


_NCCL_BLOCKS = 32  # of one collective, a multiprocessor each, unless NCCL_MIN_CTAS asks for more
_HEADROOM = 1.125  # routing drifts from step to step: a buffer that must grow grows by a little more


@dataclass
class MoveConfig:
    """Launch constants of the two kernels that move tokens. They change the time, never the bits.

    Attributes:
        num_senders: Programs, one on each multiprocessor, that push over the links of a dispatch if no tuning table
            says how many; ``usual_senders`` derives the number for a combine.
        num_programs: All programs of a launch: those that do not push place what arrives.
        num_warps: Warps of a program: with 32 the kernels would have to spill registers.
        push_elements: Elements of a tile on its way to the experts.
        return_elements: Elements of a tile on its way back.
        sum_elements: Elements of a tile of sums.
        item_tokens: Tokens that a program sums at a time (a power of two).
        num_concurrent: The most programs of a launch while another microbatch is computed, as many as a collective of
            NCCL's takes: half of them push, the others place.
    """

    num_senders: int = 16
    num_programs: int = 132
    num_warps: int = 16
    push_elements: int = 16384
    return_elements: int = 32768
    sum_elements: int = 8192
    item_tokens: int = 8
    num_concurrent: int = 32


def usual_senders(op: str, num_senders: int, world_size: int) -> int:
    """Programs that push in a ``dispatch`` or ``combine``. Those of a combine also copy the rows that stay on this
    rank, one part in ``world_size``, so a combine has that many more, the same number for each rank."""
    if op != "combine" or not 1 < world_size <= num_senders:
        return num_senders
    return -(-num_senders // (world_size - 1)) * world_size


def move_class(num_experts: int, topk: int, hidden: int) -> str:
    """The class of dispatches, or combines, that share a choice in a tuning table. It leaves out the number of tokens,
    which differs between ranks, since all ranks have to choose alike."""
    return f"{num_experts} experts top {topk} {class_of_size(hidden)}"


@dataclass
class FusedConfig:
    """Launch constants of the grouped GEMM with combine behind it. They change the time, never the bits.

    Attributes:
        num_senders: Programs that return rows instead of computing, at most half of all.
        place_elements: Elements of a tile on its way to its place.
    """

    num_senders: int = 16
    place_elements: int = 16384


class EPBuffers:
    """The symmetric buffers that all layers of a group share, whatever their experts."""

    def __init__(self, context: EPContext) -> None:
        self._context = context
        self._reserved: set[tuple] = set()

    def _buffer(
        self, name: str, num_rows: int, most_rows: int, row_shape: tuple[int, ...], dtype: torch.dtype
    ) -> SymmetricTensor:
        """The buffer with all its rows, at least ``num_rows``; if it has to grow it gets headroom, up to
        ``most_rows``. Same arguments on every rank."""
        key = (name, row_shape, dtype)
        kept = self._context.prepared.get(key)
        if kept is None or kept.shape[0] < num_rows:
            kept = None  # frees the old memory before more is requested
            row_bytes = max(math.prod(row_shape) * dtype.itemsize, 1)
            if self._context.arena.capacity_bytes(name) < max(num_rows, 1) * row_bytes:
                num_rows = max(min(int(num_rows * _HEADROOM) + 1, max(most_rows, num_rows)), 1)
                self._context.arena.tensor(name, (num_rows, *row_shape), dtype)
            num_rows = self._context.arena.capacity_bytes(name) // row_bytes
            kept = self._context.prepared[key] = self._context.arena.tensor(name, (num_rows, *row_shape), dtype)
        return kept

    def rows(self, num_rows: int, most_rows: int, hidden: int, dtype: torch.dtype) -> SymmetricTensor:
        """The buffer that tokens and rows are sent to, ``[num_rows, hidden]``."""
        return self._buffer("ep/rows", num_rows, most_rows, (hidden,), dtype)

    def _entries_buffer(self, num_rows: int, most_rows: int) -> SymmetricTensor:
        """The buffer that the entries of a handle are sent to, int32 ``[num_rows, 4]``."""
        return self._buffer("ep/entries", num_rows, most_rows, (4,), torch.int32)

    def _grads_buffer(self, num_places: int) -> SymmetricTensor:
        """The buffer that gradients of probabilities are sent to, fp32 ``[num_places]``."""
        return self._buffer("ep/prob_grads", num_places, num_places, (), torch.float32)

    def token_buffers(self, num_slots: int, num_entries: int, hidden: int, dtype: torch.dtype) -> TokenBuffers:
        """The buffers of a dispatch, of these sizes on every rank."""
        tokens = self.rows(num_slots, num_slots, hidden, dtype)
        entries = self._entries_buffer(num_entries, num_entries)
        return TokenBuffers(tokens.local, tokens.addresses, entries.local, entries.addresses)

    def row_buffers(self, num_places: int, hidden: int, dtype: torch.dtype) -> RowBuffers:
        """The buffers of a combine, of these sizes on every rank."""
        rows, grads = self.rows(num_places, num_places, hidden, dtype), self._grads_buffer(num_places)
        return RowBuffers(rows.local, rows.addresses, grads.local, grads.addresses)

    def reserve(self, room: Room, tokens: int, hidden: int, dtype: torch.dtype) -> None:
        """Makes every buffer that a handle needs large enough (collective if one must grow).

        Args:
            room: The largest need of any rank.
            tokens: Tokens of all ranks together.
            hidden: Elements of a token.
            dtype: Type of the elements.

        Raises:
            ArenaError: They do not fit; on every rank alike.
        """
        before = self._buffer_bytes()
        self.rows(max(room.slots, room.places), max(tokens, room.places), hidden, dtype)
        self._entries_buffer(room.rows, tokens * min(self._context.shape.topk, self._context.shape.experts_per_rank))
        self._grads_buffer(room.places)
        now = self._buffer_bytes()
        if now > before:
            log_once(
                f"ep memory {self._context.arena.group_name} {now}",
                f"ep: {now / 2**20:.1f} MiB of symmetric buffers on every rank",
            )

    def room_now(self, hidden: int, dtype: torch.dtype) -> tuple[int, int]:
        """Rows of ``rows`` and entries of ``_entries_buffer`` that are allocated; the same on every rank."""
        row_bytes = hidden * dtype.itemsize
        return self._context.arena.capacity_bytes("ep/rows") // row_bytes, self._context.arena.capacity_bytes(
            "ep/entries"
        ) // 16

    def _buffer_bytes(self) -> int:
        """Bytes of the buffers that all layers on this group share."""
        return sum(self._context.arena.capacity_bytes(name) for name in ("ep/rows", "ep/entries", "ep/prob_grads"))

    def has_reserved(self, room: Room, hidden: int, dtype: torch.dtype) -> bool:
        """Whether ``reserve_room`` was called for this room: a CUDA graph's capture may use it, and no other."""
        return (room, hidden, dtype) in self._reserved

    def reserve_room(self, room: Room, num_tokens: int, hidden: int, dtype: torch.dtype) -> None:
        """Makes the buffers of a capacity large enough; the first call of its kind is collective and waits for the
        device.

        Call it after an exchange of counts, whose signature carries the capacity: ranks that differ raise here.

        Raises:
            MismatchError: The ranks differ.
            ArenaError: They do not fit; on every rank alike.
            NotSupportedError: A first call while a CUDA graph is being captured.
        """
        if self.has_reserved(room, hidden, dtype):
            return
        if is_capturing(self._context.device):
            raise NotSupportedError("expert parallel: run a step of this shape before the CUDA graph is captured")
        self._context.counts_channel.synchronize()
        self.reserve(room, num_tokens * self._context.shape.world_size, hidden, dtype)
        self._reserved.add((room, hidden, dtype))


class EPContext(OpContext):
    """What all MoE layers with the same experts share on ``group`` (constructed collectively).

    Both directions and all layers of the group use one buffer for rows, whatever their experts. Its content is needed
    only inside an op, and start signals guard it. So ops that move rows run one after another, on whichever streams
    they are called, and so do exchanges of counts, which have buffers of their own and do not wait for the rows of
    another microbatch. The buffer's size is the largest need of any rank, which every rank learns from the exchanged
    counts, so growing the buffer needs no agreement.

    Args:
        group: The expert-parallel process group.
        device: CUDA device, or the CPU in the interpreter.
        num_experts: Experts over all ranks.
        topk: Experts of a token at most.

    Raises:
        NotSupportedError: Experts that do not divide by the group, top-k above the experts, no kernels for the device,
            or peers whose memory cannot be addressed (other nodes).
        ArenaError: No symmetric memory, or its cap is exceeded; on every rank alike.

    Attributes:
        buffers: The symmetric buffers of dispatch and combine.
        counts: Orders the exchanges of counts.
        num_moves: How often ``enter_move`` was called.
        tried_senders: What ``senders`` returns while ``tune`` tries it.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, num_experts: int, topk: int) -> None:
        check_member(group)
        kernel_target(device)  # raises before there is any memory, as the shape does
        sizes = dict(num_chunks=4, min_chunk_tokens=2, min_chunk_bytes=0) if is_interpreter() else {}
        self.shape = LayoutShape(dist.get_world_size(group), num_experts, topk, **sizes)
        if self.shape.columns > 1024:
            raise NotSupportedError(
                f"expert parallel: {num_experts} experts on {self.shape.world_size} ranks need more than 1024 columns"
            )
        super().__init__(group, device)
        self.move = MoveConfig(num_programs=self.num_sms)
        self.senders_beside = 12
        self.fused = FusedConfig()
        self.only_compiles = False
        if is_interpreter():
            self.move.num_senders = self.senders_beside = 1
        self._calls, self.counts = _moves_of(self.arena), CallOrder(self.device)
        self.num_moves = 0
        self.tried_senders: int | None = None
        self._senders: dict[tuple[str | None, str, int], int] = {}
        name = f"ep_e{num_experts}_k{topk}"
        fields = ("hidden", "dtype", "num_experts", "topk", "kind", "row_capacity")
        flags = self.world_size * self.shape.num_chunks
        self.counts_channel = self.add_channel(f"{name}_counts", self.world_size, fields)
        self.dispatch_channel = self.add_channel(f"{name}_dispatch", flags, fields)
        self.combine_channel = self.add_channel(f"{name}_combine", flags, fields)
        self.counts_on_their_way: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        self.buffers = EPBuffers(self)
        self.counts_channel.overflow_hint = (
            " (the slot is the local expert of that rank which gets most; DITRON_EP_CAPACITY sets the room)"
        )
        self.counts_channel.bounds = ("experts of a token", "rows of all tokens")
        self.messages = self.arena.tensor(f"{name}/messages", (self.world_size, self.shape.message_words), torch.int32)

    @cached_property
    def layout_sizes(self) -> LayoutSizes:
        """Constants of the kernels that make a handle."""
        values = [getattr(self.shape, name.lower()) for name in LayoutSizes._fields[:-1]]
        return LayoutSizes._make([*values, self.target])

    def senders(self, op: str, hidden: int) -> int:
        """How many programs push over the links in a ``dispatch`` or ``combine``: as a tuning table says, else
        ``usual_senders``; at most half of all, since the others place what arrives."""
        most = max(self.move.num_programs // 2, 1)
        if self.tried_senders is not None:
            return min(self.tried_senders, most)
        key = (os.environ.get("DITRON_TUNING"), op, hidden)
        if key not in self._senders:
            name = move_class(self.shape.num_experts, self.shape.topk, hidden)
            found = tuned_count(device_name(self.device), op, self.world_size, name, "senders")
            usual = usual_senders(op, self.move.num_senders, self.world_size)
            self._senders[key] = usual if found is None else found
        return min(self._senders[key], most)

    def leave_room(self) -> None:
        """Leaves multiprocessors to an NCCL collective with other ranks that runs on another stream.

        All blocks of the ops here and of that collective then find a multiprocessor at once, whichever comes first.
        Else there could be a deadlock: this rank's programs hold all multiprocessors and wait for rows of a peer,
        whose last programs wait for multiprocessors that NCCL holds until this rank has joined its collective."""
        self.move.num_programs = min(self.move.num_programs, max(self.num_sms - _NCCL_BLOCKS, 2))

    def run_concurrently(self) -> None:
        """Leaves multiprocessors to another microbatch's layers, which are computed while rows move."""
        self.move.num_programs = min(self.move.num_programs, self.move.num_concurrent)

    @property
    def moves(self) -> CallOrder:
        """Orders the ops that move rows, of all contexts of the group."""
        return self._calls

    def enter_move(self, channel: Channel, handle: EPHandle | None = None) -> torch.cuda.Stream | None:
        """Start of every op that moves rows: raises what an earlier op of any channel recorded (else each channel
        would wait a deadline of its own), makes this stream wait for the last op's, and keeps the tables of ``handle``
        for this stream. Returns the stream, None on the CPU."""
        self.check()
        stream = self._follow()
        self.num_moves += 1
        if handle is not None and stream is not None and stream is not handle.kept_for:
            handle.record_stream(stream)
        return stream

    def rejoin(self) -> None:
        """``join``, if ``fork`` was called since the last ``join``: capturing a graph requires a join after a fork,
        and allows none without one."""
        if not self.is_joined:
            self.join()

    def record(self, op: str, *details: Hashable) -> None:
        """Notes a call in the process's flight recorder, unless the call only compiles."""
        if not self.only_compiles:
            self._records.record(op, *details)

    def check(self) -> None:
        """Raises what any kernel of this context recorded (host memory only)."""
        for channel in self._channels:
            channel.check()


_moves: weakref.WeakKeyDictionary[SymmetricArena, CallOrder] = weakref.WeakKeyDictionary()


def _moves_of(arena: SymmetricArena) -> CallOrder:
    """The one order of ops that move rows through an arena's buffers."""
    return _moves.setdefault(arena, CallOrder(arena.device))


_contexts: GroupCache[tuple[dist.ProcessGroup, torch.device, int, int], EPContext] = GroupCache()


def get_ep_context(group: dist.ProcessGroup, device: torch.device, num_experts: int, topk: int) -> EPContext:
    """The context for these arguments, one for each; made at the first call, which is collective."""
    group = unwrapped(group)
    device = with_index(device)
    key = (group, device, num_experts, topk)
    context = _contexts.get(key)
    if context is None or context.arena.closed:
        with torch.inference_mode(False):  # an evaluation may come before training
            context = _contexts[key] = EPContext(group, device, num_experts, topk)
    return context


#: Types of tokens, and their code in a signature.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Kind(IntEnum):
    """What an op is, in its signature: ranks that disagree raise."""

    COUNTS = 0
    DISPATCH = 1
    DISPATCH_GRAD = 2
    COMBINE = 3
    COMBINE_GRAD = 4
    GEMM_COMBINE = 5
    COMBINE_BY_RANK = 6
    COMBINE_BY_RANK_GRAD = 7


def pointers(
    context: EPContext, channel: Channel, hidden: int, dtype: torch.dtype, kind: Kind, row_capacity: int = 0
) -> ChannelPointers:
    """The channel's pointers for a launch of an op of kind ``kind``, with the signature that its start signal carries;
    requested once in every call of an op."""
    shape = context.shape
    if is_capturing(context.device):
        context.arena.graph_captured = True  # replays keep using today's buffers, even if these grow meanwhile
    context.record(channel.op_name, kind.name.lower().replace("_", " "), hidden, dtype)
    return channel.pointers(channel.signature((hidden, dtype, shape.num_experts, shape.topk, int(kind), row_capacity)))


def launch(
    context: EPContext,
    kernel: Any,
    num_programs: int,
    constants: dict[str, Any],
    num_warps: int,
    *dtypes: torch.dtype,
    num_stages: int = 3,
) -> Callable[..., None]:
    """``kept_launch`` for these types of arguments. Inside ``compiling`` it compiles and does not launch."""
    kinds = (context.device, *dtypes)
    launch = kept_launch(kernel, num_programs, *kinds, num_warps=num_warps, num_stages=num_stages, **constants)
    if context.only_compiles:
        return lambda *arguments, stream=None: launch.compile(*arguments)
    return launch


@contextmanager
def compiling(context: EPContext) -> Iterator[None]:
    """A context in which ops compile their kernels, several at a time, and launch none: their results must not be
    used.

    Grouped GEMMs without dispatch or combine are not ops of an ``EPContext``: they run.
    """
    context.only_compiles = True
    try:
        with compiled_together(context.device):
            yield
    finally:
        context.only_compiles = False


def check_tokens(name: str, tensor: torch.Tensor, context: EPContext) -> None:
    """Raises ``NotSupportedError`` for rows that no op of the context takes."""
    if tensor.dim() != 2:
        raise NotSupportedError(f"{name}: needs [rows, hidden], got {tuple(tensor.shape)}")
    if tensor.dtype not in DTYPES:
        raise NotSupportedError(f"{name}: {tensor.dtype}; allowed: {', '.join(map(str, DTYPES))}")
    if tensor.device != context.device:
        raise NotSupportedError(f"{name}: a tensor on {tensor.device}, the context is on {context.device}")


def move_tile(hidden: int, elements: int) -> tuple[int, int]:
    """Rows and columns of a tile of about ``elements`` elements."""
    columns = min(1 << max(hidden - 1, 0).bit_length(), 8192)
    return max(elements // columns, 1), columns
