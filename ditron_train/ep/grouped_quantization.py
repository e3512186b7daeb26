"""Grouped quantization: rows of all experts to FP8 together, with one scale for each expert (current scaling).

# equivalent, for each expert e
data[e], transposes[e], inverses[e] = quantizer[e](rows of e)     # Transformer Engine: four kernels an expert

list tiles of all experts | clear maxima | maxima of all experts | scales, casts, transposes of all experts
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ditron_train.ep.grouped_gemm import RowTiles, row_tiles
from ditron_train.gemm.ops import on_device
from ditron_train.runtime.device import kernel_target, num_sms
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.launch import kept_launch
from ditron_train.stream.cached_tensors import int64_table


@triton.jit
def _first_row(ends, expert):
    return tl.load(ends + expert - 1, mask=expert > 0, other=0)


@triton.jit
def largest_of_experts(
    values, tiles, largest, columns, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr
):
    """largest[e] = max |values| over the rows of expert e, as the bits of an fp32 number; it was 0 before.

    A program takes one of PARTS parts of a tile of ``list_tiles``, so that all multiprocessors share the rows of one
    expert. The bits of non-negative floating-point numbers are ordered like the numbers, so an integer maximum is
    exact in any order. NaNs are ignored, as in Transformer Engine.
    """
    for index in range(tl.program_id(0), tl.load(tiles) * PARTS, tl.num_programs(0)):
        entry = tiles + 4 + 4 * (index // PARTS)
        first = tl.load(entry + 1)
        last = tl.minimum(first + BLOCK_M, tl.load(entry + 2))
        begin, end = tl.cast(first, tl.int64) * columns, tl.cast(last, tl.int64) * columns
        most = tl.zeros((BLOCK,), tl.float32)
        for block in range(index % PARTS, tl.cast(tl.cdiv(end - begin, BLOCK), tl.int32), PARTS):
            place = begin + tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            size = tl.abs(tl.load(values + place, mask=place < end, other=0.0).to(tl.float32))
            most = tl.maximum(most, tl.where(size == size, size, 0.0))
        # Relaxed: the next kernel reads it.
        tl.atomic_max(largest + tl.load(entry), tl.max(most, axis=0).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def scale_of_amax(amax, MAX_FP8: tl.constexpr, EPSILON: tl.constexpr, POWER_OF_2: tl.constexpr):
    """MAX_FP8 / max(amax, EPSILON), rounded once; with POWER_OF_2 its power of two only. 1 if amax is 0 or infinite,
    the largest fp32 number if the quotient is infinite."""
    bounded = tl.maximum(amax, EPSILON)
    is_usual = (bounded > 0.0) & (bounded < float("inf"))
    scale = tl.div_rn(tl.zeros_like(bounded) + MAX_FP8, tl.where(is_usual, bounded, 1.0))
    scale = tl.where(scale < float("inf"), scale, 3.4028234663852886e38)
    if POWER_OF_2:
        scale = (scale.to(tl.uint32, bitcast=True) & 0xFF800000).to(tl.float32, bitcast=True)
    return tl.where(is_usual, scale, 1.0)


@triton.jit
def _inverse(scale):
    return tl.div_rn(tl.zeros_like(scale) + 1.0, scale)


@triton.jit
def _bytes_of(values, MAX_FP8: tl.constexpr):
    """``values`` in the format whose largest number is MAX_FP8."""
    dtype = tl.float8e4nv if MAX_FP8 == 448.0 else tl.float8e5
    return values.to(dtype).to(tl.uint8, bitcast=True)


@triton.jit
def cast_rows(
    rows,
    tiles,
    ends,
    largest,
    numbers,
    data,
    transposes,
    inverses,
    columns,
    MAX_FP8: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    KEEPS: tl.constexpr,
    STEP: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """data[r] = FP8(rows[r] * scale[e(r)]), as bytes; the same of expert e transposed, [columns, its rows], from
    ``transposes[columns * first row]`` on; inverses[e * ALIGNED] = 1 / scale[e].

    scale[e] is computed from amax[e], which ``largest_of_experts`` found; with KEEPS they are written to the addresses
    ``numbers[e, 1]`` and ``numbers[e, 0]``. For an expert without rows nothing is written. STEP divides every expert's
    rows and ``columns``. A program takes whole tiles of ``list_tiles``, one after the other.
    """
    column_tiles = tl.cdiv(columns, BLOCK_K)
    for index in range(tl.program_id(0), tl.load(tiles) * column_tiles, tl.num_programs(0)):
        entry = tiles + 4 + 4 * (index // column_tiles)
        expert, row, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        first = _first_row(ends, expert)
        amax = tl.load(largest + expert).to(tl.float32, bitcast=True)
        scale = scale_of_amax(amax, MAX_FP8, EPSILON, POWER_OF_2)
        column = (index % column_tiles) * BLOCK_K
        if (row == first) & (column == 0):
            if KEEPS:
                tl.store(tl.load(numbers + 2 * expert).to(tl.pointer_type(tl.float32)), amax)
                tl.store(tl.load(numbers + 2 * expert + 1).to(tl.pointer_type(tl.float32)), scale)
            tl.store(inverses + expert * ALIGNED, _inverse(scale))
        num_rows, width = tl.multiple_of(end - first, STEP), tl.multiple_of(columns, STEP)
        within = tl.multiple_of(row - first, STEP) + tl.arange(0, BLOCK_M)
        across = column + tl.arange(0, BLOCK_K)
        inside = (within < num_rows)[:, None] & (across < width)[None, :]
        start = tl.cast(first, tl.int64) * width
        place = start + tl.cast(within, tl.int64)[:, None] * width + across[None, :]
        values = tl.load(rows + place, mask=inside, other=0.0).to(tl.float32) * scale
        cast = _bytes_of(values, MAX_FP8)
        tl.store(data + place, cast, mask=inside)
        turned = start + tl.cast(across, tl.int64)[:, None] * num_rows + within[None, :]
        tl.store(transposes + turned, tl.trans(cast), mask=tl.trans(inside))


_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_STEP = 16  # FP8 products want multiples of as many rows and columns: what is loaded and stored at once
_PROGRAMS_OF_AN_SM = 4
_PARTS = 4  # of a tile's rows, each the work of a program: of few tiles all multiprocessors have some
_BLOCK, _TILE = 8192, 128
_ALIGNED = 64  # numbers from one scale to the next: cuBLAS refused products if it was one (H100, CUDA 13.0)


class Fp8Rows(NamedTuple):
    """Rows of experts in FP8.

    Attributes:
        data: uint8 [rows, K] of each expert.
        transposes: uint8 [K, rows] of each expert.
        inverses: fp32 [1] of each expert, aligned to 256 bytes: the factor that restores its values. Undefined without
            rows.
    """

    data: Sequence[torch.Tensor]
    transposes: Sequence[torch.Tensor]
    inverses: Sequence[torch.Tensor]


def quantised_rows(
    rows: torch.Tensor,
    splits: Sequence[int],
    kept: Sequence[tuple[torch.Tensor, torch.Tensor]] | None,
    dtype: torch.dtype,
    *,
    epsilon: float = 0.0,
    power_of_2: bool = False,
) -> Fp8Rows:
    """Quantizes the rows of each expert as Transformer Engine's current scaling does, and fills its quantizers:

        amax, scale = kept[e]
        amax = rows of e .abs().max()               scale = (largest number of dtype) / max(amax, epsilon)
        data[e] = (rows of e * scale).to(dtype)     transposes[e] = data[e].T     inverses[e] = 1 / scale

    amax ignores NaNs. The scale is 1 if amax is 0 or infinite, and at most the largest fp32 number. For an expert
    without rows nothing is written.

    Args:
        rows: [num_rows, K], contiguous, by expert; K and the rows of each expert are multiples of 16.
        splits: Rows of each expert; their sum is num_rows.
        kept: fp32 tensors for each expert's amax and scale, one number each; None: they are not written.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        epsilon: The recipe's lower bound of amax.
        power_of_2: Whether scales are rounded to powers of two.

    Source: ``Float8CurrentScalingQuantizer`` and ``compute_scale_from_amax`` of Transformer Engine.

    Raises:
        NotSupportedError: Shapes, types or strides that are not covered.
    """
    _check_rows(rows, splits, dtype)
    numbers = None if kept is None else [number for pair in kept for number in pair]
    if numbers is not None:
        _check_numbers(splits, numbers, rows.device)
    device, (num_rows, columns), count = rows.device, rows.shape, len(splits)
    # Apart: a layer drops the rows and keeps the transposes for backward.
    data, transposes = (torch.empty(num_rows * columns, dtype=torch.uint8, device=device) for _ in range(2))
    inverses = torch.empty(count, _ALIGNED, dtype=torch.float32, device=device)
    if num_rows:
        is_interpreted = kernel_target(device) == "interpreter"
        tile = 32 if is_interpreted else _TILE
        tiles = _listed_tiles(splits, tile, device)
        places = int64_table((0,) if numbers is None else tuple(one.data_ptr() for one in numbers), device)
        largest = torch.zeros(count, dtype=torch.int32, device=device)
        num_programs = _PROGRAMS_OF_AN_SM * num_sms(device)
        parts = dict(PARTS=_PARTS, BLOCK_M=tile, BLOCK=256 if is_interpreted else _BLOCK)
        find = kept_launch(largest_of_experts, num_programs, rows.dtype, **parts, num_warps=8)
        rule = dict(MAX_FP8=_LARGEST[dtype], EPSILON=epsilon, POWER_OF_2=power_of_2, KEEPS=numbers is not None)
        sizes = dict(STEP=_STEP, ALIGNED=_ALIGNED, BLOCK_M=tile, BLOCK_K=tile)
        cast = kept_launch(cast_rows, num_programs, rows.dtype, **rule, **sizes, num_warps=8)
        with on_device(device):
            find(rows, tiles.tiles, largest, columns)
            cast(rows, tiles.tiles, tiles.row_ends, largest, places, data, transposes, inverses, columns)
    elements = [size * columns for size in splits]
    return Fp8Rows(  # while the device is at work
        _owners(data.view(num_rows, columns).split(list(splits))),
        _owners(part.view(columns, size) for part, size in zip(transposes.split(elements), splits)),
        _owners(inverses[:, :1].unbind(0)),
    )


def _owners(parts: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The same memory as tensors that are not views: a layer that replaces their data releases the memory, which views
    would keep for their base."""
    return [part.data for part in parts]


