"""The activation between an expert's two linear layers, as each version of Megatron-core computes it."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import weighted_bias_quick_geglu_impl
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.fusions.fused_weighted_squared_relu import weighted_squared_relu_impl


def activate_experts(experts: Any, y: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Activation, then probabilities, by the function that ``TEGroupedMLP`` of this version would call.

    Args:
        experts: The ``TEGroupedMLP``.
        y: [rows, columns], what the first linear layer gave, without a bias.
        probs: [rows, 1].

    Returns:
        [rows, columns], or half of the columns of a gated activation.
    """
    config = experts.config
    size = getattr(config, "moe_mlp_glu_interleave_size", None) if config.gated_linear_unit else None  # since 0.18
    if size is not None and (config.use_te_activation_func or not _is_squared_relu(experts)):
        y = experts._remove_glu_interleaving(y, size)
    if config.use_te_activation_func:
        return (experts.activation_func(y) * probs).to(y.dtype)
    if config.bias_activation_fusion and size is None:
        if experts.activation_func == F.silu:
            return weighted_bias_swiglu_impl(
                y, None, probs, config.activation_func_fp8_input_store, **_swiglu_clamp(config)
            )
        return weighted_bias_quick_geglu_impl(
            y,
            None,
            probs,
            config.activation_func_fp8_input_store,
            config.glu_linear_offset,
            config.activation_func_clamp_value,
        )
    if _is_squared_relu(experts):
        return weighted_squared_relu_impl(y, probs)
    if not config.gated_linear_unit:
        return (experts.activation_func(y) * probs).to(y.dtype)
    gate, linear = y.chunk(2, dim=-1)
    if config.activation_func_clamp_value is not None:
        limit = config.activation_func_clamp_value
        gate, linear = gate.clamp(min=None, max=limit), linear.clamp(min=-limit, max=limit)
    return ((config.activation_func(gate) * (linear + config.glu_linear_offset)) * probs).to(y.dtype)


def _is_squared_relu(experts: Any) -> bool:
    return experts.activation_func == squared_relu and experts.config.use_fused_weighted_squared_relu


def _swiglu_clamp(config: Any) -> dict[str, Any]:
    """What the fused SwiGLU clamps at: after 0.19 alone, before it is silently not clamped."""
    return {"clamp_value": config.activation_func_clamp_value} if _takes_clamp() else {}


@cache
def _takes_clamp() -> bool:
    return "clamp_value" in inspect.signature(weighted_bias_swiglu_impl).parameters
