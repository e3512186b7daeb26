"""Gathers, prepared for one shape: rows of all ranks into this rank's gathered buffer, by SM pushes or copy
engines."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Sequence

import torch

from ditron_train.runtime.launch import KernelLaunch
from ditron_train.schedule.orders import arrival_order, chunk_order
from ditron_train.stream.copies import Fan, copy_in_turn, copy_with_flags
from ditron_train.stream.driver import has_driver
from ditron_train.stream.events import current_handle
from ditron_train.stream.window import flags_of_peers, send_fans
from ditron_train.symm.arena import SymmetricTensor
from ditron_train.tp.context import FLAGS_PER_RANK, RowPartition, TPContext
from ditron_train.tp.gather_kernels import (
    copy_rows_kernel,
    gather_start_kernel,
    gather_wait_kernel,
    gather_wait_one_kernel,
    push_shard_kernel,
)
from ditron_train.tp.problem import GatherPlan

_PUSH_WARPS = 32  # docs/measurements/tp.md
_PUSH_BLOCK = 16384
_COPY_BLOCK = 4096
_GRANULE_BYTES = 1 << 18  # a notify costs a program some 3 us


def _push_granule_rows(partition: RowPartition, row_bytes: int, block_m: int) -> int:
    """Rows of one granule of a push: so many that the notify is cheap, but few enough for the flags."""
    rows = 8
    while rows < block_m and 2 * rows * row_bytes <= _GRANULE_BYTES:
        rows *= 2
    while -(-partition.max_count // rows) > FLAGS_PER_RANK:
        rows *= 2
    return rows


def _num_chunks(partition: RowPartition, wanted: int, block_m: int) -> int:
    """Chunks of a copy-engine gather: as wanted, or the next fewer that are whole row tiles."""
    tiles = -(-partition.max_count // block_m)
    chunks = max(1, min(wanted, tiles, FLAGS_PER_RANK))
    while tiles % chunks:
        chunks -= 1
    return chunks


class CopiedGather:
    """What gathers share: start signals in front of copy engines, programs that wait for arrivals behind.

    Args:
        context: Whose buffers and streams are used.
        values: Of the signature: what all ranks gather alike (collective).
        buffer: As of ``TPContext.gathered``; of the signature, too: peers write into the one of that name.

    Attributes:
        arrival_order: Ranks, as their data arrives.
    """

    buffer: SymmetricTensor
    row_starts: torch.Tensor  #: Where the flags of each rank begin, in units of which one flag stands for ...
    granule_rows: int  #: ... so many.

    def __init__(self, context: TPContext, values: tuple[int | torch.dtype, ...], buffer: str | None = None) -> None:
        self.context = context
        self.arrival_order: list[int] = arrival_order(context.rank, context.world_size).tolist()
        self.channel = channel = context.gather_channel
        values = (*values, 0 if buffer is None else zlib.crc32(buffer.encode()) & 0x7FFFFFFF)
        self.pointers = channel.pointers(context.agree(channel, values))
        world, target = {"WORLD_SIZE": context.world_size}, {"TARGET": context.target}
        flags = {"FLAGS_PER_RANK": FLAGS_PER_RANK}
        self._start = KernelLaunch(gather_start_kernel, 1, {**world, "BLOCK": 128, **target}, num_warps=1)
        self._wait = KernelLaunch(gather_wait_kernel, 1, {**flags, **world, **target}, num_warps=1)
        self._wait_one = KernelLaunch(gather_wait_one_kernel, 1, {**flags, **target}, num_warps=1)

    def _signal_start(self, num_flags: int, stream: torch.cuda.Stream | None) -> None:
        if not self._start.repeat("start", self.context.comm_handle):
            self._start(self.context.gather_epochs, num_flags, self.pointers, stream=stream, key="start")

    def _wait_for_flags(self, source: int, row_starts: torch.Tensor) -> None:
        if source == self.context.rank:
            return
        if not self._wait_one.repeat(source, current_handle(self.context.device)):
            self._wait_one(self.pointers, row_starts, source, self.granule_rows, key=source)

    def wait(self) -> torch.Tensor:
        """Holds the current stream until all rows have arrived; returns them, a view of the buffer."""
        with self.context.aborting(self.channel):
            if not self._wait.repeat("wait", current_handle(self.context.device)):
                self._wait(self.pointers, self.row_starts, self.granule_rows, key="wait")
        self.finish()
        return self.buffer.local

    def consume(
        self, blocks: Sequence[Sequence[int]], each: Callable[[Sequence[int]], None], key: Hashable | None = None
    ) -> None:
        """Instead of ``wait``: ``each`` of the blocks of ranks in turn, the current stream held until their data is
        there. When it ends, or fails, all have arrived, as after ``wait``.

        ``key``: says all that ``each`` does, which then allocates nothing: what comes often is recorded.
        """

        def enqueue() -> None:
            for ranks in blocks:
                for source in ranks:
                    self.wait_for(source)
                each(ranks)

        try:
            self.context.run_op_again(None if key is None else (self, key), enqueue, forks=False)
        finally:
            self.wait()

    def wait_for(self, source: int) -> None:
        """Holds the current stream until what is consumed of rank ``source`` is there; ``wait`` has to come."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Behind ``start`` instead of ``wait``, where what was to wait failed: a peer's rows of the next call come
        behind those of this one, which are for nobody. Nothing is waited for, so that nothing hides that failure."""
        self.context.abort(self.channel)

    def finish(self) -> None:
        """Orders the current stream behind the sends, so that what was sent may be reused."""
        self.context.join()
        self.context.leave(self.channel)


class PreparedGather(CopiedGather):
    """Gathers of rows [rows, K] over the context's group, for one partition, K and dtype (collective to make).

    ``start`` enqueues the sends beside whatever the current stream does next; the GEMM of an AG-GEMM, or ``wait``,
    consumes; ``finish`` orders the current stream behind the sends.

    ``granule_rows`` is what one arrival flag stands for; with copy engines that is one of the plan's chunks.
    ``own_rows`` is this rank's part of the buffer.

    Args:
        context: Whose buffers and streams are used.
        partition: The rows of all ranks.
        num_columns: K, with rows of whole 16 bytes.
        dtype: Of the rows.
        plan: SM pushes or copy engines (pushes where ``cuda-bindings`` is missing).
        block_m: Row tile of the consumer: chunks of copy engines are whole tiles.
        is_awaited: Whether nobody consumes rows before all are there (``wait``): flags are one command behind all rows
            then, where peers' memory can be mapped side by side.
        buffer: As of ``TPContext.gathered``.
    """

    def __init__(
        self,
        context: TPContext,
        partition: RowPartition,
        num_columns: int,
        dtype: torch.dtype,
        plan: GatherPlan,
        block_m: int,
        *,
        is_awaited: bool = False,
        buffer: str | None = None,
    ) -> None:
        self.partition = partition
        self.num_columns = num_columns
        self.by_push = plan.mode == "push" or (context.is_cuda and not has_driver())
        if self.by_push:
            self.granule_rows = _push_granule_rows(partition, num_columns * dtype.itemsize, block_m)
        else:
            num_chunks = _num_chunks(partition, plan.num_chunks, block_m)
            self.granule_rows = -(-partition.max_count // (block_m * num_chunks)) * block_m
        values = (partition.num_rows, partition.fingerprint, num_columns, dtype, self.granule_rows)
        super().__init__(context, values, buffer)
        self.buffer = context.gathered(partition.num_rows, num_columns, dtype, buffer)
        self.row_starts = context.table(partition, partition.starts)
        self.row_bytes = num_columns * dtype.itemsize
        world = {"WORLD_SIZE": context.world_size}
        target = {"TARGET": context.target}
        flags = {"FLAGS_PER_RANK": FLAGS_PER_RANK}
        self.reserved_sms = plan.push_programs if self.by_push else 1
        self._push = KernelLaunch(
            push_shard_kernel,
            plan.push_programs if context.is_cuda else 1,
            {**flags, **world, "BLOCK": _PUSH_BLOCK, **target},
            num_warps=_PUSH_WARPS,
        )
        self._copy = None
        if context.is_cuda:
            self._copy = KernelLaunch(copy_rows_kernel, context.num_sms, {"BLOCK": _COPY_BLOCK}, num_warps=4)
        start = partition.starts[context.rank]
        self.own_rows = self.buffer.local[start : start + partition.count(context.rank)]
        self._copies = [] if self.by_push else self._list_copies()
        self._flags = self._fan_of_flags() if is_awaited else None

    def _list_copies(self) -> list[tuple[int, int, int, int, int]]:
        """Every chunk in order: (destination, offset in x, bytes, its flag, the word that holds the flag's epoch)."""
        context, partition, rows = self.context, self.partition, self.granule_rows
        rank = context.rank
        start, count = partition.starts[rank], partition.count(rank)
        epochs = context.gather_epochs.data_ptr()
        copies = []
        for peer in chunk_order(rank, context.world_size, "gather_push").tolist():
            target = self.buffer.host_addresses[peer] + start * self.row_bytes
            flags = self.channel.signals.host_addresses[peer] + 4 * rank * FLAGS_PER_RANK
            for index, first in enumerate(range(0, count, rows)):
                num_rows = min(rows, count - first)
                offset = first * self.row_bytes
                copies.append(
                    (target + offset, offset, num_rows * self.row_bytes, flags + 4 * index, epochs + 4 * index)
                )
        return copies

    def _fan_of_flags(self) -> Fan | None:
        """The flags of all peers as one command; None where they are sent behind the rows of each."""
        if len(self._copies) != self.context.world_size - 1:  # one chunk for each peer has one flag
            return None
        rank, words = self.context.rank, self.context.gather_epochs.data_ptr()
        return flags_of_peers(self.channel.signals, rank, 4 * rank * FLAGS_PER_RANK, words)

    def _push_arguments(self, x: torch.Tensor) -> tuple:
        return x, self.buffer.addresses, self.pointers, self.row_starts, self.num_columns, self.granule_rows

    def compile(self, x: torch.Tensor) -> None:
        """Compiles the kernel of a push, without running it; the one in front of copy engines takes no time."""
        if self.by_push:
            self._push.compile(*self._push_arguments(x))

    def start(self, x: torch.Tensor, *, copies_own: bool = True) -> None:
        """Sends ``x``, this rank's rows, contiguous; it must stay unchanged until the stream is behind ``finish``.

        Without ``copies_own`` this rank's own rows of the buffer stay as they are; so they do where ``x`` is them."""
        context, address = self.context, x.data_ptr()
        if self.by_push:
            context.start(self.channel, lambda: self._send_by_push(x))
        else:
            context.start(self.channel, lambda: self._send_by_copies(x), (self, address), (address,))
        if copies_own and x.data_ptr() != self.own_rows.data_ptr():
            # By the current stream: between buffers of one device it needs SMs, which a GEMM would take first.
            self.own_rows.copy_(x)

    def _send_by_push(self, x: torch.Tensor) -> None:
        context, key = self.context, x.data_ptr()
        if not self._push.repeat(key, context.comm_handle):
            self._push(*self._push_arguments(x), stream=context.comm_stream, key=key)

    def copy_own(self, x: torch.Tensor) -> None:
        """Copies ``x`` to its place in the buffer on the communication stream, behind the sends: for a consumer that
        has been launched, reads own rows elsewhere, and leaves room on its multiprocessors.

        Enqueued before the consumer it would keep it waiting for the sends where a device has one connection, and the
        driver's copy kernel finds no room beside a GEMM (``docs/measurements/tp.md``).
        """
        if self._copy is None:
            self.own_rows.copy_(x)
            return
        context, key = self.context, x.data_ptr()
        if not self._copy.repeat(key, context.comm_handle):
            self._copy(x, self.own_rows, x.numel(), stream=context.comm_stream, key=key)

    def _send_by_copies(self, x: torch.Tensor) -> None:
        """Each chunk, then its flag, or all flags at the end, peer after peer on one stream: nothing else was quicker
        (``docs/measurements/tp.md``)."""
        context, stream = self.context, self.context.comm_stream
        num_flags = max(-(-self.partition.max_count // self.granule_rows), context.world_size)
        self._signal_start(num_flags, stream)
        address = x.data_ptr()
        if self._flags is None:
            copy_with_flags(self._copies, address, stream)
            return
        copy_in_turn(((to, address + offset, num_bytes) for to, offset, num_bytes, _, _ in self._copies), stream)
        if not send_fans((self._flags,), stream):
            self._flags = None  # from now on each behind its rows
            copy_in_turn(((flag, word, 4) for _, _, _, flag, word in self._copies), stream)

    def wait_for(self, source: int) -> None:
        """Holds the current stream until the rows of rank ``source`` are there; ``wait`` still has to come."""
        self._wait_for_flags(source, self.row_starts)
