"""A weight's gradient added to ``main_grad``, as apex's ``fused_weight_gradient_mlp_cuda`` does, on stock torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from ditron_train.runtime.errors import NotSupportedError

# Of multiplications: below, the host takes 9 us longer for Transformer Engine's call (docs/measurements/tp.md).
_MIN_PRODUCTS = 1 << 32
_HALVES = (torch.bfloat16, torch.float16)


@lru_cache(maxsize=1)
def product_of_transformer_engine() -> Callable[..., Any] | None:
    """Transformer Engine's ``general_gemm``, or None if it is not installed or cannot be loaded."""
    try:
        from transformer_engine.pytorch.cpp_extensions import general_gemm
    except (ImportError, OSError):  # a library that it was built against may be missing
        return None
    return general_gemm


@torch.no_grad()  # Megatron's deferred gradients of the output layer come outside of backward, of inputs with a graph
def add_wgrad(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """``main_grad += grad_output.T @ total_input`` in place, without the product in memory.

    The sum over the tokens is made in fp32, the old value is added to it in fp32, and the result is rounded once to
    the type of ``main_grad``. On GPUs that is one GEMM: Transformer Engine's if it is installed and ``main_grad``
    is wider than the operands, else ``torch.addmm``; both have the same bits (docs/measurements/tp.md). On a CPU,
    where torch has no such GEMM, operands go to fp32 first.

    Args:
        total_input: [..., K]; bf16, fp16 or fp32.
        grad_output: [..., N] of the same type and as many tokens.
        main_grad: [N, K], of fp32 or of the same type as the operands.

    Raises:
        NotSupportedError: Other types. Nothing is changed then.
    """
    x, grad = total_input.flatten(0, -2), grad_output.flatten(0, -2)
    if x.dtype != grad.dtype or main_grad.dtype not in (torch.float32, x.dtype):
        raise NotSupportedError(
            f"a weight gradient of {grad.dtype} and {x.dtype} is not added to a main_grad of {main_grad.dtype}"
        )
    if x.shape[0] == 0:
        return
    widens = main_grad.dtype != x.dtype
    if not x.is_cuda:
        total = torch.mm(grad.t().float(), x.float())
        main_grad.copy_(total.add_(main_grad)) if main_grad.dtype in _HALVES else main_grad.add_(total)
    elif widens:
        _add_widened(x, grad, main_grad)
    else:
        torch.addmm(main_grad, grad.t(), x, out=main_grad)


def _add_widened(x: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
    general_gemm = product_of_transformer_engine()
    is_short = main_grad.numel() * x.shape[0] < _MIN_PRODUCTS
    if (
        general_gemm is None
        or is_short
        or not (x.is_contiguous() and grad.is_contiguous() and main_grad.is_contiguous())
    ):
        torch.addmm(main_grad, grad.t(), x, out_dtype=main_grad.dtype, out=main_grad)
        return
    general_gemm(
        x, grad, out_dtype=main_grad.dtype, layout="NT", out=main_grad, accumulate=True, grad=True,
        use_split_accumulator=True,
    )  # fmt: skip
