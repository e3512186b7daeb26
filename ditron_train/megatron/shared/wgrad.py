"""The weight gradient as megatron-core's own layers compute it: the GEMM, and where its result goes.

The ops of layer 3 call these objects in backward instead of a plain ``grad_output.t().matmul(total_input)``, so they
need to know nothing of ``main_grad`` and its flags.
"""

from __future__ import annotations

from typing import Any

import torch

from ditron_train.megatron.compat.wgrad import multiplies_rows_of_frozen, write_wgrad


def main_grad_of(weight: Any) -> torch.Tensor:
    """The buffer of ``weight`` that takes its gradient, to be asked for in backward: a model that is only evaluated
    has none, and Megatron-FSDP's exists only from then on."""
    if hasattr(weight, "__fsdp_param__"):
        weight.main_grad = weight.get_main_grad()
    return weight.main_grad


def bias_of(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """The ``bias`` to give an op: native gives no bias gradient if the weight is frozen."""
    return bias if bias is None or weight.requires_grad else bias.detach()


def gradient_in_main_grad(weight: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """What autograd gets as the gradient of ``weight`` when ``main_grad`` holds it, or will: a dummy if
    ``grad_added_to_main_grad`` exists (zeros under ``zero_out_wgrad``), else None."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    zero, shape = getattr(weight, "zero_out_wgrad", False), weight.main_grad.shape
    from megatron.core.tensor_parallel import layers

    if layers.HAVE_TE:
        return layers.get_dummy_wgrad(list(shape), dtype, zero=zero)
    return (torch.zeros if zero else torch.empty)(shape, dtype=dtype, device=weight.main_grad.device)


class NativeWgrad:
    """wgrad of one call of a local (not Transformer Engine) linear layer.

    ``dw [N, K] = grad_output [tokens, N].T @ total_input [tokens, K]``, one GEMM over all rows.
    Without fusion it is returned in the activation's type. With gradient accumulation fusion it is added to
    ``weight.main_grad`` by the kernels that megatron-core uses, and autograd gets what it expects there: a dummy when
    ``grad_added_to_main_grad`` exists (zeros under ``zero_out_wgrad``), else None.

    Args:
        weight: The parameter, ``[N, K]``.
        fused: ``gradient_accumulation_fusion`` of the call.
        grad_output_buffer: List that collects output gradients whose wgrad is deferred, or None.
        deferral_limit: How many it may hold (0: no limit).
    """

    def __init__(
        self,
        weight: torch.Tensor,
        fused: bool,
        grad_output_buffer: list[torch.Tensor] | None = None,
        deferral_limit: int | None = 0,
    ) -> None:
        self._weight = weight
        self._fused = fused
        # A module may be used again before its backward, so the buffer of this call is remembered, as native does.
        self._main_grad = getattr(weight, "main_grad", None) if fused else None
        self._buffer = grad_output_buffer
        self._deferral_limit = deferral_limit

    def defer(self, grad_output: torch.Tensor) -> bool:
        """Whether the wgrad of this call is left to later; keeps `grad_output` ``[s, b, N]`` then.

        The caller then neither gathers the input nor computes the GEMM, and returns `result_without_gemm` to autograd.
        """
        if self._buffer is None:
            return False
        if self._deferral_limit and len(self._buffer) >= self._deferral_limit:
            return False
        self._buffer.append(grad_output)
        return True

    def operand(self, grad_output: torch.Tensor) -> torch.Tensor:
        """Itself: native multiplies a gradient with strides as it is stored; newer versions its rows if the weight
        is frozen."""
        if grad_output.dim() > 2 and not self._weight.requires_grad and multiplies_rows_of_frozen():
            return grad_output.reshape(-1, grad_output.shape[-1])
        return grad_output

    def __call__(self, grad_output: torch.Tensor, total_input: torch.Tensor) -> torch.Tensor | None:
        """Computes the gradient; both arguments are 2-D with the tokens of the whole group in order."""
        # As natively: apex's kernels read memory as if it had no strides.
        grad_output, total_input = grad_output.contiguous(), total_input.contiguous()
        if not self._fused:
            return grad_output.t().matmul(total_input)
        weight: Any = self._weight
        weight.main_grad = self._main_grad
        main_grad = main_grad_of(weight)
        if hasattr(weight, "__fsdp_param__"):
            write_wgrad(main_grad, grad_output, total_input)
        else:
            _accumulate(total_input, grad_output, main_grad)
        return self._result(total_input.dtype)  # not main_grad of the forward: Megatron-FSDP had none then

    def result_without_gemm(self, dtype: torch.dtype) -> torch.Tensor | None:
        """What autograd gets as the weight's gradient when ``main_grad`` holds it, or will."""
        weight: Any = self._weight
        if self._fused:
            weight.main_grad = self._main_grad
        return self._result(dtype)

    def bias_gradient(self, grad_output: torch.Tensor) -> torch.Tensor:
        """That of a bias, which native adds up by itself."""
        return grad_output.contiguous().sum(dim=0)

    def _result(self, dtype: torch.dtype) -> torch.Tensor | None:
        return gradient_in_main_grad(self._weight, dtype) if self._fused else None


def _accumulate(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    from megatron.core.tensor_parallel import layers

    kernels = layers.fused_weight_gradient_mlp_cuda  # apex's, or what feature wgrad has put in its place
    if main_grad.dtype == torch.float32:
        kernels.wgrad_gemm_accum_fp32(total_input, grad_output, main_grad)
    elif main_grad.dtype in (torch.float16, torch.bfloat16):
        kernels.wgrad_gemm_accum_fp16(total_input, grad_output, main_grad)
    else:
        raise RuntimeError(f"no kernel accumulates the weight gradient into {main_grad.dtype}")
