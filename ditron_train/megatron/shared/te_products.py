"""Whether Transformer Engine's products have the bits of cuBLAS's as torch asks for them.

The fused path has the bits of torch's. Transformer Engine's layers ask cuBLASLt themselves, whose choice (of K
splits, say) may be another.
"""

from __future__ import annotations

import functools

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

from ditron_train.gemm.order_probe import order_probe_matrix
from ditron_train.policy.probe import Run
from ditron_train.runtime.device import kernel_target


def product_with_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias``, rounded once, by the library whose layers add it so."""
    if not HAVE_TE:
        return torch.nn.functional.linear(x, weight, bias)
    import transformer_engine.pytorch.cpp_extensions as te_ops

    product, *_ = te_ops.general_gemm(weight, x, out_dtype=x.dtype, bias=bias)
    return product


def product_pairs(rows: int, weight: torch.Tensor) -> list[tuple[Run, Run]]:
    """What to compare in addition to native and fused, for ``decide(extra_cases=)``: forward's and dgrad's product of
    one rank by both libraries, on data that shows the order of sums. Nothing if Transformer Engine is not
    installed.

    wgrad is left out: in Transformer Engine's layers the fused path computes it by Transformer Engine's own product.

    Args:
        rows: Tokens that the products have on a rank.
        weight: Of its shape, type and device, ``[N, K]``.
    """
    if not HAVE_TE:
        return []
    import transformer_engine.pytorch.cpp_extensions as te_ops

    dtype, device, (n, k) = weight.dtype, weight.device, weight.shape

    @functools.cache
    def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = order_probe_matrix((rows, k), dtype, device, seed=301, signed="rows")
        w = order_probe_matrix((n, k), dtype, device, seed=302, signed="columns")
        return x, w, order_probe_matrix((rows, n), dtype, device, seed=303, signed="columns")

    def by_transformer_engine() -> list[torch.Tensor]:
        x, w, grad = data()
        forward, *_ = te_ops.general_gemm(w, x, out_dtype=dtype)
        dgrad, *_ = te_ops.general_gemm(w, grad, layout="NN", grad=True, out_dtype=dtype)
        return [forward, dgrad]

    def by_torch() -> list[torch.Tensor]:
        x, w, grad = data()
        return [torch.matmul(x, w.t()), torch.matmul(grad, w)]

    return [(by_transformer_engine, by_torch)]


def unsupported_reason_bias(bias: torch.Tensor | None, x: torch.Tensor) -> str | None:
    """Why a layer runs natively whose bias is added inside the product, or None."""
    if bias is None:
        return None
    if bias.dtype != x.dtype:
        return f"the input is {x.dtype} and the bias {bias.dtype}"
    if x.device.type == "cuda" and kernel_target(x.device) == "sm_100":
        return "the bias is added inside the GEMM, on Blackwell GPUs, whose shared memory is too small for it"
    return None


def bias_like(bias: torch.Tensor, seed: int) -> torch.Tensor:
    """Random values in place of a bias, which is zero when training begins and would show no rounding."""
    generator = torch.Generator(device=bias.device).manual_seed(seed)
    return torch.empty_like(bias, requires_grad=False).normal_(generator=generator)
