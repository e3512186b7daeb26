"""The product of FP8 operands by itself, which the package computes only overlapped with communication."""

from __future__ import annotations

import torch

from ditron_train.gemm.configs import GemmConfig, choose_config
from ditron_train.gemm.fp8 import check_fp8_operands, check_scales
from ditron_train.gemm.operands import TensorScales, aligned_operand, empty_aligned, result_dtype
from ditron_train.gemm.ops import gemm_launch, on_device
from ditron_train.runtime.device import num_sms
from ditron_train.runtime.errors import NotSupportedError

#: Products that a split accumulator sums before it adds them in fp32.
SPLIT_CHAIN = 128


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
        config: Tile sizes; chosen by the shape if None. They do not change bits, as long as ``block_k`` is
            ``SPLIT_CHAIN`` with a split accumulator.

    Returns:
        [M, N], bf16, contiguous. Zero if K is 0.

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
        gemm = gemm_launch(m, n, config, True, sms, (x.dtype, weight.dtype), x.device.index, chain)
        gemm.launch(*gemm.arguments(aligned_operand(x), aligned_operand(weight), out, scales))
    return out.contiguous()
