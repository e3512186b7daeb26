"""GEMM-RS in chunks: a GEMM for the rows of each rank, whose partial sums copy engines send while the next one runs.

A GEMM-RS that stores tiles from its epilogue (``prepared.PreparedGemmRs``) loses some 60 to 80 us whatever the size,
since loads queue behind the stores; copy engines read what lies in memory and hold no multiprocessor up. Times, and
what was tried: ``docs/measurements/tp.md``.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from ditron_train.gemm.operands import TensorScales, aligned_operand, padded_columns, result_dtype
from ditron_train.gemm.ops import GemmLaunch, gemm_launch
from ditron_train.stream.events import current_handle
from ditron_train.tp.all_reduce import PreparedAllReduce
from ditron_train.tp.all_reduce_kernels import OrderTables
from ditron_train.tp.context import RowPartition, TPContext
from ditron_train.tp.cost_model import first_rows, is_short, links_are_last, sums_in_parts
from ditron_train.tp.problem import Choice, Problem
from ditron_train.tp.scatter import PreparedScatter


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Rows of one owner, or the first or other part of them, and the GEMM for them; None where there are none.
    Compared by identity: part of a launch's key. ``position``: the owner's among those that rows are sent to; None:
    this rank."""

    rows: slice
    k: int
    gemm: GemmLaunch | None
    position: int | None
    is_last: bool

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, scales: TensorScales | None, partial: torch.Tensor, key: Hashable
    ) -> None:
        """On aligned operands; see ``KernelLaunch`` for ``key``."""
        assert self.gemm is not None
        self.gemm(x[self.rows], self.gemm.b_descriptors(weight), partial[self.rows], self.k, scales, key=key)


def covers(n: int, dtype: torch.dtype) -> bool:
    """Whether partial sums of ``n`` columns can be computed where copy engines send them from."""
    return padded_columns(n, dtype) == n


