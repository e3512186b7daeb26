"""The parts of a job's step that features of ``--ditron`` could accelerate, and why each would run natively.

Reasons are those of the gate: the functions that the layers ask as they run are asked here. No layer is built; they
are asked about objects with the attributes of layers, and tensors without memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe import experts as megatron_experts
from megatron.core.transformer.torch_norm import L2Norm

from ditron_train.megatron.compat.config import captured_parts, unsupported_reason_weight
from ditron_train.megatron.ep.coverage import (
    APART,
    IN_NODES,
    unsupported_reason_beside,
    unsupported_reason_config,
    unsupported_reason_flex,
    unsupported_reason_fp8_options,
    unsupported_reason_fp8_recipe,
    unsupported_reason_fp8_rows,
    unsupported_reason_gathered,
    unsupported_reason_kind,
    unsupported_reason_tensors,
)
from ditron_train.megatron.ep.experts import DitronTEGroupedMLP, unsupported_reason_fused
from ditron_train.megatron.plugin.arguments import FEATURES, WITH_OTHERS, Options, fuses_mlp
from ditron_train.megatron.pp.communicator import unsupported_reason_group
from ditron_train.megatron.sp.attention import DitronSelfAttention
from ditron_train.megatron.sp.attention_exchange import (
    config_of_one_rank,
    unsupported_reason_comm_type,
    unsupported_reason_levels,
    unsupported_reason_te_attention,
)
from ditron_train.megatron.sp.exchange import AttentionShape
from ditron_train.megatron.sp.linears import LocalLinears
from ditron_train.megatron.sp.output import unsupported_reason_left
from ditron_train.megatron.sp.spec import EXCHANGE, OUTPUT, PROJECTIONS, UlyssesCall
from ditron_train.megatron.tp.linear_call import LinearCall
from ditron_train.megatron.tp.routing import op_of
from ditron_train.megatron.tp.routing import unsupported_reason_kind as unsupported_reason_linear_kind
from ditron_train.megatron.tp.te_coverage import (
    OFFLOADED,
    WITHOUT_SEQUENCE_PARALLEL,
    unsupported_reason_delayed,
    unsupported_reason_fp8_sizes,
    unsupported_reason_options,
    unsupported_reason_parameters,
    unsupported_reason_recipe_name,
)
from ditron_train.runtime.device import assuming_gpu
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.tools.fp8.recipes import RECIPES
from ditron_train.tools.job.arguments import Job
from ditron_train.tools.job.model import has_sparse_attention, layer_counts, matrices_of

_TARGET = "sm_90"  # of the GPUs that are assumed: Hopper
_DEVICE = torch.device("cuda", 0)  # one that no machine needs to have: tensors have no memory
# Layers that normalise what the residual connection brings.
_NORMED = ("attention: linear_qkv", "MLP: linear_fc1", "Mamba: in_proj", "gated delta net: in_proj")
# Scopes of ``--cuda-graph-scope`` that a layer's call is a part of, by how its name begins.
_GRAPH_SCOPES = {
    "attention": frozenset({"attn"}),
    "MLP": frozenset({"mlp"}),
    "Mamba": frozenset({"mamba"}),
    "shared experts": frozenset({"moe", "moe_router"}),
}
_RECIPES = {**RECIPES, "mxfp8": "MXFP8BlockScaling"}
_PROBS_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
_ANY_VOCABULARY = 256  # times the unit that Megatron-LM pads to: reasons depend on nothing else

#: Name and reason for the native path, or None.
_Found = Iterator[tuple[str, str | None]]


@dataclass(frozen=True)
class Part:
    """A part of a training step: the feature that accelerates it, its name, and why it is native, or None."""

    feature: str
    name: str
    native_because: str | None


class _Group:
    """A process group, of which nothing but the number of ranks is asked."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


class _Layer(SimpleNamespace):
    """A layer that feature ``tp`` has replaced."""


_MegatronLayer = type("_MegatronLayer", (SimpleNamespace,), {"__module__": "megatron.core.tensor_parallel.layers"})


