"""``gemm_a2a``, ``a2a_gemm`` and the exchanges without a GEMM: plain functions on tensors.

They enqueue on the current stream (all but ``a2a_gemm`` on the context's communication stream too), never wait for the
device but at the first call of a new shape, and give the bits of GEMM, all-to-all and reorder wherever the tile GEMM
gives cuBLAS's (``policy.gate`` compares them): rows and columns are only moved, and every sum runs over all of K in
order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from ditron_train.gemm.fp8 import check_bias
from ditron_train.gemm.ops import check_operands
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.sp.choices import Product, ProjectionChoice, choose, exchange_programs
from ditron_train.sp.context import SPContext
from ditron_train.sp.layouts import HeadsLayout
from ditron_train.sp.prepared import (
    DTYPES,
    PreparedA2AGemm,
    PreparedExchange,
    PreparedGather,
    PreparedGemmA2A,
    WeightLayout,
)


def _check_parts(
    name: str,
    context: SPContext,
    layout: HeadsLayout,
    parts: Sequence[torch.Tensor],
    row_table: torch.Tensor | None,
    *,
    whole_sequence: bool,
) -> None:
    """Checks what this rank can see alone of the parts [s, ..., heads, head size]."""
    if len(parts) != len(layout.widths):
        raise NotSupportedError(f"{name}: {len(parts)} parts, the layout has {len(layout.widths)}")
    first = parts[0]
    world = context.world_size
    for index, part in enumerate(parts):
        heads = layout.num_heads(index) * (1 if whole_sequence else world)
        if part.dim() < 3 or tuple(part.shape[-2:]) != (heads, layout.head_dims[index]):
            raise NotSupportedError(
                f"{name}: part {index} is {tuple(part.shape)}, needed is [s, ..., {heads}, {layout.head_dims[index]}]"
            )
        if part.shape[:-2] != first.shape[:-2] or part.dtype != first.dtype or part.device != context.device:
            raise NotSupportedError(
                f"{name}: part {index} is {tuple(part.shape)} {part.dtype} on {part.device}, part 0 is "
                f"{tuple(first.shape)} {first.dtype}, the context is on {context.device}"
            )
    if first.dtype not in DTYPES:
        raise NotSupportedError(f"{name}: {first.dtype}; allowed: {', '.join(map(str, DTYPES))}")
    _check_rows(name, context, first.shape[:-2], world if whole_sequence else 1, row_table)


def _kinds_of(parts: Sequence[torch.Tensor]) -> tuple:
    """What a kernel takes for granted of parts that have been checked once: part of every key."""
    return tuple((part.shape, part.dtype, part.device) for part in parts)


def _kind_of(row_table: torch.Tensor | None) -> tuple | None:
    """Likewise of a table of rows."""
    if row_table is None:
        return None
    return row_table.shape, row_table.dtype, row_table.device, row_table.is_contiguous()


def _check_rows(
    name: str, context: SPContext, lead: Sequence[int], num_ranks: int, row_table: torch.Tensor | None
) -> None:
    """``lead``: leading dimensions, the rows of ``num_ranks`` ranks."""
    length, num_rows = lead[0], torch.Size(lead).numel()
    if num_rows == 0:
        context.agree_on_nothing((context.heads_channel, context.sequence_channel))
        raise NotSupportedError(f"{name}: an empty sequence")
    if row_table is not None and (
        length % num_ranks
        or tuple(row_table.shape) != (context.world_size, num_rows // num_ranks)
        or row_table.dtype != torch.int32
        or row_table.device != context.device
        or not row_table.is_contiguous()
    ):
        raise NotSupportedError(
            f"{name}: the table of rows is {tuple(row_table.shape)} {row_table.dtype} on {row_table.device}, needed "
            f"is a contiguous int32 of ({context.world_size}, {num_rows} / {num_ranks})"
        )
    divisor = 2 * num_ranks
    if row_table is None and length % divisor:
        raise NotSupportedError(
            f"{name}: Sequence length per GPU needs to be divisible by 2! A sequence dimension of {length} does not "
            f"divide by {divisor}"
        )


def _check_gemm(
    name: str,
    context: SPContext,
    x: torch.Tensor,
    k: int,
    num_columns: int,
    weight: torch.Tensor,
    weight_layout: WeightLayout,
) -> None:
    """Checks that ``x`` and ``weight`` make [.., K=k] times [k, num_columns]; ``num_columns`` of -1 allows any."""
    if weight_layout not in ("nt", "nn"):
        raise NotSupportedError(f"{name}: weight layout {weight_layout!r} is not nt or nn")
    if weight.dim() != 2:
        raise NotSupportedError(f"{name}: weight must have 2 dimensions, has {weight.dim()}")
    if x.device != context.device:
        raise NotSupportedError(f"{name}: the input is on {x.device}, the context on {context.device}")
    check_operands(name, x, weight)
    n, weight_k = weight.shape if weight_layout == "nt" else weight.shape[::-1]
    if weight_k != k or (num_columns >= 0 and n != num_columns) or n == 0 or k == 0:
        wanted = num_columns if num_columns >= 0 else "any"
        raise NotSupportedError(
            f"{name}: weight {tuple(weight.shape)} ({weight_layout}) maps {weight_k} columns to {n}, "
            f"needed is {k} to {wanted}"
        )


@outside_compile
def gemm_a2a(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    context: SPContext,
    layout: HeadsLayout,
    weight_layout: WeightLayout = "nt",
    row_table: torch.Tensor | None = None,
    choice: ProjectionChoice | None = None,
    meanwhile: Callable[[], object] | None = None,
    bias: torch.Tensor | None = None,
    return_mixed: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Projects ``x`` and gives every rank its heads of the whole sequence: QKV's forward, the output projection's
    dgrad.

    The bits are those of ``x @ weight.T``, split into parts, then for each part an all-to-all and the reorder of
    chunks.

    Args:
        x: [s / world, ..., K], this rank's two chunks of the sequence; bf16 or fp16 (on CPU fp32 too), any
            strides.
        weight: [world * layout.num_columns, K] (``nt``) or its transpose (``nn``).
        context: The group's context.
        layout: Columns of one rank.
        weight_layout: How ``weight`` lies.
        row_table: Rows of the whole that each rank's rows are, int32 [world, local rows] (``packed_rows``); None: its
            two chunks of one sequence.
        choice: Tile sizes and programs that move data; by the shape where None. They do not change bits.
        meanwhile: Called when all is enqueued; what it enqueues runs beside the last transfers, and may use what is
            given here but not what is returned.
        bias: [world * layout.num_columns] with ``nt``, added before the product is rounded, as of ``tp.ag_gemm``.
        return_mixed: Also return what was sent, as the last tensor: [s / world, ..., world * layout.num_columns].

    Returns:
        One tensor a part, [s, ..., heads of this rank, head size], in the order of the sequence.

    Raises:
        NotSupportedError: What this rank sees alone does not fit.
        MismatchError: The ranks' calls differ (at the first call of a shape here, else at the next ``check``).
        PeerTimeoutError: A peer did not come (CPU: here, GPU: at a later call or ``context.synchronize()``).
    """
    if bias is not None:
        check_bias("gemm_a2a", x, bias, weight.shape[0] if weight.dim() else 0)
    context.enter("gemm_a2a", x.shape, weight.shape, x.dtype)
    kinds = x.shape, x.dtype, x.device, weight.shape, weight.dtype, weight.device
    key = ("gemm_a2a", *kinds, layout, weight_layout, choice, _kind_of(row_table))
    prepared = context.prepared.get(key)
    if prepared is None:
        name, world = "gemm_a2a", context.world_size
        if x.dim() < 2:
            raise NotSupportedError(f"{name}: x has {x.dim()} dimensions, needed are 2 or more")
        _check_gemm(name, context, x, x.shape[-1], world * layout.num_columns, weight, weight_layout)
        _check_rows(name, context, x.shape[:-1], 1, row_table)
        m, k, n = x.shape[:-1].numel(), x.shape[-1], world * layout.num_columns
        chosen = choice or choose(Product("gemm_a2a", weight_layout, m, n, k, x.dtype), context)
        prepared = PreparedGemmA2A(context, layout, m, k, x.dtype, weight_layout, chosen, row_table is not None)
        context.prepared[key] = prepared
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    lead = (x.shape[0] * context.world_size, *x.shape[1:-1])
    parts = prepared(rows, weight, lead, row_table, meanwhile, bias)
    return (*parts, prepared.mixed().view(*x.shape[:-1], -1)) if return_mixed else parts


