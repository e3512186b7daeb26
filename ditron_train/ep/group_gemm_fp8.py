"""Host side of the grouped GEMM of FP8 operands, of which each expert's lie where they were quantised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ditron_train.ep.arguments import ExpertPlaces, GemmSizes
from ditron_train.ep.group_gemm import reach_of
from ditron_train.ep.group_gemm_fp8_kernels import group_gemm_fp8_kernel
from ditron_train.ep.row_tiles import group_launch, row_tiles
from ditron_train.gemm.configs import GemmConfig, choose_config
from ditron_train.gemm.fp8 import SPLIT_CHAIN, check_fp8_operands
from ditron_train.gemm.operands import make_descriptor
from ditron_train.gemm.ops import on_device
from ditron_train.runtime.device import num_sms
from ditron_train.runtime.errors import NotSupportedError

_ALIGNMENT = 16  # of N and K
# With a split accumulator a tile's sums are there twice: a wide tile's do not fit the registers.
_SPLIT = GemmConfig(128, 128, 128, num_warps=8, num_stages=4, operand_bytes=1)
_INTERPRETED = GemmConfig(32, 128, 128, num_warps=4, num_stages=1, operand_bytes=1)


class ExpertRows(NamedTuple):
    """Quantised operands of one side, one of each expert.

    Attributes:
        data: Rows [m, K], or weights [N, K], in e4m3 or e5m2; contiguous, anywhere in memory.
        scales: fp32, one number each, what the values are multiplied by.
    """

    data: Sequence[torch.Tensor]
    scales: Sequence[torch.Tensor]


def group_gemm_fp8(
    rows: ExpertRows,
    weights: ExpertRows,
    *,
    out: torch.Tensor | None = None,
    split_accumulator: bool = False,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """y[rows of e] = bf16((rows[e] @ weights[e].T in fp32) * both scales): Transformer Engine's
    ``general_grouped_gemm`` on FP8 tensors with one scale each, in one kernel.

    Plain equivalent: ``torch.cat([torch._scaled_mm(x, w.t(), scale_a=a, scale_b=b,
    out_dtype=torch.bfloat16, use_fast_accum=not split_accumulator) for x, w, a, b in zip(...)])``.

    Args:
        rows: Of each expert, none or as many as a tile has (at most 128): a tile reads nothing behind them.
        weights: Of each expert, in e4m3, of one shape.
        out: [rows of all experts, N], bf16, contiguous; None: a new tensor.
        split_accumulator: Whether sums are added in fp32 every 128 products.
        config: Tile sizes; by rule where None. They do not change bits.

    Returns:
        ``out``.

    Raises:
        NotSupportedError: Shapes, types, strides or a device that are not covered.
    """
    name = "group_gemm_fp8"
    target = _check(name, rows, weights)
    n, k = weights.data[0].shape
    device, num_rows = weights.data[0].device, sum(map(len, rows.data))
    if out is None:
        out = torch.empty(num_rows, n, dtype=torch.bfloat16, device=device)
    if (out.shape, out.dtype, out.device) != ((num_rows, n), torch.bfloat16, device) or not out.is_contiguous():
        raise NotSupportedError(f"{name}: a result {tuple(out.shape)} {out.dtype} for {num_rows} x {n} in bf16")
    if num_rows == 0:
        return out
    if config is None:
        config = _chosen(target, num_rows, n, k, rows.data[0].dtype, device, splits=split_accumulator)
    if min(len(one) for one in rows.data if len(one)) < config.block_m:
        raise NotSupportedError(f"{name}: an expert has fewer rows than a tile, which has {config.block_m}")
    _launch(rows, weights, out, config, SPLIT_CHAIN if split_accumulator else None)
    return out


def _chosen(
    target: str, num_rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device, *, splits: bool
) -> GemmConfig:
    if target == "interpreter":
        return _INTERPRETED
    return _SPLIT if splits else choose_config(num_rows, n, k, dtype, target, num_sms(device))


def _check(name: str, rows: ExpertRows, weights: ExpertRows) -> str:
    """The target of the operands' device."""
    first, count = weights.data[0], len(weights.data)
    if {*map(len, rows), *map(len, weights)} != {count}:
        raise NotSupportedError(f"{name}: operands or scales of {len(rows.data)} experts, weights of {count}")
    target = check_fp8_operands(name, rows.data[0], first)
    n, k = first.shape
    if n % _ALIGNMENT or k % _ALIGNMENT:
        raise NotSupportedError(f"{name}: weights {tuple(first.shape)} are no multiples of {_ALIGNMENT}")
    _check_side(name, "rows", rows, rows.data[0].dtype, k, None)
    _check_side(name, "weights", weights, torch.float8_e4m3fn, k, n)
    return target


