"""Which layers a job's model has, and the matrices of those that are tensor parallel, told from its arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

import torch

from ditron_train.tools.predict.megatron_arguments import Job

__all__ = ["DEVICE", "Matrix", "has_sparse_attention", "kinds_of", "matrices_of", "tensor"]

DEVICE = torch.device("cuda", 0)  # one that no machine needs to have: tensors have no memory

#: Name, kind, whole N and K of a tensor parallel layer, and whether it adds a bias itself.
Matrix = tuple[str, Literal["column", "row"], int, int, bool]


_LATENT = "+D"  # letters of attentions with --multi-latent-attention, D of those over a part of the keys


def _some(frequency: Any) -> bool:
    """Whether a pattern of layers (``--moe-layer-freq``, ``--linear-attention-freq``) leaves some without."""
    return frequency > 1 if isinstance(frequency, int) else re.search(r"\b0\b", str(frequency)) is not None


def kinds_of(job: Job, config: Any) -> set[str]:
    """What the model's layers are, as a hybrid model's letters say: * attention (any), - MLP, E experts, M Mamba, G
    gated delta net."""
    if config.hybrid_pattern is not None:
        return {"*" if kind in _LATENT else kind for kind in config.hybrid_pattern}
    if config.is_hybrid_model:
        shares = {"*": config.hybrid_attention_ratio, "-": config.hybrid_mlp_ratio}
        return {"M", *(kind for kind, share in shares.items() if share)}
    kinds = {"*"} if job.model.experts is None else {"*", "E"}
    if job.model.experts is None or _some(config.moe_layer_freq):
        kinds.add("-")
    if config.experimental_attention_variant in ("gated_delta_net", "gdn", "gdn2"):
        kinds.add("G")
        if config.linear_attention_freq is None or not _some(config.linear_attention_freq):
            kinds.remove("*")
    return kinds


def has_sparse_attention(config: Any) -> bool:
    """Whether every attention is one over a part of the keys (DSA)."""
    letters = set(config.hybrid_pattern or "")
    return config.experimental_attention_variant == "dsa" or "D" in letters and letters.isdisjoint("*+")


def _of_states(config: Any, kinds: set[str]) -> Iterator[Matrix]:
    """As ``matrices_of``, of layers with a state."""
    hidden = int(config.hidden_size)
    if "M" in kinds:
        heads = config.mamba_num_heads or 2 * hidden // config.mamba_head_dim
        inner = heads * config.mamba_head_dim
        rows = 2 * inner + 2 * config.mamba_num_groups * config.mamba_state_dim + heads
        yield "Mamba: in_proj", "column", rows, hidden, False
        yield "Mamba: out_proj", "row", hidden, inner, False
    if "G" in kinds:
        keys, heads = config.linear_key_head_dim * config.linear_num_key_heads, config.linear_num_value_heads
        values = config.linear_value_head_dim * heads
        gates = 2 * keys + values if config.experimental_attention_variant == "gdn2" else 2 * heads
        yield "gated delta net: in_proj", "column", 2 * (keys + values) + gates, hidden, False
        yield "gated delta net: out_proj", "row", hidden, values, False


def matrices_of(job: Job, config: Any) -> Iterator[Matrix]:
    """Name, kind, whole N and K of the tensor parallel layers, and whether they add a bias themselves."""
    model, hidden, kinds = job.model, int(config.hidden_size), kinds_of(job, config)
    yield from _of_states(config, kinds)
    if "*" not in kinds:
        pass
    elif config.multi_latent_attention:
        heads, q_dim = model.heads, config.qk_head_dim + config.qk_pos_emb_head_dim
        name, rank = ("q_up_proj", config.q_lora_rank) if config.q_lora_rank else ("q_proj", hidden)
        yield f"attention: linear_{name}", "column", heads * q_dim, rank, False
        kv_dim = config.qk_head_dim + config.v_head_dim
        yield "attention: linear_kv_up_proj", "column", heads * kv_dim, config.kv_lora_rank, False
        yield "attention: linear_proj", "row", hidden, heads * config.v_head_dim, False
    else:
        rows = (model.heads * (2 if config.attention_output_gate else 1) + 2 * model.groups) * model.channels
        has_bias = bool(config.add_bias_linear or config.add_qkv_bias)
        yield "attention: linear_qkv", "column", rows, hidden, has_bias
        yield "attention: linear_proj", "row", hidden, model.heads * model.channels, False
    gates = 2 if config.gated_linear_unit else 1
    if "-" in kinds:
        yield "MLP: linear_fc1", "column", gates * model.ffn, hidden, False
        yield "MLP: linear_fc2", "row", hidden, model.ffn, False
    shared = config.moe_shared_expert_intermediate_size
    if model.experts is not None and shared:
        yield "shared experts: linear_fc1", "column", gates * shared, hidden, False
        yield "shared experts: linear_fc2", "row", hidden, shared, False
    if config.mtp_num_layers:
        yield "multi-token prediction: eh_proj", "column", hidden, 2 * hidden, False
    yield "output_layer", "column", model.vocabulary or 0, hidden, False


def tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """One of this shape, where tensors have no memory (``FakeTensorMode``)."""
    return torch.empty(*shape, dtype=dtype, device=DEVICE)