class ChunkedGemm:
    """A GEMM in chunks of rows, each sent when it is done; then the sum. What the exchanges by copy engines share.

    Where the op is short, and only there may a step wait for its host, it is recorded as a whole once its operands,
    result and partial sums have lain at the same addresses a few times, with the same strides: a training step
    allocates alike each time. The graph runs on the current stream, from the start signals to the join: who may free
    or overwrite what it reads, and when, is as without it. Start signals, epochs, deadlines and errors are the
    kernels' own, so they are in every repetition; what a call does on the host (``OpContext.enter``) is done before.

    Args:
        context: Whose streams are used.
        problem: The op at its shape.
        choice: Tiles.
        exchange: Sends the chunks and adds up.
    """

    def __init__(
        self, context: TPContext, problem: Problem, choice: Choice, exchange: PreparedScatter | PreparedAllReduce
    ) -> None:
        self.context, self._out_dtype = context, result_dtype(problem.dtype)
        self.m, self.n, self.k = problem.m, problem.n, problem.k
        self._scatter = exchange
        self._chunks: list[_Chunk] = []
        tiles = (choice.config, False, problem.layout == "nt", context.num_sms)
        self._options = (*tiles, (problem.dtype, problem.dtype), context.device.index)
        self._is_recorded = context.is_cuda and is_short(problem, choice, context.machine)

    def _add_chunk(self, first: int, last: int, position: int | None, *, is_last: bool) -> None:
        gemm = gemm_launch(last - first, self.n, *self._options) if last > first else None
        self._chunks.append(_Chunk(slice(first, last), self.k, gemm, position, is_last))

    @property
    def identity(self) -> tuple:
        """Of two with the same one the same kernels are compiled."""
        return tuple(chunk.gemm.launch.identity for chunk in self._chunks if chunk.gemm is not None)

    def into(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, scales: TensorScales | None = None
    ) -> None:
        """``x``: [m, k]; ``out``: where the sum goes, contiguous."""
        context = self.context
        partial = x.new_empty(self.m, self.n, dtype=self._out_dtype)
        addresses = scales.addresses if scales else ()
        key = (x.data_ptr(), x.stride(), weight.data_ptr(), weight.stride(), partial.data_ptr(), *addresses)
        if not self._is_recorded:
            self._enqueue(x, weight, scales, partial, out, key)
            return
        op, copied = (self, out.data_ptr(), *key), (partial.data_ptr(),)
        if not context.repeat_op(op, copied) and self._enqueue(x, weight, scales, partial, out, key):
            context.remember_op(op, lambda: self._enqueue(x, weight, scales, partial, out, key), copied)

    def _enqueue(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: TensorScales | None,
        partial: torch.Tensor,
        out: torch.Tensor,
        key: tuple,
    ) -> bool:
        """Whether it reads the operands as given: addresses and strides, ``key``, say all that it does."""
        context, scatter = self.context, self._scatter
        stream = current_handle(context.device)
        operands, is_as_given = None, True
        scatter.begin()
        with context.aborting(scatter.channel):
            for chunk in self._chunks:
                if chunk.gemm is not None and not chunk.gemm.launch.repeat((chunk, *key), stream):
                    a, b = operands = operands or (aligned_operand(x), aligned_operand(weight))
                    is_as_given = a is x and b is weight
                    chunk.multiply(a, b, scales, partial, key=(chunk, *key) if is_as_given else None)
                if chunk.position is not None:
                    context.fork()
                    scatter.send(partial, chunk.position, chunk.rows, signals=chunk.is_last)
        scatter.finish(partial, out)
        return is_as_given

    def compile(self, x: torch.Tensor, weight: torch.Tensor, scales: TensorScales | None = None) -> None:
        """Compiles what a call with these would run, without running it."""
        x, weight = aligned_operand(x), aligned_operand(weight)
        partial = x.new_empty(self.m, self.n, dtype=self._out_dtype)
        for gemm, chunk in {chunk.gemm: chunk for chunk in self._chunks if chunk.gemm is not None}.items():
            gemm.compile(x[chunk.rows], gemm.b_descriptors(weight), partial[chunk.rows], self.k, scales)


class PreparedChunkedGemmRs(ChunkedGemm):
    """[m, k] times a weight, reduce-scattered by rows; collective to make.

    Rows of rank - 1 first, in halves where the links are last and begin earlier that way; own rows last: their GEMM
    hides the last transfer. Then the sum (``PreparedScatter.finish``), whose order is that of the arrivals: rank + 1
    first.
    """

    def __init__(
        self,
        context: TPContext,
        partition: RowPartition,
        problem: Problem,
        choice: Choice,
        *,
        order: tuple[OrderTables, int] | None = None,
    ) -> None:
        n, out_dtype = problem.n, result_dtype(problem.dtype)
        assert covers(n, out_dtype), f"rows of {n} x {out_dtype} are not whole 16 bytes"
        if order is None:
            in_parts = sums_in_parts(problem, choice, context.machine)
            scatter = PreparedScatter(context, partition, n, out_dtype, in_parts=in_parts)
        else:
            scatter = PreparedScatter(context, partition, n, out_dtype, order=order[0], vector=order[1])
        super().__init__(context, problem, choice, scatter)
        halves_first = links_are_last(problem, choice, context.machine)
        for position, owner in enumerate([*scatter.peers, context.rank]):
            start, end = edges = partition.starts[owner : owner + 2]
            if halves_first and position == 0:
                num_first = first_rows(end - start, n, choice.config, context.machine)
                edges = edges if num_first == end - start else (start, start + num_first, end)
            sent_to = position if owner != context.rank else None
            for first, last in zip(edges, edges[1:]):
                self._add_chunk(first, last, sent_to, is_last=last == end)

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, scales: TensorScales | None = None
    ) -> None:
        """``x``: [m, k]; ``out``: this rank's rows, contiguous."""
        self.into(x, weight, out, scales)
