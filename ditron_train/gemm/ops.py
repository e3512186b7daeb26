"""Host side of the tile GEMM: two layouts, any shape and stride, the bits of cuBLAS if it does not split K."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ditron_train.gemm.configs import GemmConfig, choose_config
from ditron_train.gemm.kernels import gemm_kernel
from ditron_train.gemm.operands import (
    Operand,
    TensorScales,
    aligned_operand,
    empty_aligned,
    is_aligned,
    make_descriptor,
)
from ditron_train.runtime.device import kernel_target, num_sms
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.launch import KernelLaunch, kept_launch

_DTYPES = {"interpreter": (torch.float32, torch.bfloat16, torch.float16), "gpu": (torch.bfloat16, torch.float16)}


def check_operands(name: str, a: torch.Tensor | Operand, b: torch.Tensor | Operand) -> str:
    """Checks that two tensors can be multiplied by the kernels; returns the ``TARGET`` of their device.

    Raises:
        NotSupportedError: Different devices or types, or a type or device without a kernel.
    """
    if a.device != b.device:
        raise NotSupportedError(f"{name}: operands on {a.device} and {b.device}")
    if a.dtype != b.dtype:
        raise NotSupportedError(f"{name}: operands of {a.dtype} and {b.dtype}")
    target = kernel_target(a.device)
    allowed = _DTYPES["interpreter" if target == "interpreter" else "gpu"]
    if a.dtype not in allowed:
        raise NotSupportedError(f"{name}: {a.dtype} on {target}; allowed: {', '.join(map(str, allowed))}")
    return target


def _check_out(name: str, out: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor) -> None:
    if tuple(out.shape) != shape or out.dtype != like.dtype or out.device != like.device:
        raise NotSupportedError(
            f"{name}: out is {tuple(out.shape)} {out.dtype} on {out.device}, "
            f"needed is {shape} {like.dtype} on {like.device}"
        )
    if out.numel() and any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride())):
        raise NotSupportedError(f"{name}: out overlaps itself (a stride of 0)")


def _shares_memory(out: torch.Tensor, operand: torch.Tensor) -> bool:
    return out.untyped_storage().data_ptr() == operand.untyped_storage().data_ptr()


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes ``device`` the current one for a launch: Triton launches on the current device, not on the tensors'."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@dataclass(frozen=True)
class GemmLaunch:
    """A launch of the kernel and how it takes its operands; see ``gemm_launch``."""

    launch: KernelLaunch
    config: GemmConfig
    transpose_b: bool
    num_whole_tiles: int
    has_halves: bool

    def arguments(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scales: TensorScales | None = None
    ) -> tuple[Any, ...]:
        """What ``launch`` takes: aligned, not empty 2-D operands of the current device, FP8 ones with their
        ``scales``."""
        config, transpose_b = self.config, self.transpose_b
        a_desc, c_desc = make_descriptor(a, (config.block_m, config.block_k)), make_descriptor(out, config.store_block)
        b_desc = half_b_desc = make_descriptor(b, config.b_block(transpose_b))
        if self.has_halves:
            half_b_desc = make_descriptor(b, config.b_block(transpose_b, halved=True))
        return (a_desc, b_desc, half_b_desc, c_desc, scales, *out.shape, a.shape[1], self.num_whole_tiles)


@lru_cache(maxsize=4096)
def gemm_launch(
    m: int,
    n: int,
    config: GemmConfig,
    transpose_b: bool,
    num_programs: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    device_index: int | None,
    fp8_chain: int | None = None,
) -> GemmLaunch:
    """How C [m, n] is computed of operands of ``dtypes`` with these tiles on ``num_programs`` multiprocessors of a
    device; ``fp8_chain`` as of ``tile_product``."""
    num_tiles, num_whole_tiles = config.num_tiles(m, n), config.num_whole_tiles(m, n, num_programs)
    split_last_wave = num_whole_tiles < num_tiles
    grid = num_programs if split_last_wave else min(num_programs, num_tiles)
    launch = kept_launch(
        gemm_kernel,
        grid,
        dtypes,
        device_index,
        **config.tile_constants(transpose_b=transpose_b),
        SPLIT_LAST_WAVE=split_last_wave,
        FP8_CHAIN=fp8_chain,
        **config.launch_options,
    )
    return GemmLaunch(launch, config, transpose_b, num_whole_tiles, split_last_wave)


def _product(
    name: str,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    config: GemmConfig | None,
    *,
    transpose_b: bool = False,
) -> torch.Tensor:
    """C = op(a) @ op(b) for 2-D operands, see the public functions."""
    target = check_operands(name, a, b)
    m, k = a.shape
    n, b_k = b.shape if transpose_b else b.shape[::-1]
    if k != b_k:
        raise NotSupportedError(f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)} do not fit: {k} against {b_k}")
    if out is not None:
        _check_out(name, out, (m, n), a)
    if m == 0 or n == 0 or k == 0:
        return torch.zeros(m, n, dtype=a.dtype, device=a.device) if out is None else out.zero_()

    is_direct = out is not None and is_aligned(out) and not _shares_memory(out, a) and not _shares_memory(out, b)
    result = out if out is not None and is_direct else empty_aligned(m, n, a.dtype, a.device)
    sms = num_sms(a.device)
    config = config or choose_config(m, n, k, a.dtype, target, sms)
    a, b = aligned_operand(a), aligned_operand(b)
    with on_device(a.device):
        gemm = gemm_launch(m, n, config, transpose_b, sms, (a.dtype, a.dtype), a.device.index)
        gemm.launch(*gemm.arguments(a, b, result))
    if is_direct:
        return result
    return result.contiguous() if out is None else out.copy_(result)


def _matrix(name: str, role: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 2:
        raise NotSupportedError(f"{name}: {role} must have 2 dimensions, has {tensor.dim()}")
    return tensor


def _rows(name: str, role: str, tensor: torch.Tensor) -> torch.Tensor:
    """[..., K] as [rows, K]."""
    if tensor.dim() < 1:
        raise NotSupportedError(f"{name}: {role} has no dimension")
    return tensor if tensor.dim() == 2 else tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])


def _on_rows(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None,
    config: GemmConfig | None,
    transpose_b: bool,
) -> torch.Tensor:
    weight = _matrix(name, "weight", weight)
    shape = (*x.shape[:-1], weight.shape[0 if transpose_b else 1])
    if out is None or x.dim() == 2:
        y = _product(name, _rows(name, "x", x), weight, out, config, transpose_b=transpose_b)
        return y if x.dim() == 2 else y.view(shape)
    _check_out(name, out, shape, x)
    if out.is_contiguous():
        rows = out.view(out.shape[:-1].numel(), out.shape[-1])
        _product(name, _rows(name, "x", x), weight, rows, config, transpose_b=transpose_b)
        return out
    return out.copy_(_on_rows(name, x, weight, None, config, transpose_b))


def matmul_nt(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None, *, config: GemmConfig | None = None
) -> torch.Tensor:
    """y = x @ weight.T: the forward of a linear layer, without bias. Not differentiable by itself.

    Args:
        x: [..., K], bf16 or fp16 (on CPU, interpreted, fp32 too); any strides.
        weight: [N, K] of the same type.
        out: Where to write [..., N]; may share memory with an operand.
        config: Tile sizes; chosen by the shape if None. They do not change bits.

    Returns:
        [..., N], ``out`` if given, else contiguous. Zero if K is 0.

    Raises:
        NotSupportedError: Shapes, types or devices that do not fit or have no kernel.
    """
    return _on_rows("matmul_nt", x, weight, out, config, True)


def matmul_nn(
    grad: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None, *, config: GemmConfig | None = None
) -> torch.Tensor:
    """dx = grad @ weight: the dgrad of a linear layer. Not differentiable by itself.

    Args:
        grad: [..., N], as ``matmul_nt``.
        weight: [N, K] of the same type.
        out: Where to write [..., K]; may share memory with an operand.
        config: Tile sizes; chosen by the shape if None.

    Returns:
        [..., K], ``out`` if given, else contiguous.

    Raises:
        NotSupportedError: As ``matmul_nt``.
    """
    return _on_rows("matmul_nn", grad, weight, out, config, False)


def library_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    transpose_b: bool,
    scales: TensorScales | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """out = x @ weight (``transpose_b``: weight.T), with the bias added before the one rounding: by cuBLAS.

    Args:
        x: [rows, K], 16 bits or FP8 (on CPU any type); this is not differentiable by itself.
        weight: [K, N], or [N, K] if transposed.
        out: [rows, N].
        scales: Of FP8 operands, whose sums are fast accumulation's; K and N are whole sixteens then.
        bias: [N].
    """
    a, b = x.detach(), (weight.t() if transpose_b else weight).detach()
    if scales is not None:
        torch._scaled_mm(a, b, *scales, bias=bias, out_dtype=out.dtype, use_fast_accum=True, out=out)
    elif bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias.detach(), a, b, out=out)
