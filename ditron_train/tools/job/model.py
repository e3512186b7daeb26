"""Which layers a job's model has, how often, and the matrices of those that are tensor parallel."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from ditron_train.tools.job.arguments import Job, pattern_values

_LATENT = "+D"  # letters of attentions with --multi-latent-attention, D of those over a part of the keys
_GATED_DELTA = ("gated_delta_net", "gdn", "gdn2")


class Matrix(NamedTuple):
    """A tensor parallel linear layer: whole N and K, and in how many of the model's layers it is."""

    name: str
    kind: Literal["column", "row"]
    n: int
    k: int
    adds_bias: bool
    layers: int


def _every(frequency: Any, layers: int, *, last: bool) -> int:
    """How many of the layers a frequency names: the first or, with ``last``, the last of every so many; or those that
    a pattern says."""
    text = str(frequency)
    if not text.isdecimal():
        return sum(map(bool, pattern_values(text)))
    each = max(int(text), 1)
    return layers // each if last else -(-layers // each)


def layer_counts(job: Job) -> Counter[str]:
    """How many layers of each kind the model has, by a hybrid model's letters: * attention (any), - MLP, E experts, M
    Mamba, G gated delta net. Layers of multi-token prediction are like the last ones."""
    layers = job.num_layers
    if job.hybrid_layer_pattern:
        letters = re.sub(r"[|]", "", job.hybrid_layer_pattern.split("/")[0])
        return Counter("*" if letter in _LATENT else letter for letter in letters)
    if job.is_hybrid_model:
        shares = Counter({"*": round(layers * job.hybrid_attention_ratio), "-": round(layers * job.hybrid_mlp_ratio)})
        return Counter({"M": layers - shares.total(), **+shares})
    counts = Counter({"*": layers, "-": layers})
    frequency = job.linear_attention_freq
    if job.experimental_attention_variant in _GATED_DELTA:
        is_number = str(frequency).isdecimal()  # of layers with attention; a pattern names those without
        named = _every(frequency, layers, last=True) if frequency is not None else 0
        counts["*"] = named if is_number or not frequency else layers - named
        counts["G"] = layers - counts["*"]
    if job.num_moe_experts:
        counts["E"] = _every(job.moe_layer_freq, layers, last=False)
        counts["-"] = layers - counts["E"]
    if job.mtp_num_layers:
        last = "E" if counts["E"] else "-"
        counts.update({"*": job.mtp_num_layers, last: job.mtp_num_layers})
    return +counts


def windowed_layers(job: Job) -> int:
    """How many attentions reach back over ``--window-size`` keys only."""
    layers, has_window = layer_counts(job)["*"], job.window_size is not None and job.window_size[0] >= 0
    frequency = str(job.window_attn_skip_freq or layers + 1)
    named = min(_every(frequency, layers, last=True), layers)  # a number names those without, a pattern those with one
    windowed = layers - named if frequency.isdecimal() else named
    return windowed if has_window else 0


def has_sparse_attention(job: Job) -> bool:
    """Whether every attention is one over a part of the keys (DSA)."""
    letters = set(job.hybrid_layer_pattern or "")
    return job.experimental_attention_variant == "dsa" or "D" in letters and letters.isdisjoint("*+")


def _of_states(job: Job, counts: Counter[str]) -> Iterator[Matrix]:
    hidden = job.hidden_size
    if counts["M"]:
        heads = job.mamba_num_heads or 2 * hidden // job.mamba_head_dim
        inner = heads * job.mamba_head_dim
        rows = 2 * inner + 2 * job.mamba_num_groups * job.mamba_state_dim + heads
        yield Matrix("Mamba: in_proj", "column", rows, hidden, False, counts["M"])
        yield Matrix("Mamba: out_proj", "row", hidden, inner, False, counts["M"])
    if counts["G"]:
        keys, heads = job.linear_key_head_dim * job.linear_num_key_heads, job.linear_num_value_heads
        values = job.linear_value_head_dim * heads
        gates = 2 * keys + values if job.experimental_attention_variant == "gdn2" else 2 * heads
        rows = 2 * (keys + values) + gates
        yield Matrix("gated delta net: in_proj", "column", rows, hidden, False, counts["G"])
        yield Matrix("gated delta net: out_proj", "row", hidden, values, False, counts["G"])


def _of_attention(job: Job, count: int) -> Iterator[Matrix]:
    model, hidden = job.model, job.hidden_size
    if job.multi_latent_attention:
        name, rank = ("q_up_proj", job.q_lora_rank) if job.q_lora_rank else ("q_proj", hidden)
        q_dim, kv_dim = job.qk_head_dim + job.qk_pos_emb_head_dim, job.qk_head_dim + job.v_head_dim
        yield Matrix(f"attention: linear_{name}", "column", model.heads * q_dim, rank, False, count)
        yield Matrix("attention: linear_kv_up_proj", "column", model.heads * kv_dim, job.kv_lora_rank, False, count)
        yield Matrix("attention: linear_proj", "row", hidden, model.heads * job.v_head_dim, False, count)
    else:
        rows = (model.heads * (2 if job.attention_output_gate else 1) + 2 * model.groups) * model.channels
        has_bias = bool(job.add_bias_linear or job.add_qkv_bias)
        yield Matrix("attention: linear_qkv", "column", rows, hidden, has_bias, count)
        yield Matrix("attention: linear_proj", "row", hidden, model.heads * model.channels, False, count)


def matrices_of(job: Job, *, any_vocabulary: int | None = None) -> Iterator[Matrix]:
    """The tensor parallel layers; if only the tokenizer knows the vocabulary, the output layer has ``any_vocabulary``,
    or is left out."""
    counts, hidden, gates = layer_counts(job), job.hidden_size, 2 if job.gated_linear_unit else 1
    yield from _of_states(job, counts)
    if counts["*"]:
        yield from _of_attention(job, counts["*"])
    shared, mtp = job.moe_shared_expert_intermediate_size, job.mtp_num_layers or 0
    for name, width, count in (("MLP", job.ffn_hidden_size, counts["-"]), ("shared experts", shared, counts["E"])):
        if width and count:
            yield Matrix(f"{name}: linear_fc1", "column", gates * width, hidden, False, count)
            yield Matrix(f"{name}: linear_fc2", "row", hidden, width, False, count)
    if mtp:
        yield Matrix("multi-token prediction: eh_proj", "column", hidden, 2 * hidden, False, mtp)
    vocabulary = job.vocabulary or any_vocabulary
    if vocabulary:
        yield Matrix("output_layer", "column", vocabulary, hidden, False, 1 + mtp)