def _check_side(name: str, which: str, side: ExpertRows, dtype: torch.dtype, k: int, num_rows: int | None) -> None:
    """``num_rows``: None where experts differ."""
    device = side.data[0].device
    for one, scale in zip(side.data, side.scales):
        if not len(one):
            continue
        found = (one.dim(), one.shape[-1], one.dtype, one.device, one.is_contiguous())
        if found != (2, k, dtype, device, True) or len(one) != (num_rows or len(one)):
            raise NotSupportedError(f"{name}: {which} {tuple(one.shape)} {one.dtype}; all need {k} columns of {dtype}")
        if (scale.numel(), scale.dtype, scale.device) != (1, torch.float32, device):
            raise NotSupportedError(f"{name}: scales {tuple(scale.shape)} {scale.dtype} of {which} {tuple(one.shape)}")


def _launch(rows: ExpertRows, weights: ExpertRows, out: torch.Tensor, config: GemmConfig, chain: int | None) -> None:
    (n, k), device, dtype = weights.data[0].shape, out.device, rows.data[0].dtype
    rows_desc, row_places = _spanning(rows.data, config.block_m, config.block_k)
    weights_desc, weight_places = _spanning(weights.data, config.block_n, config.block_k)
    half_desc = weights_desc
    if config.split_store:
        half_desc = replace(weights_desc, block_shape=[1, config.block_n // 2, config.block_k])
    counts, starts = [len(one) for one in rows.data], [0]
    for count in counts[:-1]:
        starts.append(starts[-1] + count)
    addresses = [[one.data_ptr() for one in side.scales] for side in (rows, weights)]
    lines = [counts, starts, row_places, weight_places, *addresses]
    on_host = torch.tensor(lines, dtype=torch.int64, pin_memory=device.type == "cuda")
    row_counts, *places = on_host.to(device, non_blocking=True).unbind(0)
    tiles = row_tiles(row_counts, len(out), config.block_m)
    sizes = GemmSizes(config.block_m, config.block_n, config.block_k, config.group_m, config.split_store)
    constants = (("CHAIN", chain), ("GEMM", sizes))
    num_programs = min(num_sms(device), tiles.max_tiles * -(-n // config.block_n))
    launch = group_launch(group_gemm_fp8_kernel, num_programs, constants, config.num_warps, config.num_stages, dtype)
    store = make_descriptor(out, config.store_block)
    with on_device(device):
        launch(rows_desc, weights_desc, half_desc, store, ExpertPlaces(*places), tiles.tiles, n, k)


def _spanning(
    matrices: Sequence[torch.Tensor], block_rows: int, block_columns: int
) -> tuple[TensorDescriptor, list[int]]:
    """One descriptor of matrices of as many columns, in blocks [1, block_rows, block_columns], and how many of its
    first units each lies behind the lowest (0 of an empty one)."""
    filled: Sequence[torch.Tensor] = [one for one in matrices if len(one)]
    reach = reach_of(filled)
    if reach is None:  # allocations too far apart: copies side by side
        copied = torch.cat([one.view(torch.uint8) for one in filled]).view(filled[0].dtype)
        filled = copied.split([len(one) for one in filled])
        reach = reach_of(filled)
    assert reach is not None, "slices of one allocation"
    distances, unit = reach
    shape = [max(distances) + 1, max(map(len, filled)), matrices[0].shape[1]]
    behind = iter(distances)
    places = [next(behind) if len(one) else 0 for one in matrices]
    lowest = min(filled, key=torch.Tensor.data_ptr)  # a copy is kept by it
    return TensorDescriptor(lowest, shape, [unit, shape[2], 1], [1, block_rows, block_columns]), places
