"""What an op needs at a shape, made at its first call: checks, the rows of all ranks, tiles, ways of moving data.

A ``...Call`` says all that this depends on: with its kind in front its fields are the key of what was prepared
(``TPContext.prepare``). ``prepare`` is collective; it returns what enqueues the op, or None where there are no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ditron_train.gemm.fp8 import check_fp8_operands
from ditron_train.gemm.operands import FP8_DTYPES, Operand, padded_columns, result_dtype
from ditron_train.gemm.ops import check_operands
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.stream.driver import has_driver
from ditron_train.symm.control import DTYPES
from ditron_train.tp.choices import choose
from ditron_train.tp.chunked_gemm_ar import PreparedGemmAr, gemm_ar_by
from ditron_train.tp.chunked_gemm_rs import PreparedChunkedGemmRs, covers
from ditron_train.tp.context import RowPartition, TPContext
from ditron_train.tp.gather import PreparedGather
from ditron_train.tp.prepared_ag_gemm import PreparedAgGemm
from ditron_train.tp.prepared_gemm_rs import PreparedGemmRs
from ditron_train.tp.problem import Choice, GatherPlan, Layout, Problem, ScatterMode
from ditron_train.tp.scatter import SUM_DTYPES, PreparedScatter


def _check(context: TPContext, call: AgGemmCall | GemmRsCall | GemmArCall) -> tuple[int, int]:
    """Checks what this rank can see alone; returns (N, K)."""
    name, layout, x_shape, weight_shape = call.op, call.layout, call.x_shape, call.weight_shape
    if layout not in ("nt", "nn"):
        raise NotSupportedError(f"{name}: layout {layout!r} is not nt or nn")
    if call.device != context.device:
        raise NotSupportedError(f"{name}: x is on {call.device}, the context on {context.device}")
    if len(weight_shape) != 2 or len(x_shape) < 2:
        raise NotSupportedError(
            f"{name}: x must have at least 2 dimensions and weight 2, got {len(x_shape)} and {len(weight_shape)}"
        )
    operands = Operand(call.dtype, call.device), Operand(call.weight_dtype, call.weight_device)
    if call.dtype in FP8_DTYPES:
        check_fp8_operands(name, *operands)
        if layout != "nt" or call.dtype != call.weight_dtype:
            raise NotSupportedError(
                f"{name}: FP8 operands of {call.dtype} and {call.weight_dtype}, {layout}: only nt of one type"
            )
    else:
        check_operands(name, *operands)
    n, k = weight_shape if layout == "nt" else weight_shape[::-1]
    if x_shape[-1] != k:
        raise NotSupportedError(f"{name}: x {tuple(x_shape)} and weight {tuple(weight_shape)} ({layout}) do not fit")
    if n == 0 or k == 0:
        raise NotSupportedError(f"{name}: weight {tuple(weight_shape)} has an empty dimension")
    return n, k


def _partition(
    name: str, context: TPContext, shape: torch.Size, row_counts: Sequence[int] | None, *, total: bool
) -> RowPartition:
    """Rows of all ranks: given, or the same number everywhere. ``total``: x holds all of them, not this rank's."""
    world = context.world_size
    rows = shape[:-1].numel()
    if row_counts is None:
        if total and shape[0] % world:
            raise NotSupportedError(
                f"{name}: dimension 0 of {tuple(shape)} does not divide by {world} ranks; pass row_counts"
            )
        row_counts = [rows // world if total else rows] * world
    if len(row_counts) != world or min(row_counts) < 0:
        raise NotSupportedError(f"{name}: row_counts {list(row_counts)} for a group of {world}")
    partition = RowPartition.of(row_counts)
    if rows != (partition.num_rows if total else partition.count(context.rank)):
        raise NotSupportedError(f"{name}: x has {rows} rows, row_counts {list(row_counts)} say otherwise")
    return partition


def _problem(context: TPContext, m: int, n: int, k: int, call: AgGemmCall | GemmRsCall | GemmArCall) -> Problem:
    return Problem(call.op, m, n, k, call.layout, call.dtype, context.world_size)


class AgGemmCall(NamedTuple):
    """Of ``ops.ag_gemm``."""

    op = "ag_gemm"  # type: ignore[misc]  # no field
    x_shape: torch.Size
    weight_shape: torch.Size
    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    weight_device: torch.device
    layout: Layout
    counts: tuple[int, ...] | None
    plan: GatherPlan | None
    keeps_gathered: bool
    buffer: str | None

    def prepare(self, context: TPContext) -> PreparedAgGemm | None:
        """See above."""
        n, k = _check(context, self)
        partition = _partition(self.op, context, self.x_shape, self.counts, total=False)
        if partition.num_rows == 0:
            columns = padded_columns(k, self.dtype)
            context.agree_on_nothing((context.gather_channel,), columns=columns, dtype=self.dtype)
            return None
        problem = _problem(context, partition.num_rows, n, k, self)
        choice = choose(problem, context.machine)
        if self.plan is not None:
            choice = replace(choice, gather=self.plan)
        return PreparedAgGemm(context, partition, problem, choice, self.keeps_gathered, self.buffer)


class GemmRsCall(NamedTuple):
    """Of ``ops.gemm_rs``."""

    op = "gemm_rs"  # type: ignore[misc]  # no field
    x_shape: torch.Size
    weight_shape: torch.Size
    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    weight_device: torch.device
    layout: Layout
    counts: tuple[int, ...] | None
    scatter: ScatterMode | None

    def prepare(self, context: TPContext) -> PreparedChunkedGemmRs | PreparedGemmRs | None:
        """See above."""
        n, k = _check(context, self)
        partition = _partition(self.op, context, self.x_shape, self.counts, total=True)
        if partition.num_rows == 0:
            channels = (context.scatter_channel, context.reduce_channel)
            context.agree_on_nothing(channels, columns=n, dtype=self.dtype)
            return None
        problem = _problem(context, partition.num_rows, n, k, self)
        choice = choose(problem, context.machine)
        if self.scatter is not None:
            choice = replace(choice, scatter=self.scatter)
        return gemm_rs_by(context, partition, problem, choice)


class GemmArCall(NamedTuple):
    """Of ``ops.gemm_ar``."""

    op = "gemm_ar"  # type: ignore[misc]  # no field
    x_shape: torch.Size
    weight_shape: torch.Size
    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    weight_device: torch.device
    layout: Layout
    choice: Choice | None

    def prepare(self, context: TPContext) -> PreparedGemmAr | None:
        """See above."""
        n, k = _check(context, self)
        m = self.x_shape[:-1].numel()
        if m == 0:
            channels = (context.all_reduce_channel, context.push_channel, context.reduce_channel)
            context.agree_on_nothing(channels, flagged=context.push_channel, columns=n, dtype=self.dtype)
            return None
        problem = _problem(context, m, n, k, self)
        choice = self.choice or choose(problem, context.machine)
        return gemm_ar_by(context, problem, choice, can_copy=can_copy(context))


def gemm_rs_by(
    context: TPContext, partition: RowPartition, problem: Problem, choice: Choice
) -> PreparedChunkedGemmRs | PreparedGemmRs:
    """A GEMM-RS as ``choice`` says, stored by the GEMM where it cannot be copied (collective)."""
    by_copy = choice.scatter == "copy" and can_copy(context) and covers(problem.n, result_dtype(problem.dtype))
    kind = PreparedChunkedGemmRs if by_copy else PreparedGemmRs
    return kind(context, partition, problem, choice)


def can_copy(context: TPContext) -> bool:
    """Whether copy engines can be driven here: on a GPU that needs ``cuda-bindings``."""
    return has_driver() or not context.is_cuda


class AllGatherCall(NamedTuple):
    """An all-gather whose chunks the caller waits for; no rows are an error."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    counts: tuple[int, ...] | None
    in_turn: bool

    def prepare(self, context: TPContext) -> PreparedGather:
        """See above."""
        if self.device != context.device or len(self.shape) < 2:
            raise NotSupportedError(
                f"all_gather: x {tuple(self.shape)} on {self.device}, the context is on {context.device}"
            )
        if self.dtype not in DTYPES:
            raise NotSupportedError(f"all_gather: {self.dtype} is not supported")
        partition = _partition("all_gather", context, self.shape, self.counts, total=False)
        if partition.num_rows == 0 or self.shape[-1] == 0:
            context.agree_on_nothing((context.gather_channel,), dtype=self.dtype)
            raise NotSupportedError(f"all_gather: nothing to gather in {tuple(self.shape)}")
        columns = padded_columns(self.shape[-1], self.dtype)
        plan, is_awaited = GatherPlan("copy"), not self.in_turn
        return PreparedGather(context, partition, columns, self.dtype, plan, block_m=1, is_awaited=is_awaited)


class ReduceScatterCall(NamedTuple):
    """A reduce-scatter whose rows the caller writes chunk by chunk; no rows are an error."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def prepare(self, context: TPContext) -> PreparedScatter:
        """See above."""
        is_fitting = self.device == context.device and len(self.shape) >= 2
        if is_fitting and self.shape.numel() == 0:
            context.agree_on_nothing((context.reduce_channel,))
        if not is_fitting or self.shape.numel() == 0:
            where = f"on {self.device}, context on {context.device}"
            raise NotSupportedError(f"reduce_scatter: {tuple(self.shape)} {where}")
        if self.dtype not in SUM_DTYPES:
            raise NotSupportedError(f"reduce_scatter: {self.dtype}; allowed: {', '.join(map(str, SUM_DTYPES))}")
        partition = _partition("reduce_scatter", context, self.shape, None, total=True)
        return PreparedScatter(context, partition, self.shape[-1], self.dtype)
