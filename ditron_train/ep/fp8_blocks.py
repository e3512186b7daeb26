"""Rows of experts in FP8 with a scale for each block of 128 numbers, those of all experts at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ditron_train.ep.fp8_rows import LARGEST, STEP, check_rows, listed_tiles, owners
from ditron_train.ep.fp8_rows_kernels import cast_blocks
from ditron_train.ep.row_tiles import group_launch
from ditron_train.gemm.ops import on_device
from ditron_train.runtime.device import num_sms

#: Numbers of a block, along a row or down a column.
BLOCK = 128

# Two programs of eight warps share a multiprocessor. Left alone the compiler takes 197 registers, for one: 1.00 ms
# instead of 0.82 for 64 experts of 1024 rows of 7168 (H100).
_PROGRAMS_OF_AN_SM, _REGISTERS = 2, 128


class Fp8Blocks(NamedTuple):
    """Rows of experts in FP8 by blocks, of each expert; scales are what values are to be multiplied by.

    Attributes:
        data: uint8 [rows, K].
        scales: fp32 [K / 128, rows].
        transposes: uint8 [K, rows].
        transposed_scales: fp32 [rows / 128, rounded up; K].
    """

    data: Sequence[torch.Tensor]
    scales: Sequence[torch.Tensor]
    transposes: Sequence[torch.Tensor]
    transposed_scales: Sequence[torch.Tensor]


def quantised_blocks(
    rows: torch.Tensor, splits: Sequence[int], dtype: torch.dtype, *, epsilon: float = 0.0, power_of_2: bool = True
) -> Fp8Blocks:
    """What Transformer Engine's scaling by blocks of one dimension makes of the rows of each expert, x:

        blocks = x.view(rows, K / 128, 128)                      amaxes = blocks.abs().amax(2)
        factors = (largest number of dtype) / max(amaxes, epsilon)
        data = (blocks * factors[..., None]).to(dtype)           scales = (1 / factors).T

    and the same of the columns of x, in blocks of 128 of its expert's rows, of which the last may have fewer; their
    results are transposed. What is not a number counts as nothing in an amax. A factor is 1 where amax is 0 or
    infinite, and at most the largest bf16 number.

    Args:
        rows: bf16 [num_rows, K], contiguous, by expert; K is a multiple of 128, the rows of each expert of 16.
        splits: Rows of each expert; their sum is num_rows.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        epsilon: Of the recipe.
        power_of_2: Whether factors lose their mantissa.

    Source: ``Float8BlockQuantizer`` and ``block_scaled_1d_cast_transpose_kernel`` of Transformer Engine.

    Raises:
        NotSupportedError: Shapes, types or strides that are not covered.
    """
    check_rows(rows, splits, dtype, columns=BLOCK)
    device, (num_rows, columns) = rows.device, rows.shape
    blocks, heights = columns // BLOCK, [-(-size // BLOCK) for size in splits]
    # Apart: a layer drops the rows and keeps the transposes for backward.
    data, transposes = (torch.empty(num_rows * columns, dtype=torch.uint8, device=device) for _ in range(2))
    scales = torch.empty(num_rows * blocks, dtype=torch.float32, device=device)
    transposed_scales = torch.empty(sum(heights), columns, dtype=torch.float32, device=device)
    if num_rows:
        tiles = listed_tiles(splits, BLOCK, device)
        rule = (("MAX_FP8", LARGEST[dtype]), ("EPSILON", epsilon), ("POWER_OF_2", power_of_2))
        constants = (*rule, ("STEP", STEP), ("BLOCK", BLOCK))
        cast = group_launch(cast_blocks, _PROGRAMS_OF_AN_SM * num_sms(device), constants, 8, 3, rows.dtype, _REGISTERS)
        with on_device(device):
            cast(rows, tiles.tiles, tiles.row_ends, data, scales, transposes, transposed_scales, columns)
    return Fp8Blocks(  # while the device is at work
        owners(data.view(num_rows, columns).split(list(splits))),
        _upright(scales, splits, blocks),
        _upright(transposes, splits, columns),
        owners(transposed_scales.split(heights)),
    )


def _upright(values: torch.Tensor, splits: Sequence[int], height: int) -> list[torch.Tensor]:
    """Of each expert [height, rows], one behind the other."""
    parts = values.split([size * height for size in splits])
    return owners(part.view(height, size) for part, size in zip(parts, splits))
