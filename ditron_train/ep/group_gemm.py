"""Host side of the grouped GEMMs: forward, dgrad and wgrad over the experts of a rank, without a host sync."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack
from triton.tools.tensor_descriptor import TensorDescriptor

from ditron_train.ep.arguments import GemmSizes
from ditron_train.ep.group_choices import GroupOp, choose_group_config, default_group_config
from ditron_train.ep.group_gemm_kernels import group_gemm_kernel, group_wgrad_kernel
from ditron_train.ep.row_tiles import RowTiles, group_launch
from ditron_train.ep.tables import int32_table, int64_table
from ditron_train.gemm.configs import GemmConfig
from ditron_train.gemm.operands import make_descriptor
from ditron_train.gemm.ops import on_device
from ditron_train.runtime.device import kernel_target, num_sms
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.sizes import next_power_of_2

_ALIGNMENT_BYTES = 16  # of addresses and strides in a descriptor
_MAX_STRIDE_BYTES = 1 << 40
_TO_DESCRIPTOR, _TO_ADDED, _TO_WRITTEN = 0, 1, 2  # of ``group_wgrad_kernel``
# A wider tile's old values and sums do not fit the registers of a program (tests/compile).
_INTO_CONFIG = GemmConfig(128, 128, 64, 8, 4)


def _clipped_rows(matrix: torch.Tensor, block_rows: int, block_columns: int) -> TensorDescriptor:
    """``matrix`` [rows, columns] for blocks that end at any row, see ``group_gemm_kernels``."""
    rows, columns = matrix.shape
    return TensorDescriptor(matrix, [rows, block_rows, columns], [columns, columns, 1], [1, block_rows, block_columns])


def _own_storage(part: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor whose storage begins where ``part`` does.

    ``torch.compile`` makes other code for another storage offset, which may add up in another order: Megatron's
    compiled activations must find what they find behind native's GEMMs. The allocator does not know the new storage:
    ``record_stream`` does nothing for it, so who uses it on another stream keeps it until the one that it was made on
    has waited for that.
    """
    return from_dlpack(to_dlpack(part))


