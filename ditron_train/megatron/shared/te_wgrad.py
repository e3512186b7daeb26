"""The weight gradient as Transformer Engine's linear layers compute it (features ``tp`` and ``sp``).

Imported only where Transformer Engine is installed.
"""

from __future__ import annotations

from typing import Any

import torch
import transformer_engine.pytorch.cpp_extensions as te_ops
from transformer_engine.pytorch.module.base import _2X_ACC_WGRAD

from ditron_train.megatron.shared.wgrad import gradient_in_main_grad, main_grad_of


class TELinearWgrad:
    """wgrad of one call of a Transformer Engine linear layer: its GEMM, and where its result goes.

    ``dw [N, K] = grad_output [tokens, N].T @ total_input [tokens, K]``: returned in the activation's type, or with
    ``fuse_wgrad_accumulation`` added to ``main_grad`` (written over it for the first microbatch, if the layer counts
    microbatches, and where ``overwrite_main_grad`` is set).
    """

    def __init__(self, weight: torch.Tensor, fused: bool, is_first_microbatch: bool | None) -> None:
        self._weight: Any = weight
        self._fused = fused
        self._accumulates = fused and not is_first_microbatch

    def defer(self, grad_output: torch.Tensor) -> bool:
        """Never: layers with a delayed weight gradient run natively."""
        return False

    def __call__(self, grad_output: torch.Tensor, total_input: torch.Tensor) -> torch.Tensor | None:
        """Computes the gradient; both arguments are 2-D with the tokens of the whole group in order."""
        weight = self._weight
        out = main_grad_of(weight) if self._fused else None
        gradient, *_ = te_ops.general_gemm(
            total_input,
            grad_output,
            out_dtype=total_input.dtype if out is None else out.dtype,
            accumulate=self._accumulates and not getattr(weight, "overwrite_main_grad", False),
            layout="NT",
            out=out,
            use_split_accumulator=_2X_ACC_WGRAD,
            grad=True,
        )
        return self.result_without_gemm(total_input.dtype) if self._fused else gradient

    def result_without_gemm(self, dtype: torch.dtype) -> torch.Tensor | None:
        """What autograd gets as the weight's gradient when ``main_grad`` holds it."""
        return gradient_in_main_grad(self._weight, self._weight.dtype)


def wgrad_of(layer: Any) -> TELinearWgrad:
    """The weight gradient of one call of ``layer``, which counts as the microbatch's."""
    first = None if layer.disable_parameter_transpose_cache else layer.is_first_microbatch
    if layer.is_first_microbatch is not False:  # a module takes 10 us to set it
        layer.is_first_microbatch = False
    return TELinearWgrad(layer.weight, layer.fuse_wgrad_accumulation, first)
