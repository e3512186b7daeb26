"""All-reduces, prepared for one shape: every rank gets all partial sums and adds them up in NCCL's order.

By copy engines beside a GEMM, or by the stores of one kernel where there is little to send. A rank sends its partial
sums whole to each peer: with two ranks that are no more bytes than NCCL sends, with more a GEMM hides them, or
``chunked_gemm_ar.PreparedGemmArInTwoRounds`` sends less.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ditron_train.policy.all_reduce_order import SumMap, all_reduce_orders
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.launch import KernelLaunch
from ditron_train.runtime.settings import get_settings
from ditron_train.schedule.orders import chunk_order
from ditron_train.stream.copies import copy_with_flags
from ditron_train.stream.events import current_handle
from ditron_train.tp.all_reduce_kernels import OrderTables, fold_all_kernel, push_and_fold_kernel, push_largest_kernel
from ditron_train.tp.context import MOST_CHUNKS, MOST_PUSH_PROGRAMS, TPContext
from ditron_train.tp.problem import PUSH_BYTES
from ditron_train.tp.scatter import FOLD_BLOCK, SentPartials

_PUSH_BLOCK = 2048
_MOST_ELEMENTS = 1 << 31  # tables hold int32


def sums_of(context: TPContext, num_elements: int, dtype: torch.dtype) -> SumMap | None:
    """In which orders NCCL adds (collective where it is not known yet); None where any order is right.

    Raises:
        NotSupportedError: It does not add along a chain of the ranks, and bits count; on every rank alike.
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


class PreparedAllReduce(SentPartials):
    """All-reduces of partial sums [num_rows, num_columns] by copy engines (collective to make).

    ``begin`` and then ``send`` for chunks of ``chunk_rows`` rows as they are done; ``finish`` adds up on the current
    stream. Start signals go before the sends, since slots are single; arrival is told by a flag for each chunk and
    source.

    Args:
        context: Whose buffers and streams are used.
        num_rows, num_columns: Of the partial sums, in rows of whole 16 bytes.
        dtype: Of the partial sums.
        chunk_rows: Rows that are sent together.
    """

    def __init__(
        self, context: TPContext, num_rows: int, num_columns: int, dtype: torch.dtype, chunk_rows: int
    ) -> None:
        assert -(-num_rows // chunk_rows) <= MOST_CHUNKS, f"{num_rows} rows by {chunk_rows}"
        channel = context.all_reduce_channel
        pointers = channel.pointers(context.agree(channel, (num_rows, num_columns, dtype, chunk_rows)))
        super().__init__(context, channel, pointers, context.all_reduce_epochs)
        self._slots = context.slots((context.world_size - 1) * num_rows, num_columns, dtype)
        self._tables, vector = order_tables(context, num_rows, num_columns, dtype, FOLD_BLOCK)
        self._num_elements, self._chunk_elements = num_rows * num_columns, chunk_rows * num_columns
        self._fold = self._launch_of_sum(fold_all_kernel, {"CHUNKS": MOST_CHUNKS, "VECTOR": vector})
        row_bytes = num_columns * dtype.itemsize
        self._chunks = [
            self._list_copies(index, first * row_bytes, (min(first + chunk_rows, num_rows) - first) * row_bytes)
            for index, first in enumerate(range(0, num_rows, chunk_rows))
        ]

    def _list_copies(self, index: int, offset: int, num_bytes: int) -> list[tuple[int, int, int, int, int]]:
        """Of one chunk, to every peer: what ``copy_with_flags`` takes."""
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
        """Sends chunk ``position``, ``rows`` of the partial, behind what the communication stream has."""
        assert signals, "a chunk is sent whole"
        copy_with_flags(self._chunks[position], partial.data_ptr(), self.context.comm_stream)

    def _fold_arguments(self, partial: torch.Tensor, out: torch.Tensor) -> tuple[Any, ...]:
        sizes = (self._num_elements, self._chunk_elements)
        return (partial, self._slots.local, self._pointers, out, self._tables, *sizes)


class PreparedPush:
    """All-reduces of at most ``PUSH_BYTES`` by one kernel that stores to the peers (collective to make).

    Args:
        context: Whose buffers are used.
        num_rows, num_columns: Of the partial sums.
        dtype: Of the partial sums.
        num_programs: That share them, at the most.
    """

    def __init__(
        self, context: TPContext, num_rows: int, num_columns: int, dtype: torch.dtype, num_programs: int
    ) -> None:
        num_elements = num_rows * num_columns
        assert num_elements * dtype.itemsize <= PUSH_BYTES, f"{num_elements} elements of {dtype}"
        self.context, self.channel = context, context.push_channel
        num_programs = min(num_programs, -(-num_elements // _PUSH_BLOCK), MOST_PUSH_PROGRAMS, context.num_sms)
        values = (num_rows, num_columns, dtype, num_programs)
        self._pointers = self.channel.pointers(context.agree(self.channel, values))
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
        self._launch = KernelLaunch(push_and_fold_kernel, num_programs, constants, num_warps=8)

    @property
    def identity(self) -> tuple:
        """Of two with the same one the same kernel is compiled."""
        return self._launch.identity

    def __call__(self, partial: torch.Tensor) -> None:
        """``partial``, contiguous, becomes the sum over ranks."""
        key = partial.data_ptr()
        if not self._launch.repeat(key, current_handle(self.context.device)):
            self._launch(*self._arguments(partial), key=key)
        self.context.leave(self.channel)

    def compile(self, partial: torch.Tensor) -> None:
        """Compiles what a call would run, without running it."""
        self._launch.compile(*self._arguments(partial))

    def _arguments(self, partial: torch.Tensor) -> tuple[Any, ...]:
        return (partial, self._slots.addresses, self._pointers, partial, self._tables, self._num_elements)


class PreparedLargest:
    """The largest of one fp32 value a rank, by one kernel that stores to the peers (collective to make).

    Args:
        context: Whose buffers are used.
    """

    def __init__(self, context: TPContext) -> None:
        self.context, self._channel = context, context.push_channel
        self._pointers = self._channel.pointers(context.agree(self._channel, (0, 1, torch.float32, 0)))
        self._slots = context.arena.tensor("tp.largest", (2, context.world_size), torch.float32)
        constants = {"MOST_PROGRAMS": MOST_PUSH_PROGRAMS, "WORLD_SIZE": context.world_size, "TARGET": context.target}
        self._launch = KernelLaunch(push_largest_kernel, 1, constants, num_warps=1)

    def __call__(self, value: torch.Tensor) -> None:
        """``value`` becomes the largest of all ranks'."""
        key = value.data_ptr()
        if not self._launch.repeat(key, current_handle(self.context.device)):
            self._launch(value, self._slots.addresses, self._pointers, key=key)
        self.context.leave(self._channel)
