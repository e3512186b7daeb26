"""``ag_gemm``, ``gemm_rs``, ``gemm_ar`` and ``all_gather``: plain functions on tensors, not differentiable by
themselves (``tp.functions`` is).

They enqueue on the current stream (and the context's communication stream), never wait for the device but at the first
call of a new shape, and give the bits of NCCL plus cuBLAS wherever cuBLAS does not split K.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch

from ditron_train.gemm.fp8 import check_scales
from ditron_train.gemm.operands import FP8_DTYPES, TensorScales, padded_columns, result_dtype
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.runtime.versions import pip_command
from ditron_train.schedule.orders import arrival_order
from ditron_train.tp.all_reduce import PreparedAllReduce
from ditron_train.tp.context import TPContext
from ditron_train.tp.gather import PreparedGather
from ditron_train.tp.prepared import (
    AgGemmCall,
    AllGatherCall,
    AllReduceCall,
    GemmArCall,
    GemmRsCall,
    ReduceScatterCall,
    can_copy,
)
from ditron_train.tp.problem import Choice, GatherPlan, Layout, ScatterMode
from ditron_train.tp.scatter import PreparedScatter

__all__ = [
    "StartedGather",
    "StartedSum",
    "ag_gemm",
    "all_gather",
    "gemm_ar",
    "gemm_rs",
    "scatter_as_computed",
    "start_all_gather",
    "start_all_reduce",
    "start_reduce_scatter",
]


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


def _check_scaled(name: str, x: torch.Tensor, scales: TensorScales | None) -> None:
    if (x.dtype in FP8_DTYPES) != (scales is not None):
        raise NotSupportedError(f"{name}: {x.dtype} {'without' if scales is None else 'with'} scales")
    if scales is not None:
        check_scales(name, scales, x.device)


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
    scales: TensorScales | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """All-gather of ``x`` along dimension 0, times ``weight``: Megatron's column-linear forward and row-linear dgrad.

    Args:
        x: [s / world, ..., K], this rank's rows; bf16, fp16 or, on Hopper, FP8 (on CPU fp32 too), any strides.
        weight: [N, K] (``nt``: gathered @ weight.T) or [K, N] (``nn``: gathered @ weight; not of FP8).
        context: The group's context.
        layout: How ``weight`` lies.
        row_counts: Rows (all leading dimensions multiplied) of each rank where they differ.
        return_gathered: Also return the gathered rows [total rows, K]: a view that the next gather of this context
            overwrites.
        plan: How to move the rows; chosen by the shape where None (``tp.choices``).
        scales: Of FP8 operands; that of ``x`` is the same on all ranks.

    Returns:
        [s, ..., N] ([total rows, N] with ``row_counts``), bf16 of FP8 operands (``gemm.fp8.matmul_fp8`` with fast
        accumulation), and the gathered rows if asked for.

    Raises:
        NotSupportedError: What this rank sees alone does not fit.
        MismatchError: The ranks' calls differ (at the first call of a shape here, else at the next ``check``).
        PeerTimeoutError: A peer did not come (CPU: here, GPU: at a later call or ``context.synchronize()``).
    """
    counts = None if row_counts is None else tuple(row_counts)
    _check_scaled("ag_gemm", x, scales)
    context.enter("ag_gemm", x.shape if counts is None else counts, weight.shape, x.dtype)
    operands = (x.shape, weight.shape, x.dtype, weight.dtype, x.device, weight.device)
    prepared = context.prepare(AgGemmCall, *operands, layout, counts, plan, return_gathered)
    if prepared is None:
        n, k = weight.shape if layout == "nt" else weight.shape[::-1]
        shape = (0,) if counts is not None else (x.shape[0] * context.world_size, *x.shape[1:-1])
        empty = x.new_empty(*shape, n, dtype=result_dtype(x.dtype))
        return (empty, x.new_empty(0, k)) if return_gathered else empty
    y = prepared(_sendable_rows(x), weight, scales)
    if counts is None and x.dim() > 2:
        y = y.view(x.shape[0] * context.world_size, *x.shape[1:-1], prepared.n)
    return (y, prepared.gathered) if return_gathered else y


@outside_compile
class StartedGather:
    """A gather on its way; ``wait()``, once and before the next one starts, gives the rows: starts and waits are
    counted. ``rows``: where they will be.

    Args:
        started_on: What ``enter`` gave; ``wait`` may come on another stream.
    """

    def __init__(
        self, prepared: PreparedGather, rows: torch.Tensor, num_columns: int, started_on: torch.cuda.Stream | None
    ) -> None:
        self._prepared = prepared
        self._sent = rows  # kept until the stream is behind the sends
        self.rows = prepared.buffer.local[:, :num_columns]
        self._started_on = started_on
        prepared.start(rows)

    def wait(self) -> torch.Tensor:
        """Holds the current stream until all rows are there: [total rows, K], a view of the context's buffer that the
        next gather overwrites."""
        self._prepared.context.resume(self._started_on, self._sent)
        self._prepared.wait()
        return self.rows

    def arrivals(self) -> Generator[tuple[slice, torch.Tensor]]:
        """Instead of ``wait``: each rank's rows and where they stand among all, this rank's own first, then the
        others' in the order of arrival, the current stream held until they are there. When it ends all are there and
        counted, as after ``wait``: go through it to the end, or close it.
        """
        prepared = self._prepared
        prepared.context.resume(self._started_on, self._sent)
        try:
            for source in arrival_order(prepared.context.rank, prepared.context.world_size).tolist():
                prepared.wait_for(source)
                starts = prepared.partition.starts
                share = slice(starts[source], starts[source + 1])
                yield share, self.rows[share]
        finally:
            prepared.wait()


@outside_compile
def start_all_gather(
    x: torch.Tensor, *, context: TPContext, row_counts: Sequence[int] | None = None, in_turn: bool = False
) -> StartedGather:
    """Starts a gather of ``x`` [rows, ..., K] by copy engines, beside what the current stream does next. ``in_turn``:
    peers get the rows one after the other, for consumers that go through ``arrivals``.

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``ag_gemm``.
    """
    counts = None if row_counts is None else tuple(row_counts)
    stream = context.enter("all_gather", x.shape if counts is None else counts, x.dtype)
    prepared = context.prepare(AllGatherCall, x.shape, x.dtype, x.device, counts, in_turn)
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
    scales: TensorScales | None = None,
) -> torch.Tensor:
    """``x`` times ``weight``, reduce-scattered along dimension 0: Megatron's row-linear forward and column-linear
    dgrad.

    Partials are folded by their owner in NCCL's ring order, each sum rounded to the dtype.

    Args:
        x: [s, ..., K], all rows, this rank's share of K; bf16, fp16 or, on Hopper, FP8 (on CPU fp32 too), any strides.
        weight: [N, K] (``nt``) or [K, N] (``nn``; not of FP8).
        context: The group's context.
        layout: How ``weight`` lies.
        row_counts: Rows that each rank gets where they differ.
        scatter: How to move partial sums; chosen by the shape where None (``tp.choices``). Without ``cuda-bindings``,
            or where rows of the result are not whole 16 bytes, they are stored by the GEMM whatever is said here.
        scales: Of FP8 operands, this rank's own: partial sums are bf16.

    Returns:
        [s / world, ..., N] ([rows of this rank, N] with ``row_counts``).

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``ag_gemm``.
    """
    counts = None if row_counts is None else tuple(row_counts)
    _check_scaled("gemm_rs", x, scales)
    context.enter("gemm_rs", x.shape, weight.shape, x.dtype)
    operands = (x.shape, weight.shape, x.dtype, weight.dtype, x.device, weight.device)
    prepared, dtype = context.prepare(GemmRsCall, *operands, layout, counts, scatter), result_dtype(x.dtype)
    if prepared is None:
        shape = (0,) if counts is not None else (x.shape[0] // context.world_size, *x.shape[1:-1])
        return x.new_empty(*shape, weight.shape[0 if layout == "nt" else 1], dtype=dtype)
    if counts is None:
        out = x.new_empty(x.shape[0] // context.world_size, *x.shape[1:-1], prepared.n, dtype=dtype)
    else:
        out = x.new_empty(counts[context.rank], prepared.n, dtype=dtype)
    prepared(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]), weight, out, scales)
    return out


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
        layout: How ``weight`` lies.
        choice: Tiles and way to move partial sums; by the shape where None (``tp.choices``).

    Returns:
        [..., N].

    Raises:
        NotSupportedError: As ``ag_gemm``; also where NCCL's order cannot be had (``policy.all_reduce_order``).
        MismatchError, PeerTimeoutError: As ``ag_gemm``.
    """
    _check_scaled("gemm_ar", x, None)
    context.enter("gemm_ar", x.shape, weight.shape, x.dtype)
    operands = (x.shape, weight.shape, x.dtype, weight.dtype, x.device, weight.device)
    prepared = context.prepare(GemmArCall, *operands, layout, choice)
    n = weight.shape[0 if layout == "nt" else 1]
    if prepared is None:
        return x.new_empty(*x.shape[:-1], n)
    y = prepared(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]), weight)
    # No view of it: what an autograd function returns may be edited in place.
    return y if x.dim() == 2 else torch.ops.aten._unsafe_view(y, [*x.shape[:-1], n])


