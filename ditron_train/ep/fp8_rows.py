"""Scales of experts' rows in FP8 (current scaling), of all experts in two kernels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from ditron_train.ep.fp8_scales_kernels import largest_of_parts, scales_of_largest
from ditron_train.ep.row_tiles import group_launch
from ditron_train.ep.tables import int64_table
from ditron_train.gemm.ops import on_device
from ditron_train.runtime.device import kernel_target
from ditron_train.runtime.errors import NotSupportedError

_PARTS = 16  # of an expert's rows: some programs for each multiprocessor where there are as many experts
_BLOCK = 8192


def write_scales(
    rows: torch.Tensor,
    splits: Sequence[int],
    amaxes: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    *,
    max_fp8: float,
    epsilon: float,
    power_of_2: bool,
) -> None:
    """What Transformer Engine's current scaling leaves in a quantizer before it casts, of each expert that has rows.

        amaxes[e] = rows of e .abs().max()          scales[e] = max_fp8 / max(amaxes[e], epsilon)

    Not a number counts as nothing. The scale is 1 where amax is 0 or infinite, and at most the largest fp32 number.

    Args:
        rows: [num_rows, K], contiguous, by expert.
        splits: Rows of each expert; their sum is num_rows.
        amaxes, scales: Of each expert one fp32 number, written.
        max_fp8: The largest number of the format.
        epsilon: Of the recipe.
        power_of_2: Whether scales lose their mantissa.

    Source: ``compute_scale_from_amax`` of Transformer Engine.

    Raises:
        NotSupportedError: Shapes, types or strides that are not covered.
    """
    if rows.dim() != 2 or not rows.is_contiguous() or len(rows) != sum(splits):
        raise NotSupportedError(f"scales of rows: {tuple(rows.shape)} for {sum(splits)} rows")
    if not len(splits) == len(amaxes) == len(scales):
        raise NotSupportedError(f"scales of rows: {len(amaxes)} and {len(scales)} numbers for {len(splits)} experts")
    device = rows.device
    if any(one.dtype != torch.float32 or one.numel() != 1 or one.device != device for one in (*amaxes, *scales)):
        raise NotSupportedError("scales of rows: numbers are not fp32, or elsewhere")
    starts = torch.tensor([0, *accumulate(splits)], dtype=torch.int64, device="cpu")
    if device.type == "cuda":
        starts = starts.pin_memory().to(device, non_blocking=True)
    block = _BLOCK if kernel_target(device) != "interpreter" else 256
    largest = torch.empty(len(splits) * _PARTS, dtype=torch.float32, device=device)
    parts = (("PARTS", _PARTS), ("BLOCK", block))
    constants = (("MAX_FP8", max_fp8), ("EPSILON", epsilon), ("POWER_OF_2", power_of_2), ("PARTS", _PARTS))
    read = group_launch(largest_of_parts, len(largest), parts, 8, 3, rows.dtype)
    write = group_launch(scales_of_largest, len(splits), constants, 1, 3, torch.float32)
    places = (int64_table(tuple(one.data_ptr() for one in numbers), device) for numbers in (amaxes, scales))
    with on_device(device):
        read(rows, starts, largest, rows.shape[1])
        write(largest, starts, *places)
