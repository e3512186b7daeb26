"""``ag_gemm``, ``gemm_rs`` and ``all_gather``: plain functions on tensors, not differentiable by themselves
(``tp.functions`` is).

They enqueue on the current stream (and the context's communication stream), never wait for the device but at the first
call of a new shape, and give the bits of NCCL plus cuBLAS wherever cuBLAS does not split K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ditron_train.gemm.operands import padded_columns
from ditron_train.gemm.ops import check_operands
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.runtime.versions import pip_command
from ditron_train.stream.driver import has_driver
from ditron_train.symm.control import DTYPES
from ditron_train.tp.choices import Choice, GatherPlan, Op, Problem, ScatterMode, choose
from ditron_train.tp.chunked_gemm_rs import PreparedChunkedGemmRs
from ditron_train.tp.context import RowPartition, TPContext
from ditron_train.tp.gather import PreparedGather
from ditron_train.tp.prepared import Layout, PreparedAgGemm, PreparedGemmRs
from ditron_train.tp.scatter import SUM_DTYPES, PreparedScatter

__all__ = [
    "StartedGather",
    "StartedReduceScatter",
    "ag_gemm",
    "all_gather",
    "can_copy",
    "gemm_rs",
    "prepare_gemm_rs",
    "start_all_gather",
    "start_reduce_scatter",
]


def _check(name: str, context: TPContext, x: torch.Tensor, weight: torch.Tensor, layout: Layout) -> tuple[int, int]:
    """Checks what this rank can see alone; returns (N, K)."""
    if layout not in ("nt", "nn"):
        raise NotSupportedError(f"{name}: layout {layout!r} is not nt or nn")
    if x.device != context.device:
        raise NotSupportedError(f"{name}: x is on {x.device}, the context on {context.device}")
    if weight.dim() != 2 or x.dim() < 2:
        raise NotSupportedError(
            f"{name}: x must have at least 2 dimensions and weight 2, got {x.dim()} and {weight.dim()}"
        )
    check_operands(name, x, weight)
    n, k = weight.shape if layout == "nt" else weight.shape[::-1]
    if x.shape[-1] != k:
        raise NotSupportedError(f"{name}: x {tuple(x.shape)} and weight {tuple(weight.shape)} ({layout}) do not fit")
    if n == 0 or k == 0:
        raise NotSupportedError(f"{name}: weight {tuple(weight.shape)} has an empty dimension")
    return n, k


def _partition(
    name: str, context: TPContext, x: torch.Tensor, row_counts: Sequence[int] | None, *, total: bool
) -> RowPartition:
    """Rows of all ranks: given, or the same number everywhere. ``total``: x holds all of them, not this rank's."""
    world = context.world_size
    rows = x.shape[:-1].numel()
    if row_counts is None:
        if total and x.shape[0] % world:
            raise NotSupportedError(
                f"{name}: dimension 0 of {tuple(x.shape)} does not divide by {world} ranks; pass row_counts"
            )
        row_counts = [rows // world if total else rows] * world
    if len(row_counts) != world or min(row_counts) < 0:
        raise NotSupportedError(f"{name}: row_counts {list(row_counts)} for a group of {world}")
    partition = RowPartition.of(row_counts)
    if rows != (partition.num_rows if total else partition.count(context.rank)):
        raise NotSupportedError(f"{name}: x has {rows} rows, row_counts {list(row_counts)} say otherwise")
    return partition


def _sendable_rows(x: torch.Tensor) -> torch.Tensor:
    """[rows, K] with rows of whole 16 bytes, contiguous: symmetric memory must be describable as it is."""
    columns = x.shape[-1]
    if x.requires_grad:  # a copy into symmetric memory would make autograd's history of all calls part of it
        x = x.detach()
    if x.is_contiguous() and x.data_ptr() % 16 == 0 and columns * x.dtype.itemsize % 16 == 0:
        return x if x.dim() == 2 else x.view(-1, columns)
    rows = x if x.dim() == 2 else x.reshape(-1, columns)
    missing = padded_columns(columns, x.dtype) - columns
    if missing:
        rows = torch.nn.functional.pad(rows, (0, missing))
    rows = rows.contiguous()
    return rows if rows.data_ptr() % 16 == 0 else rows.clone()


def _choose(op: Op, context: TPContext, m: int, n: int, k: int, dtype: torch.dtype, layout: Layout) -> Choice:
    return choose(Problem(op, m, n, k, layout, dtype, context.world_size), context.machine)


@outside_compile
def ag_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    context: TPContext,
    layout: Layout = "nt",
    row_counts: Sequence[int] | None = None,
    return_gathered: bool = False,
    plan: GatherPlan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """All-gather of ``x`` along dimension 0, times ``weight``: Megatron's column-linear forward and row-linear dgrad.

    Args:
        x: [s / world, ..., K], this rank's rows; bf16 or fp16 (on CPU fp32 too), any strides.
        weight: [N, K] (``nt``: gathered @ weight.T) or [K, N] (``nn``: gathered @ weight).
        context: The group's context.
        layout: How ``weight`` lies.
        row_counts: Rows (all leading dimensions multiplied) of each rank where they differ.
        return_gathered: Also return the gathered rows [total rows, K]: a view that the next gather of this context
            overwrites.
        plan: How to move the rows; chosen by the shape where None (``tp.tuning``).

    Returns:
        [s, ..., N] ([total rows, N] with ``row_counts``), and the gathered rows if asked for.

    Raises:
        NotSupportedError: What this rank sees alone does not fit.
        MismatchError: The ranks' calls differ (at the first call of a shape here, else at the next ``check``).
        PeerTimeoutError: A peer did not come (CPU: here, GPU: at a later call or ``context.synchronize()``).
    """
    counts = None if row_counts is None else tuple(row_counts)
    context.enter("ag_gemm", x.shape if counts is None else counts, weight.shape, x.dtype)
    key = ("ag_gemm", x.shape, weight.shape, x.dtype, weight.dtype, x.device, weight.device, layout,
           counts, plan, return_gathered)  # fmt: skip
    prepared = context.prepared.get(key)
    if prepared is None:
        n, k = _check("ag_gemm", context, x, weight, layout)
        partition = _partition("ag_gemm", context, x, counts, total=False)
        if partition.num_rows == 0:
            context.agree_on_nothing((context.gather_channel,), columns=padded_columns(k, x.dtype), dtype=x.dtype)
            shape = (0,) if counts is not None else (x.shape[0] * context.world_size, *x.shape[1:-1])
            empty = x.new_empty(*shape, n)
            return (empty, x.new_empty(0, k)) if return_gathered else empty
        choice = _choose("ag_gemm", context, partition.num_rows, n, k, x.dtype, layout)
        if plan is not None:
            choice = replace(choice, gather=plan)
        prepared = PreparedAgGemm(context, partition, n, k, x.dtype, layout, choice, keeps_gathered=return_gathered)
        context.prepared[key] = prepared
    y = prepared(_sendable_rows(x), weight)
    if counts is None and x.dim() > 2:
        y = y.view(x.shape[0] * context.world_size, *x.shape[1:-1], prepared.n)
    return (y, prepared.gathered) if return_gathered else y


@outside_compile
class StartedGather:
    """A gather on its way; ``wait()``, once and before the next one starts, gives the rows: starts and waits are
    counted.

    Args:
        started_on: What ``enter`` gave; ``wait`` may come on another stream.
    """

    def __init__(
        self, prepared: PreparedGather, rows: torch.Tensor, num_columns: int, started_on: torch.cuda.Stream | None
    ) -> None:
        self._prepared = prepared
        self._rows = rows  # kept until the stream is behind the sends
        self._num_columns = num_columns
        self._started_on = started_on
        prepared.start(rows)

    def wait(self) -> torch.Tensor:
        """Holds the current stream until all rows are there: [total rows, K], a view of the context's buffer that the
        next gather overwrites."""
        self._prepared.context.resume(self._started_on, self._rows)
        return self._prepared.wait()[:, : self._num_columns]


@outside_compile
def start_all_gather(x: torch.Tensor, *, context: TPContext, row_counts: Sequence[int] | None = None) -> StartedGather:
    """Starts a gather of ``x`` [rows, ..., K] by copy engines, beside what the current stream does next.

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``ag_gemm``.
    """
    counts = None if row_counts is None else tuple(row_counts)
    stream = context.enter("all_gather", x.shape if counts is None else counts, x.dtype)
    key = ("all_gather", x.shape, x.dtype, x.device, counts)
    prepared = context.prepared.get(key)
    if prepared is None:
        if x.device != context.device or x.dim() < 2:
            raise NotSupportedError(
                f"all_gather: x {tuple(x.shape)} on {x.device}, the context is on {context.device}"
            )
        if x.dtype not in DTYPES:
            raise NotSupportedError(f"all_gather: {x.dtype} is not supported")
        partition = _partition("all_gather", context, x, counts, total=False)
        if partition.num_rows == 0 or x.shape[-1] == 0:
            context.agree_on_nothing((context.gather_channel,), dtype=x.dtype)
            raise NotSupportedError(f"all_gather: nothing to gather in {tuple(x.shape)}")
        columns = padded_columns(x.shape[-1], x.dtype)
        prepared = PreparedGather(context, partition, columns, x.dtype, GatherPlan("copy"), block_m=1, is_awaited=True)
        context.prepared[key] = prepared
    return StartedGather(prepared, _sendable_rows(x), x.shape[-1], stream)


@outside_compile
def all_gather(x: torch.Tensor, *, context: TPContext, row_counts: Sequence[int] | None = None) -> torch.Tensor:
    """Rows of all ranks, [total rows, K], as a tensor of its own."""
    return start_all_gather(x, context=context, row_counts=row_counts).wait().clone()


@outside_compile
def gemm_rs(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    context: TPContext,
    layout: Layout = "nt",
    row_counts: Sequence[int] | None = None,
    scatter: ScatterMode | None = None,
) -> torch.Tensor:
    """``x`` times ``weight``, reduce-scattered along dimension 0: Megatron's row-linear forward and column-linear
    dgrad.

    Partials are folded by their owner in NCCL's ring order, each sum rounded to the dtype.

    Args:
        x: [s, ..., K], all rows, this rank's share of K; bf16 or fp16 (on CPU fp32 too), any strides.
        weight: [N, K] (``nt``) or [K, N] (``nn``).
        context: The group's context.
        layout: How ``weight`` lies.
        row_counts: Rows that each rank gets where they differ.
        scatter: How to move partial sums; chosen by the shape where None (``tp.tuning``). Without ``cuda-bindings``,
            or where rows of the result are not whole 16 bytes, they are stored by the GEMM whatever is said here.

    Returns:
        [s / world, ..., N] ([rows of this rank, N] with ``row_counts``).

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``ag_gemm``.
    """
    counts = None if row_counts is None else tuple(row_counts)
    context.enter("gemm_rs", x.shape, weight.shape, x.dtype)
    key = ("gemm_rs", x.shape, weight.shape, x.dtype, weight.dtype, x.device, weight.device, layout,
           counts, scatter)  # fmt: skip
    prepared = context.prepared.get(key)
    if prepared is None:
        n, k = _check("gemm_rs", context, x, weight, layout)
        partition = _partition("gemm_rs", context, x, counts, total=True)
        if partition.num_rows == 0:
            context.agree_on_nothing((context.scatter_channel, context.reduce_channel), columns=n, dtype=x.dtype)
            shape = (0,) if counts is not None else (x.shape[0] // context.world_size, *x.shape[1:-1])
            return x.new_empty(*shape, n)
        choice = _choose("gemm_rs", context, partition.num_rows, n, k, x.dtype, layout)
        if scatter is not None:
            choice = replace(choice, scatter=scatter)
        prepared = context.prepared[key] = prepare_gemm_rs(context, partition, n, k, x.dtype, layout, choice)
    if counts is None:
        out = x.new_empty(x.shape[0] // context.world_size, *x.shape[1:-1], prepared.n)
    else:
        out = x.new_empty(counts[context.rank], prepared.n)
    prepared(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]), weight, out)
    return out


def prepare_gemm_rs(
    context: TPContext, partition: RowPartition, n: int, k: int, dtype: torch.dtype, layout: Layout, choice: Choice
) -> PreparedChunkedGemmRs | PreparedGemmRs:
    """A GEMM-RS as ``choice`` says, stored by the GEMM where it cannot be copied (collective)."""
    by_copy = choice.scatter == "copy" and can_copy(context) and PreparedChunkedGemmRs.covers(n, dtype)
    kind = PreparedChunkedGemmRs if by_copy else PreparedGemmRs
    return kind(context, partition, n, k, dtype, layout, choice)


def can_copy(context: TPContext) -> bool:
    """Whether copy engines can be driven here: on a GPU that needs ``cuda-bindings``."""
    return has_driver() or not context.is_cuda


@outside_compile
class StartedReduceScatter:
    """A reduce-scatter on its way; ``wait()``, once and before the next one starts, gives this rank's rows.

    Args:
        started_on: As of ``StartedGather``.
    """

    def __init__(
        self,
        prepared: PreparedScatter,
        partial: torch.Tensor,
        shape: tuple[int, ...],
        started_on: torch.cuda.Stream | None,
    ) -> None:
        self._prepared = prepared
        self._partial = partial
        self._started_on = started_on
        # Allocated before the communication stream forks off: memory that the current stream frees later is not free
        # there.
        self._out = partial.new_empty(shape)
        prepared.start(partial)

    def wait(self) -> torch.Tensor:
        """The sum over ranks of this rank's rows, in NCCL's ring order."""
        self._prepared.context.resume(self._started_on, self._partial, self._out)
        self._prepared.finish(self._partial, self._out, beside=True)
        return self._out


@outside_compile
def start_reduce_scatter(partial: torch.Tensor, *, context: TPContext) -> StartedReduceScatter:
    """Starts the reduce-scatter of ``partial`` [s, ..., N] along dimension 0 by copy engines, beside what the current
    stream does next. One at a time: ``wait()`` before the next op of this context.

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``gemm_rs``; also without ``cuda-bindings`` on a GPU.
    """
    stream = context.enter("reduce_scatter", partial.shape, partial.dtype)
    if not can_copy(context):
        raise NotSupportedError(f"reduce_scatter by copy engines needs cuda-bindings: {pip_command('cuda-bindings')}")
    key = ("reduce_scatter", partial.shape, partial.dtype, partial.device)
    prepared = context.prepared.get(key)
    if prepared is None:
        is_fitting = partial.device == context.device and partial.dim() >= 2
        if is_fitting and partial.numel() == 0:
            context.agree_on_nothing((context.reduce_channel,))
        if not is_fitting or partial.numel() == 0:
            raise NotSupportedError(
                f"reduce_scatter: {tuple(partial.shape)} on {partial.device}, context on {context.device}"
            )
        if partial.dtype not in SUM_DTYPES:
            raise NotSupportedError(f"reduce_scatter: {partial.dtype}; allowed: {', '.join(map(str, SUM_DTYPES))}")
        partition = _partition("reduce_scatter", context, partial, None, total=True)
        prepared = PreparedScatter(context, partition, partial.shape[-1], partial.dtype)
        context.prepared[key] = prepared
    shape = (partial.shape[0] // context.world_size, *partial.shape[1:])
    return StartedReduceScatter(prepared, partial.contiguous(), shape, stream)
