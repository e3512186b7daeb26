"""The weight gradient as Transformer Engine's linear layers compute it (features ``tp`` and ``sp``).

Imported only if Transformer Engine is installed.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import transformer_engine.pytorch.cpp_extensions as te_ops
from transformer_engine.pytorch.module.base import _2X_ACC_WGRAD

from ditron_train.megatron.shared.wgrad import gradient_in_main_grad, main_grad_of


class TELinearWgrad:
    """wgrad of one call of a Transformer Engine linear layer: its GEMM, and where its result goes.

    ``dw [N, K] = grad_output [tokens, N].T @ total_input [tokens, K]``: returned in the activation's type, or with
    ``fuse_wgrad_accumulation`` added to ``main_grad`` (written over it for the first microbatch, if the layer counts
    microbatches, and if ``overwrite_main_grad`` is set).

    Args:
        weight: The parameter.
        fused: ``fuse_wgrad_accumulation`` of the layer.
        is_first_microbatch: Whether the call is of one, or None if the layer does not count them.
        bias: What the layer adds inside its product: its gradient comes out of the same GEMM.
        store: Where a delayed gradient waits (``--delay-wgrad-compute``) for the layer's ``backward_dw``, or None.
        borrowed: Which operand is in memory that the next op overwrites; a delayed gradient copies it.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        fused: bool,
        is_first_microbatch: bool | None,
        bias: torch.Tensor | None = None,
        store: Any = None,
        borrowed: Literal["input", "grad"] | None = None,
    ) -> None:
        self._weight: Any = weight
        self._fused = fused
        self._accumulates = fused and not is_first_microbatch
        self._bias, self._bias_gradient = bias, None
        self._store, self._borrowed = store, borrowed

    def defer(self, grad_output: torch.Tensor) -> bool:
        """Never: a delayed gradient has its operands gathered at once, as natively."""
        return False

    def operand(self, grad_output: torch.Tensor) -> torch.Tensor:
        """Whole rows: before all products Transformer Engine makes rows of a gradient, and copies those with
        strides. Torch takes a dimension of one for whole whatever its stride, and multiplies it otherwise."""
        return grad_output.reshape(-1, grad_output.shape[-1]).contiguous()

    def __call__(self, grad_output: torch.Tensor, total_input: torch.Tensor) -> torch.Tensor | None:
        """Computes the gradient, or leaves it in the store; both arguments are 2-D with the tokens of the whole group
        in order."""
        # As natively: Transformer Engine reads memory as if it had no strides.
        grad_output, total_input = grad_output.contiguous(), total_input.contiguous()
        weight = self._weight
        out = main_grad_of(weight) if self._fused else None
        options = dict(
            out_dtype=total_input.dtype if out is None else out.dtype,
            accumulate=self._accumulates and not getattr(weight, "overwrite_main_grad", False),
            layout="NT",
            out=out,
            bias=self._bias,
            use_split_accumulator=_2X_ACC_WGRAD,
            grad=True,
        )

        def product(rows: torch.Tensor, grads: torch.Tensor) -> tuple[Any, Any]:
            gradient, bias_gradient, *_ = te_ops.general_gemm(rows, grads, **options)
            return gradient, bias_gradient

        gradient = None
        if self._store is None:
            gradient, self._bias_gradient = product(total_input, grad_output)
        else:
            operands = {"input": total_input, "grad": grad_output}
            if self._borrowed is not None:
                kept = operands[self._borrowed].clone(memory_format=torch.contiguous_format)
                operands[self._borrowed] = kept
            self._store.put(list(operands.values()), product)
        return self.result_without_gemm(total_input.dtype) if self._fused else gradient

    def result_without_gemm(self, dtype: torch.dtype) -> torch.Tensor | None:
        """What autograd gets as the weight's gradient when ``main_grad`` holds it."""
        return gradient_in_main_grad(self._weight, self._weight.dtype)

    def bias_gradient(self, grad_output: torch.Tensor) -> torch.Tensor | None:
        """What the weight gradient's GEMM has given for the bias: None if the weight is frozen, or its gradient
        delayed."""
        return self._bias_gradient


def bias_in_product(layer: Any) -> torch.Tensor | None:
    """The bias that ``layer`` adds inside its GEMM, before the rounding, or None."""
    return layer.bias if layer.use_bias and layer.apply_bias and not layer.gemm_bias_unfused_add else None


def wgrad_of(layer: Any, borrowed: Literal["input", "grad"] | None = None) -> TELinearWgrad:
    """The weight gradient of one call of ``layer``, which counts as the microbatch's; ``borrowed`` as above."""
    first = None if layer.disable_parameter_transpose_cache else layer.is_first_microbatch
    if getattr(layer, "is_first_microbatch", None) is not False:  # a module takes 10 us to set it
        layer.is_first_microbatch = False
    store = layer.wgrad_store if layer.wgrad_store.delay_wgrad_compute() else None
    fused, bias = layer.fuse_wgrad_accumulation, bias_in_product(layer)
    return TELinearWgrad(layer.weight, fused, first, bias, store, borrowed)
