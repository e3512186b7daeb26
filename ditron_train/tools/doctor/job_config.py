"""Megatron's configuration as its arguments make it: a stand-in with the same fields, for questions about a job.

Megatron's own classes check what they are given and may want GPUs; here every field has its default until an argument
names it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from ditron_train.tools.predict.megatron_arguments import hybrid_pattern, words_by_name

__all__ = ["config_of", "is_te", "recipe_of"]

# Arguments that are called otherwise than the fields that they set.
_FIELD_OF = {
    "num_experts": "num_moe_experts",
    "fp8_format": "fp8",
    "fp4_format": "fp4",
    "fp8_param_gather": "fp8_param",
    "te_precision_config_file": "quant_recipe",
}
_OFF = {"disable_bias_linear": "add_bias_linear"}
# Megatron-LM's defaults where they differ from the configuration's.
_ARGUMENTS_DEFAULTS = {
    "gradient_accumulation_fusion": True,
    "bias_activation_fusion": True,
    "pipeline_dtype": torch.bfloat16,
    "muon_tp_mode": "blockwise",
    "muon_coefficient_type": "quintic",
    "muon_use_syrk": False,
    "optimizer": "adam",
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "moe_token_dispatcher_type": "allgather",
    "hierarchical_context_parallel_sizes": None,
    "hybrid_attention_ratio": 0.0,
    "hybrid_mlp_ratio": 0.0,
}
_RECIPES = {
    "tensorwise": "Float8CurrentScaling",
    "delayed": "DelayedScaling",
    "mxfp8": "MXFP8BlockScaling",
    "blockwise": "Float8BlockScaling",
}
_OLD_GRAPHS = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}


def _value(words: list[str]) -> Any:
    """What the words behind an argument say; none: a switch."""
    if len(words) != 1:
        return [_value([word]) for word in words] if words else True
    for read in (int, float):
        try:
            return read(words[0])
        except ValueError:
            continue
    return words[0]


def config_of(words: Sequence[str]) -> SimpleNamespace:
    """The configuration that ``pretrain_gpt.py``'s arguments make.

    Raises:
        ImportError: megatron-core is not installed.
    """
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    fields = dataclasses.fields(MLATransformerConfig)
    values = {field.name: None if field.default is dataclasses.MISSING else field.default for field in fields}
    values.update(_ARGUMENTS_DEFAULTS, multi_latent_attention=False)
    given = {name: _value(rest) for name, rest in words_by_name(words)}
    for name, value in given.items():
        if name in _OFF or (name.startswith("no_") and name[3:] in values):
            values[_OFF.get(name, name[3:])] = False
        else:
            values[_FIELD_OF.get(name, name)] = value
    values["hybrid_pattern"] = hybrid_pattern(words)
    _derive(values, given)
    return SimpleNamespace(**values)


def _derive(values: dict[str, Any], given: dict[str, Any]) -> None:
    """What Megatron-LM and the configuration make of other fields."""
    values["params_dtype"] = (
        torch.bfloat16 if given.get("bf16") else torch.float16 if given.get("fp16") else torch.float32
    )
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    if not given.get("group_query_attention"):
        values["num_query_groups"] = heads
    values["kv_channels"] = given.get("kv_channels") or hidden // heads
    gated = bool(given.get("swiglu") or given.get("quick_geglu"))
    values["gated_linear_unit"] = gated
    no_fusion = ("no_bias_swiglu_fusion",) if given.get("swiglu") else ("no_bias_gelu_fusion", "disable_bias_linear")
    values["bias_activation_fusion"] = not any(given.get(name) for name in no_fusion)
    values["activation_func"] = _activation(given) or values["activation_func"]
    comm_type = values["cp_comm_type"] or "p2p"
    values["cp_comm_type"] = comm_type[0] if isinstance(comm_type, list) and len(comm_type) == 1 else comm_type
    levels = values["hierarchical_context_parallel_sizes"]
    values["hierarchical_context_parallel_sizes"] = levels if isinstance(levels, list) else [levels] if levels else []
    if given.get("recompute_activations"):
        values["recompute_granularity"] = "selective"
    if values["recompute_granularity"] == "selective" and not values["recompute_modules"]:
        values["recompute_modules"] = ["core_attn"]
    values["cpu_offloading"] |= bool(given.get("cpu_offloading_num_layers"))
    for name, implementation in _OLD_GRAPHS.items():
        if given.get(name):
            values["cuda_graph_impl"] = implementation
    if given.get("cuda_graph_scope") and not given.get("cuda_graph_modules"):
        values["cuda_graph_modules"] = None  # the newer name's default says nothing beside the old name
    for name in ("recompute_modules", "offload_modules"):
        value = values.get(name) or []
        values[name] = value if isinstance(value, list) else [value]
    values["expert_tensor_parallel_size"] = (
        given.get("expert_tensor_parallel_size") or values["tensor_model_parallel_size"]
    )
    tp = values["tensor_model_parallel_size"]
    values["gtp_weight_remat_size"] = given.get("tensor_parallel_num_weight_shards", tp) // tp
    chunks = given.get("num_virtual_stages_per_pipeline_rank")
    values["virtual_pipeline_model_parallel_size"] = chunks
    values["moe_router_padding_for_quantization"] |= bool(values.get("moe_router_padding_for_fp8"))


def _activation(given: dict[str, Any]) -> Any:
    """The function that is asked for; None: the configuration's own."""
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    by_argument = {"swiglu": F.silu, "squared_relu": squared_relu, "quick_geglu": quick_gelu}
    return next((function for name, function in by_argument.items() if given.get(name)), None)


def is_te(config: Any) -> bool:
    """Whether the layers are Transformer Engine's."""
    return bool(config.transformer_impl == "transformer_engine")


def recipe_of(config: Any) -> str | None:
    """The class of the recipe that Transformer Engine's layers compute in, None in 16 bits."""
    if config.fp4:
        return "NVFP4BlockScaling"
    return _RECIPES.get(config.fp8_recipe, config.fp8_recipe) if config.fp8 else None
