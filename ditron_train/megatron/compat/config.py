"""Configurations, weights and calls of Megatron-core 0.16 and newer: one question for what the versions call
differently, and a reason to run natively for what came later than 0.16 and is not covered."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils

# Of ``linear_with_grad_accumulation_and_async_allreduce`` in 0.16: what the tp ops do themselves or hand on.
_KNOWN_ARGUMENTS = frozenset(
    (
        "allreduce_dgrad",
        "async_grad_allreduce",
        "bias",
        "grad_output_buffer",
        "gradient_accumulation_fusion",
        "sequence_parallel",
        "tp_group",
        "wgrad_deferral_limit",
    )
)

_NEUTRAL = {"gtp_remat_size": 1}  # weights that are not shared


def captured_parts(config: Any) -> frozenset[str] | None:
    """Names of what is captured in CUDA graphs, empty for whole layers; None if nothing is.

    0.16 and 0.17 name the parts in ``cuda_graph_scope``, 0.18 and newer in ``cuda_graph_modules``.
    """
    if getattr(config, "cuda_graph_impl", "none") == "none":
        return None
    parts = getattr(config, "cuda_graph_modules", None)
    if parts is None:
        parts = getattr(config, "cuda_graph_scope", None)
    if not parts or parts == "full":
        return frozenset()
    return frozenset(getattr(part, "name", str(part)) for part in ([parts] if isinstance(parts, str) else parts))


def captures_dispatch(config: Any) -> bool:
    """Whether the exchange of the experts' counts is part of a CUDA graph."""
    parts = captured_parts(config)
    return parts is not None and (not parts or "moe_preprocess" in parts)


def captures_iteration(config: Any) -> bool:
    """Whether a whole iteration is one CUDA graph: an implementation of its own since 0.18, a scope before."""
    if getattr(config, "cuda_graph_impl", "none") == "full_iteration":
        return True
    scopes = getattr(config, "cuda_graph_scope", None) or ()
    return any("full_iteration" in str(scope) for scope in ([scopes] if isinstance(scopes, str) else scopes))


def padded_routing(config: Any, routing_map: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The routing map as Megatron's dispatcher pads it, and how many entries that adds at most: with
    ``moe_router_padding_for_quantization`` each expert gets whole multiples of rows from every rank."""
    if not config.moe_router_padding_for_quantization:
        return routing_map, 0
    from megatron.core.config import is_experimental_enabled
    from megatron.core.fusions.fused_pad_routing_map import fused_pad_routing_map
    from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization, pad_routing_map

    multiple: int = get_align_size_for_quantization(config)
    is_fused = config.moe_permute_fusion and is_experimental_enabled()
    pad = fused_pad_routing_map if is_fused else pad_routing_map
    padded = pad(routing_map, multiple).bool()  # the fused kernel gives int32
    return padded, routing_map.shape[1] * (multiple - 1)


@cache
def _rope_takes_longest() -> bool:
    return "max_seqlen" in inspect.signature(rope_utils.apply_rotary_pos_emb).parameters


def rope_arguments(packed: Any) -> dict[str, Any]:
    """What RoPE of ``packed`` sequences is told beyond 0.16's arguments: after 0.19 the longest of them says whether a
    table is of the rows of all sequences or of one, and RoPE asks the device if it is not told."""
    longest = packed.max_seqlen_q, packed.max_seqlen_kv
    if not _rope_takes_longest() or None in longest:
        return {}
    return {"max_seqlen": max(longest)}


def _multiplies_at_once(linear: Any) -> bool:
    """Whether a grouped layer of Transformer Engine's calls one GEMM for all experts: from 2.17 to 2.19 if its
    variable asks for it, since 2.20 by an argument that the variable sets."""
    requested = getattr(linear, "use_grouped_tensor", None)
    if requested is not None:
        return bool(requested)
    if os.environ.get("NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM", "0") == "0":
        return False
    functions = (getattr(sys.modules.get(one.__module__), "_GroupedLinear", None) for one in type(linear).__mro__)
    return any(hasattr(function, "_is_grouped_tensor_path_supported") for function in functions)


def unsupported_reason_experts(experts: torch.nn.Module) -> str | None:
    """Why experts of a newer Megatron-core run by its own path, or None."""
    config: Any = experts.config
    if getattr(config, "use_transformer_engine_op_fuser", False) or getattr(experts, "_with_fused_impl", False):
        return "Transformer Engine's operation fuser computes the experts"
    if getattr(config, "moe_use_grouped_tensor", False):
        return "moe_use_grouped_tensor pads the experts' rows"
    reasons = (unsupported_reason_grouped_layer(getattr(experts, name, None)) for name in ("linear_fc1", "linear_fc2"))
    return next((reason for reason in reasons if reason is not None), None)


def unsupported_reason_grouped_layer(linear: Any) -> str | None:
    """The same of one of their linear layers."""
    if getattr(linear, "single_grouped_weight", False):
        return "the experts share one grouped weight"
    if _multiplies_at_once(linear):
        return "Transformer Engine multiplies by cuBLAS's grouped GEMM, whose bits may be others"
    return unsupported_reason_weight(getattr(linear, "weight0", None))


def unsupported_reason_dispatcher(dispatcher: Any) -> str | None:
    """Why a dispatcher of tokens of a newer Megatron-core moves them by its own path, or None: after 0.19 it adds a
    token's rows up in another order if batches shall not matter."""
    adds_otherwise = hasattr(dispatcher, "batch_invariant_inverse_permutation_mapping")
    return "batch_invariant_mode is on" if adds_otherwise and dispatcher.config.batch_invariant_mode else None


def unsupported_reason_weight(weight: Any) -> str | None:
    """Why a layer with this weight runs natively, or None: since 0.19 a weight may be a part that is
    gathered for each product."""
    size = getattr(weight, "gtp_remat_size", 1)
    if size > 1 or getattr(weight, "is_gtp_weight_remat", False):
        return f"its weight is shared by {f'{size} ' if size > 1 else ''}ranks (generalized tensor parallelism)"
    # Transformer Engine's own mark since 2.20, whoever shares weights.
    return "its weight is shared by ranks" if getattr(weight, "is_distributed_weight", False) else None


def unsupported_reason_arguments(x: torch.Tensor, arguments: Mapping[str, Any]) -> str | None:
    """Why a linear layer that is called with these keywords runs natively, or None: what 0.16 does not know
    must not ask for anything."""
    for name in sorted(arguments.keys() - _KNOWN_ARGUMENTS):
        value = arguments[name]
        if (
            value is None
            or value is False
            or value == _NEUTRAL.get(name)
            or (name, value) == ("output_dtype", x.dtype)
        ):
            continue
        return f"{name}={value} is not covered"
    return None
