"""Transformer Engine's tensor parallel linear layers with the communication overlapped (part of feature ``tp``).

The reference here is Transformer Engine itself: the norm is computed by its own kernels, the weight gradient by its
own GEMM (into ``main_grad`` if it would). Imported only if Transformer Engine is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import transformer_engine.pytorch.cpp_extensions as te_ops
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
)
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
from transformer_engine.pytorch.module import layernorm_linear as te_layernorm_linear

from ditron_train.megatron.shared.in_place import EqualsBaseClass
from ditron_train.megatron.shared.interfaces import computes_in_fp8
from ditron_train.megatron.shared.te_wgrad import bias_in_product, wgrad_of
from ditron_train.megatron.tp.routing import op_of, route
from ditron_train.megatron.tp.spec import Kind, linear_of
from ditron_train.megatron.tp.te_coverage import WITHOUT_SEQUENCE_PARALLEL
from ditron_train.megatron.tp.te_fp8 import overlapped_base, overlapping, scaling_of
from ditron_train.megatron.tp.te_passes import reduce_amax_in_passes
from ditron_train.megatron.tp.te_routes import answer_in_fp8, unsupported_reason_covered
from ditron_train.policy import Answer, log_native, observed
from ditron_train.runtime.derivatives import refuse_second_derivatives
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.tp.context import TPContext

_COLUMN_BASE: Any = overlapped_base(TEColumnParallelLinear)
_NORM_COLUMN_BASE: Any = overlapped_base(TELayerNormColumnParallelLinear)
_ROW_BASE: Any = overlapped_base(TERowParallelLinear)


@outside_compile
class _Norm(torch.autograd.Function):
    """LayerNorm or RMSNorm of ``x [tokens, K]`` by Transformer Engine's kernels, as inside its fused layer."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: Any, sm_margin: int
    ) -> torch.Tensor:
        # By its name there: from 0.19 on Megatron puts another one in its place if batches shall not matter.
        out, mean, inverse_deviation = te_layernorm_linear.apply_normalization(
            x, None, weight, bias, layer.eps, None, x.dtype, layer.normalization, sm_margin, layer.zero_centered_gamma
        )
        ctx.save_for_backward(x, weight, mean, inverse_deviation)
        ctx.normalization, ctx.zero_centered_gamma = layer.normalization, layer.zero_centered_gamma
        ctx.sm_margin = layer.bwd_ln_sm_margin
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_derivatives("the norm of a column layer")
        x, weight, mean, inverse_deviation = ctx.saved_tensors
        options = (ctx.sm_margin, ctx.zero_centered_gamma)
        grad_bias = None
        if ctx.normalization == "LayerNorm":
            grad_x, grad_weight, grad_bias = te_ops.layernorm_bwd(
                grad_out, x, mean, inverse_deviation, weight, *options
            )
        else:
            grad_x, grad_weight = te_ops.rmsnorm_bwd(grad_out, x, inverse_deviation, weight, *options)
        return grad_x.view_as(x), grad_weight, grad_bias, None, None