@outside_compile
def a2a_gemm(
    parts: Sequence[torch.Tensor],
    weight: torch.Tensor,
    *,
    context: SPContext,
    layout: HeadsLayout,
    weight_layout: WeightLayout = "nt",
    return_gathered: Literal["no", "copy", "borrow"] = "no",
    row_table: torch.Tensor | None = None,
    choice: ProjectionChoice | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Gives every rank all heads of its chunks and projects them: the output projection's forward, QKV's dgrad.

    The bits are those of the reorder and all-to-all of each part, then the GEMM over all heads.

    Args:
        parts: One tensor a part, [s, ..., heads of this rank, head size], in the order of the sequence.
        weight: [N, world * layout.num_columns] (``nt``) or its transpose (``nn``).
        context: The group's context.
        layout: Columns of one rank.
        weight_layout: How ``weight`` lies.
        return_gathered: ``copy``: also return what was multiplied, [local rows, world * layout.num_columns];
            ``borrow``: the same, which may lie in the context's buffer: until the next op of the context.
        row_table: As ``gemm_a2a``.
        choice: Tile sizes and programs that move data; by the shape where None. They do not change bits.

    Returns:
        [s / world, ..., N], and the gathered rows if asked for.

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``gemm_a2a``.
    """
    context.enter("a2a_gemm", parts[0].shape, weight.shape, weight.dtype)
    kinds = *_kinds_of(parts), weight.shape, weight.dtype, weight.device
    key = ("a2a_gemm", *kinds, layout, weight_layout, choice, _kind_of(row_table))
    prepared = context.prepared.get(key)
    if prepared is None:
        name, world = "a2a_gemm", context.world_size
        _check_parts(name, context, layout, parts, row_table, whole_sequence=True)
        k = world * layout.num_columns
        _check_gemm(name, context, parts[0], k, -1, weight, weight_layout)
        m, n = parts[0].shape[:-2].numel() // world, weight.shape[0 if weight_layout == "nt" else 1]
        dtype = parts[0].dtype
        chosen = choice or choose(Product("a2a_gemm", weight_layout, m, n, k, dtype), context)
        prepared = PreparedA2AGemm(context, layout, m, n, dtype, weight_layout, chosen, row_table is not None)
        context.prepared[key] = prepared
    out, gathered = prepared(parts, weight, return_gathered == "copy", row_table)
    if return_gathered == "borrow":
        gathered = prepared.borrowed()
    lead = parts[0].shape[:-2]
    y = out.view(lead[0] // context.world_size, *lead[1:], prepared.n)
    return (y, gathered) if gathered is not None else y


@outside_compile
def gather_sequence(
    parts: Sequence[torch.Tensor],
    *,
    context: SPContext,
    layout: HeadsLayout,
    row_table: torch.Tensor | None = None,
    meanwhile: Callable[[], object],
) -> torch.Tensor:
    """Gives every rank all heads of its chunks, as ``a2a_gemm`` multiplies them, under other work.

    Args:
        parts, context, layout, row_table: As ``a2a_gemm``.
        meanwhile: Enqueues what runs while they arrive, on the current stream.

    Returns:
        [local rows, world * layout.num_columns], in the context's buffer: until its next op.

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``a2a_gemm``.
    """
    name = "gather_sequence"
    context.enter(name, parts[0].shape, parts[0].dtype)
    key = (name, layout, _kind_of(row_table), *_kinds_of(parts))
    prepared = context.prepared.get(key)
    if prepared is None:
        _check_parts(name, context, layout, parts, row_table, whole_sequence=True)
        m = parts[0].shape[:-2].numel() // context.world_size
        prepared = PreparedGather(context, layout, m, parts[0].dtype, packed=row_table is not None)
        context.prepared[key] = prepared
    return prepared(parts, row_table, meanwhile)


def _exchange(
    name: str,
    context: SPContext,
    layout: HeadsLayout,
    parts: Sequence[torch.Tensor],
    towards_heads: bool,
    row_table: torch.Tensor | None,
    programs: int | None,
) -> tuple[torch.Tensor, ...]:
    context.enter(name, parts[0].shape, parts[0].dtype)
    world = context.world_size
    key = (name, layout, programs, _kind_of(row_table), *_kinds_of(parts))
    prepared = context.prepared.get(key)
    if prepared is None:
        _check_parts(name, context, layout, parts, row_table, whole_sequence=not towards_heads)
        m = parts[0].shape[:-2].numel() // (1 if towards_heads else world)
        options = dict(towards_heads=towards_heads, packed=row_table is not None)
        programs = programs or exchange_programs(name, m, world * layout.num_columns, context)
        prepared = PreparedExchange(context, layout, m, parts[0].dtype, **options, programs=programs)
        context.prepared[key] = prepared
    lead = parts[0].shape[:-2]
    return prepared(parts, (lead[0] * world if towards_heads else lead[0] // world, *lead[1:]), row_table)


@outside_compile
def to_heads(
    parts: Sequence[torch.Tensor],
    *,
    context: SPContext,
    layout: HeadsLayout,
    row_table: torch.Tensor | None = None,
    programs: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """The exchange before attention: all heads of this rank's chunks become this rank's heads of the whole sequence.

    Args:
        parts: One tensor a part, [s / world, ..., world * heads of a rank, head size]; fp32, bf16 or fp16, any
            strides.
        context: The group's context.
        layout: Columns of one rank.
        row_table: As ``gemm_a2a``.
        programs: That move data; by the shape where None. They do not change bits.

    Returns:
        One tensor a part, [s, ..., heads of this rank, head size], in the order of the sequence.

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``gemm_a2a``.
    """
    return _exchange("to_heads", context, layout, parts, True, row_table, programs)


@outside_compile
def to_sequence(
    parts: Sequence[torch.Tensor],
    *,
    context: SPContext,
    layout: HeadsLayout,
    row_table: torch.Tensor | None = None,
    programs: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """The inverse of ``to_heads``, the exchange after attention.

    Args:
        parts: One tensor a part, [s, ..., heads of this rank, head size].
        context: The group's context.
        layout: Columns of one rank.
        row_table: As ``gemm_a2a``.
        programs: As ``to_heads``.

    Returns:
        One tensor a part, [s / world, ..., world * heads of a rank, head size].

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``gemm_a2a``.
    """
    return _exchange("to_sequence", context, layout, parts, False, row_table, programs)
