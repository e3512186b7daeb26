"""Why a linear layer of Transformer Engine runs natively, by its options alone: Transformer Engine is not imported."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from ditron_train.megatron.compat.config import unsupported_reason_weight
from ditron_train.megatron.shared.values import unsupported_reason_hidden

#: Recipes whose layers may be overlapped: those of which a GPU has shown the bits (docs/measurements/fp8.md).
FP8_RECIPES = ("Float8CurrentScaling", "DelayedScaling", "Float8BlockScaling")
BLOCK = 128  # values that share a scale in the last of them
OFFLOADED = "activations are offloaded to the CPU"
WITHOUT_SEQUENCE_PARALLEL = "FP8 without --sequence-parallel"

_ROW_ALIGNMENT = 16  # of the tokens of a rank: cuBLAS multiplies each rank's by themselves, and wgrad sums over them
_USERBUFFERS = (
    "ub_overlap_rs_fprop",
    "ub_overlap_ag_dgrad",
    "ub_overlap_ag_fprop",
    "ub_overlap_rs_dgrad",
    "ub_bulk_dgrad",
    "ub_bulk_wgrad",
)


def unsupported_reason_options(layer: Any, x: torch.Tensor) -> str | None:
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
    return unsupported_reason_weight(layer.weight)


def unsupported_reason_delayed(layer: Any) -> str | None:
    """Why a layer in FP8, or of ``sp``, is native: it computes the weight gradient at once. Or None."""
    return "the weight gradient is delayed" if layer.wgrad_store.delay_wgrad_compute() else None


def unsupported_reason_fp8_sizes(
    kind: str, x: torch.Tensor, weight: torch.Tensor, world_size: int, *, has_blocks: bool
) -> str | None:
    """Why a ``column`` or a ``row`` layer that computes in FP8 runs natively, by types and sizes alone, or None.

    Args:
        kind: Of the layer.
        x: Input ``[s, b, K]`` or ``[tokens, K]``: of ``column`` the local part of the sequence.
        weight: This rank's ``[N, K]``.
        world_size: Of the tensor parallel group.
        has_blocks: Whether blocks of values have scales, not tensors.
    """
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return f"the input is {x.dtype} and the weight {weight.dtype}; covered is bfloat16"
    if x.dim() < 2 or 0 in x.shape or x.shape[-1] != weight.shape[1]:
        return f"shapes {tuple(x.shape)} and {tuple(weight.shape)} are not covered"
    if kind == "row" and x.shape[0] % world_size:
        return f"the sequence of {x.shape[0]} does not divide by {world_size}"
    rows_of_a_rank = x.shape[:-1].numel() // (world_size if kind == "row" else 1)
    if rows_of_a_rank % _ROW_ALIGNMENT or weight.shape[0] % _ROW_ALIGNMENT or weight.shape[1] % _ROW_ALIGNMENT:
        return f"{rows_of_a_rank} tokens a rank and {tuple(weight.shape)} are not multiples of {_ROW_ALIGNMENT}"
    gathered_columns = weight.shape[kind == "column"]
    if has_blocks and (rows_of_a_rank % BLOCK or gathered_columns % BLOCK):
        return f"{rows_of_a_rank} tokens a rank and {gathered_columns} columns are not multiples of {BLOCK}"
    return unsupported_reason_hidden(x.device, rows_of_a_rank, *weight.shape)


def unsupported_reason_recipe_name(name: str) -> str | None:
    """Why layers of an FP8 recipe, as its class is called, run natively, or None."""
    return None if name in FP8_RECIPES else f"FP8 by the recipe {name}"


def unsupported_reason_parameters(names: Collection[str]) -> str | None:
    """Why layers whose parameters are FP8 run natively, or None; the state of delayed scaling was seen to differ.

    Args:
        names: Of the recipe's class and of those that it is derived from.
    """
    is_covered = FP8_RECIPES[0] in names or FP8_RECIPES[2] in names
    return None if is_covered else "the parameters are FP8 (--fp8-param-gather), with delayed scaling"
