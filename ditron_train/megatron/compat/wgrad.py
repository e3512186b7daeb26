"""Products of gradients in each version of Megatron-core: how those of a frozen layer are, and a weight gradient that
is written, not added, as Megatron-FSDP has it."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch


@cache
def multiplies_rows_of_frozen() -> bool:
    """Whether a gradient is made rows before its product with a frozen weight: since 0.19."""
    from megatron.core.tensor_parallel import layers

    return "reshape" in inspect.unwrap(layers.LinearWithFrozenWeight.backward).__code__.co_names


def write_wgrad(main_grad: torch.Tensor, grad_output: torch.Tensor, total_input: torch.Tensor) -> None:
    """``main_grad [N, K] = grad_output [tokens, N].T @ total_input [tokens, K]``, by the product that the layers of
    this version ask for: since 0.18 ``main_grad`` may be wider than the operands."""
    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.tensor_parallel import layers

    product: Any = getattr(layers, "_wgrad_gemm", None)  # after 0.19
    if product is not None:
        product(main_grad, grad_output, total_input)
        return
    backward = inspect.unwrap(layers.LinearWithGradAccumulationAndAsyncCommunication.backward)
    by_name = "te_general_gemm" in backward.__code__.co_names  # 0.18 and 0.19; 0.17 has it and does not call it here
    product = getattr(extension, "te_general_gemm", None) if by_name else None
    if product is None:
        torch.matmul(grad_output.t(), total_input, out=main_grad)
    else:
        product(total_input, grad_output, out_dtype=main_grad.dtype, layout="NT", out=main_grad, grad=True)