def reach_of(addresses: Sequence[int]) -> tuple[tuple[int, ...], int] | None:
    """Distance of each tensor, of which these are the addresses, from the lowest in units, and the unit in bytes; None
    where one descriptor cannot span them."""
    lowest = min(addresses)
    unit = math.gcd(*(address - lowest for address in addresses)) or 4096
    distances = tuple((address - lowest) // unit for address in addresses)
    if (
        lowest % _ALIGNMENT_BYTES
        or unit % _ALIGNMENT_BYTES
        or unit >= _MAX_STRIDE_BYTES
        or max(distances) >= 2**31 - 1
    ):
        return None
    return distances, unit


def are_whole(columns: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether rows of so many elements are whole 16 bytes each, as descriptors want them."""
    return not any(width * dtype.itemsize % _ALIGNMENT_BYTES for width in columns)


def _check(name: str, rows: torch.Tensor, tiles: RowTiles, columns: Sequence[int]) -> str:
    if rows.dim() != 2 or rows.shape[0] != tiles.num_rows:
        raise NotSupportedError(f"{name}: needs [{tiles.num_rows}, columns], got {tuple(rows.shape)}")
    if not are_whole(columns, rows.dtype):
        raise NotSupportedError(f"{name}: rows of {tuple(columns)} elements are not whole 16 bytes")
    target = kernel_target(rows.device)
    if target != "interpreter" and rows.dtype not in (torch.bfloat16, torch.float16):
        raise NotSupportedError(f"{name}: {rows.dtype}; only bfloat16 and float16")
    return target


def _sizes(config: GemmConfig, block_m: int) -> GemmSizes:
    return GemmSizes(block_m, config.block_n, config.block_k, config.group_m, config.split_store)


@dataclass(frozen=True)
class GemmOperands:
    """What a grouped GEMM kernel takes: descriptors of rows, weights and result, and where each expert's weight
    lies."""

    a: TensorDescriptor
    b: TensorDescriptor
    half_b: TensorDescriptor
    c: TensorDescriptor
    places: torch.Tensor
    y: torch.Tensor
    n: int
    k: int
    config: GemmConfig
    sizes: GemmSizes


def gemm_operands(
    name: str,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    tiles: RowTiles,
    *,
    transpose: bool,
    config: GemmConfig | None = None,
) -> GemmOperands:
    """Checks the operands of ``group_gemm`` and describes them; allocates the result ``y`` [num_rows, N].

    Raises:
        NotSupportedError: Shapes, types, strides or a device that are not covered.
    """
    if len(weights) != tiles.num_experts:
        raise NotSupportedError(f"{name}: {len(weights)} weights for {tiles.num_experts} experts")
    first = weights[0]
    kinds = {(w.shape, w.dtype, w.device, w.is_contiguous()) for w in weights}
    if kinds != {(first.shape, x.dtype, x.device, True)}:
        raise NotSupportedError(f"{name}: weights must be contiguous and alike, of {x.dtype} on {x.device}")
    n, k = first.shape if transpose else first.shape[::-1]
    if x.dim() != 2 or x.shape[1] != k:
        raise NotSupportedError(f"{name}: rows of {tuple(x.shape)} for weights of {tuple(first.shape)}")
    target = _check(name, x, tiles, (n, k))
    x = x.contiguous()
    padded = torch.empty(tiles.block_m + tiles.num_rows, n, dtype=x.dtype, device=x.device)
    reach = reach_of([weight.data_ptr() for weight in weights])
    if reach is None:  # allocations too far apart, or not aligned to each other: copies side by side
        weights = torch.stack(tuple(weights)).unbind(0)
        reach = reach_of([weight.data_ptr() for weight in weights])
    assert reach is not None, "slices of one allocation"
    distances, unit = reach
    if config is None:
        op: GroupOp = "group_gemm" if transpose else "group_dgrad"
        sizes = (tiles.num_experts, tiles.num_rows, n, k)
        # A kernel that does more beside the product has its own need of memory: only the product alone was tuned.
        choose = choose_group_config if name == "group_gemm" else default_group_config
        config = choose(op, *sizes, x.dtype, target, x.device)
    block_n, block_k = config.block_n, config.block_k
    spanning, half = (
        TensorDescriptor(
            min(weights, key=torch.Tensor.data_ptr),
            [max(distances) + 1, *first.shape],
            [unit // x.element_size(), first.shape[1], 1],
            [1, width, block_k] if transpose else [1, block_k, width],
        )
        for width in (block_n, block_n // 2 if config.split_store else block_n)
    )
    return GemmOperands(
        make_descriptor(x if tiles.num_rows else first, (tiles.block_m, block_k)),  # no rows: any memory will do
        spanning,
        half,
        _clipped_rows(padded, tiles.block_m, config.store_block[1]),
        int32_table(distances, x.device),
        _own_storage(padded[tiles.block_m :]),
        n,
        k,
        config,
        _sizes(config, tiles.block_m)._replace(TRANSPOSE_B=transpose),
    )


def group_gemm(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    tiles: RowTiles,
    *,
    transpose: bool = True,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """y[r] = x[r] @ weights[e(r)].T (``transpose``: forward), or x[r] @ weights[e(r)] (dgrad).

    Args:
        x: [num_rows, K], rows by expert; bf16 or fp16 (fp32 too in the interpreter).
        weights: One [N, K] (dgrad: [K, N]) for each expert, of one shape and type; contiguous, anywhere in memory.
        tiles: Of the rows.
        transpose: Whether weights are stored [N, K].
        config: Tile sizes; by the shape where None.

    Returns:
        [num_rows, N].

    Raises:
        NotSupportedError: Shapes, types, strides or a device that are not covered.
    """
    operands = gemm_operands("group_gemm", x, weights, tiles, transpose=transpose, config=config)
    multiply(operands, tiles)
    return operands.y


def multiply(operands: GemmOperands, tiles: RowTiles) -> None:
    """The rows of ``tiles``, which may be a part of all, of the product that ``gemm_operands`` described."""
    if 0 in operands.y.shape:
        return
    chosen, y = operands.config, operands.y
    num_programs = min(num_sms(y.device), tiles.max_tiles * -(-operands.n // chosen.block_n))
    constants = (("GEMM", operands.sizes),)
    launch = group_launch(group_gemm_kernel, num_programs, constants, chosen.num_warps, chosen.num_stages, y.dtype)
    with on_device(y.device):
        launch(
            operands.a, operands.b, operands.half_b, operands.c, operands.places, tiles.tiles, operands.n, operands.k
        )  # fmt: skip


def group_wgrad(
    grad: torch.Tensor, x: torch.Tensor, tiles: RowTiles, *, spare_sms: int = 0, config: GemmConfig | None = None
) -> torch.Tensor:
    """dw[e] = grad[rows of e].T @ x[rows of e]: one sum over the expert's rows in order; zeros where it has none.

    Args:
        grad: [num_rows, N].
        x: [num_rows, K] of the same type.
        tiles: Of the rows.
        spare_sms: Multiprocessors that another kernel holds meanwhile: a program that waited for one would end last.
        config: As ``group_gemm``.

    Returns:
        [num_experts, N, K].

    Raises:
        NotSupportedError: As ``group_gemm``.
    """
    target = _check_wgrad("group_wgrad", grad, x, tiles)
    n, k = grad.shape[1], x.shape[1]
    shape = (tiles.num_experts, n, k)
    if tiles.num_rows == 0 or 0 in shape:
        return torch.zeros(shape, dtype=x.dtype, device=x.device)
    dw = torch.empty(shape, dtype=x.dtype, device=x.device)
    config = config or choose_group_config(
        "group_wgrad", tiles.num_experts, tiles.num_rows, n, k, x.dtype, target, x.device
    )
    store_m, store_n = config.store_block
    result = TensorDescriptor(dw, list(shape), [n * k, k, 1], [1, store_m, store_n])
    _launch_wgrad(grad, x, tiles, result, config, spare_sms, TO=_TO_DESCRIPTOR, WIDE=False)
    return dw


def group_wgrad_into(
    grad: torch.Tensor,
    x: torch.Tensor,
    tiles: RowTiles,
    main_grads: Sequence[torch.Tensor],
    *,
    overwrites: bool = False,
    spare_sms: int = 0,
) -> None:
    """main_grads[e] += grad[rows of e].T @ x[rows of e]: the sum over the rows in fp32, added in fp32, rounded once.

    Args:
        grad: [num_rows, N].
        x: [num_rows, K] of the same type.
        tiles: Of the rows.
        main_grads: [N, K] of each expert, of fp32 or of the operands' type; contiguous, anywhere in memory. They stay
            where they are: their addresses are kept.
        overwrites: Whether the sum takes the place of what is there; zeros then where an expert has no rows.
        spare_sms: As of ``group_wgrad``.

    Raises:
        NotSupportedError: As ``group_gemm``; nothing is changed then.
    """
    name = "group_wgrad_into"
    target = _check_wgrad(name, grad, x, tiles)
    shape, dtype = (grad.shape[1], x.shape[1]), main_grads[0].dtype
    if len(main_grads) != tiles.num_experts or any(
        w.shape != shape or w.dtype != dtype or w.device != x.device or not w.is_contiguous() for w in main_grads
    ):
        raise NotSupportedError(f"{name}: needs {tiles.num_experts} contiguous buffers {shape} on {x.device}, alike")
    if dtype not in (torch.float32, x.dtype) or any(w.data_ptr() % _ALIGNMENT_BYTES for w in main_grads):
        raise NotSupportedError(f"{name}: buffers of {dtype}, or not at whole 16 bytes, for operands of {x.dtype}")
    if tiles.num_rows == 0 or 0 in shape:
        if overwrites:
            torch._foreach_zero_(list(main_grads))
        return
    config = _INTO_CONFIG
    if target == "interpreter":
        sizes = (tiles.num_experts, tiles.num_rows, *shape)
        config = default_group_config("group_wgrad", *sizes, x.dtype, target, x.device)
    addresses = int64_table(tuple(w.data_ptr() for w in main_grads), x.device)
    to = _TO_WRITTEN if overwrites else _TO_ADDED
    _launch_wgrad(grad, x, tiles, addresses, config, spare_sms, TO=to, WIDE=dtype == torch.float32)


def _check_wgrad(name: str, grad: torch.Tensor, x: torch.Tensor, tiles: RowTiles) -> str:
    if grad.dtype != x.dtype or grad.device != x.device:
        raise NotSupportedError(f"{name}: {grad.dtype} on {grad.device} and {x.dtype} on {x.device}")
    _check(name, x, tiles, (x.shape[-1],))
    return _check(name, grad, tiles, (grad.shape[-1], x.shape[-1]))


def _launch_wgrad(
    grad: torch.Tensor, x: torch.Tensor, tiles: RowTiles, result: Any, config: GemmConfig, spare_sms: int, **sink: Any
) -> None:
    grad, x = grad.contiguous(), x.contiguous()
    n, k = grad.shape[1], x.shape[1]
    constants = dict(
        NUM_EXPERTS=tiles.num_experts,
        EXPERTS=next_power_of_2(tiles.num_experts),
        **sink,
        GEMM=_sizes(config, config.block_m),
    )
    num_programs = min(max(num_sms(x.device) - spare_sms, 1), tiles.num_experts * config.num_tiles(n, k))
    launch = group_launch(
        group_wgrad_kernel, num_programs, tuple(constants.items()), config.num_warps, config.num_stages, x.dtype
    )
    operands = _clipped_rows(grad, config.block_k, config.block_m), _clipped_rows(x, config.block_k, config.block_n)
    with on_device(x.device):
        launch(*operands, result, grad, x, tiles.row_ends, n, k)
