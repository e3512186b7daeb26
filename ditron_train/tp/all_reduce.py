"""All-reduces: every rank gets all partial sums and adds up each element in the order in which NCCL would. Equivalent
PyTorch code:

    dist.all_reduce(partial, group=group)

By copy engines concurrent with a GEMM, or by the stores of one kernel if there is little to send. A rank sends its
partial sums whole to each peer: with two ranks that are no more bytes than NCCL sends, with more a GEMM hides them, or
``tp.gemm_ar`` sends less in two rounds.

Streams of one rank, by copy engines:

    communication   start signals (one program) | chunk 0 to all peers, flags | chunk 1 to all peers, flags | ...
    current         GEMM of chunk 0 | GEMM of chunk 1 | ... | a kernel that adds up chunk after chunk

Who waits for whom: copies wait for the start signals of this epoch, since receive buffers (slots) are single. The sum
of a chunk waits for its flag of every source. The stores of one kernel wait for nobody: their slots change with the
parity of the epoch (``push_and_reduce_kernel``).
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.policy.all_reduce_order import SumMap, all_reduce_orders
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.launch import KernelLaunch
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.runtime.settings import get_settings
from ditron_train.schedule.orders import chunk_order
from ditron_train.stream.agreement import agree
from ditron_train.stream.copies import copy_with_flags
from ditron_train.stream.events import current_handle
from ditron_train.stream.plan import REDUCE_BLOCK, Plan, SumExchange
from ditron_train.tp.choices import PUSH_BYTES
from ditron_train.tp.context import MOST_CHUNKS, MOST_PUSH_PROGRAMS, TPContext


class OrderTables(NamedTuple):
    """A ``SumMap`` on the device, int32.

    Attributes:
        ends: [runs], the element behind each run's last.
        order_of_run: [runs].
        orders: [orders, world_size].
        first_runs: [ceil(elements / BLOCK)], the run of the first element of every block.
    """

    ends: Any
    order_of_run: Any
    orders: Any
    first_runs: Any


class _Partials(NamedTuple):
    """Partial sums of all ranks, from element ``first`` on: this rank's in ``own``, the others in ``slots``."""

    own: Any
    slots: Any
    slot_elements: Any
    first: Any
    rank: Any


