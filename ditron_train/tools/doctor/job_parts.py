"""What of a job's layers would run by the fused path, asked of the functions that the layers ask as they run.

No layer is built: they are asked about stand-ins with the attributes of layers, and tensors without memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.torch_norm import L2Norm

from ditron_train.megatron.compat import captured_parts, why_not_weight
from ditron_train.megatron.plugin.arguments import fuses_mlp
from ditron_train.megatron.pp.communicator import why_not_group
from ditron_train.megatron.sp.attention import DitronSelfAttention
from ditron_train.megatron.sp.attention_exchange import config_of_one_rank
from ditron_train.megatron.sp.coverage import why_not_comm_type, why_not_levels, why_not_te_attention
from ditron_train.megatron.sp.exchange import AttentionShape
from ditron_train.megatron.sp.linears import LocalLinears
from ditron_train.megatron.sp.output import why_not_left
from ditron_train.megatron.sp.spec import EXCHANGE, OUTPUT, PROJECTIONS, UlyssesCall
from ditron_train.megatron.tp.linear_call import LinearCall
from ditron_train.megatron.tp.routing import op_of, why_not_kind
from ditron_train.megatron.tp.te_coverage import (
    OFFLOADED,
    WITHOUT_SEQUENCE_PARALLEL,
    why_not_delayed,
    why_not_fp8_sizes,
    why_not_options,
    why_not_parameters,
    why_not_recipe_name,
)
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.tools.doctor.job_config import is_te, recipe_of
from ditron_train.tools.doctor.job_experts import experts_of
from ditron_train.tools.doctor.job_layers import has_sparse_attention, kinds_of, matrices_of, tensor
from ditron_train.tools.predict.megatron_arguments import Job

__all__ = ["Part", "parts_of"]

# Layers that normalise what the residual connection brings.
_NORMED = ("attention: linear_qkv", "MLP: linear_fc1", "Mamba: in_proj", "gated delta net: in_proj")
# Scopes of ``--cuda-graph-scope`` that a layer's call is a part of, by how its name begins.
_GRAPH_SCOPES = {
    "attention": frozenset({"attn"}),
    "MLP": frozenset({"mlp"}),
    "Mamba": frozenset({"mamba"}),
    "shared experts": frozenset({"moe", "moe_router"}),
}


@dataclass(frozen=True)
class Part:
    """A part of a training step: the feature that accelerates it, its name, and why it is native, or None."""

    feature: str
    name: str
    native_because: str | None


class _Ranks:
    """A process group of so many ranks, of which nothing but the number is asked."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def _ranks(size: int) -> Any:
    return _Ranks(size)


class _Layer(SimpleNamespace):
    """A layer that feature ``tp`` has replaced."""


_MegatronLayer = type("_MegatronLayer", (SimpleNamespace,), {"__module__": "megatron.core.tensor_parallel.layers"})


def parts_of(feature: str, job: Job, config: Any) -> list[Part]:
    """The parts that ``feature`` could accelerate; to be called where tensors have no memory (``FakeTensorMode``) and
    a GPU is assumed."""
    found = {"tp": _linears, "sp": _attention, "ep": experts_of, "pp": _pipeline, "muon": _optimizer}[feature]
    return [Part(feature, name, reason) for name, reason in found(job, config)]


def _weight(*sizes: int, config: Any) -> torch.Tensor:
    """One of a tensor parallel layer."""
    weight = tensor(*sizes, dtype=config.params_dtype)
    weight.gtp_remat_size = config.gtp_weight_remat_size  # type: ignore[attr-defined]
    return weight


def _linear_layer(kind: str, config: Any, weight: torch.Tensor, *, adds_bias: bool, is_ours: bool = True) -> Any:
    """Attributes of a tensor parallel linear layer, local or Transformer Engine's."""
    size = config.tensor_model_parallel_size
    return (_Layer if is_ours else _MegatronLayer)(
        parallel_mode=kind,
        te_quant_params=config.quant_recipe,
        ub_overlap_ag_fprop=config.tp_comm_overlap,
        parameters=lambda: [weight],
        sequence_parallel=config.sequence_parallel,
        tp_size=size,
        tp_group=_ranks(size),
        symmetric_ar_type=config.symmetric_ar_type,
        wgrad_store=SimpleNamespace(delay_wgrad_compute=lambda: config.delay_wgrad_compute),
        use_bias=adds_bias,
        apply_bias=adds_bias,
        gemm_bias_unfused_add=adds_bias and kind == "row",
        weight=weight,
        bias=None,
        skip_bias_add=False,
        explicit_expert_comm=False,
        input_is_parallel=True,
        disable_grad_reduce=False,
        config=SimpleNamespace(_cpu_offloading_context=None),
    )