def parts_of(job: Job, features: tuple[str, ...]) -> tuple[list[Part], list[str]]:
    """The parts that ``features`` could accelerate, and what has nothing to do in the job, in words."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    config = job.config
    sizes = {
        "tp": config.tensor_model_parallel_size,
        "sp": config.context_parallel_size,
        "ep": config.expert_model_parallel_size,
        "pp": config.pipeline_model_parallel_size,
    }
    options = Options(
        tuple(name for name in features if name not in WITH_OTHERS and name in _PARTS_OF),
        sizes={name: size for name, size in sizes.items() if name in features},
        expert_slices=config.expert_tensor_parallel_size,
        gathers_tokens=config.moe_token_dispatcher_type == "allgather",
        optimizer=config.optimizer,
    )
    idle = list(options.idle())
    if not options.overlapping:
        idle += [f"{name}: {FEATURES[name]}; nothing is overlapped" for name in features]
    parts: list[Part] = []
    for feature in options.overlapping:
        if any(line.startswith(f"{feature}:") for line in idle):
            continue
        with assuming_gpu(_TARGET), FakeTensorMode(), torch.no_grad():
            found = [Part(feature, *entry) for entry in _PARTS_OF[feature](job, config)]
        parts += found
        if not found:
            idle.append(f"{feature}: the model has no such layers")
    return parts, idle


def _tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=_DEVICE)


def _weight(*sizes: int, config: Any) -> torch.Tensor:
    """A weight of a tensor parallel layer."""
    weight = _tensor(*sizes, dtype=config.params_dtype)
    weight.gtp_remat_size = config.gtp_weight_remat_size  # type: ignore[attr-defined]
    return weight


def _is_te(config: Any) -> bool:
    return bool(config.transformer_impl == "transformer_engine")


def _recipe_of(config: Any) -> str | None:
    """The class of the recipe that Transformer Engine's layers compute in, None in 16 bits."""
    if config.fp4:
        return "NVFP4BlockScaling"
    return _RECIPES.get(config.fp8_recipe, config.fp8_recipe) if config.fp8 else None


