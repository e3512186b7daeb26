"""The one reader of Megatron's arguments: what ``doctor``, ``predict``, ``verify`` and ``tune`` know of a job.

Names, types and defaults are those of Megatron-LM's own parsers, which ``data/megatron_arguments.json`` holds
(``tests/tools/job/record_arguments.py`` records it). No model is built, and Megatron-LM need not be there.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from ditron_train.megatron.plugin.arguments import add_ditron_args
from ditron_train.runtime.errors import NotSupportedError, SettingError
from ditron_train.runtime.files import parse_json
from ditron_train.runtime.versions import pip_command
from ditron_train.tools.cases import ModelSizes
from ditron_train.tools.job.command import read_command

MEGATRON_VERSIONS = "0.16.1 to 0.20"
_TYPES = {"int": int, "float": float}
# Arguments that are called otherwise than the configuration's fields that they set.
_FIELD_OF = {
    "num_experts": "num_moe_experts", "fp8_param_gather": "fp8_param", "te_precision_config_file": "quant_recipe",
    "encoder_num_layers": "num_layers", "encoder_seq_length": "seq_length",
    "hybrid_override_pattern": "hybrid_layer_pattern", "cuda_graph_scope_deprecated": "cuda_graph_scope",
    "fp4_param_gather": "fp4_param", "moe_router_padding_for_fp8": "moe_router_padding_for_quantization",
}  # fmt: skip
_OLD_GRAPHS = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}
_MOST = 1 << 20  # of a size: what is estimated tile by tile takes its time
_MOST_OF = {"seq_length": 1 << 22, "global_batch_size": 1 << 24}
_SIZES = (
    "num_layers", "hidden_size", "num_attention_heads", "seq_length", "ffn_hidden_size", "num_query_groups",
    "kv_channels", "micro_batch_size", "global_batch_size", "vocab_size", "padded_vocab_size",
    "make_vocab_size_divisible_by", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "num_moe_experts",
    "moe_ffn_hidden_size", "moe_router_topk", "moe_shared_expert_intermediate_size", "mtp_num_layers",
    "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "q_lora_rank", "kv_lora_rank",
    "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers", "mamba_num_heads", "mamba_head_dim", "mamba_num_groups", "mamba_state_dim",
)  # fmt: skip
_VALUED = (*_SIZES, "attention_dropout", "pipeline_model_parallel_layout", "hybrid_layer_pattern", "moe_layer_freq")
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
_HYBRID = ("pretrain_mamba", "pretrain_hybrid")
_OTHER_MODELS = ("pretrain_bert", "pretrain_t5", "pretrain_ict", "pretrain_vision", "pretrain_vlm", "pretrain_retro")


def option(name: str) -> str:
    """``num_layers`` as it is written in a command line."""
    return "--" + name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingError(f"Megatron's arguments: {message}")


@lru_cache(maxsize=2)
def _parser(*, any_choice: bool = False) -> _Parser:
    parser = _Parser(prog="", add_help=False, allow_abbrev=False)
    table = parse_json(resources.files("ditron_train.data").joinpath("megatron_arguments.json").read_bytes())
    for name, entry in table.items():
        keywords = {**entry, "type": _TYPES[entry["type"]]} if "type" in entry else dict(entry)
        if not {"action", "nargs", "choices"} & set(keywords):
            keywords["nargs"] = "?"  # what a variable holds that is not set where this is read
        if any_choice:
            keywords.pop("choices", None)  # a script of one's own may know others
        parser.add_argument(name, **keywords)
    return add_ditron_args(parser)  # type: ignore[return-value]


def nearest(name: str) -> str | None:
    """Megatron's argument whose name is most like ``name``, or None."""
    found = difflib.get_close_matches(name, list(_parser()._option_string_actions), 1, 0.75)
    return found[0] if found else None


class Config(SimpleNamespace):
    """Megatron's configuration as its arguments make it; notes which of its fields are read."""

    def __getattribute__(self, name: str) -> Any:
        fields = super().__getattribute__("__dict__")
        if name in fields:
            fields["fields_read"].add(name)
        return super().__getattribute__(name)


