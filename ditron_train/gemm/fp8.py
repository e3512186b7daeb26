"""Products of FP8 operands with one scale a tensor, with the bits of cuBLASLt's (Hopper).

Transformer Engine's per-tensor recipes (tensorwise, delayed) compute all their products this way: forward with
cuBLAS's fast accumulation (all of K is one chain of the tensor cores, whose sums are shorter than fp32), gradients
with its split accumulator (every 128 products are added to an fp32 sum). Hopper multiplies FP8 only if both
operands have K last.

In the interpreter products are exact in fp32 and each block of K is summed by NumPy in fp32, with either accumulation:
there only data that is exact in any order can be compared.
"""

from __future__ import annotations

import torch

from ditron_train.gemm.operands import FP8_DTYPES, Operand, TensorScales, result_dtype
from ditron_train.runtime.device import kernel_target
from ditron_train.runtime.errors import NotSupportedError


def check_fp8_operands(name: str, a: torch.Tensor | Operand, b: torch.Tensor | Operand) -> str:
    """Checks that FP8 operands can be multiplied by the kernels; returns the ``TARGET`` of their device.

    Raises:
        NotSupportedError: Different devices, types that are not FP8, or a device without such a kernel.
    """
    if a.device != b.device:
        raise NotSupportedError(f"{name}: operands on {a.device} and {b.device}")
    if a.dtype not in FP8_DTYPES or b.dtype not in FP8_DTYPES:
        raise NotSupportedError(f"{name}: operands of {a.dtype} and {b.dtype}; both have to be FP8")
    target = kernel_target(a.device)
    if target not in ("interpreter", "sm_90"):
        raise NotSupportedError(f"{name}: FP8 on {target}: only on Hopper")
    return target


def check_scales(name: str, scales: TensorScales, device: torch.device) -> None:
    """Checks what the operands are scaled by.

    Raises:
        NotSupportedError: Not fp32 of one element on ``device``.
    """
    for scale in scales:
        if scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != device:
            shape = tuple(scale.shape)
            raise NotSupportedError(f"{name}: a scale {shape} {scale.dtype} on {scale.device}, needed is one fp32")


def check_scaled(name: str, x: torch.Tensor, scales: TensorScales | None) -> None:
    """Checks that FP8 operands, and no others, come with what they are scaled by.

    Raises:
        NotSupportedError: They do not, or the scales do not fit.
    """
    if (x.dtype in FP8_DTYPES) != (scales is not None):
        raise NotSupportedError(f"{name}: {x.dtype} {'without' if scales is None else 'with'} scales")
    if scales is not None:
        check_scales(name, scales, x.device)


def check_bias(name: str, x: torch.Tensor, bias: torch.Tensor, num_columns: int) -> None:
    """Checks what is added to a product before it is rounded.

    Raises:
        NotSupportedError: It is not contiguous, of the result's type and ``num_columns``, on the operands' device.
    """
    kind = tuple(bias.shape), bias.dtype, bias.device, bias.is_contiguous()
    if kind != ((num_columns,), result_dtype(x.dtype), x.device, True):
        raise NotSupportedError(
            f"{name}: a bias {tuple(bias.shape)} {bias.dtype} on {bias.device} for {num_columns} columns of {x.dtype}"
        )