def _listed_tiles(splits: Sequence[int], block_m: int, device: torch.device) -> RowTiles:
    """Tiles of ``block_m`` rows of experts with ``splits`` rows, listed on the device."""
    counts = torch.tensor(splits, dtype=torch.int64, device="cpu")
    if device.type == "cuda":
        counts = counts.pin_memory().to(device, non_blocking=True)
    return row_tiles(counts, sum(splits), block_m)


def _check_rows(rows: torch.Tensor, splits: Sequence[int], dtype: torch.dtype) -> None:
    """Checks that the rows of all experts can be quantized together.

    Raises:
        NotSupportedError: They cannot.
    """
    if rows.dim() != 2 or not rows.is_contiguous() or len(rows) != sum(splits):
        raise NotSupportedError(f"rows in FP8: {tuple(rows.shape)} for {sum(splits)} rows")
    if dtype not in _LARGEST:
        raise NotSupportedError(f"rows in FP8: {dtype} is no format of it")
    if rows.shape[1] % _STEP:
        raise NotSupportedError(f"rows in FP8: {rows.shape[1]} columns are no multiple of {_STEP}")
    if any(size % _STEP for size in splits):
        raise NotSupportedError(f"rows in FP8: an expert's rows are no multiple of {_STEP}")


def _check_numbers(splits: Sequence[int], numbers: Sequence[torch.Tensor], device: torch.device) -> None:
    if len(numbers) != 2 * len(splits):
        raise NotSupportedError(f"rows in FP8: {len(numbers)} numbers for {len(splits)} experts")
    if {(number.dtype, number.numel(), number.device) for number in numbers} != {(torch.float32, 1, device)}:
        raise NotSupportedError("rows in FP8: numbers are not fp32, or elsewhere")
