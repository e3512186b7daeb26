"""Host side of the grouped GEMM of FP8 operands, of which each expert's lie where they were quantised."""

from __future__ import annotations

import itertools
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
        dtype: What ``data`` holds, where its tensors are plain bytes (uint8); None: the tensors' own type.
    """

    data: Sequence[torch.Tensor]
    scales: Sequence[torch.Tensor]
    dtype: torch.dtype | None = None

    @property
    def values_dtype(self) -> torch.dtype:
        """e4m3 or e5m2, if they are FP8."""
        return self.data[0].dtype if self.dtype is None else self.dtype


class _Places(NamedTuple):
    """Of each expert of one side: how many rows, where they lie, and where their scale does."""

    counts: list[int]
    addresses: list[int]
    scale_addresses: list[int]


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
    target, of_rows, of_weights = _check(name, rows, weights)
    n, k = weights.data[0].shape
    device, num_rows, dtype = weights.data[0].device, sum(of_rows.counts), rows.values_dtype
    if out is None:
        out = torch.empty(num_rows, n, dtype=torch.bfloat16, device=device)
    if (out.shape, out.dtype, out.device) != ((num_rows, n), torch.bfloat16, device) or not out.is_contiguous():
        raise NotSupportedError(f"{name}: a result {tuple(out.shape)} {out.dtype} for {num_rows} x {n} in bf16")
    if num_rows == 0:
        return out
    if config is None:
        config = _chosen(target, num_rows, n, k, dtype, device, splits=split_accumulator)
    if min(filter(None, of_rows.counts)) < config.block_m:
        raise NotSupportedError(f"{name}: an expert has fewer rows than a tile, which has {config.block_m}")
    _launch((rows, weights), (of_rows, of_weights), out, config, SPLIT_CHAIN if split_accumulator else None)
    return out


def _chosen(
    target: str, num_rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device, *, splits: bool
) -> GemmConfig:
    if target == "interpreter":
        return _INTERPRETED
    return _SPLIT if splits else choose_config(num_rows, n, k, dtype, target, num_sms(device))


def _check(name: str, rows: ExpertRows, weights: ExpertRows) -> tuple[str, _Places, _Places]:
    """The target of the operands' device, and where both sides lie."""
    first, count = weights.data[0], len(weights.data)
    sides = (rows.data, rows.scales, weights.data, weights.scales)
    if any(len(side) != count for side in sides):
        raise NotSupportedError(f"{name}: operands or scales of {len(rows.data)} experts, weights of {count}")
    target = check_fp8_operands(name, rows.data[0].view(rows.values_dtype), first.view(weights.values_dtype))
    if any(side.dtype is not None and side.data[0].dtype not in (torch.uint8, side.dtype) for side in (rows, weights)):
        raise NotSupportedError(f"{name}: operands of {rows.data[0].dtype} and {first.dtype} are no bytes of FP8")
    n, k = first.shape
    if n % _ALIGNMENT or k % _ALIGNMENT:
        raise NotSupportedError(f"{name}: weights {tuple(first.shape)} are no multiples of {_ALIGNMENT}")
    if weights.values_dtype != torch.float8_e4m3fn:
        raise NotSupportedError(f"{name}: weights {tuple(first.shape)} {weights.values_dtype}; all need e4m3")
    return target, _places(name, "rows", rows, k, None), _places(name, "weights", weights, k, n)


def _places(name: str, which: str, side: ExpertRows, k: int, num_rows: int | None) -> _Places:
    """One pass over an operand of each expert. The host waits for what it returns, in every call, so nothing is read
    twice.

    Args:
        num_rows: Of every one; None where they differ.
    """
    device, dtype = side.data[0].get_device(), side.data[0].dtype
    counts, addresses, scale_addresses = [], [], []
    for one, scale in zip(side.data, side.scales):
        shape = one.shape
        count = shape[0] if shape else 0
        counts.append(count)
        if not count:
            addresses.append(0)
            scale_addresses.append(0)
            continue
        is_plain = one.dtype == dtype and one.get_device() == device and one.is_contiguous()
        if not is_plain or len(shape) != 2 or shape[1] != k or count != (num_rows or count):
            raise NotSupportedError(f"{name}: {which} {tuple(shape)} {one.dtype}; all need {k} columns of {dtype}")
        if scale.numel() != 1 or scale.dtype != torch.float32 or scale.get_device() != device:
            raise NotSupportedError(f"{name}: scales {tuple(scale.shape)} {scale.dtype} of {which} {tuple(shape)}")
        addresses.append(one.data_ptr())
        scale_addresses.append(scale.data_ptr())
    return _Places(counts, addresses, scale_addresses)


def _launch(
    sides: tuple[ExpertRows, ExpertRows],
    places: tuple[_Places, _Places],
    out: torch.Tensor,
    config: GemmConfig,
    chain: int | None,
) -> None:
    n, device, dtype = out.shape[1], out.device, sides[0].values_dtype
    k, blocks = sides[1].data[0].shape[1], (config.block_m, config.block_n)
    (rows_desc, row_units), (weights_desc, weight_units) = (
        _spanning(side, of_side, block, config.block_k, k) for side, of_side, block in zip(sides, places, blocks)
    )
    half_desc = weights_desc
    if config.split_store:
        half_desc = replace(weights_desc, block_shape=[1, config.block_n // 2, config.block_k])
    counts = places[0].counts
    starts = [0, *itertools.accumulate(counts[:-1])]
    lines = [counts, starts, row_units, weight_units, *(of_side.scale_addresses for of_side in places)]
    on_host = torch.tensor(lines, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    row_counts, *tables = on_host.to(device, non_blocking=True).unbind(0)
    tiles = row_tiles(row_counts, len(out), config.block_m)
    sizes = GemmSizes(config.block_m, config.block_n, config.block_k, config.group_m, config.split_store)
    constants = (("CHAIN", chain), ("GEMM", sizes))
    num_programs = min(num_sms(device), tiles.max_tiles * -(-n // config.block_n))
    launch = group_launch(group_gemm_fp8_kernel, num_programs, constants, config.num_warps, config.num_stages, dtype)
    store = make_descriptor(out, config.store_block)
    with on_device(device):
        launch(rows_desc, weights_desc, half_desc, store, ExpertPlaces(*tables), tiles.tiles, n, k)


def _spanning(
    side: ExpertRows, places: _Places, block_rows: int, block_columns: int, columns: int
) -> tuple[TensorDescriptor, list[int]]:
    """One descriptor of matrices of as many columns, in blocks [1, block_rows, block_columns], and how many of its
    first units each lies behind the lowest (0 of an empty one)."""
    filled = [index for index, count in enumerate(places.counts) if count]
    tensors, addresses = [side.data[index] for index in filled], [places.addresses[index] for index in filled]
    reach = reach_of(addresses)
    if reach is None:  # allocations too far apart: copies side by side
        copied = torch.cat([one.view(torch.uint8) for one in tensors])
        tensors = list(copied.split([len(one) for one in tensors]))
        addresses = [one.data_ptr() for one in tensors]
        reach = reach_of(addresses)
    assert reach is not None, "slices of one allocation"
    distances, unit = reach
    units = [0] * len(places.counts)
    for index, distance in zip(filled, distances):
        units[index] = distance
    lowest = tensors[distances.index(0)].view(side.values_dtype)  # a copy is kept by it
    shape = [max(distances) + 1, max(places.counts), columns]
    return TensorDescriptor(lowest, shape, [unit, columns, 1], [1, block_rows, block_columns]), units
