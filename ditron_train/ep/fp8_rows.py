"""Rows of experts in FP8 with one scale an expert (current scaling), those of all experts at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ditron_train.ep.fp8_rows_kernels import cast_rows, largest_of_experts
from ditron_train.ep.row_tiles import RowTiles, group_launch, row_tiles
from ditron_train.ep.tables import int64_table
from ditron_train.gemm.ops import on_device
from ditron_train.runtime.device import kernel_target, num_sms
from ditron_train.runtime.errors import NotSupportedError

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_STEP = 16  # FP8 products want multiples of as many rows and columns: what is loaded and stored at once
_PROGRAMS_OF_AN_SM = 4
_PARTS = 4  # of a tile's rows, each the work of a program: of few tiles all multiprocessors have some
_BLOCK, _TILE = 8192, 128
_ALIGNED = 64  # numbers from one scale to the next: cuBLAS refused products where it was one (H100, CUDA 13.0)


class Fp8Rows(NamedTuple):
    """Rows of experts in FP8.

    Attributes:
        data: uint8 [rows, K] of each expert.
        transposes: uint8 [K, rows] of each expert.
        inverses: fp32 [1] of each expert, at 256 bytes: what its values are to be multiplied by. Undefined without
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
    """What Transformer Engine's current scaling makes of the rows of each expert, and leaves in its quantizer:

        amax, scale = kept[e]
        amax = rows of e .abs().max()               scale = (largest number of dtype) / max(amax, epsilon)
        data[e] = (rows of e * scale).to(dtype)     transposes[e] = data[e].T     inverses[e] = 1 / scale

    Not a number counts as nothing in amax. The scale is 1 where amax is 0 or infinite, and at most the largest fp32
    number. Of an expert without rows nothing is written.

    Args:
        rows: [num_rows, K], contiguous, by expert; K and the rows of each expert are multiples of 16.
        splits: Rows of each expert; their sum is num_rows.
        kept: Where each expert's amax and scale are kept, an fp32 number each; None where nobody keeps them.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        epsilon: Of the recipe.
        power_of_2: Whether scales lose their mantissa.

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
        parts = (("PARTS", _PARTS), ("BLOCK_M", tile), ("BLOCK", 256 if is_interpreted else _BLOCK))
        rule = (("MAX_FP8", _LARGEST[dtype]), ("EPSILON", epsilon), ("POWER_OF_2", power_of_2))
        constants = (
            *rule,
            ("KEEPS", numbers is not None),
            ("STEP", _STEP),
            ("ALIGNED", _ALIGNED),
            ("BLOCK_M", tile),
            ("BLOCK_K", tile),
        )
        num_programs = _PROGRAMS_OF_AN_SM * num_sms(device)
        find = group_launch(largest_of_experts, num_programs, parts, 8, 3, rows.dtype)
        cast = group_launch(cast_rows, num_programs, constants, 8, 3, rows.dtype)
        with on_device(device):
            find(rows, tiles.tiles, largest, columns)
            cast(rows, tiles.tiles, tiles.row_ends, largest, places, data, transposes, inverses, columns)
    sizes = [size * columns for size in splits]
    return Fp8Rows(  # while the device is at work
        _owners(data.view(num_rows, columns).split(list(splits))),
        _owners(part.view(columns, size) for part, size in zip(transposes.split(sizes), splits)),
        _owners(inverses[:, :1].unbind(0)),
    )


def _owners(parts: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The same parts of memory, each with a hold on it of its own: a layer that puts others into them has given up the
    memory, which views would keep for the tensor that they are of."""
    return [part.data for part in parts]


def _listed_tiles(splits: Sequence[int], block_m: int, device: torch.device) -> RowTiles:
    """Tiles of ``block_m`` rows of experts that have so many, listed on the device."""
    counts = torch.tensor(splits, dtype=torch.int64, device="cpu")
    if device.type == "cuda":
        counts = counts.pin_memory().to(device, non_blocking=True)
    return row_tiles(counts, sum(splits), block_m)


def _check_rows(rows: torch.Tensor, splits: Sequence[int], dtype: torch.dtype) -> None:
    """That rows of experts can be quantised at once.

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
    if {(one.dtype, one.numel(), one.device) for one in numbers} != {(torch.float32, 1, device)}:
        raise NotSupportedError("rows in FP8: numbers are not fp32, or elsewhere")
