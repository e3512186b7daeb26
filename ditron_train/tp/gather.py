"""Host side of gathers: rows of all ranks into this rank's gathered buffer, pushed by SMs or by copy engines."""

from __future__ import annotations

import torch

from ditron_train.schedule.orders import chunk_order
from ditron_train.stream.copies import put
from ditron_train.symm.arena import SymmetricTensor
from ditron_train.tp.context import FLAGS_PER_RANK, RowPartition, TPContext
from ditron_train.tp.kernels import gather_start_kernel, gather_wait_kernel, push_shard_kernel

__all__ = ["Gather"]

_PUSH_WARPS = 32  # a program of 32 warps moves some 42 GB/s; eight saturate the links
_PUSH_BLOCK = 16384
_MIN_GRANULE_ROWS = 8


def push_granule_rows(partition: RowPartition) -> int:
    """Rows of one granule of a push: small, so that the GEMM's first tiles start early, but few enough for the flags."""
    rows = _MIN_GRANULE_ROWS
    while -(-partition.max_count // rows) > FLAGS_PER_RANK:
        rows *= 2
    return rows


def copy_granule_rows(partition: RowPartition, num_chunks: int, block_m: int) -> int:
    """Rows of one chunk of a copy-engine gather: whole row tiles."""
    rows = -(-partition.max_count // max(num_chunks, 1))
    return max(-(-rows // block_m) * block_m, block_m)


class Gather:
    """One gather of ``x`` [rows, K] over the context's group: agreed, started, and waited for by whoever consumes it.

    Args:
        context: Whose buffers and streams are used.
        x: This rank's rows, contiguous.
        partition: The rows of all ranks.
        granule_rows: Rows that one arrival flag stands for.
    """

    def __init__(self, context: TPContext, x: torch.Tensor, partition: RowPartition, granule_rows: int) -> None:
        self.context = context
        self.channel = context.gather_channel
        self.x = x
        self.partition = partition
        self.granule_rows = granule_rows
        values = (partition.num_rows, partition.fingerprint, x.shape[1], x.element_size(), granule_rows)
        self.signature = context.agree(self.channel, values)
        self.buffer: SymmetricTensor = context.gathered(partition.num_rows, x.shape[1], x.dtype)
        self.row_starts = context.table(partition, partition.starts)

    def push(self, num_programs: int) -> None:
        """Pushes by ``num_programs`` SMs, this rank's own rows too, beside whatever the current stream does next."""
        context = self.context
        with _CommStream(context):
            push_shard_kernel[(num_programs,)](
                self.x,
                self.buffer.addresses,
                self.channel.signals.addresses,
                self.channel.ready.addresses,
                self.channel.ready.local,
                self.signature,
                self.row_starts,
                self.channel.tickets,
                self.channel.control,
                self.x.shape[1],
                self.granule_rows,
                FLAGS_PER_RANK=FLAGS_PER_RANK,
                WORLD_SIZE=context.world_size,
                BLOCK=_PUSH_BLOCK,
                TARGET=context.target,
                num_warps=_PUSH_WARPS,
            )

    def copy(self) -> None:
        """Pushes by copy engines, no SM but one small program in front; own rows by the current stream."""
        context, partition = self.context, self.partition
        num_flags = -(-partition.max_count // self.granule_rows)
        with _CommStream(context) as stream:
            gather_start_kernel[(1,)](
                context.gather_epochs,
                num_flags,
                self.channel.ready.addresses,
                self.channel.ready.local,
                self.signature,
                self.channel.tickets,
                self.channel.control,
                WORLD_SIZE=context.world_size,
                BLOCK=128,
                TARGET=context.target,
                num_warps=1,
            )
            for peer in chunk_order(context.rank, context.world_size, "gather_push").tolist():
                self._copy_to(peer, stream)
        start = partition.starts[context.rank]
        put(self.buffer.local[start : start + self.x.shape[0]], self.x)

    def _copy_to(self, peer: int, stream: torch.cuda.Stream | None) -> None:
        rank, rows = self.context.rank, self.granule_rows
        target = self.buffer.peer(peer)
        flags = self.channel.signals.peer(peer)
        start = self.partition.starts[rank]
        for index, first in enumerate(range(0, self.x.shape[0], rows)):
            chunk = self.x[first : first + rows]
            put(target[start + first : start + first + chunk.shape[0]], chunk, stream)
            flag = rank * FLAGS_PER_RANK + index
            put(flags[flag : flag + 1], self.context.gather_epochs[index : index + 1], stream)

    def wait(self) -> torch.Tensor:
        """Holds the current stream until all rows have arrived; returns them, [total rows, K], a view of the buffer."""
        context = self.context
        gather_wait_kernel[(1,)](
            self.channel.signals.local,
            self.row_starts,
            self.channel.tickets,
            self.channel.control,
            self.granule_rows,
            FLAGS_PER_RANK=FLAGS_PER_RANK,
            WORLD_SIZE=context.world_size,
            TARGET=context.target,
            num_warps=1,
        )
        self.finish()
        return self.buffer.local

    def finish(self) -> None:
        """Orders the current stream behind the sends, so that ``x`` may be reused."""
        context = self.context
        if context.comm_stream is not None:
            torch.cuda.current_stream(context.device).wait_stream(context.comm_stream)
        context.leave(self.channel)


class _CommStream:
    """The context's communication stream, ordered behind the current one; nothing on the CPU."""

    def __init__(self, context: TPContext) -> None:
        self._stream = context.comm_stream
        self._device = context.device
        self._scope = torch.cuda.stream(self._stream) if self._stream is not None else None

    def __enter__(self) -> torch.cuda.Stream | None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            self._scope.__enter__()
        return self._stream

    def __exit__(self, *error: object) -> None:
        if self._scope is not None:
            self._scope.__exit__(*error)