@triton.jit
def _load(partials, source, offsets, mask, SKIPS_OWN: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """Loads those of ``source`` in fp32. SKIPS_OWN: slots are of rank + 1, rank + 2, ...; else of rank 0, 1, ..."""
    if source == partials.rank:
        values = tl.load(partials.own + offsets, mask=mask)
    else:
        slot = source
        if SKIPS_OWN:
            slot = (source + WORLD_SIZE - partials.rank - 1) % WORLD_SIZE
        values = tl.load(partials.slots + slot * partials.slot_elements + offsets, mask=mask)
    return values.to(tl.float32)


@triton.jit
def _reduce_block(
    partials,
    out_ptr,
    tables,
    low,
    limit,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    SKIPS_OWN: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):
    """out = the sums of elements [low, limit) of the whole buffer, within one block of BLOCK elements; each + in fp32,
    rounded at every hop.

    VECTOR: a divisor of the ends of all runs, so that masks cover whole vectors: if the compiler cannot see this, it
    loads elements one by one. Most blocks have one run, none has many. 0: there are two ranks, and any order is
    right."""
    dtype = partials.own.dtype.element_ty
    offsets = low - partials.first + tl.arange(0, BLOCK)
    if VECTOR == 0:
        mask = offsets < limit - partials.first
        total = tl.load(partials.own + offsets, mask=mask).to(tl.float32)
        for step in tl.static_range(1, WORLD_SIZE):
            source = (partials.rank + step) % WORLD_SIZE
            total = (total + _load(partials, source, offsets, mask, SKIPS_OWN, WORLD_SIZE)).to(dtype).to(tl.float32)
        tl.store(out_ptr + offsets, total.to(dtype), mask=mask)
    else:
        block = (low // BLOCK).to(tl.int32)
        run = tl.load(tables.first_runs + block)
        begin = low
        end = tl.minimum(tl.cast(block + 1, tl.int64) * BLOCK, limit)
        while begin < end:
            behind = tl.maximum(tl.minimum(tl.load(tables.ends + run).to(tl.int64), end), begin)
            first_lane = (begin - partials.first) // VECTOR * VECTOR
            end_lane = (behind - partials.first) // VECTOR * VECTOR
            mask = (offsets >= first_lane) & (offsets < end_lane)
            order = tables.orders + tl.load(tables.order_of_run + run) * WORLD_SIZE
            total = _load(partials, tl.load(order), offsets, mask, SKIPS_OWN, WORLD_SIZE)
            for step in tl.static_range(1, WORLD_SIZE):
                values = _load(partials, tl.load(order + step), offsets, mask, SKIPS_OWN, WORLD_SIZE)
                total = (total + values).to(dtype).to(tl.float32)
            tl.store(out_ptr + offsets, total.to(dtype), mask=mask)
            begin = behind
            run += 1


@triton.jit
def _num_chunks(behind, num_elements, chunk_elements):
    """How many chunks hold the elements before ``behind``."""
    return tl.cdiv(tl.maximum(tl.minimum(behind, num_elements), 0), chunk_elements).to(tl.int32)


@triton.jit(do_not_specialize=["chunk_elements"])
def reduce_all_kernel(
    partial_ptr,
    slots_ptr,
    channel,
    out_ptr,
    tables,
    num_elements,
    chunk_elements,
    CHUNKS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """out [elements] = the sum over ranks of the partial sums that copy engines have sent.

    This rank's are read from ``partial_ptr``, the others from slots [world - 1, elements] in own memory, those of
    rank + 1 first. They arrive in chunks of ``chunk_elements`` with a flag for each chunk and source, ``CHUNKS`` flags
    to a source. A program waits for a chunk (acquire) before its first block there, so early chunks are added up while
    the last one arrives.
    """
    epoch = dl.next_epoch(channel.tickets + 1)  # slot 1: the role that waits
    rank = dl.rank(channel.control)
    num_elements = tl.cast(num_elements, tl.int64)
    chunk_elements = tl.cast(chunk_elements, tl.int64)
    partials = _Partials(partial_ptr, slots_ptr, num_elements, tl.cast(0, tl.int64), rank)
    for block in range(tl.program_id(0), tl.cdiv(num_elements, BLOCK).to(tl.int32), tl.num_programs(0)):
        low = tl.cast(block, tl.int64) * BLOCK
        # Not carried from block to block: Triton loses a value that a loop carries only for an inner loop's bounds
        # (its pull request 9036), and each block would wait for all chunks again.
        num_waited = _num_chunks(low - (tl.num_programs(0) - 1) * BLOCK, num_elements, chunk_elements)
        for chunk in range(num_waited, _num_chunks(low + BLOCK, num_elements, chunk_elements)):
            flags = channel.signals + chunk
            dl.wait_peers(flags, CHUNKS, epoch, channel.control, rank, chunk, 1, WORLD_SIZE - 1, WORLD_SIZE, TARGET)
        _reduce_block(partials, out_ptr, tables, low, num_elements, BLOCK, VECTOR, True, WORLD_SIZE)


@triton.jit(do_not_specialize=["slot_rows"])
def reduce_local_shard_kernel(
    partial_ptr,
    slots_ptr,
    channel,
    out_ptr,
    row_starts_ptr,
    tables,
    N,
    slot_rows,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """``reduce_rows_kernel`` with each element added in the order of an all-reduce of the whole buffer [total rows,
    N].

    out is this rank's rows; ``partial_ptr`` [total rows, N] its own partial sums, slots [world, slot_rows, N] those of
    the others, read once the flag of their source holds this epoch (acquire).
    """
    epoch = dl.next_epoch(channel.tickets + 1)  # slot 1: the role that waits
    rank = dl.rank(channel.control)
    first = tl.load(row_starts_ptr + rank).to(tl.int64) * N
    behind = tl.load(row_starts_ptr + rank + 1).to(tl.int64) * N
    partials = _Partials(partial_ptr + first, slots_ptr, tl.cast(slot_rows, tl.int64) * N, first, rank)
    dl.wait_peers(channel.signals, 1, epoch, channel.control, rank, 0, 1, WORLD_SIZE - 1, WORLD_SIZE, TARGET)
    first_block = (first // BLOCK).to(tl.int32)
    for block in range(first_block + tl.program_id(0), tl.cdiv(behind, BLOCK).to(tl.int32), tl.num_programs(0)):
        low = tl.maximum(tl.cast(block, tl.int64) * BLOCK, first) // VECTOR * VECTOR
        _reduce_block(partials, out_ptr, tables, low, behind, BLOCK, VECTOR, False, WORLD_SIZE)


@triton.jit
def push_and_reduce_kernel(
    partial_ptr,
    slots_addresses,
    channel,
    out_ptr,
    tables,
    num_elements,
    AREA: tl.constexpr,
    MOST_PROGRAMS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """A whole all-reduce of a few elements: out = the sum over ranks of ``partial_ptr`` [elements].

    Program p stores blocks p, p + num_programs, ... into the slots of every peer, rank + 1 first, releases its flags
    there, waits for the flags of the peers' programs p (acquire), and adds up the same blocks. All programs run at
    once, and each stores before it waits.

    Slots [2, world, AREA] change with the parity of the epoch, so nobody waits for a start signal before its stores: a
    rank begins epoch e + 2, whose slots are those of e, when it has finished e + 1, for which every peer had to store,
    and a peer stores for e + 1 only when it has finished e. Signatures are compared after the sum.
    """
    epoch = dl.next_epoch(channel.tickets)
    rank = dl.rank(channel.control)
    program = tl.program_id(0)
    num_elements = tl.cast(num_elements, tl.int64)
    area = tl.cast((epoch & 1) * WORLD_SIZE, tl.int64) * AREA
    lanes = tl.arange(0, BLOCK)
    num_blocks = tl.cdiv(num_elements, BLOCK).to(tl.int32)
    for step in tl.static_range(1, WORLD_SIZE):
        peer = (rank + step) % WORLD_SIZE
        slot = dl.symm_at(slots_addresses, peer, partial_ptr.dtype.element_ty) + area + rank * AREA
        for block in range(program, num_blocks, tl.num_programs(0)):
            offsets = tl.cast(block, tl.int64) * BLOCK + lanes
            mask = offsets < num_elements
            tl.store(slot + offsets, tl.load(partial_ptr + offsets, mask=mask), mask=mask)
    if program == 0:
        dl.announce(channel.ready_addresses, channel.signature, epoch, rank, WORLD_SIZE, TARGET)
    for step in tl.static_range(1, WORLD_SIZE):
        flags = dl.symm_at(channel.signals_addresses, (rank + step) % WORLD_SIZE, tl.int32)
        dl.notify(flags + rank * MOST_PROGRAMS + program, epoch, TARGET)
    flags = channel.signals + program
    dl.wait_peers(flags, MOST_PROGRAMS, epoch, channel.control, rank, program, 1, WORLD_SIZE - 1, WORLD_SIZE, TARGET)
    own_slots = dl.symm_at(slots_addresses, rank, partial_ptr.dtype.element_ty) + area
    partials = _Partials(partial_ptr, own_slots, AREA, tl.cast(0, tl.int64), rank)
    for block in range(program, num_blocks, tl.num_programs(0)):
        low = tl.cast(block, tl.int64) * BLOCK
        _reduce_block(partials, out_ptr, tables, low, num_elements, BLOCK, VECTOR, False, WORLD_SIZE)
    dl.verify_peers(channel.ready, channel.signature, epoch, channel.control, rank, WORLD_SIZE, TARGET)


@triton.jit
def push_largest_kernel(
    value_ptr, slots_addresses, channel, MOST_PROGRAMS: tl.constexpr, WORLD_SIZE: tl.constexpr, TARGET: tl.constexpr
):
    """One program: ``value_ptr`` [1] becomes the largest of all ranks'; the result is NaN only if all values are, as
    in NCCL.

    Slots [2, world] change with the parity of the epoch, as those of ``push_and_reduce_kernel``, whose channel this
    is.
    """
    epoch = dl.next_epoch(channel.tickets)
    rank = dl.rank(channel.control)
    area = (epoch & 1) * WORLD_SIZE
    largest = tl.load(value_ptr)
    for step in tl.static_range(1, WORLD_SIZE):
        peer = (rank + step) % WORLD_SIZE
        tl.store(dl.symm_at(slots_addresses, peer, value_ptr.dtype.element_ty) + area + rank, largest)
    dl.announce(channel.ready_addresses, channel.signature, epoch, rank, WORLD_SIZE, TARGET)
    for step in tl.static_range(1, WORLD_SIZE):
        flags = dl.symm_at(channel.signals_addresses, (rank + step) % WORLD_SIZE, tl.int32)
        dl.notify(flags + rank * MOST_PROGRAMS, epoch, TARGET)
    flags = channel.signals
    dl.wait_peers(flags, MOST_PROGRAMS, epoch, channel.control, rank, 0, 1, WORLD_SIZE - 1, WORLD_SIZE, TARGET)
    slots = dl.symm_at(slots_addresses, rank, value_ptr.dtype.element_ty) + area
    for step in tl.static_range(1, WORLD_SIZE):
        value = tl.load(slots + (rank + step) % WORLD_SIZE)
        # As fmaxf; the interpreter's maximum is NaN if either value is.
        largest = tl.maximum(tl.where(largest != largest, value, largest), tl.where(value != value, largest, value))
    tl.store(value_ptr, largest)
    dl.verify_peers(channel.ready, channel.signature, epoch, channel.control, rank, WORLD_SIZE, TARGET)


_PUSH_BLOCK = 2048
_MOST_ELEMENTS = 1 << 31  # tables hold int32


def sums_of(context: TPContext, num_elements: int, dtype: torch.dtype) -> SumMap | None:
    """The orders in which NCCL adds (collective if they are not known yet); None if any order is right.

    Raises:
        NotSupportedError: NCCL's sums are not reductions from left to right, and bits matter; on every rank alike.
    """
    if context.world_size <= 2:
        return None
    if not context.is_cuda:
        return SumMap.ring(num_elements, context.world_size)
    if num_elements >= _MOST_ELEMENTS:
        raise NotSupportedError(f"all-reduce: the orders of {num_elements} sums are not looked at")
    orders = all_reduce_orders(context.group, context.device, dtype, num_elements)
    if orders.sums is None and get_settings().policy in ("strict", "bits"):
        raise NotSupportedError(str(orders.reason))
    return orders.sums or SumMap.ring(num_elements, context.world_size)


def order_tables(
    context: TPContext, num_rows: int, num_columns: int, dtype: torch.dtype, block: int
) -> tuple[OrderTables, int]:
    """NCCL's orders for [num_rows, num_columns], for kernels that add up ``block`` elements at once, and their
    ``VECTOR`` (collective).

    Raises:
        NotSupportedError: As ``sums_of``.
    """
    num_elements = num_rows * num_columns
    sums = sums_of(context, num_elements, dtype)
    if sums is None:
        nothing = context.table("no order", [0])
        return OrderTables(nothing, nothing, nothing, nothing), 0
    ends = np.asarray(sums.ends, dtype=np.int64)
    blocks = np.arange(0, num_elements, block)
    first_runs = np.searchsorted(ends, blocks, side="right")
    key = ("orders", sums, block)
    values = (ends, np.asarray(sums.order_of_run), np.ravel(sums.orders), first_runs)
    tables = (context.table((*key, index), value) for index, value in enumerate(values))
    vector = math.gcd(16 // dtype.itemsize, num_columns, *(int(end) for end in sums.ends))
    return OrderTables(*tables), vector


class AllReduce(SumExchange[TPContext]):
    """All-reduces of partial sums [num_rows, num_columns] by copy engines (constructed collectively).

    ``begin``, then ``send`` for chunks of ``chunk_rows`` rows as they are computed; ``finish`` adds up on the current
    stream. Start signals come before the sends, since slots are single; a flag for each chunk and source signals its
    arrival.

    Args:
        context: The context whose buffers and streams are used.
        num_rows, num_columns: Sizes of the partial sums, in rows of whole 16 bytes.
        dtype: Type of the partial sums.
        chunk_rows: Rows that are sent together.
    """

    def __init__(
        self, context: TPContext, num_rows: int, num_columns: int, dtype: torch.dtype, chunk_rows: int
    ) -> None:
        assert -(-num_rows // chunk_rows) <= MOST_CHUNKS, f"{num_rows} rows by {chunk_rows}"
        channel = context.all_reduce_channel
        pointers = channel.pointers(agree(context, channel, (num_rows, num_columns, dtype, chunk_rows)))
        super().__init__(context, channel, pointers, context.all_reduce_epochs)
        self._slots = context.slots((context.world_size - 1) * num_rows, num_columns, dtype)
        self._tables, vector = order_tables(context, num_rows, num_columns, dtype, REDUCE_BLOCK)
        self._num_elements, self._chunk_elements = num_rows * num_columns, chunk_rows * num_columns
        self._ring_reduce = self._launch_of_sum(reduce_all_kernel, {"CHUNKS": MOST_CHUNKS, "VECTOR": vector})
        row_bytes = num_columns * dtype.itemsize
        self._chunks = [
            self._list_copies(index, first * row_bytes, (min(first + chunk_rows, num_rows) - first) * row_bytes)
            for index, first in enumerate(range(0, num_rows, chunk_rows))
        ]

    def _list_copies(self, index: int, offset: int, num_bytes: int) -> list[tuple[int, int, int, int, int]]:
        """Arguments of ``copy_with_flags`` for one chunk, to every peer."""
        context, rank = self.context, self.context.rank
        slot_bytes = self._num_elements * self._slots.local.element_size()
        copies = []
        for peer in chunk_order(rank, context.world_size, "sum_push").tolist():
            slot = (rank - peer - 1) % context.world_size
            destination = self._slots.host_addresses[peer] + slot * slot_bytes + offset
            flag = self.channel.signals.host_addresses[peer] + 4 * (rank * MOST_CHUNKS + index)
            copies.append((destination, offset, num_bytes, flag, self._epochs.data_ptr()))
        return copies

    def send(self, partial: torch.Tensor, position: int, rows: slice, *, signals: bool) -> None:
        """Sends chunk ``position``, ``rows`` of the partial, after what the communication stream has."""
        assert signals, "a chunk is sent whole"
        copy_with_flags(self._chunks[position], partial.data_ptr(), self.context.comm_stream)

    def _reduce_arguments(self, partial: torch.Tensor, out: torch.Tensor) -> tuple[Any, ...]:
        sizes = (self._num_elements, self._chunk_elements)
        return (partial, self._slots.local, self.pointers, out, self._tables, *sizes)


class PushAllReduce(Plan[TPContext]):
    """All-reduces of at most ``PUSH_BYTES`` by one kernel that stores to the peers (constructed collectively).

    Args:
        context: The context whose buffers are used.
        num_rows, num_columns: Sizes of the partial sums.
        dtype: Type of the partial sums.
        num_programs: The most programs that share them.
    """

    def __init__(
        self, context: TPContext, num_rows: int, num_columns: int, dtype: torch.dtype, num_programs: int
    ) -> None:
        num_elements = num_rows * num_columns
        assert num_elements * dtype.itemsize <= PUSH_BYTES, f"{num_elements} elements of {dtype}"
        super().__init__(context, context.push_channel)
        num_programs = min(num_programs, -(-num_elements // _PUSH_BLOCK), MOST_PUSH_PROGRAMS, context.num_sms)
        values = (num_rows, num_columns, dtype, num_programs)
        self.pointers = self.channel.pointers(agree(context, self.channel, values))
        self._slots = context.pushed(dtype)
        self._tables, vector = order_tables(context, num_rows, num_columns, dtype, _PUSH_BLOCK)
        self._num_elements = num_elements
        constants = {
            "AREA": PUSH_BYTES // dtype.itemsize,
            "MOST_PROGRAMS": MOST_PUSH_PROGRAMS,
            "VECTOR": vector,
            "BLOCK": _PUSH_BLOCK,
            "WORLD_SIZE": context.world_size,
            "TARGET": context.target,
        }
        self._launch = KernelLaunch(push_and_reduce_kernel, num_programs, constants, num_warps=8)

    @property
    def identity(self) -> tuple:
        """Plans with the same identity share their compiled kernels."""
        return self._launch.identity

    def run(self, partial: torch.Tensor) -> None:
        """``partial``, contiguous, becomes the sum over ranks."""
        key = partial.data_ptr()
        if not self._launch.repeat(key, current_handle(self.context.device)):
            self._launch(*self._arguments(partial), key=key)
        self.context.leave(self.channel)

    def compile(self, partial: torch.Tensor) -> None:
        """Compiles what a call would run, without running it."""
        self._launch.compile(*self._arguments(partial))

    def _arguments(self, partial: torch.Tensor) -> tuple[Any, ...]:
        return (partial, self._slots.addresses, self.pointers, partial, self._tables, self._num_elements)


class MaxAllReduce(Plan[TPContext]):
    """The maximum over ranks of one fp32 value, by one kernel that stores to the peers (constructed collectively).

    Args:
        context: The context whose buffers are used.
    """

    def __init__(self, context: TPContext) -> None:
        super().__init__(context, context.push_channel)
        self.pointers = self.channel.pointers(agree(context, self.channel, (0, 1, torch.float32, 0)))
        self._slots = context.arena.tensor("tp.largest", (2, context.world_size), torch.float32)
        constants = {"MOST_PROGRAMS": MOST_PUSH_PROGRAMS, "WORLD_SIZE": context.world_size, "TARGET": context.target}
        self._launch = KernelLaunch(push_largest_kernel, 1, constants, num_warps=1)

    def run(self, value: torch.Tensor) -> None:
        """``value`` becomes the largest of all ranks'."""
        key = value.data_ptr()
        if not self._launch.repeat(key, current_handle(self.context.device)):
            self._launch(value, self._slots.addresses, self.pointers, key=key)
        self.context.leave(self.channel)


@outside_compile
def largest_of_ranks(value: torch.Tensor, *, context: TPContext) -> None:
    """``value``, one fp32 element, becomes the largest of all ranks': an all-reduce with ``ReduceOp.MAX`` that treats
    NaN as NCCL does.

    Raises:
        NotSupportedError: ``value`` has another type, size or device.
        MismatchError, PeerTimeoutError: As ``gemm_ar``.
    """
    context.enter("largest_of_ranks", value.shape, value.dtype)
    if value.numel() != 1 or value.dtype != torch.float32 or value.device != context.device:
        raise NotSupportedError(
            f"largest_of_ranks: {tuple(value.shape)} {value.dtype} on {value.device}, needed is one fp32 on "
            f"{context.device}"
        )
    context.plan(MaxAllReduce).run(value)
