"""A weight gradient that is written, not added, as Megatron-FSDP has it in each version of Megatron-core."""

from __future__ import annotations

from typing import Any

import torch


def write_wgrad(main_grad: torch.Tensor, grad_output: torch.Tensor, total_input: torch.Tensor) -> None:
    """``main_grad [N, K] = grad_output [tokens, N].T @ total_input [tokens, K]``, by the product that the layers of
    this version ask for: after 0.19 ``main_grad`` may be wider than the operands."""
    from megatron.core.tensor_parallel import layers

    product: Any = getattr(layers, "_wgrad_gemm", None)
    if product is None:
        torch.matmul(grad_output.t(), total_input, out=main_grad)
    else:
        product(main_grad, grad_output, total_input)