def _linear_layer(kind: str, config: Any, weight: torch.Tensor, *, adds_bias: bool, is_fused: bool = True) -> Any:
    """Attributes of a tensor parallel linear layer, local or Transformer Engine's."""
    size = config.tensor_model_parallel_size
    return (_Layer if is_fused else _MegatronLayer)(
        parallel_mode=kind,
        te_quant_params=config.quant_recipe,
        ub_overlap_ag_fprop=config.tp_comm_overlap,
        parameters=lambda: [weight],
        sequence_parallel=config.sequence_parallel,
        tp_size=size,
        tp_group=_Group(size),
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


def _linears(job: Job, config: Any) -> _Found:
    yield from _linears_of_a_layer(job, config)
    if config.first_last_layers_bf16 and _recipe_of(config) is not None:
        config = copy.copy(config)
        config.fp8 = config.fp4 = None
        for name, reason in _linears_of_a_layer(job, config):
            if name.startswith(("attention", "MLP", "shared")):
                yield f"{name}, first and last layers in 16 bits", reason


def _linears_of_a_layer(job: Job, config: Any) -> _Found:
    tp, sequence = config.tensor_model_parallel_size, config.seq_length // config.context_parallel_size
    vocabulary = _ANY_VOCABULARY * config.make_vocab_size_divisible_by * tp
    for name, kind, n, k, adds_bias, _ in matrices_of(job, any_vocabulary=vocabulary):
        local = (n // tp, k) if kind == "column" else (n, k // tp)
        weight = _weight(*local, config=config)
        rows = sequence // tp if kind == "column" and config.sequence_parallel else sequence
        x = _tensor(rows, config.micro_batch_size, local[1], dtype=config.params_dtype)
        reason = unsupported_reason_weight(weight)
        if _is_te(config) and name != "output_layer":
            layer = _linear_layer(kind, config, weight, adds_bias=adds_bias)
            if name.startswith("shared") and config.moe_shared_expert_overlap:
                layer.parallel_mode = None
            wide = config.fp32_residual_connection and name in _NORMED
            reason = _unsupported_reason_mlp(name, config) or _unsupported_reason_te(
                layer, x.float() if wide else x, config
            )
            if _recipe_of(config) is not None:
                has_blocks = config.fp8_recipe == "blockwise"
                reason = _unsupported_reason_captured(name, config) or reason
                yield name, reason or unsupported_reason_fp8_sizes(kind, x, weight, tp, has_blocks=has_blocks)
                continue
        reason = reason or unsupported_reason_linear_kind(kind, config.sequence_parallel)
        call = LinearCall(x, weight, _Group(tp))  # type: ignore[arg-type]
        yield name, reason or op_of(kind, config.sequence_parallel).unsupported_reason(call)


def _unsupported_reason_mlp(name: str, config: Any) -> str | None:
    """The operation fuser calls no linear layer."""
    is_fused = name.startswith("MLP:") and fuses_mlp(config)
    return "Transformer Engine's operation fuser computes the MLP" if is_fused else None


def _unsupported_reason_captured(name: str, config: Any) -> str | None:
    """As the layers ask in FP8, whoever makes the graphs."""
    parts = captured_parts(config)
    if parts is None:
        return None
    scopes = next((scopes for start, scopes in _GRAPH_SCOPES.items() if name.startswith(start)), frozenset())
    is_captured = bool(scopes) and (not parts or bool(scopes & parts))
    return "FP8 is calibrated or captured" if is_captured else None


def _unsupported_reason_te(layer: Any, x: torch.Tensor, config: Any) -> str | None:
    """As ``te_layers`` ask."""
    recipe = _recipe_of(config)
    if recipe is not None and not config.sequence_parallel:
        return WITHOUT_SEQUENCE_PARALLEL
    return _unsupported_reason_call(layer, x, config) or (
        None if recipe is None else unsupported_reason_delayed(layer)
    )


def _unsupported_reason_call(layer: Any, x: torch.Tensor, config: Any) -> str | None:
    reason, recipe = None, _recipe_of(config)
    if recipe is not None:
        reason = unsupported_reason_recipe_name(recipe)
        if reason is None and config.fp8_param:
            reason = unsupported_reason_parameters([recipe])
    return reason or unsupported_reason_options(layer, x) or (OFFLOADED if config.cpu_offloading else None)


class _Linears(LocalLinears):
    """Projections of an attention that is not built."""

    qkv_kinds, out_kind = (SimpleNamespace,), SimpleNamespace

    def __init__(self, config: Any) -> None:
        self._config = config

    def _unsupported_reason_layer(self, layer: Any, x: torch.Tensor) -> str | None:
        if not _is_te(self._config):
            return None
        if self._config.fp8:
            return "the layer computes in FP8"
        return _unsupported_reason_call(layer, x, self._config) or unsupported_reason_delayed(layer)


def _attention(job: Job, config: Any) -> _Found:
    if not layer_counts(job)["*"]:
        return
    kinds = config.cp_comm_type if isinstance(config.cp_comm_type, list) else [config.cp_comm_type]
    for kind in dict.fromkeys(kinds):
        for name, reason in _attention_of(kind, job, config):
            yield name if len(set(kinds)) == 1 else f"{name}, layers with {kind}", reason


def _unsupported_reason_exchanged(kind: str, ranks: int, job: Job, config: Any) -> str | None:
    """Why the exchanges of attentions with this ``cp_comm_type`` are native, or None."""
    reason = unsupported_reason_comm_type(kind)
    if kind == "all_gather":
        reason = None if _is_te(config) else "Megatron's local attention has no all_gather"
        if config.multi_latent_attention:
            reason = "Transformer Engine's all_gather refuses multi-latent attention"
    if reason is None and kind == "a2a+p2p":
        reason = unsupported_reason_levels(config.hierarchical_context_parallel_sizes)
        if not _is_te(config):
            reason = "Megatron's local attention has no a2a+p2p"
    if reason is None and has_sparse_attention(job):
        reason = "the attention of dsa is not Transformer Engine's"
    if reason is None and config.hybrid_context_parallel:
        reason = "the context parallel group changes from batch to batch"
    if reason is None and kind != "all_gather":
        try:
            config_of_one_rank(config, ranks)
        except NotSupportedError as error:
            reason = str(error)
    if reason is None and _is_te(config):
        reason = unsupported_reason_te_attention(config, is_training=True)
    return reason


def _attention_of(kind: str, job: Job, config: Any) -> _Found:
    model, tp, mla = job.model, config.tensor_model_parallel_size, config.multi_latent_attention
    sizes = config.hierarchical_context_parallel_sizes
    cp = sizes[0] if kind == "a2a+p2p" and sizes else config.context_parallel_size
    reason = _unsupported_reason_exchanged(kind, cp, job, config)
    head_dim = config.qk_head_dim + config.qk_pos_emb_head_dim if mla else model.channels
    value_dim = config.v_head_dim if mla else model.channels
    shape = AttentionShape(model.heads // tp, (model.heads if mla else model.groups) // tp, head_dim, value_dim)
    rows = (model.seq_length // config.context_parallel_size, model.micro_batch_size)
    like = _tensor(*rows, model.heads // tp, head_dim, dtype=config.params_dtype)
    group: Any = _Group(cp)
    name = "attention: gathers of keys and values" if kind == "all_gather" else "attention: exchanges"
    yield name, reason or EXCHANGE.unsupported_tensors(UlyssesCall(group, shape, rows, like))
    if reason is not None or kind == "all_gather":
        return
    x = _tensor(*rows, config.hidden_size, dtype=config.params_dtype)
    qkv = _weight((model.heads + 2 * model.groups) * model.channels // tp, config.hidden_size, config=config)
    out = _weight(config.hidden_size, model.heads * value_dim // tp, config=config)
    is_fused = "tp" in (config.ditron or ("tp",))
    adds_bias = bool(config.add_bias_linear or config.add_qkv_bias)
    qkv_layer = _linear_layer("column", config, qkv, adds_bias=adds_bias, is_fused=is_fused)
    out_layer = _linear_layer("row", config, out, adds_bias=False, is_fused=is_fused)
    linears, attention = _Linears(config), _self_attention(config)
    native: str | None = "multi-latent attention has its own projections"
    if not mla:
        native = DitronSelfAttention._unsupported_reason_fused(attention, (), {})
    reason = native or linears.unsupported_reason(qkv_layer, out_layer, x)
    call = UlyssesCall(group, shape, rows, like, (qkv, out))
    yield "attention: QKV projection with its exchange", reason or PROJECTIONS.unsupported_tensors(call)
    reason = linears.unsupported_reason_out(out_layer, x) or (
        None if reason is None else unsupported_reason_left(attention)
    )
    yield (
        "attention: output projection with its exchange",
        reason or OUTPUT.unsupported_tensors(call._replace(weights=(out,))),
    )


def _self_attention(config: Any) -> Any:
    """Attributes of a ``SelfAttention``."""
    norm = L2Norm(1) if config.qk_l2_norm else torch.nn.RMSNorm(1) if config.qk_layernorm else None
    offloads = config.offload_modules if config.fine_grained_activation_offloading else ()
    return SimpleNamespace(
        config=config,
        core_attention=SimpleNamespace(takes_packed=_is_te(config)),
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


def _experts(job: Job, config: Any) -> _Found:
    if not layer_counts(job)["E"] or not config.num_moe_experts:
        return
    slices, kind = config.expert_tensor_parallel_size, config.moe_token_dispatcher_type
    dispatcher = SimpleNamespace(config=config, ep_size=config.expert_model_parallel_size, tp_size=slices)
    tokens = config.seq_length // config.context_parallel_size * config.micro_batch_size
    tokens //= config.tensor_model_parallel_size if config.sequence_parallel else 1
    hidden = _tensor(tokens, config.hidden_size, dtype=config.params_dtype)
    dtype = _PROBS_DTYPES.get(config.moe_router_dtype or "", config.params_dtype)
    gathered = kind == "allgather"
    of_kind = {"allgather": unsupported_reason_gathered, "flex": unsupported_reason_flex}
    reason = unsupported_reason_kind(kind) or of_kind.get(kind, unsupported_reason_config)(dispatcher)
    dtype = torch.float32 if kind == "flex" else dtype
    probs = _tensor(tokens, config.num_moe_experts, dtype=dtype)
    reason = reason or unsupported_reason_tensors(hidden, probs, None, gathered=gathered)
    yield "experts: dispatch and combine", reason
    if reason is None:
        apart = APART if kind == "flex" else None if gathered else unsupported_reason_beside(slices)
        apart = apart or (IN_NODES if config.overlap_moe_expert_parallel_comm else None)
        yield "experts: GEMMs in one kernel with them", apart or _unsupported_reason_fused(config)
        if _recipe_of(config) is not None and _is_te(config) and config.moe_grouped_gemm:
            yield "experts: grouped quantization to FP8", _unsupported_reason_quantised(config)


def _unsupported_reason_quantised(config: Any) -> str | None:
    """As the grouped linear layers ask in FP8."""
    is_plain = config.quant_recipe is None and not config.add_bias_linear and not config.cpu_offloading
    reason = unsupported_reason_fp8_options(is_plain=is_plain, has_fp8_parameters=bool(config.fp8_param))
    return (
        reason
        or unsupported_reason_fp8_recipe([str(_recipe_of(config))])
        or unsupported_reason_fp8_rows(config.params_dtype)
    )


def _unsupported_reason_fused(config: Any) -> str | None:
    if not (_is_te(config) and config.moe_grouped_gemm):
        return unsupported_reason_fused(object.__new__(megatron_experts.SequentialMLP), _DEVICE)
    if getattr(config, "moe_use_legacy_grouped_gemm", False):
        return unsupported_reason_fused(object.__new__(megatron_experts.GroupedMLP), _DEVICE)
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
    return unsupported_reason_fused(experts, _DEVICE)


def _pipeline(job: Job, config: Any) -> _Found:
    group: Any = _Group(config.pipeline_model_parallel_size)
    yield "messages between stages", unsupported_reason_group(group, config)


def _optimizer(job: Job, config: Any) -> _Found:
    from ditron_train.megatron.muon.optimizer import unsupported_reason_muon

    reason = unsupported_reason_muon(config.muon_tp_mode, config.muon_coefficient_type)
    if reason is None and config.muon_use_syrk:
        reason = "use_syrk=True is not covered"
    yield "Newton-Schulz steps of matrices", reason or unsupported_reason_weight(_weight(1, 1, config=config))


#: What finds the parts of a feature; of those that are not here nothing is estimated.
_PARTS_OF = {"tp": _linears, "sp": _attention, "ep": _experts, "pp": _pipeline, "muon": _optimizer}
