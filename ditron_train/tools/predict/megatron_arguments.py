"""Megatron's own arguments, as far as they say what a step takes; megatron need not be installed, no model is built.

What is not known here is ignored and listed. Defaults are Megatron-LM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from ditron_train.costs import Recipe
from ditron_train.runtime.errors import SettingError
from ditron_train.tools.cases import ModelSizes

_NUMBERS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "seq_length", "micro_batch_size", "global_batch_size", "vocab_size", "padded_vocab_size",
    "make_vocab_size_divisible_by", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "context_parallel_size", "expert_model_parallel_size", "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank", "num_experts", "moe_ffn_hidden_size", "moe_router_topk",
    "expert_tensor_parallel_size",
)  # fmt: skip
_LEVELS = "hierarchical_context_parallel_sizes"
_WORDS = (
    "optimizer", "cp_comm_type", "recompute_granularity", "transformer_impl", "position_embedding_type", "fp8_format",
    "fp8_recipe", "moe_token_dispatcher_type", "ditron", "cuda_graph_impl", "cuda_graph_scope",
    _LEVELS,
)  # fmt: skip
_LISTS = ("cuda_graph_scope", _LEVELS)  # words of several values
_FLAGS = (
    "swiglu", "group_query_attention", "sequence_parallel", "use_distributed_optimizer", "overlap_grad_reduce",
    "overlap_param_gather", "untie_embeddings_and_output_weights", "bf16", "fp16", "no_overlap_p2p_communication",
    "deterministic_mode", "no_gradient_accumulation_fusion", "fp8_param_gather",
    "use_tp_pp_dp_mapping",
)  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "micro_batch_size": 1, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1, "expert_model_parallel_size": 1, "moe_router_topk": 2, "optimizer": "adam",
    "make_vocab_size_divisible_by": 128, "vocab_size": 32000, "cp_comm_type": "p2p",
    "transformer_impl": "transformer_engine", "position_embedding_type": "learned_absolute",
    "fp8_recipe": "delayed", "moe_token_dispatcher_type": "allgather",
}  # fmt: skip
_MOST = 1 << 20  # of other sizes: what is estimated tile by tile takes its time
_MOST_OF = {"seq_length": 1 << 22, "global_batch_size": 1 << 24, "num_experts": 1 << 14}
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
_OTHER_NAMES = {"encoder_num_layers": "num_layers", "encoder_seq_length": "seq_length"}
# Stages have the layers that these say, not all as many.
_UNEVEN = {
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A training job.

    Attributes:
        model: One layer of it.
        num_layers: All; stages may have more or fewer than others.
        global_batch: Sequences of a step; None: one microbatch of each replica.
        tp, pp, cp, ep: Parallel sizes.
        chunks: Virtual stages of a rank.
        optimizer: ``adam``, ``muon``, ``dist_muon``, ...
        flags: Megatron's switches that are on.
        words: Its named choices, such as ``cp_comm_type``.
        ignored: Arguments that the model does not look at.
        expert_slices: Tensor parallel ranks that every expert is split over.
        fp8: The recipe of FP8 layers; None in 16 bits, and of a recipe that the model does not know.
    """

    model: ModelSizes
    num_layers: int
    global_batch: int | None
    tp: int
    pp: int
    cp: int
    ep: int
    chunks: int
    optimizer: str
    flags: frozenset[str]
    words: dict[str, str]
    ignored: tuple[str, ...] = ()
    expert_slices: int = 1

    @property
    def fp8(self) -> Recipe | None:
        """See the class."""
        recipe = self.words.get("fp8_recipe")
        known = "fp8_format" in self.words and recipe in get_args(Recipe)
        return recipe if known else None  # type: ignore[return-value]

    @property
    def head_ranks(self) -> int:
        """Context parallel ranks that share out an attention's heads: all by Ulysses, the inner level of ``a2a+p2p``,
        one where keys and values go round."""
        kind = self.words.get("cp_comm_type")
        if kind == "a2a+p2p":
            return int(self.words.get(_LEVELS, "1").split()[0])
        return self.cp if kind == "a2a" else 1

    @property
    def is_layer_wise(self) -> bool:
        """Whether replicas share out Muon's matrices, and their state, as whole ones: ``dist_muon``, or from
        megatron-core 0.18 on ``muon`` with ``--use-distributed-optimizer``."""
        return self.optimizer == "dist_muon" or (
            "muon" in self.optimizer and "use_distributed_optimizer" in self.flags
        )

    @property
    def moves_tokens(self) -> bool:
        """Whether tokens go to experts of other ranks by a dispatcher that ``--ditron ep`` takes over."""
        kind = self.words.get("moe_token_dispatcher_type", "allgather")
        return kind != "flex" and self.ep * (self.expert_slices if kind == "allgather" else 1) > 1

    @property
    def replica_stride(self) -> int:
        """Between ranks that hold the same dense weights. Stages are farthest apart, but for those of
        ``--use-tp-pp-dp-mapping``, which replicas lie around."""
        return self.tp * self._inner_stages

    @property
    def expert_stride(self) -> int:
        """Between ranks that hold the same experts."""
        return self.ep * self.expert_slices * self._inner_stages

    @property
    def _inner_stages(self) -> int:
        return self.pp if "use_tp_pp_dp_mapping" in self.flags else 1

    def stage_stride(self, world_size: int) -> int:
        """Between ranks of neighbouring stages."""
        return self.tp * self.cp if self._inner_stages > 1 else world_size // self.pp

    def data_parallel(self, world_size: int) -> int:
        """Replicas.

        Raises:
            SettingError: The sizes do not divide the ranks, or the batch the replicas.
        """
        model_ranks = self.tp * self.pp * self.cp
        if world_size % model_ranks:
            raise SettingError(f"{world_size} GPUs do not divide into TP {self.tp} x PP {self.pp} x CP {self.cp}")
        replicas = world_size // model_ranks
        if (self.global_batch or 0) % (replicas * self.model.micro_batch_size):
            raise SettingError(
                f"--global-batch-size {self.global_batch} does not divide over {replicas} replicas of "
                f"--micro-batch-size {self.model.micro_batch_size}"
            )
        return replicas

    def microbatches(self, world_size: int) -> int:
        """Of a step, on each replica."""
        replicas = self.data_parallel(world_size)
        return 1 if self.global_batch is None else self.global_batch // (replicas * self.model.micro_batch_size)

    def expert_replicas(self, world_size: int) -> int:
        """Ranks that hold the same experts."""
        return max(world_size // (self.pp * self.ep * self.expert_slices), 1)


def words_by_name(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Arguments with their values; what stands in front of the first is the script and its launcher."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found.append((name.replace("-", "_"), [value] if equals else []))
        elif found:
            found[-1][1].append(word)
    return found


def _number(name: str, values: list[str]) -> int:
    option = "--" + name.replace("_", "-")
    try:
        (value,) = values
        number = int(value)
    except ValueError:
        raise SettingError(f"{option} takes one number, not {' '.join(values) or 'nothing'}") from None
    most = _MOST_OF.get(name, _MOST)
    if not 1 <= number <= most:
        raise SettingError(f"{option} has to be from 1 to {most}")
    return number


def parse_job(words: Sequence[str]) -> Job:
    """The job that ``pretrain_gpt.py``'s arguments describe; launchers and paths in front of them are passed over.

    Raises:
        SettingError: A size is missing, is no number, or does not divide.
    """
    known: dict[str, Any] = dict(_DEFAULTS)
    said, flags, ignored = {}, set(), []
    for given, values in words_by_name(words):
        name = _OTHER_NAMES.get(given, given)
        if name in _NUMBERS:
            known[name] = _number(name, values)
        elif name in _WORDS and values:
            if name == _LEVELS:
                values = [str(_number(name, [value])) for value in values]
            known[name] = said[name] = " ".join(values) if name in _LISTS else values[0]
        elif name in _FLAGS:
            flags.add(name)
        else:
            ignored.append("--" + name.replace("_", "-"))
    names, pattern = {name for name, _ in words_by_name(words)}, hybrid_pattern(words)
    if pattern is not None:
        known["num_layers"] = _number("num_layers", [str(len(pattern.replace("|", "")))])
    missing = ["--" + name.replace("_", "-") for name in _NEEDED if name not in known]
    if missing:
        raise SettingError(f"the job's arguments lack {', '.join(missing)}")
    tp, pp = known["tensor_model_parallel_size"], known["pipeline_model_parallel_size"]
    return Job(
        model=_model(known, flags, tp),
        num_layers=known["num_layers"],
        global_batch=known.get("global_batch_size"),
        tp=tp,
        pp=pp,
        cp=known["context_parallel_size"],
        ep=known["expert_model_parallel_size"],
        chunks=_chunks(known, pp, pattern or "", is_even=_UNEVEN.isdisjoint(names)),
        optimizer=known["optimizer"],
        flags=frozenset(flags),
        words={name: known[name] for name in (*_WORDS,) if name in known},
        ignored=tuple(dict.fromkeys(ignored)),
        expert_slices=known.get("expert_tensor_parallel_size", tp),
    )


def _model(known: dict[str, Any], flags: set[str], tp: int) -> ModelSizes:
    hidden, heads = known["hidden_size"], known["num_attention_heads"]
    groups = known.get("num_query_groups", heads) if "group_query_attention" in flags else heads
    swiglu = "swiglu" in flags
    ffn = known.get("ffn_hidden_size") or (int(4 * hidden * 2 / 3) // 64 * 64 if swiglu else 4 * hidden)
    unit = known["make_vocab_size_divisible_by"] * tp
    vocabulary = known.get("padded_vocab_size") or -(-known["vocab_size"] // unit) * unit
    for what, size, parts in (("heads", heads, tp), ("query groups", groups, 1), ("FFN", ffn, tp)):
        if size % parts:
            raise SettingError(f"{size} {what} do not divide over --tensor-model-parallel-size {parts}")
    channels, experts, topk = (
        known.get("kv_channels", hidden // heads),
        known.get("num_experts"),
        known["moe_router_topk"],
    )
    if not channels or not ffn:
        raise SettingError(f"--hidden-size {hidden} is too small for {heads} heads or its feed-forward layer")
    if heads * channels > _MOST:
        raise SettingError(f"{heads} heads of {channels} channels are more than {_MOST} features")
    if experts is not None and topk > experts:
        raise SettingError(f"--moe-router-topk {topk} is more than --num-experts {experts}")
    return ModelSizes(
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        groups=groups,
        channels=channels,
        seq_length=known["seq_length"],
        micro_batch_size=known["micro_batch_size"],
        swiglu=swiglu,
        vocabulary=vocabulary,
        experts=experts,
        topk=topk,
        expert_ffn=known.get("moe_ffn_hidden_size", ffn),
    )


def hybrid_pattern(words: Sequence[str]) -> str | None:
    """The kinds of a hybrid model's layers, a letter each, with ``|`` between stages where these are said, and without
    those of multi-token prediction; or None."""
    for name, values in words_by_name(words):
        if name in ("hybrid_layer_pattern", "hybrid_override_pattern") and values:
            return values[0].split("/")[0]
    return None


def _chunks(known: dict[str, Any], pp: int, pattern: str, *, is_even: bool) -> int:
    segments = pattern.count("|") + 1
    if segments > 1:
        if segments % pp:
            raise SettingError(f"{segments} segments of the hybrid pattern do not divide over {pp} stages")
        return segments // pp
    if is_even and known["num_layers"] % pp:
        raise SettingError(f"{known['num_layers']} layers do not divide over {pp} stages")
    if "num_virtual_stages_per_pipeline_rank" in known:
        return int(known["num_virtual_stages_per_pipeline_rank"])
    per_chunk = known.get("num_layers_per_virtual_pipeline_stage")
    return 1 if per_chunk is None else max(known["num_layers"] // pp // per_chunk, 1)
