"""What of a job's experts would run by the fused path, asked of the functions that its dispatcher and experts ask."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.moe import experts as megatron_experts

from ditron_train.megatron.ep.coverage import (
    why_not_beside,
    why_not_config,
    why_not_fp8_options,
    why_not_fp8_recipe,
    why_not_fp8_rows,
    why_not_gathered,
    why_not_kind,
    why_not_tensors,
)
from ditron_train.megatron.ep.experts import DitronTEGroupedMLP, why_not_fused
from ditron_train.tools.doctor.job_config import is_te, recipe_of
from ditron_train.tools.doctor.job_layers import DEVICE, kinds_of, tensor
from ditron_train.tools.predict.megatron_arguments import Job

__all__ = ["experts_of"]

_PROBS_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def experts_of(job: Job, config: Any) -> Iterator[tuple[str, str | None]]:
    """Parts of the layers with experts, and why each is native, or None."""
    if "E" not in kinds_of(job, config) or job.model.experts is None:
        return
    dispatcher = SimpleNamespace(config=config, ep_size=job.ep, tp_size=config.expert_tensor_parallel_size)
    tokens = job.model.seq_length // job.cp * job.model.micro_batch_size
    tokens //= job.tp if config.sequence_parallel else 1
    hidden = tensor(tokens, config.hidden_size, dtype=config.params_dtype)
    probs = tensor(
        tokens, job.model.experts, dtype=_PROBS_DTYPES.get(config.moe_router_dtype or "", config.params_dtype)
    )
    reason = why_not_kind(config.moe_token_dispatcher_type)
    gathered = config.moe_token_dispatcher_type == "allgather"
    if reason is None:
        reason = why_not_gathered(dispatcher) if gathered else why_not_config(dispatcher)
    reason = reason or why_not_tensors(hidden, probs, None, gathered=gathered)
    yield "experts: dispatch and combine", reason
    if reason is None:
        apart = None if gathered else why_not_beside(config.expert_tensor_parallel_size)
        yield "experts: GEMMs in one kernel with them", apart or _why_not_fused(config)
        if recipe_of(config) is not None and is_te(config) and config.moe_grouped_gemm:
            yield "experts: grouped quantization to FP8", _why_not_quantised(config)


def _why_not_quantised(config: Any) -> str | None:
    """As the grouped linear layers ask in FP8."""
    is_plain = config.quant_recipe is None and not config.add_bias_linear and not config.cpu_offloading
    reason = why_not_fp8_options(is_plain=is_plain, has_fp8_parameters=bool(config.fp8_param))
    return reason or why_not_fp8_recipe([str(recipe_of(config))]) or why_not_fp8_rows(config.params_dtype)


def _why_not_fused(config: Any) -> str | None:
    if not (is_te(config) and config.moe_grouped_gemm):
        return why_not_fused(object.__new__(megatron_experts.SequentialMLP), DEVICE)
    if getattr(config, "moe_use_legacy_grouped_gemm", False):
        return why_not_fused(object.__new__(megatron_experts.GroupedMLP), DEVICE)
    experts = object.__new__(DitronTEGroupedMLP)
    offloads = config.offload_modules if config.fine_grained_activation_offloading else ()
    linear = SimpleNamespace(te_quant_params=config.quant_recipe, weight0=None)
    experts.__dict__.update(
        config=config,
        linear_fc1=linear,
        linear_fc2=linear,
        activation_func=config.activation_func,
        activation_recompute=config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules,
        offload_expert_fc1="expert_fc1" in offloads,
        offload_moe_act="moe_act" in offloads,
    )
    return why_not_fused(experts, DEVICE)
