"""Reduce-scatters by copy engines, prepared for one shape: they run beside a GEMM and take none of its SMs.

Where the product to be scattered can be complete before something else long enough to hide the transfer runs (column
linear's backward: dgrad first, wgrad after it), this beats GEMM-RS: the product is cuBLAS's own, the transfer lies
under the next GEMM, and only the addition at the end is left.

A copy engine takes 2 to 3 us for each command beside its bytes: flags of several peers are one command where peers'
memory can be mapped side by side (``stream.window``). Times: ``docs/measurements/tp.md``.
"""

from __future__ import annotations

from typing import Any

import torch

from ditron_train.runtime.launch import KernelLaunch
from ditron_train.schedule.orders import chunk_order
from ditron_train.stream.copies import Fan, copy_bytes, copy_in_turn, copy_with_flags
from ditron_train.stream.events import current_handle
from ditron_train.stream.window import flags_of_peers, send_fans
from ditron_train.symm.channel import Channel, ChannelPointers
from ditron_train.tp.all_reduce_kernels import OrderTables, fold_own_rows_kernel
from ditron_train.tp.context import RowPartition, TPContext
from ditron_train.tp.gather_kernels import gather_start_kernel
from ditron_train.tp.scatter_kernels import fold_rows_kernel

#: What is added up: in fp32, each sum rounded.
SUM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

FOLD_BLOCK = 4096  # elements that a program adds up at once


class SentPartials:
    """What exchanges of partial sums by copy engines share: start signals in front, a kernel behind that adds up.

    Args:
        context: Whose streams are used.
        channel: Of the exchange: start signals draw from its first ticket slot, the sum from its second.
        pointers: The channel as kernels take it.
        epochs: Words whose epoch copy engines copy onto the peers' flags.
    """

    def __init__(self, context: TPContext, channel: Channel, pointers: ChannelPointers, epochs: torch.Tensor) -> None:
        self.context, self.channel = context, channel
        self._pointers, self._epochs = pointers, epochs
        constants = {"WORLD_SIZE": context.world_size, "BLOCK": 128, "TARGET": context.target}
        self._start = KernelLaunch(gather_start_kernel, 1, constants, num_warps=1)

    def _launch_of_sum(self, kernel: Any, constants: dict[str, Any]) -> KernelLaunch:
        context = self.context
        world = {"BLOCK": FOLD_BLOCK, "WORLD_SIZE": context.world_size, "TARGET": context.target}
        num_programs = 2 * context.num_sms if context.is_cuda else 1
        return KernelLaunch(kernel, num_programs, {**constants, **world}, num_warps=8)

    def begin(self) -> None:
        """Start signals, behind what the current stream has done; ``send`` follows, inside
        ``OpContext.aborting``."""
        self.context.start(self.channel, self._signal_start)

    def _signal_start(self) -> None:
        context = self.context
        if not self._start.repeat("start", context.comm_handle):
            arguments = (self._epochs, self._epochs.numel(), self._pointers)
            self._start(*arguments, stream=context.comm_stream, key="start")

    def finish(self, partial: torch.Tensor, out: torch.Tensor, *, beside: bool = False) -> None:
        """``out``, contiguous: the sum over ranks, when all have arrived.

        ``beside``: as soon as the own sends are done, beside what the current stream has been given since ``start``
        (``partial`` must be whole by then).
        """
        context, fold = self.context, self._fold
        key = (partial.data_ptr(), out.data_ptr())
        with context.aborting(self.channel):
            if not fold.repeat(key, context.comm_handle if beside else current_handle(context.device)):
                fold(*self._fold_arguments(partial, out), stream=context.comm_stream if beside else None, key=key)
        context.join()
        context.leave(self.channel)

    _fold: KernelLaunch

    def _fold_arguments(self, partial: torch.Tensor, out: torch.Tensor) -> tuple[Any, ...]:
        """Of the kernel behind ``_fold``."""
        raise NotImplementedError


