"""Products of FP8 operands with one scale a tensor, with the bits of cuBLASLt's (Hopper).

Transformer Engine's per-tensor recipes (tensorwise, delayed) compute all their products this way: forward with
cuBLAS's fast accumulation (all of K is one chain of the tensor cores, whose sums are shorter than fp32), gradients
with its split accumulator (every 128 products are added to an fp32 sum). Hopper multiplies FP8 only where both
operands have K last.

In the interpreter products are exact in fp32 and each block of K is summed by NumPy in fp32, with either accumulation:
there only data that is exact in any order can be compared.
"""

from __future__ import annotations

import torch

from ditron_train.gemm.configs import GemmConfig, choose_config
from ditron_train.gemm.operands import FP8_DTYPES, Operand, TensorScales, aligned_operand, empty_aligned, result_dtype
from ditron_train.gemm.ops import launch_gemm, on_device
from ditron_train.runtime.device import kernel_target, num_sms
from ditron_train.runtime.errors import NotSupportedError

#: Products that a split accumulator sums before it adds them in fp32.
SPLIT_CHAIN = 128


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


def matmul_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: TensorScales,
    *,
    split_accumulator: bool = False,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """y = bf16((x @ weight.T in fp32) * (scales.a * scales.b)): ``general_gemm`` of Transformer Engine on FP8 tensors.

    The plain equivalent: ``torch._scaled_mm(x, weight.t(), scale_a=scales.a, scale_b=scales.b,
    out_dtype=torch.bfloat16, use_fast_accum=not split_accumulator)``.

    Args:
        x: [M, K], e4m3 or e5m2; any strides.
        weight: [N, K], e4m3 or e5m2.
        scales: Of x and of weight.
        split_accumulator: Whether sums are added in fp32 every ``SPLIT_CHAIN`` products.
        config: Tile sizes; chosen by the shape where None. They do not change bits, as long as ``block_k`` is
            ``SPLIT_CHAIN`` with a split accumulator.

    Returns:
        [M, N], bf16, contiguous. Zero where K is 0.

    Raises:
        NotSupportedError: Shapes, types or devices that do not fit or have no kernel.
    """
    name = "matmul_fp8"
    target = check_fp8_operands(name, x, weight)
    check_scales(name, scales, x.device)
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise NotSupportedError(f"{name}: shapes {tuple(x.shape)} and {tuple(weight.shape)} do not fit")
    (m, k), n = x.shape, weight.shape[0]
    if 0 in (m, n, k):
        return torch.zeros(m, n, dtype=result_dtype(x.dtype), device=x.device)
    out = empty_aligned(m, n, result_dtype(x.dtype), x.device)
    sms = num_sms(x.device)
    config = config or choose_config(m, n, k, x.dtype, target, sms)
    chain = min(SPLIT_CHAIN, config.block_k) if split_accumulator else None  # the interpreter's blocks may be shorter
    with on_device(x.device):
        launch_gemm(
            aligned_operand(x),
            aligned_operand(weight),
            out,
            config,
            transpose_a=False,
            transpose_b=True,
            num_programs=sms,
            scales=scales,
            fp8_chain=chain,
        )
    return out.contiguous()