def normalised(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """The norm of ``layer``, a ``TELayerNormColumnParallelLinear``, by Transformer Engine's own kernels."""
    rows = x.contiguous().view(-1, x.shape[-1])
    sm_margin = layer.fwd_ln_sm_margin if torch.is_grad_enabled() else layer.inf_ln_sm_margin
    return _Norm.apply(rows, layer.layer_norm_weight, layer.layer_norm_bias, layer, sm_margin).view(x.shape)


def _run_in_fp8(layer: Any, kind: Kind, x: torch.Tensor, forward: Callable[[torch.Tensor], Any]) -> Any:
    """A call of a layer that computes in FP8: Transformer Engine's own either way, overlapped if that is covered,
    has the same bits and is faster."""
    answer = None
    if layer.sequence_parallel:
        answer = answer_in_fp8(layer, kind, x)
    elif layer.tp_size > 1:
        log_native(f"tp {kind} (TE, FP8)", WITHOUT_SEQUENCE_PARALLEL)
    if answer is None or not answer.is_fused:
        return observed(answer, x, lambda: forward(x))
    return observed(answer, x, lambda: _run_overlapped(layer, kind, answer, forward, x))


def _run_overlapped(layer: Any, kind: Kind, answer: Answer, forward: Callable[[torch.Tensor], Any], x: Any) -> Any:
    reduce_amax_in_passes(layer)
    scaling = scaling_of(FP8GlobalStateManager.get_fp8_recipe())
    with overlapping(kind, answer.context, scaling, tuple(layer.weight.shape), answer.cpu_bound):
        return forward(x)


def _run(
    layer: Any,
    kind: Kind,
    x: torch.Tensor,
    forward: Callable[[torch.Tensor], Any],
    before: Callable[[Any, torch.Tensor], torch.Tensor] = lambda layer, x: x,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A call of a layer, whose own is ``forward``; ``before`` makes what is multiplied from its input."""
    if computes_in_fp8(FP8GlobalStateManager):
        return _run_in_fp8(layer, kind, x, forward)
    answer = _route(layer, kind, x)
    if answer is None or not answer.is_fused:
        return observed(answer, x, lambda: forward(x), lambda: before(layer, x))
    context = answer.context
    out = observed(answer, x, lambda: _linear(layer, kind, before(layer, x), context), lambda: before(layer, x))
    if kind == "row" and layer.gemm_bias_unfused_add:
        out = out + layer.bias
    return out, layer.bias if layer.te_return_bias else None


def _route(layer: Any, kind: Kind, x: torch.Tensor) -> Answer | None:
    if not layer.sequence_parallel and layer.tp_size == 1:
        return None
    reason = unsupported_reason_covered(layer, x)
    if reason is not None:
        log_native(f"tp {kind} (TE)", reason)
        return None
    options = {"sequence_parallel": bool(layer.sequence_parallel), "is_frozen": not layer.weight.requires_grad}
    return route(kind, x, layer.weight, group=layer.tp_group, bias=bias_in_product(layer), by_te=True, **options)


def _linear(layer: Any, kind: Kind, x: torch.Tensor, context: TPContext) -> torch.Tensor:
    gathered: Literal["input", "grad"] = "input" if kind == "column" else "grad"
    options: dict[str, Any] = {"wgrad": wgrad_of(layer, gathered if layer.sequence_parallel else None)}
    if bias_in_product(layer) is not None:
        options.update(bias=layer.bias, rounds_once=True)
    # Natively a layer multiplies a whole copy of an input with strides.
    return linear_of(op_of(kind, layer.sequence_parallel))(x.contiguous(), layer.weight, context=context, **options)


@outside_compile
class DitronTEColumnParallelLinear(
    TEColumnParallelLinear, _COLUMN_BASE, metaclass=EqualsBaseClass, native=TEColumnParallelLinear
):
    """``TEColumnParallelLinear`` with the gather of its input and the reduce-scatter of its gradient overlapped."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return _run(self, "column", x, super().forward)


@outside_compile
class DitronTELayerNormColumnParallelLinear(
    TELayerNormColumnParallelLinear,
    _NORM_COLUMN_BASE,
    metaclass=EqualsBaseClass,
    native=TELayerNormColumnParallelLinear,
):
    """``TELayerNormColumnParallelLinear``: Transformer Engine's norm on the local sequence, then the overlapped
    linear."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return _run(self, "column", x, super().forward, normalised)


@outside_compile
class DitronTERowParallelLinear(TERowParallelLinear, _ROW_BASE, metaclass=EqualsBaseClass, native=TERowParallelLinear):
    """``TERowParallelLinear`` with the reduce-scatter of its output and the gather of its gradient overlapped."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return _run(self, "row", x, super().forward)


def class_map() -> dict[type, type]:
    """Transformer Engine's layers as megatron-core wraps them, and the fused ones."""
    return {
        TEColumnParallelLinear: DitronTEColumnParallelLinear,
        TELayerNormColumnParallelLinear: DitronTELayerNormColumnParallelLinear,
        TERowParallelLinear: DitronTERowParallelLinear,
    }