class PreparedScatter(SentPartials):
    """Reduce-scatters of partial sums [total rows, N] by rows, for one partition, N and dtype (collective to make).

    ``start`` enqueues the sends behind what the current stream has done, or ``begin`` and then ``send`` for rows as
    they are done; ``finish`` adds up on the current stream. ``peers``: in the order of delivery, so that rows arrive
    in the order of the sum.

    Args:
        context: Whose buffers and streams are used.
        partition: The rows of all ranks.
        num_columns: N, with rows of whole 16 bytes.
        dtype: Of the partial sums.
        in_parts: Whether ``finish`` comes long before the last rows do, and adds up the others meanwhile.
        order: Of the sums, where it is not the ring's: an all-reduce's.
    """

    def __init__(
        self,
        context: TPContext,
        partition: RowPartition,
        num_columns: int,
        dtype: torch.dtype,
        *,
        in_parts: bool = False,
        order: OrderTables | None = None,
        vector: int = 1,
    ) -> None:
        channel = context.reduce_channel
        self.partition = partition
        values = (partition.num_rows, partition.fingerprint, num_columns, dtype)
        pointers = channel.pointers(context.agree(channel, values))
        super().__init__(context, channel, pointers, context.reduce_epochs)
        self._slots = context.slots(context.world_size * partition.max_count, num_columns, dtype)
        self._row_starts = context.table(partition, partition.starts)
        self._num_columns = num_columns
        self._order = order
        if order is None:
            first_part = {"FIRST_PART": context.world_size - 2 if in_parts else 0}
            self._fold = self._launch_of_sum(fold_rows_kernel, first_part)
        else:
            self._fold = self._launch_of_sum(fold_own_rows_kernel, {"VECTOR": vector})
        self.peers = chunk_order(context.rank, context.world_size, "sum_push").tolist()
        self._row_bytes = num_columns * dtype.itemsize
        self._copies = self._list_copies(self._row_bytes)
        self._all_flags: Fan | None = None  # of what is sent as a whole, from the first time on
        self._has_all_flags = False
        self._first_flags = self._fan_of_flags(num_skipped=1) if in_parts else None

    def _list_copies(self, row_bytes: int) -> list[tuple[int, int, int, int, int]]:
        """For each of ``peers`` what ``copy_with_flags`` takes: its rows of the partial to its slot."""
        context, partition, rank = self.context, self.partition, self.context.rank
        slot = rank * partition.max_count * row_bytes
        return [
            (
                self._slots.host_addresses[peer] + slot,
                partition.starts[peer] * row_bytes,
                partition.count(peer) * row_bytes,
                self.channel.signals.host_addresses[peer] + 4 * rank,
                context.reduce_epochs.data_ptr(),
            )
            for peer in self.peers
        ]

    def _fan_of_flags(self, num_skipped: int) -> Fan | None:
        """The flags of all ``peers`` but the last ``num_skipped``, as one command; None where they are sent one by
        one."""
        rank, words = self.context.rank, self.context.reduce_epochs.data_ptr()
        return flags_of_peers(self.channel.signals, rank, 4 * rank, words, num_skipped=num_skipped)

    def start(self, partial: torch.Tensor) -> None:
        """Sends ``partial`` [total rows, N], contiguous; it must stay unchanged until ``finish``."""
        if not self._has_all_flags:
            self._all_flags, self._has_all_flags = self._fan_of_flags(num_skipped=0), True
        address = partial.data_ptr()
        self.context.start(self.channel, lambda: self._send_all(partial), (self, address), (address,))

    def _send_all(self, partial: torch.Tensor) -> None:
        """Rows peer by peer: in one command for several GPUs they would take four times as long
        (``docs/measurements/tp.md``). Nobody adds up before all rows are there, so flags come last."""
        self._signal_start()
        address, stream = partial.data_ptr(), self.context.comm_stream
        if self._all_flags is None:
            copy_with_flags(self._copies, address, stream)
            return
        rows = ((to, address + offset, num_bytes) for to, offset, num_bytes, _, _ in self._copies if num_bytes)
        copy_in_turn(rows, stream)
        if not send_fans((self._all_flags,), stream):
            self._all_flags = None
            copy_in_turn(((flag, word, 4) for _, _, _, flag, word in self._copies), stream)

    def send(self, partial: torch.Tensor, position: int, rows: slice, *, signals: bool) -> None:
        """Sends ``rows``, of those of ``peers[position]``, behind what the communication stream has; it ``signals``
        behind the last of them. Peers that add up in parts wait for all sources but one: so long flags can wait, to be
        one command."""
        stream = self.context.comm_stream
        destination, offset, _, flag, word = self._copies[position]
        skipped = rows.start * self._row_bytes - offset
        source, num_bytes = rows.start * self._row_bytes, (rows.stop - rows.start) * self._row_bytes
        num_behind = len(self.peers) - 1 - position
        if signals and (self._first_flags is None or num_behind == 0):
            chunk = (destination + skipped, source, num_bytes, flag, word)
            copy_with_flags((chunk,), partial.data_ptr(), stream)
            return
        if num_bytes:
            copy_bytes(destination + skipped, partial.data_ptr() + source, num_bytes, stream)
        first_flags = self._first_flags
        if signals and num_behind == 1 and first_flags is not None and not send_fans((first_flags,), stream):
            self._first_flags = None
            copy_in_turn(((flag, word, 4) for _, _, _, flag, word in self._copies[:-1]), stream)

    def _fold_arguments(self, partial: torch.Tensor, out: torch.Tensor) -> tuple[Any, ...]:
        order = () if self._order is None else (self._order,)
        operands = (partial, self._slots.local, self._pointers, out, self._row_starts, *order)
        return (*operands, self._num_columns, self.partition.max_count)