def _linears(job: Job, config: Any) -> Iterator[tuple[str, str | None]]:
    yield from _linears_of_a_layer(job, config)
    if config.first_last_layers_bf16 and recipe_of(config) is not None:
        config = copy.copy(config)
        config.fp8 = config.fp4 = None
        for name, reason in _linears_of_a_layer(job, config):
            if name != "output_layer":
                yield f"{name}, first and last layers in 16 bits", reason


def _linears_of_a_layer(job: Job, config: Any) -> Iterator[tuple[str, str | None]]:
    tp, sequence = job.tp, job.model.seq_length // job.cp
    for name, kind, n, k, adds_bias in matrices_of(job, config):
        own = (n // tp, k) if kind == "column" else (n, k // tp)
        weight = _weight(*own, config=config)
        rows = sequence // tp if kind == "column" and config.sequence_parallel else sequence
        x = tensor(rows, job.model.micro_batch_size, own[1], dtype=config.params_dtype)
        reason = why_not_weight(weight)
        if is_te(config) and name != "output_layer":
            layer = _linear_layer(kind, config, weight, adds_bias=adds_bias)
            if name.startswith("shared") and config.moe_shared_expert_overlap:
                layer.parallel_mode = None
            wide = config.fp32_residual_connection and name in _NORMED
            reason = _why_not_mlp(name, config) or _why_not_te(layer, x.float() if wide else x, config)
            if recipe_of(config) is not None:
                has_blocks = config.fp8_recipe == "blockwise"
                reason = _why_not_captured(name, config) or reason
                yield name, reason or why_not_fp8_sizes(kind, x, weight, tp, has_blocks=has_blocks)
                continue
        reason = reason or why_not_kind(kind, config.sequence_parallel)
        yield (
            name,
            reason or op_of(kind, config.sequence_parallel).unsupported_reason(LinearCall(x, weight, _ranks(tp))),
        )


def _why_not_mlp(name: str, config: Any) -> str | None:
    """The operation fuser calls no linear layer."""
    is_fused = name.startswith("MLP:") and fuses_mlp(config)
    return "Transformer Engine's operation fuser computes the MLP" if is_fused else None


def _why_not_captured(name: str, config: Any) -> str | None:
    """As the layers ask in FP8, whoever makes the graphs."""
    parts = captured_parts(config)
    if parts is None:
        return None
    scopes = next((scopes for start, scopes in _GRAPH_SCOPES.items() if name.startswith(start)), frozenset())
    is_captured = bool(scopes) and (not parts or bool(scopes & parts))
    return "FP8 is calibrated or captured" if is_captured else None


def _why_not_te(layer: Any, x: torch.Tensor, config: Any) -> str | None:
    """As ``te_layers`` ask."""
    recipe = recipe_of(config)
    if recipe is not None and not config.sequence_parallel:
        return WITHOUT_SEQUENCE_PARALLEL
    return _why_not_call(layer, x, config) or (None if recipe is None else why_not_delayed(layer))


def _why_not_call(layer: Any, x: torch.Tensor, config: Any) -> str | None:
    reason, recipe = None, recipe_of(config)
    if recipe is not None:
        reason = why_not_recipe_name(recipe)
        if reason is None and config.fp8_param:
            reason = why_not_parameters([recipe])
    return reason or why_not_options(layer, x) or (OFFLOADED if config.cpu_offloading else None)


class _Asked(LocalLinears):
    """Projections that are asked about stand-ins."""

    qkv_kinds, out_kind = (SimpleNamespace,), SimpleNamespace

    def __init__(self, config: Any) -> None:
        self._config = config

    def _why_not_layer(self, layer: Any, x: torch.Tensor) -> str | None:
        if not is_te(self._config):
            return None
        if self._config.fp8:
            return "the layer computes in FP8"
        return _why_not_call(layer, x, self._config) or why_not_delayed(layer)


def _attention(job: Job, config: Any) -> Iterator[tuple[str, str | None]]:
    if "*" not in kinds_of(job, config):
        return
    kinds = config.cp_comm_type if isinstance(config.cp_comm_type, list) else [config.cp_comm_type]
    for kind in dict.fromkeys(kinds):
        for name, reason in _attention_of(kind, job, config):
            yield name if len(set(kinds)) == 1 else f"{name}, layers with {kind}", reason


def _why_not_exchanged(kind: str, ranks: int, config: Any) -> str | None:
    """Why the exchanges of attentions with this ``cp_comm_type`` are native, or None."""
    reason = why_not_comm_type(kind)
    if reason is None and kind == "a2a+p2p":
        reason = why_not_levels(config.hierarchical_context_parallel_sizes)
        if not is_te(config):
            reason = "Megatron's local attention has no a2a+p2p"
    if reason is None and has_sparse_attention(config):
        reason = "the attention of dsa is not Transformer Engine's"
    if reason is None and config.hybrid_context_parallel:
        reason = "the context parallel group changes from batch to batch"
    if reason is None:
        try:
            config_of_one_rank(config, ranks)
        except NotSupportedError as error:
            reason = str(error)
    if reason is None and is_te(config):
        reason = why_not_te_attention(config, is_training=True)
    return reason


def _attention_of(kind: str, job: Job, config: Any) -> Iterator[tuple[str, str | None]]:
    model = job.model
    sizes = config.hierarchical_context_parallel_sizes
    cp = sizes[0] if kind == "a2a+p2p" and sizes else job.cp
    reason = _why_not_exchanged(kind, cp, config)
    mla, tp = config.multi_latent_attention, job.tp
    head_dim = config.qk_head_dim + config.qk_pos_emb_head_dim if mla else model.channels
    value_dim = config.v_head_dim if mla else model.channels
    shape = AttentionShape(model.heads // tp, (model.heads if mla else model.groups) // tp, head_dim, value_dim)
    rows = (model.seq_length // job.cp, model.micro_batch_size)
    like = tensor(*rows, model.heads // tp, head_dim, dtype=config.params_dtype)
    yield "attention: exchanges", reason or EXCHANGE.unsupported_tensors(UlyssesCall(_ranks(cp), shape, rows, like))
    if reason is not None:
        return
    x = tensor(rows[0], rows[1], config.hidden_size, dtype=config.params_dtype)
    qkv, out = (
        _weight(*sizes, config=config)
        for sizes in (
            ((model.heads + 2 * model.groups) * model.channels // tp, config.hidden_size),
            (config.hidden_size, model.heads * value_dim // tp),
        )
    )
    is_ours = "tp" in job.words.get("ditron", "tp")
    adds_bias = bool(config.add_bias_linear or config.add_qkv_bias)
    qkv_layer = _linear_layer("column", config, qkv, adds_bias=adds_bias, is_ours=is_ours)
    out_layer = _linear_layer("row", config, out, adds_bias=False, is_ours=is_ours)
    asked = _Asked(config)
    attention = _self_attention(config)
    if mla:
        fused: str | None = "multi-latent attention has its own projections"
    else:
        fused = DitronSelfAttention._why_not_fused(attention, (), {})
    reason = fused or asked.why_not(qkv_layer, out_layer, x)
    call = UlyssesCall(_ranks(cp), shape, rows, like, (qkv, out))
    yield "attention: QKV projection with its exchange", reason or PROJECTIONS.unsupported_tensors(call)
    reason = asked.why_not_out(out_layer, x) or (None if reason is None else why_not_left(attention))
    yield (
        "attention: output projection with its exchange",
        reason or OUTPUT.unsupported_tensors(call._replace(weights=(out,))),
    )


def _self_attention(config: Any) -> Any:
    """Attributes of a ``SelfAttention``."""
    from megatron.core.transformer.enums import AttnMaskType

    norm = L2Norm(1) if config.qk_l2_norm else torch.nn.RMSNorm(1) if config.qk_layernorm else None
    offloads = config.offload_modules if config.fine_grained_activation_offloading else ()
    return SimpleNamespace(
        config=config,
        core_attention=SimpleNamespace(takes_packed=is_te(config)),
        attn_mask_type=AttnMaskType.causal,
        world_size=config.tensor_model_parallel_size,
        q_layernorm=norm,
        k_layernorm=norm,
        checkpoint_core_attention=(
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        ),
        cache_mla_latents=False,
        offload_qkv_linear="qkv_linear" in offloads,
        offload_core_attention="core_attn" in offloads,
        offload_attn_proj="attn_proj" in offloads,
    )


def _pipeline(job: Job, config: Any) -> Iterator[tuple[str, str | None]]:
    yield "messages between stages", why_not_group(_ranks(job.pp), config)


def _optimizer(job: Job, config: Any) -> Iterator[tuple[str, str | None]]:
    from ditron_train.megatron.muon.optimizer import why_not_muon

    reason = why_not_muon(config.muon_tp_mode, config.muon_coefficient_type)
    if reason is None and config.muon_use_syrk:
        reason = "use_syrk=True is not covered"
    yield "Newton-Schulz steps of matrices", reason or why_not_weight(_weight(1, 1, config=config))
