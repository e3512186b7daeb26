"""``ag_gemm``, ``gemm_rs`` and ``all_gather``: plain functions on tensors.

They enqueue on the current stream (and the context's communication stream), never wait for the device but at the first
call of a new shape, and give the bits of NCCL plus cuBLAS wherever the tile GEMM gives cuBLAS's (``gemm.known_bits``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from ditron_train.gemm.configs import GemmConfig, choose_config
from ditron_train.gemm.operands import aligned_operand, empty_aligned, is_aligned, make_descriptor
from ditron_train.gemm.ops import check_operands
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.symm.arena import SymmetricTensor
from ditron_train.tp.context import FLAGS_PER_RANK, RowPartition, TPContext
from ditron_train.tp.gather import Gather, copy_granule_rows, push_granule_rows
from ditron_train.tp.kernels import ag_gemm_kernel, gemm_rs_kernel
from ditron_train.tp.tuning import GatherPlan, choose_gather_plan

__all__ = ["Layout", "ag_gemm", "all_gather", "gemm_rs", "reserve_linear", "start_all_gather"]

Layout = Literal["nt", "nn"]
_MAX_DESCRIPTOR_RANKS = 8
_FOLD_ROWS = 32


def _next_power_of_2(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def _check(name: str, context: TPContext, x: torch.Tensor, weight: torch.Tensor, layout: Layout) -> tuple[int, int]:
    """Checks what this rank can see alone; returns (N, K)."""
    if layout not in ("nt", "nn"):
        raise NotSupportedError(f"{name}: layout {layout!r} is not nt or nn")
    if x.device != context.device:
        raise NotSupportedError(f"{name}: x is on {x.device}, the context on {context.device}")
    if weight.dim() != 2 or x.dim() < 2:
        raise NotSupportedError(f"{name}: x must have at least 2 dimensions and weight 2, got {x.dim()} and {weight.dim()}")
    check_operands(name, x, weight)
    n, k = weight.shape if layout == "nt" else weight.shape[::-1]
    if x.shape[-1] != k:
        raise NotSupportedError(f"{name}: x {tuple(x.shape)} and weight {tuple(weight.shape)} ({layout}) do not fit")
    if n == 0 or k == 0:
        raise NotSupportedError(f"{name}: weight {tuple(weight.shape)} has an empty dimension")
    return n, k


def _partition(name: str, context: TPContext, rows: int, row_counts: Sequence[int] | None, total: bool) -> RowPartition:
    """Rows of all ranks: given, or the same number everywhere."""
    world = context.world_size
    if row_counts is None:
        if total and rows % world:
            raise NotSupportedError(f"{name}: {rows} rows do not divide by {world} ranks; pass row_counts")
        row_counts = [rows // world if total else rows] * world
    if len(row_counts) != world or min(row_counts) < 0:
        raise NotSupportedError(f"{name}: row_counts {list(row_counts)} for a group of {world}")
    partition = RowPartition.of(row_counts)
    if rows != (partition.num_rows if total else partition.count(context.rank)):
        raise NotSupportedError(f"{name}: x has {rows} rows, row_counts {list(row_counts)} say otherwise")
    return partition


def _rows_of(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _operand_b(weight: torch.Tensor, config: GemmConfig, layout: Layout):
    block = (config.block_n, config.block_k) if layout == "nt" else (config.block_k, config.block_n)
    return make_descriptor(aligned_operand(weight), block)


def _padded(x: torch.Tensor) -> torch.Tensor:
    """x with rows of whole 16 bytes, contiguous: what lies in symmetric memory must be describable as it is."""
    per_line = 16 // x.element_size()
    missing = -x.shape[1] % per_line
    if missing:
        x = torch.nn.functional.pad(x, (0, missing))
    return x.contiguous()


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
        plan: How to move the rows; chosen by the shape where None.

    Returns:
        [s, ..., N] ([total rows, N] with ``row_counts``), and the gathered rows if asked for.

    Raises:
        NotSupportedError: What this rank sees alone does not fit.
        MismatchError: The ranks' calls differ (at the first call of a shape here, else at the next ``check``).
        PeerTimeoutError: A peer did not come (CPU: here, GPU: at a later call or ``context.synchronize()``).
    """
    n, k = _check("ag_gemm", context, x, weight, layout)
    rows = _rows_of(x)
    partition = _partition("ag_gemm", context, rows.shape[0], row_counts, total=False)
    shape = (x.shape[0] * context.world_size, *x.shape[1:-1], n) if row_counts is None else (partition.num_rows, n)
    context.enter()
    m = partition.num_rows
    if m == 0:
        empty = x.new_empty(shape)
        return (empty, rows) if return_gathered else empty
    rows = _padded(rows)
    config = choose_config(m, n, k, x.dtype, context.target, context.num_sms)
    plan = plan or choose_gather_plan(m, n, k, x.element_size(), context.world_size, context.target)
    by_push = plan.mode == "push"
    granule_rows = push_granule_rows(partition) if by_push else copy_granule_rows(partition, plan.num_chunks, config.block_m)
    gather = Gather(context, rows, partition, granule_rows)
    reserved = plan.push_programs if by_push else 1
    if by_push:
        gather.push(1 if context.target == "interpreter" else plan.push_programs)
    else:
        gather.copy()
    y = x.new_empty(shape)  # what is returned must not be a view: Megatron's cross entropy edits the logits in place
    out = y.view(m, n) if is_aligned(y.view(m, n)) else empty_aligned(m, n, x.dtype, x.device)
    even = partition.is_even(config.block_m) and (granule_rows <= config.block_m or granule_rows % config.block_m == 0)
    order = context.tile_order("gather", partition, config.block_m, even)
    num_programs = max(1, min(context.num_sms - reserved, config.num_tiles(m, n)))
    ag_gemm_kernel[(num_programs,)](
        make_descriptor(gather.buffer.local[:, :k], (config.block_m, config.block_k)),
        _operand_b(weight, config, layout),
        make_descriptor(out, config.store_block),
        gather.channel.signals.local,
        order,
        gather.row_starts,
        gather.channel.tickets,
        gather.channel.control,
        m,
        n,
        k,
        granule_rows,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        TRANSPOSE_B=layout == "nt",
        SPLIT_STORE=config.split_store,
        FLAGS_PER_RANK=FLAGS_PER_RANK,
        FLAGS_PER_TILE=_next_power_of_2(config.block_m // granule_rows + 2),
        WORLD_SIZE=context.world_size,
        EVEN=even,
        OWN_FLAGS=by_push,
        TARGET=context.target,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    gather.finish()
    if out.data_ptr() != y.data_ptr():
        y.view(m, n).copy_(out)
    return (y, gather.buffer.local[:, :k]) if return_gathered else y


def start_all_gather(x: torch.Tensor, *, context: TPContext, row_counts: Sequence[int] | None = None) -> Gather:
    """Starts a gather by copy engines that runs beside what the current stream does next; ``.wait()`` gives the rows.

    The rows are [total rows, K (padded to whole 16 bytes)], a view that the next gather of this context overwrites.
    """
    if x.device != context.device or x.dim() < 2:
        raise NotSupportedError(f"all_gather: x {tuple(x.shape)} on {x.device}, the context is on {context.device}")
    rows = _rows_of(x)
    partition = _partition("all_gather", context, rows.shape[0], row_counts, total=False)
    if partition.num_rows == 0 or x.shape[-1] == 0:
        raise NotSupportedError(f"all_gather: nothing to gather in {tuple(x.shape)}")
    context.enter()
    gather = Gather(context, _padded(rows), partition, copy_granule_rows(partition, 1, 1))
    gather.copy()
    return gather


def all_gather(x: torch.Tensor, *, context: TPContext, row_counts: Sequence[int] | None = None) -> torch.Tensor:
    """Rows of all ranks, [total rows, K], as a tensor of its own."""
    return start_all_gather(x, context=context, row_counts=row_counts).wait()[:, : x.shape[-1]].clone()


@dataclass(frozen=True)
class _ScatterPlan:
    """What a GEMM-RS of one shape needs: tile sizes, and how slots and flags lie at every rank."""

    config: GemmConfig
    slot_rows: int  # rows of one source rank's slot, aligned down to the tile grid
    flags_per_rank: int
    signature: tuple[int, ...]


@lru_cache(maxsize=1024)
def _scatter_plan(partition: RowPartition, n: int, k: int, dtype: torch.dtype, target: str, sms: int) -> _ScatterPlan:
    config = choose_config(partition.num_rows, n, k, dtype, target, sms)
    block = config.block_m
    spans = [
        -(-end // block) - start // block for start, end in zip(partition.starts, partition.starts[1:]) if end > start
    ]
    signature = (partition.num_rows, partition.fingerprint, n, dtype.itemsize, block, config.block_n)
    return _ScatterPlan(config, max(spans) * block, max(spans) * -(-n // config.block_n), signature)


def _prepare_scatter(
    context: TPContext, partition: RowPartition, n: int, k: int, dtype: torch.dtype
) -> tuple[_ScatterPlan, torch.Tensor, SymmetricTensor]:
    """Agreement on the shape, and room for its flags and partials; a lookup once it is known."""
    plan = _scatter_plan(partition, n, k, dtype, context.target, context.num_sms)
    signature = context.agree(context.scatter_channel, plan.signature)
    context.scatter_channel.reserve_signals(context.world_size * plan.flags_per_rank)
    padded_n = n + -n % (16 // dtype.itemsize)
    return plan, signature, context.slots(context.world_size * plan.slot_rows, padded_n, dtype)


def gemm_rs(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    context: TPContext,
    layout: Layout = "nt",
    row_counts: Sequence[int] | None = None,
) -> torch.Tensor:
    """``x`` times ``weight``, reduce-scattered along dimension 0: Megatron's row-linear forward and column-linear dgrad.

    Partials are folded by their owner in NCCL's ring order, each sum rounded to the dtype.

    Args:
        x: [s, ..., K], all rows, this rank's share of K; bf16 or fp16 (on CPU fp32 too), any strides.
        weight: [N, K] (``nt``) or [K, N] (``nn``).
        context: The group's context.
        layout: How ``weight`` lies.
        row_counts: Rows that each rank gets where they differ.

    Returns:
        [s / world, ..., N] ([rows of this rank, N] with ``row_counts``).

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``ag_gemm``.
    """
    n, k = _check("gemm_rs", context, x, weight, layout)
    rows = _rows_of(x)
    partition = _partition("gemm_rs", context, rows.shape[0], row_counts, total=True)
    if row_counts is None and x.shape[0] % context.world_size:
        raise NotSupportedError(f"gemm_rs: dimension 0 of {tuple(x.shape)} does not divide by {context.world_size} ranks")
    shape = (x.shape[0] // context.world_size, *x.shape[1:-1], n) if row_counts is None else (partition.count(context.rank), n)
    context.enter()
    channel = context.scatter_channel
    if partition.num_rows == 0:
        return x.new_empty(shape)
    plan, signature, slots = _prepare_scatter(context, partition, n, k, x.dtype)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    _launch_gemm_rs(context, rows, weight, layout, plan, slots, signature, partition, out)
    context.leave(channel)
    return out


def _slot_descriptors(context: TPContext, slots: SymmetricTensor, n: int, config: GemmConfig, use_descriptors: bool) -> list:
    """Eight descriptors, one a peer; the rest repeat the first (a kernel argument each, never used)."""
    peers = range(context.world_size) if use_descriptors else [context.rank]
    made = [make_descriptor(slots.peer(peer)[:, :n], config.store_block) for peer in peers]
    return made + made[:1] * (_MAX_DESCRIPTOR_RANKS - len(made))


def _launch_gemm_rs(
    context: TPContext,
    rows: torch.Tensor,
    weight: torch.Tensor,
    layout: Layout,
    plan: _ScatterPlan,
    slots: SymmetricTensor,
    signature: torch.Tensor,
    partition: RowPartition,
    out: torch.Tensor,
) -> None:
    channel, config = context.scatter_channel, plan.config
    m, n, k = partition.num_rows, out.shape[-1], rows.shape[1]
    even = partition.is_even(config.block_m)
    use_descriptors = context.world_size <= _MAX_DESCRIPTOR_RANKS
    a = rows if is_aligned(rows) else aligned_operand(rows)
    gemm_rs_kernel[(min(context.num_sms, config.num_tiles(m, n)),)](
        make_descriptor(a, (config.block_m, config.block_k)),
        _operand_b(weight, config, layout),
        *_slot_descriptors(context, slots, n, config, use_descriptors),
        slots.addresses,
        slots.local,
        channel.signals.addresses,
        channel.signals.local,
        channel.ready.addresses,
        channel.ready.local,
        signature,
        out,
        context.tile_order("scatter", partition, config.block_m, even),
        context.table(partition, partition.starts),
        channel.tickets,
        channel.control,
        m,
        n,
        k,
        plan.slot_rows,
        slots.local.stride(0),
        plan.flags_per_rank,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        TRANSPOSE_B=layout == "nt",
        SPLIT_STORE=config.split_store,
        FOLD_ROWS=min(_FOLD_ROWS, config.block_m),
        WORLD_SIZE=context.world_size,
        RANKS_POW2=_next_power_of_2(context.world_size),
        EVEN=even,
        USE_DESCRIPTORS=use_descriptors,
        TARGET=context.target,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def reserve_linear(kind: Literal["column", "row"], x: torch.Tensor, weight: torch.Tensor, *, context: TPContext) -> None:
    """Takes, before the first call, the symmetric memory that forward and backward of a linear layer need (collective).

    Args:
        kind: ``column`` (x is [s / world, ..., K]) or ``row`` (x is [s, ..., K]).
        x: An input of the layer.
        weight: [N, K].
        context: The group's context.

    Raises:
        ArenaError: It does not fit, on every rank alike; nothing was signalled.
    """
    n, k = weight.shape
    rows = x.shape[:-1].numel() * (context.world_size if kind == "column" else 1)
    partition = RowPartition.of([rows // context.world_size] * context.world_size)
    wide_in, wide_out = (k, n) if kind == "column" else (n, k)  # gathered columns; columns of the local activation
    per_line = 16 // x.element_size()
    context.gathered(rows, wide_in + -wide_in % per_line, x.dtype)
    _prepare_scatter(context, partition, wide_in, wide_out, x.dtype)
