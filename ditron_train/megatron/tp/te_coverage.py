"""Why a linear layer of Transformer Engine runs natively, by its options alone: Transformer Engine is not imported."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from ditron_train.megatron.compat import why_not_weight

__all__ = [
    "FP8_RECIPES",
    "OFFLOADED",
    "WITHOUT_SEQUENCE_PARALLEL",
    "why_not_options",
    "why_not_parameters",
    "why_not_recipe_name",
]

#: Recipes whose layers may be overlapped: those of which a GPU has shown the bits (docs/measurements/fp8.md).
FP8_RECIPES = ("Float8CurrentScaling", "DelayedScaling", "Float8BlockScaling")
OFFLOADED = "activations are offloaded to the CPU"
WITHOUT_SEQUENCE_PARALLEL = "FP8 without --sequence-parallel"

_USERBUFFERS = (
    "ub_overlap_rs_fprop",
    "ub_overlap_ag_dgrad",
    "ub_overlap_ag_fprop",
    "ub_overlap_rs_dgrad",
    "ub_bulk_dgrad",
    "ub_bulk_wgrad",
)


def why_not_options(layer: Any, x: torch.Tensor) -> str | None:
    """What a layer does, by its attributes, in a call with ``x`` that the op does not do, or None."""
    if layer.parallel_mode is None:
        return "its communication is another's (--moe-shared-expert-overlap)"
    if layer.te_quant_params is not None:
        return "the layer has quantization parameters"
    if any(getattr(layer, name, False) for name in _USERBUFFERS):
        return "--tp-comm-overlap (userbuffers) is on"
    if any(parameter.dtype != x.dtype for parameter in layer.parameters()):
        return "the parameters have another type than the input"
    if not layer.sequence_parallel and layer.tp_size > 1 and getattr(layer, "symmetric_ar_type", None) is not None:
        return "its all-reduce is another's (symmetric_ar_type)"
    if getattr(layer, "return_layernorm_output", False):
        return "the layer returns what it has normalised, too"
    if layer.wgrad_store.delay_wgrad_compute():
        return "the weight gradient is delayed"
    if layer.use_bias and layer.apply_bias and not layer.gemm_bias_unfused_add:
        return "the bias is added inside the GEMM, with one rounding less"
    return why_not_weight(layer.weight)


def why_not_recipe_name(name: str) -> str | None:
    """Why layers of an FP8 recipe, as its class is called, run natively, or None."""
    return None if name in FP8_RECIPES else f"FP8 by the recipe {name}"


def why_not_parameters(names: Collection[str]) -> str | None:
    """Why layers whose parameters are FP8 run natively, or None; the state of delayed scaling was seen to differ.

    Args:
        names: Of the recipe's class and of those that it is derived from.
    """
    return None if FP8_RECIPES[0] in names else "the parameters are FP8 (--fp8-param-gather), not tensorwise"