@outside_compile
class StartedSum:
    """A reduce-scatter or an all-reduce on its way; ``wait()``, once and before the next one starts, gives this rank's
    rows, or all. ``out``: where they will be.

    Args:
        started_on: As of ``StartedGather``.
    """

    def __init__(
        self,
        prepared: PreparedScatter | PreparedAllReduce,
        partial: torch.Tensor,
        shape: tuple[int, ...],
        started_on: torch.cuda.Stream | None,
    ) -> None:
        self._prepared = prepared
        self._partial = partial
        self._started_on = started_on
        # Allocated before the communication stream forks off: memory that the current stream frees later is not free
        # there.
        self.out = partial.new_empty(shape)
        prepared.start(partial)

    def wait(self) -> torch.Tensor:
        """The sum over ranks, in NCCL's order."""
        self._prepared.context.resume(self._started_on, self._partial, self.out)
        self._prepared.finish(self._partial, self.out, beside=True)
        return self.out


@outside_compile
def start_reduce_scatter(partial: torch.Tensor, *, context: TPContext) -> StartedSum:
    """Starts the reduce-scatter of ``partial`` [s, ..., N] along dimension 0 by copy engines, beside what the current
    stream does next. One at a time: ``wait()`` before the next op of this context.

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``gemm_rs``; also without ``cuda-bindings`` on a GPU.
    """
    stream = context.enter("reduce_scatter", partial.shape, partial.dtype)
    _check_can_copy("reduce_scatter", context)
    prepared = context.prepare(ReduceScatterCall, partial.shape, partial.dtype, partial.device)
    shape = (partial.shape[0] // context.world_size, *partial.shape[1:])
    return StartedSum(prepared, partial.contiguous(), shape, stream)


@outside_compile
def start_all_reduce(partial: torch.Tensor, *, context: TPContext) -> StartedSum:
    """Starts the all-reduce of ``partial`` [..., N] by copy engines, beside what the current stream does next. One at
    a time: ``wait()`` before the next op of this context.

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``gemm_ar``; also without ``cuda-bindings`` on a GPU.
    """
    stream = context.enter("all_reduce", partial.shape, partial.dtype)
    _check_can_copy("all_reduce", context)
    prepared = context.prepare(AllReduceCall, partial.shape, partial.dtype, partial.device)
    return StartedSum(prepared, partial.contiguous(), tuple(partial.shape), stream)


@outside_compile
def scatter_as_computed(
    compute: Callable[[slice, torch.Tensor], None], shape: Sequence[int], dtype: torch.dtype, *, context: TPContext
) -> torch.Tensor:
    """The reduce-scatter along dimension 0 of a product [s, ..., N] that ``compute`` writes share by share: each is
    sent by copy engines while the next is computed, this rank's own last. Sums are those of ``gemm_rs``.

    Args:
        compute: Called with rows of [s * ..., N] and where they go, contiguous; enqueues on the current stream.
        shape: Of the product.
        dtype: Of the product.
        context: The group's context.

    Returns:
        [s / world, ..., N].

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``start_reduce_scatter``.
    """
    context.enter("scatter_as_computed", tuple(shape), dtype)
    _check_can_copy("scatter_as_computed", context)
    prepared = context.prepare(ReduceScatterCall, torch.Size(shape), dtype, context.device)
    starts, rank = prepared.partition.starts, context.rank
    partial = torch.empty(starts[-1], shape[-1], dtype=dtype, device=context.device)
    out = partial.new_empty(shape[0] // context.world_size, *shape[1:])
    prepared.begin()
    try:
        for position, owner in enumerate([*prepared.peers, rank]):
            rows = slice(starts[owner], starts[owner + 1])
            compute(rows, partial[rows])
            if owner != rank:
                context.fork()
                prepared.send(partial, position, rows, signals=True)
    except BaseException:  # no memory
        prepared.give_up()
        raise
    prepared.finish(partial, out)
    return out


def _check_can_copy(name: str, context: TPContext) -> None:
    if not can_copy(context):
        raise NotSupportedError(f"{name} by copy engines needs cuda-bindings: {pip_command('cuda-bindings')}")
