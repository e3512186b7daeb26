"""``ag_gemm``, ``gemm_rs`` and ``gemm_ar``: plain functions on tensors, not differentiable by
themselves (``tp.functions`` is).

They enqueue on the current stream (and the context's communication stream), never wait for the device but at the first
call of a new shape, and give the bits of NCCL plus cuBLAS wherever cuBLAS does not split K.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ditron_train.gemm.fp8 import check_bias, check_scaled
from ditron_train.gemm.operands import TensorScales, result_dtype
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.tp.context import TPContext
from ditron_train.tp.movement import sendable_rows
from ditron_train.tp.prepared import AgGemmCall, GemmArCall, GemmRsCall
from ditron_train.tp.problem import Choice, GatherPlan, Layout, ScatterMode


@outside_compile
def ag_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    context: TPContext,
    layout: Layout = "nt",
    row_counts: Sequence[int] | None = None,
    return_gathered: bool = False,
    gathered_in: str | None = None,
    plan: GatherPlan | None = None,
    scales: TensorScales | None = None,
    bias: torch.Tensor | None = None,
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
        gathered_in: Name of the symmetric buffer that the rows are gathered into, all of them, until the next call
            with it; the same on all ranks. None: the one that all gathers share.
        plan: How to move the rows; chosen by the shape where None (``tp.choices``).
        scales: Of FP8 operands; that of ``x`` is the same on all ranks.
        bias: [N], of the result's type: added in fp32 to the (scaled) product, which is rounded then, as cuBLAS's
            epilogue does.

    Returns:
        [s, ..., N] ([total rows, N] with ``row_counts``), bf16 of FP8 operands (``gemm.fp8.matmul_fp8`` with fast
        accumulation), and the gathered rows if asked for.

    Raises:
        NotSupportedError: What this rank sees alone does not fit.
        MismatchError: The ranks' calls differ (at the first call of a shape here, else at the next ``check``).
        PeerTimeoutError: A peer did not come (CPU: here, GPU: at a later call or ``context.synchronize()``).
    """
    counts = None if row_counts is None else tuple(row_counts)
    check_scaled("ag_gemm", x, scales)
    if bias is not None:
        check_bias("ag_gemm", x, bias, weight.shape[0 if layout == "nt" else -1] if weight.dim() else 0)
    context.enter("ag_gemm", x.shape if counts is None else counts, weight.shape, x.dtype)
    operands = (x.shape, weight.shape, x.dtype, weight.dtype, x.device, weight.device)
    keeps = return_gathered or gathered_in is not None
    prepared = context.prepare(AgGemmCall, *operands, layout, counts, plan, keeps, gathered_in)
    if prepared is None:
        n, k = weight.shape if layout == "nt" else weight.shape[::-1]
        shape = (0,) if counts is not None else (x.shape[0] * context.world_size, *x.shape[1:-1])
        empty = x.new_empty(*shape, n, dtype=result_dtype(x.dtype))
        return (empty, x.new_empty(0, k)) if return_gathered else empty
    y = prepared(sendable_rows(x), weight, scales, bias)
    if counts is None and x.dim() > 2:
        y = y.view(x.shape[0] * context.world_size, *x.shape[1:-1], prepared.n)
    return (y, prepared.gathered) if return_gathered else y


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
    check_scaled("gemm_rs", x, scales)
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
    check_scaled("gemm_ar", x, None)
    context.enter("gemm_ar", x.shape, weight.shape, x.dtype)
    operands = (x.shape, weight.shape, x.dtype, weight.dtype, x.device, weight.device)
    prepared = context.prepare(GemmArCall, *operands, layout, choice)
    n = weight.shape[0 if layout == "nt" else 1]
    if prepared is None:
        return x.new_empty(*x.shape[:-1], n)
    y = prepared(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]), weight)
    # No view of it: what an autograd function returns may be edited in place.
    return y if x.dim() == 2 else torch.ops.aten._unsafe_view(y, [*x.shape[:-1], n])