@dataclass(frozen=True)
class Job:
    """A training job.

    Attributes:
        config: All of Megatron's arguments, completed as Megatron completes them, under the names that its
            configuration has for them.
        given: The arguments that were given, as written, and the fields that they set.
        sizes: ``nodes`` and ``gpus_per_node``, if the launcher says them.
        unknown: Arguments that Megatron-LM does not have.
    """

    config: Any
    given: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)

    def has(self, name: str) -> bool:
        """Whether this field was given, and is on."""
        return name in self.given.values() and bool(getattr(self.config, name))

    def without_effect(self) -> list[str]:
        """The given arguments that nothing has looked at."""
        return [name for name, target in self.given.items() if target not in self.config.fields_read]

    @property
    def passed_over(self) -> list[str]:
        """What a reader has to know of arguments that Megatron-LM does not have, a line each."""
        lines = [f"passed over, as Megatron-LM does not have them: {' '.join(self.unknown)}"]
        if not (self.config.bf16 or self.config.fp16):
            lines.append("read as fp32: add --bf16 if the framework sets it by itself")
        return lines if self.unknown else []

    @property
    def vocabulary(self) -> int | None:
        """Padded; None if only the tokenizer knows it."""
        config = self.config
        if config.padded_vocab_size or not config.vocab_size:
            return config.padded_vocab_size
        unit = config.make_vocab_size_divisible_by * config.tensor_model_parallel_size
        return -(-config.vocab_size // unit) * unit

    @property
    def model(self) -> ModelSizes:
        """One transformer layer."""
        config = self.config
        return ModelSizes(
            hidden=config.hidden_size,
            ffn=config.ffn_hidden_size,
            heads=config.num_attention_heads,
            groups=config.num_query_groups,
            channels=config.kv_channels,
            seq_length=config.seq_length,
            micro_batch_size=config.micro_batch_size,
            swiglu=config.gated_linear_unit,
            vocabulary=self.vocabulary,
            experts=config.num_moe_experts,
            topk=config.moe_router_topk,
            expert_ffn=config.moe_ffn_hidden_size or config.ffn_hidden_size,
        )

    @property
    def stages(self) -> tuple[int, int, int]:
        """Layers of the stage that has most, layers of the last one, and virtual stages of a rank.

        Raises:
            SettingError: The layers do not divide.
        """
        config = self.config
        pp, layers = config.pipeline_model_parallel_size, config.num_layers
        if config.pipeline_model_parallel_layout:
            return _of_layout(config.pipeline_model_parallel_layout, pp)
        if config.hybrid_layer_pattern and "|" in config.hybrid_layer_pattern:
            segments = [len(segment) for segment in config.hybrid_layer_pattern.split("/")[0].split("|")]
            if len(segments) % pp:
                raise SettingError(f"{len(segments)} segments of the hybrid pattern do not divide over {pp} stages")
            of_stages = [sum(segments[stage::pp]) for stage in range(pp)]
            return max(of_stages), of_stages[-1], len(segments) // pp
        first, last = config.decoder_first_pipeline_num_layers, config.decoder_last_pipeline_num_layers
        ends = [count for count in (first, last) if count]
        is_last_shorter = config.account_for_loss_in_pipeline_split
        layers += config.account_for_embedding_in_pipeline_split + is_last_shorter - sum(ends)
        inner = pp - len(ends)
        if layers < 0 or (layers % inner if inner else layers):
            raise SettingError(f"{config.num_layers} layers do not divide over {pp} stages")
        each = layers // inner if inner else 0
        per_chunk = config.num_layers_per_virtual_pipeline_stage
        chunks = config.num_virtual_stages_per_pipeline_rank or (each // per_chunk if per_chunk else 1)
        return max(each, *ends, 0), last or each - is_last_shorter, max(chunks, 1)

    def replicas(self, world_size: int) -> int:
        """Data parallel replicas.

        Raises:
            SettingError: The sizes do not divide the ranks, or the batch the replicas.
        """
        config = self.config
        tp, pp, cp = (
            getattr(config, f"{name}_parallel_size") for name in ("tensor_model", "pipeline_model", "context")
        )
        if world_size % (tp * pp * cp):
            raise SettingError(f"{world_size} GPUs do not divide into TP {tp} x PP {pp} x CP {cp}")
        replicas = world_size // (tp * pp * cp)
        if (config.global_batch_size or 0) % (replicas * config.micro_batch_size):
            raise SettingError(
                f"--global-batch-size {config.global_batch_size} does not divide over {replicas} replicas of "
                f"--micro-batch-size {config.micro_batch_size}"
            )
        return replicas


def _of_layout(text: str, pp: int) -> tuple[int, int, int]:
    """As `Job.stages`, of ``--pipeline-model-parallel-layout``, which Megatron's own class reads."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    try:
        layout = PipelineParallelLayerLayout(text, pp).layout
    except (AssertionError, ValueError) as error:
        raise SettingError(f"--pipeline-model-parallel-layout {text}: {error}") from None
    of_stages = [sum(layer == LayerType.decoder for chunk in stage for layer in chunk) for stage in layout]
    return max(of_stages), of_stages[-1], len(layout[0])


def pattern_values(text: str, most: int = 4096) -> list[int]:
    """The numbers that a pattern such as ``([0]*3+[1]*5)*2`` says.

    Raises:
        SettingError: It is none, or too long.
    """

    def values(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value <= most:
            return node.value
        if isinstance(node, ast.List):
            return [values(item) for item in node.elts]
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
            left, right = values(node.left), values(node.right)
            if isinstance(node.op, ast.Add):
                return left + right
            if (len(left) * right if isinstance(left, list) else right) <= most:
                return left * right
        raise ValueError

    try:
        found = values(ast.parse(text, mode="eval").body)
        return found if isinstance(found, list) else [found]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise SettingError(f"{text} is no pattern of layers, such as ([0]*1+[1]*3)*2") from None


def read_job(words: Sequence[str], *, allow_unknown: bool = False, needs: Sequence[str] = _NEEDED) -> Job:
    """The job that a training command describes: its words, pasted text, or a file (`read_command`).

    Raises:
        SettingError: An argument is unknown (unless that is allowed) or has a value that it cannot have, or one of
            ``needs`` is missing.
    """
    command = read_command(words)
    if command.script.startswith(_OTHER_MODELS):
        raise SettingError(f"{command.script} trains another kind of model; GPT and hybrid models are read")
    arguments, extra = _parser(any_choice=allow_unknown).parse_known_args(command.arguments)
    unknown = [word.partition("=")[0] for word in extra if word.startswith("-")] or extra
    if unknown and not (allow_unknown and extra[0].startswith("--")):
        like = nearest(unknown[0])
        meant = f"; did you mean {like}?" if like else ""
        raise SettingError(
            f"{unknown[0]} is no argument of Megatron-LM {MEGATRON_VERSIONS}{meant} (--allow-unknown passes over "
            "arguments of a script of your own)"
        )
    actions = _parser()._option_string_actions
    written = [word.partition("=")[0] for word in command.arguments]
    given = {word: _FIELD_OF.get(actions[word].dest, actions[word].dest) for word in written if word in actions}
    config = _completed(arguments, given, needs)
    config.is_hybrid_model |= bool(config.hybrid_attention_ratio or config.hybrid_mlp_ratio)
    config.is_hybrid_model |= command.script.startswith(_HYBRID) or "mamba" in " ".join(config.spec or ())
    job = Job(config, given, command.sizes, tuple(dict.fromkeys(unknown)))
    if config.num_layers is not None and config.pipeline_model_parallel_size > 1:
        assert job.stages  # raises for layers that do not divide
    return job


def _completed(arguments: argparse.Namespace, given: dict[str, str], needs: Sequence[str]) -> Config:
    """The configuration, with what Megatron-LM derives from other arguments."""
    config = Config(fields_read=set(), **{**_configuration_defaults(), **vars(arguments)})
    for name, target in _FIELD_OF.items():
        value = getattr(arguments, name, None)
        if value is not None and (target not in vars(arguments) or value):
            setattr(config, target, value)
    if getattr(config, "yaml_cfg", None):
        raise SettingError("--yaml-cfg: the file decides, and is not read; give the arguments themselves")
    if config.hybrid_layer_pattern:
        config.num_layers = len(config.hybrid_layer_pattern.split("/")[0].replace("|", ""))
    for written, target in given.items():
        if target in _VALUED and getattr(config, target) is None:
            raise SettingError(f"{written} has no value: is a variable not set here that is set in the job?")
    missing = [option(name) for name in needs if getattr(config, name) is None]
    if missing:
        raise SettingError(f"the job's arguments lack {', '.join(missing)}")
    for name in _SIZES:
        size, most = getattr(config, name), _MOST_OF.get(name, _MOST)
        if size is not None and not (size == 0 and name in ("mtp_num_layers", "mamba_num_heads")):
            if not 1 <= size <= most:
                written = next((word for word, target in given.items() if target == name), option(name))
                raise SettingError(f"{written} has to be from 1 to {most}")
    _derive_sizes(config, given)
    _derive_choices(config)
    return config


def _configuration_defaults() -> dict[str, Any]:
    """Of the configuration's fields that no argument sets; nothing without megatron-core."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        return {}
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    fields = dataclasses.fields(MLATransformerConfig)
    return {entry.name: None if entry.default is dataclasses.MISSING else entry.default for entry in fields}


def _derive_sizes(config: Config, given: dict[str, str]) -> None:
    hidden, heads = config.hidden_size, config.num_attention_heads
    config.gated_linear_unit = bool(config.swiglu or config.quick_geglu)
    config.micro_batch_size = config.micro_batch_size or 1
    if hidden and heads:
        config.num_query_groups = config.num_query_groups if config.group_query_attention else heads
        config.kv_channels = config.kv_channels or hidden // heads
        plain = 4 * hidden
        config.ffn_hidden_size = config.ffn_hidden_size or (int(plain * 2 / 3) // 64 * 64 if config.swiglu else plain)
        if not config.kv_channels or not config.ffn_hidden_size:
            raise SettingError(f"--hidden-size {hidden} is too small for {heads} heads or its feed-forward layer")
        if heads * config.kv_channels > _MOST:
            raise SettingError(f"{heads} heads of {config.kv_channels} channels are more than {_MOST} features")
    tp, experts = config.tensor_model_parallel_size, config.num_moe_experts
    config.sequence_parallel = config.sequence_parallel and tp > 1  # as Megatron-LM has it
    for what, size in (("heads", heads), ("FFN", config.ffn_hidden_size)):
        if size and size % tp:
            raise SettingError(f"{size} {what} do not divide over --tensor-model-parallel-size {tp}")
    if experts is not None and config.moe_router_topk > experts:
        raise SettingError(f"--moe-router-topk {config.moe_router_topk} is more than --num-experts {experts}")
    if experts is not None and experts % config.expert_model_parallel_size:
        raise SettingError(
            f"{experts} experts do not divide over --expert-model-parallel-size {config.expert_model_parallel_size}"
        )
    config.expert_tensor_parallel_size = config.expert_tensor_parallel_size or tp
    config.gtp_weight_remat_size = (getattr(config, "tensor_parallel_num_weight_shards", None) or tp) // tp


def _derive_choices(config: Config) -> None:
    config.params_dtype = torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else torch.float32
    config.pipeline_dtype = config.params_dtype
    config.fp8, config.fp4 = config.fp8 or None, config.fp4 or None
    config.bias_activation_fusion = (
        config.bias_swiglu_fusion if config.swiglu else config.bias_gelu_fusion and config.add_bias_linear
    )
    config.activation_func = _activation(config)
    kinds = config.cp_comm_type or ["p2p"]
    config.cp_comm_type = kinds[0] if len(kinds) == 1 else kinds
    if isinstance(config.window_size, str):
        config.window_size = tuple(int(keys) for keys in config.window_size.strip("()").split(","))
    config.hierarchical_context_parallel_sizes = config.hierarchical_context_parallel_sizes or []
    if config.recompute_activations:
        config.recompute_granularity = "selective"
    config.recompute_modules = config.recompute_modules or []
    if config.recompute_granularity == "selective" and not config.recompute_modules:
        config.recompute_modules = ["core_attn"]
    config.offload_modules = getattr(config, "offload_modules", None) or []
    config.cpu_offloading = bool(config.cpu_offloading or config.cpu_offloading_num_layers)
    for name, implementation in _OLD_GRAPHS.items():
        if getattr(config, name, False):
            config.cuda_graph_impl = implementation
    if config.cuda_graph_scope and not config.cuda_graph_modules:
        config.cuda_graph_modules = None  # the newer name's default says nothing beside the old name


def _activation(config: Config) -> Any:
    if config.swiglu:
        return F.silu
    if not config.quick_geglu and not config.squared_relu:
        return F.gelu
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    return quick_gelu if config.quick_geglu else squared_relu


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Options of commands that describe a job, whose arguments follow ``--``."""
    parser.add_argument(
        "--allow-unknown",
        action="store_true",
        help="pass over arguments that Megatron-LM does not have, such as those of a script of your own",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="also list the arguments that have no effect here"
    )


def require_megatron(command: str) -> None:
    """Raises NotSupportedError if megatron-core, whose layers are asked, is not installed."""
    if not _configuration_defaults():
        raise NotSupportedError(f"{command} -- ARGUMENTS needs megatron-core; {pip_command('megatron-core')}")
