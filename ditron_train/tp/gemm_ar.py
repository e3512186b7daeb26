"""GEMM-AR: a GEMM and the all-reduce of its result, as one op. Equivalent PyTorch code:

    y = x @ weight.T
    dist.all_reduce(y, group=group)

There are three ways to move the partial sums.

* Little to send: cuBLAS's GEMM, then one kernel that stores to the peers, waits for their flags and adds up.

      current         GEMM | stores, sum

* In chunks of rows: a GEMM for each, sent whole to every peer by copy engines while the next one runs; then the sum,
  which waits for the flag of each (source rank, chunk).

  Timeline of ``gemm_ar`` in one round, on any rank:

      native   compute   | GEMM                                                  |
      native   NCCL      |                                                       | all-reduce                       |
      fused    copies    |              | 0 to all    | 1 to all    | 2 to all    | 3 to all  |
      fused    compute   | GEMM: rows 0 | rows 1      | rows 2      | rows 3      | sum of 0 to 2 | sum of 3 |
      fused    waits     |                                                        | ^ their flags | ^ flags of 3 |

* In two rounds, for many ranks: a GEMM-RS in chunks (``tp.gemm_rs``), which adds up each row at one rank, in the
orders
  of the all-reduce; then a gather of the rows (``tp.gather``), of which each rank's are copied to the result while the
  next rank's arrive.

Who waits for whom is described with the exchanges: ``tp.all_reduce``, ``tp.reduce_scatter``, ``tp.gather``.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ditron_train.gemm.fp8 import check_scaled
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.stream.agreement import agree_on_nothing
from ditron_train.stream.plan import REDUCE_BLOCK, Plan
from ditron_train.tp.all_reduce import AllReduce, PushAllReduce, order_tables, reduce_local_shard_kernel
from ditron_train.tp.choices import PUSH_BYTES, Choice, GatherPlan, Layout, Problem, choose, chunk_rows_of
from ditron_train.tp.context import Operands, RowPartition, TPContext, can_copy
from ditron_train.tp.gather import Gather
from ditron_train.tp.gemm_rs import ChunkedGemmPlan, GemmRsCopyPlan, covers
from ditron_train.tp.reduce_scatter import SumOrder


class GemmArPushPlan(Plan[TPContext]):
    """cuBLAS's product, then ``PushAllReduce``; constructed collectively."""

    def __init__(self, context: TPContext, problem: Problem, choice: Choice) -> None:
        super().__init__(context, context.push_channel)
        programs = choice.gather.push_programs
        self._transpose_b = problem.layout == "nt"
        self._sum = None
        if context.world_size > 1:
            self._sum = PushAllReduce(context, problem.m, problem.n, problem.dtype, programs)

    @property
    def identity(self) -> Hashable:
        """Plans with the same identity share their compiled kernels."""
        return None if self._sum is None else self._sum.identity

    def run(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``x``: [m, k]. Returns [m, n], contiguous."""
        product = torch.matmul(x, weight.t() if self._transpose_b else weight)
        if self._sum is not None:
            self._sum.run(product)
        return product

    def compile(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Compiles what a call with these operands would run, without running it."""
        if self._sum is not None:
            self._sum.compile(x.new_empty(x.shape[0], weight.shape[0 if self._transpose_b else 1]))


class GemmArCopyPlan(ChunkedGemmPlan):
    """[m, k] times a weight, in chunks of rows that are sent to every peer; constructed collectively."""

    def __init__(self, context: TPContext, problem: Problem, choice: Choice) -> None:
        rows = chunk_rows_of(problem.m, choice)
        exchange = AllReduce(context, problem.m, problem.n, problem.dtype, rows)
        super().__init__(context, problem, choice, exchange)
        for position, first in enumerate(range(0, problem.m, rows)):
            self._add_chunk(first, min(first + rows, problem.m), position, is_last=True)

    def run(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``x``: [m, k]. Returns [m, n], contiguous."""
        out = x.new_empty(self.m, self.n)
        self.into(x, weight, out)
        return out


class GemmArTwoRoundPlan(Plan[TPContext]):
    """A GEMM-RS whose owners add in the all-reduce's orders, into their part of the result, then the gather;
    constructed collectively."""

    def __init__(self, context: TPContext, problem: Problem, choice: Choice) -> None:
        m, n, dtype, world_size = problem.m, problem.n, problem.dtype, context.world_size
        partition = RowPartition.of(
            [m * (rank + 1) // world_size - m * rank // world_size for rank in range(world_size)]
        )
        tables, vector = order_tables(context, m, n, dtype, REDUCE_BLOCK)
        order = None if vector == 0 else SumOrder(reduce_local_shard_kernel, tables, {"VECTOR": vector})
        product = replace(problem, op="gemm_rs")
        self._product = GemmRsCopyPlan(context, partition, product, choice, order=order)
        plan = GatherPlan("copy")
        self._gather = Gather(context, partition, n, dtype, plan, block_m=1)
        super().__init__(context, self._gather.channel)
        self._rows = [slice(*edges) for edges in zip(partition.starts, partition.starts[1:])]
        self._shape, self._own = (m, n), self._rows[context.rank]

    @property
    def identity(self) -> Hashable:
        """Plans with the same identity share their compiled kernels."""
        return self._product.identity

    def run(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``x``: [m, k]. Returns [m, n], contiguous."""
        out, gather = x.new_empty(self._shape), self._gather
        self._product.run(x, weight, out[self._own])
        gather.start(out[self._own], copies_own=False)
        arrived = gather.buffer.local

        def copy(ranks: Sequence[int]) -> None:
            for rank in ranks:
                out[self._rows[rank]].copy_(arrived[self._rows[rank]])

        gather.consume([[peer] for peer in gather.arrival_order[1:]], copy)
        return out

    def compile(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Compiles what a call with these operands would run, without running it."""
        self._product.compile(x, weight)


GemmArPlan = GemmArPushPlan | GemmArCopyPlan | GemmArTwoRoundPlan


def gemm_ar_by(context: TPContext, problem: Problem, choice: Choice, *, can_copy: bool) -> GemmArPlan:
    """The plan of a GEMM-AR as ``choice`` says; multiprocessors store what cannot be copied (collective).

    Raises:
        NotSupportedError: It cannot be stored either; on every rank alike.
    """
    if context.world_size == 1:
        return GemmArPushPlan(context, problem, choice)
    is_small = problem.m * problem.n * problem.dtype.itemsize <= PUSH_BYTES
    is_copied = can_copy and covers(problem.n, problem.dtype)
    if is_small and (choice.gather.mode == "push" or not is_copied):
        return GemmArPushPlan(context, problem, choice)
    if not is_copied:
        what = f"gemm_ar: {problem.m}x{problem.n} of {problem.dtype}"
        why = "rows are not whole 16 bytes" if can_copy else "copy engines need cuda-bindings"
        raise NotSupportedError(f"{what} is more than {PUSH_BYTES >> 20} MiB, and {why}")
    return (GemmArTwoRoundPlan if choice.rounds == 2 else GemmArCopyPlan)(context, problem, choice)


def plan_gemm_ar(
    context: TPContext, operands: tuple[Any, ...], layout: Layout, choice: Choice | None
) -> GemmArPlan | None:
    """The plan of ``gemm_ar`` for these ``Operands`` (collective); None if there are no rows."""
    shapes = Operands(*operands)
    n, k = shapes.sizes("gemm_ar", context, layout)
    m = shapes.x_shape[:-1].numel()
    if m == 0:
        channels = (context.all_reduce_channel, context.push_channel, context.reduce_channel)
        agree_on_nothing(context, channels, flagged=context.push_channel, columns=n, dtype=shapes.dtype)
        return None
    problem = Problem("gemm_ar", m, n, k, layout, shapes.dtype, context.world_size)
    return gemm_ar_by(context, problem, choice or choose(problem, context.machine), can_copy=can_copy(context))


@outside_compile
def gemm_ar(
    x: torch.Tensor, weight: torch.Tensor, *, context: TPContext, layout: Layout = "nt", choice: Choice | None = None
) -> torch.Tensor:
    """``x`` times ``weight``, summed over the ranks: Megatron's row-linear forward without sequence parallelism.

    Each element is added up in the order in which NCCL's all-reduce adds it, each sum rounded to the dtype.

    Args:
        x: [..., K], this rank's share of K; bf16 or fp16 (on CPU fp32 too), any strides.
        weight: [N, K] (``nt``) or [K, N] (``nn``).
        context: The group's context.
        layout: Layout of ``weight``.
        choice: Tiles and way to move partial sums; None: by the shape (``tp.choices``).

    Returns:
        [..., N].

    Raises:
        NotSupportedError: As ``ag_gemm``; also if NCCL's order cannot be followed (``policy.all_reduce_order``).
        MismatchError, PeerTimeoutError: As ``ag_gemm``.
    """
    check_scaled("gemm_ar", x, None)
    context.enter("gemm_ar", x.shape, weight.shape, x.dtype)
    operands = (x.shape, weight.shape, x.dtype, weight.dtype, x.device, weight.device)
    made = context.plan(plan_gemm_ar, operands, layout, choice)
    n = weight.shape[0 if layout == "nt" else 1]
    if made is None:
        return x.new_empty(*x.shape[:-1], n)
    y = made.run(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]), weight)
    # Not a view: the result of an autograd function may be edited in place.
    return y if x.dim() == 2 else torch.ops.aten._unsafe_view(y, [*x.shape[:-1], n])
