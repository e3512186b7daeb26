"""The ``--ditron`` arguments, in the style of Megatron's own argument groups.

They are not fields of Megatron's configuration (which drops what it does not know), so the chosen options are kept
here: `options_from_args` makes them from the parsed namespace.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ditron_train.megatron.plugin.record_trace import TraceRequest, parse_trace_request
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.settings import SETTINGS, get_settings
from ditron_train.runtime.versions import is_at_least

#: Name on the command line: what it accelerates.
FEATURES: dict[str, str] = {
    "tp": "tensor parallel linear layers, with --sequence-parallel or without",
    "sp": "attention with --cp-comm-type a2a, a2a+p2p (Ulysses) or all_gather",
    "ep": "mixture-of-experts dispatch, expert GEMMs and combine",
    "pp": "pipeline sends and receives",
    "muon": "the Muon optimizer",
    "adam": "Adam of bf16 parameters: clipping, step and cast in one pass",
    "loss": "the cross entropy of language models, unless Megatron fuses it",
    "det": "Megatron's deterministic mode, without PyTorch's fill of uninitialized memory",
    "wgrad": "gradient accumulation fusion without apex",
}

#: Where layers are of several kinds: arguments, and what configurations call them.
_KINDS_OF_LAYERS = (
    "num_experts",
    "num_moe_experts",
    "experimental_attention_variant",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "hybrid_pattern",
    "is_hybrid_model",
    "heterogeneous_layers_config_path",
)
#: The module of each feature: what it replaces (``class_map``, ``symbols``), and its ``start`` and ``stop``.
FEATURE_MODULES = {
    "tp": "ditron_train.megatron.tp.layers",
    "sp": "ditron_train.megatron.sp.attention",
    "ep": "ditron_train.megatron.ep.layer",
    "pp": "ditron_train.megatron.pp.communicator",
    "muon": "ditron_train.megatron.muon.optimizer",
    "adam": "ditron_train.megatron.adam.optimizer",
    "loss": "ditron_train.megatron.loss.cross_entropy",
    "det": "ditron_train.megatron.det.first_step",
    "wgrad": "ditron_train.megatron.wgrad.stand_in",
}

#: Stock Megatron may have this feature, too.
WGRAD = "wgrad"
#: These and ``wgrad`` overlap nothing: they are on with the others, too.
LOSS, DET = "loss", "det"
WITH_OTHERS = (LOSS, DET, WGRAD)

#: Megatron's argument that says how many ranks a feature's groups have.
SIZE_ARGUMENTS = {
    "tp": "tensor_model_parallel_size",
    "sp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
}


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Attributes:
        features: Names out of `FEATURES`, in the order of that table.
        transport: Value for ``DITRON_TRANSPORT``, or None to leave the environment as it is.
        timeout_s: Value for ``DITRON_TIMEOUT_S`` in seconds, or None to leave the environment as it is.
        policy: Value for ``DITRON_POLICY``, or None to leave the environment as it is.
        plan: Value for ``DITRON_PLAN``, or None to leave the environment as it is.
        sizes: Ranks of the groups of each feature, if Megatron's arguments tell; 1: there is nothing to accelerate.
        expert_slices: Tensor parallel ranks that every expert is split over.
        gathers_tokens: Whether experts' tokens go to all ranks, those of their slices, too (``allgather``).
        has_rings: Whether an attention exchanges over parts of the context parallel group (``a2a+p2p``).
        optimizer: Megatron's, if its arguments tell.
        fuses_wgrad: Whether they ask for gradient accumulation fusion.
        fuses_mlp: Whether they give the MLPs to Transformer Engine's operation fuser, which calls no linear layer.
        record: Folder in which every training step is noted, or None.
        record_trace: The step of which a trace is kept there, and the rank, or None.
        from_environment: Whether ``DITRON`` named the features: then an unsupported version is no error.
    """

    features: tuple[str, ...] = ()
    transport: str | None = None
    timeout_s: float | None = None
    policy: str | None = None
    plan: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    expert_slices: int = 1
    gathers_tokens: bool = False
    has_rings: bool = False
    optimizer: str | None = None
    fuses_wgrad: bool = False
    fuses_mlp: bool = False
    record: str | None = None
    record_trace: TraceRequest | None = None
    from_environment: bool = False

    @property
    def overlapping(self) -> tuple[str, ...]:
        """The features that replace a part of Megatron's step."""
        return tuple(name for name in self.features if name not in WITH_OTHERS)

    @property
    def deciding_sizes(self) -> dict[str, int]:
        """Ranks of the groups that decide for each feature, if that is one number: if experts are split, what
        they share is decided by their slices' ranks together; parts of a group have sizes of their own."""
        split = {name for name, is_split in (("ep", self.expert_slices > 1), ("sp", self.has_rings)) if is_split}
        return {name: size for name, size in self.sizes.items() if size > 1 and name not in split}

    def environment(self) -> dict[str, str]:
        """The ``DITRON_*`` variables that these options set."""
        values = {
            "DITRON_TRANSPORT": self.transport,
            "DITRON_TIMEOUT_S": self.timeout_s,
            "DITRON_POLICY": self.policy,
            "DITRON_PLAN": self.plan,
        }
        return {name: str(value) for name, value in values.items() if value is not None}

    def idle(self) -> list[str]:
        """What of this has no effect in the job, in words."""
        if not self.overlapping:
            given = [name.lower().replace("_", "-") for name in self.environment()]
            return [f"--{option} has no effect: --ditron names no feature" for option in given]
        moved = {"ep"} if self.gathers_tokens and self.expert_slices > 1 else set()
        alone = [name for name, size in self.sizes.items() if size == 1 and name not in moved]
        words = [
            f"{name}: nothing to accelerate where --{SIZE_ARGUMENTS[name].replace('_', '-')} is 1" for name in alone
        ]
        if "muon" in self.features and self.optimizer not in (None, "muon", "dist_muon"):
            words.append(f"muon: nothing to accelerate where --optimizer is {self.optimizer}")
        if "tp" in self.features and self.fuses_mlp:
            words.append(
                "--use-transformer-engine-op-fuser: from Megatron-LM 0.19 on Transformer Engine's operation fuser "
                "computes the MLPs, and tp does not"
            )
        return words


def parse_features(value: str | Sequence[str], source: str = "--ditron") -> tuple[str, ...]:
    """Returns the feature names in ``"tp,pp"`` or ``("tp", "pp")``, without repetitions, in the order of `FEATURES`.
    ``source``: who names them, for the error.

    Raises:
        SettingError: A name is unknown; the message lists those that are known.
    """
    given = value.split(",") if isinstance(value, str) else value
    if not isinstance(given, Sequence) or not all(isinstance(name, str) for name in given):
        raise SettingError(f'features are names, as in "tp,pp" or ("tp", "pp"), not {value!r}')
    names = [name.strip() for name in given]
    unknown = sorted(set(names) - FEATURES.keys())
    if unknown or not names:
        listed = ", ".join(repr(name) for name in unknown) or "nothing"
        raise SettingError(
            f"{source} does not know {listed}; it takes a comma-separated list of: {', '.join(FEATURES)}"
        )
    return tuple(name for name in FEATURES if name in names)


def _for_argparse(parse: Callable[[str], Any], before: str = "") -> Callable[[str], Any]:
    """``parse``, whose errors argparse shows; ``before`` them the text if it is "{!r}: "."""

    def parse_word(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(before.format(text) + str(error)) from None

    return parse_word


def _checked_trace_request(text: str) -> str:
    """``text`` itself: Megatron's checkpoints hold the arguments, and are read with plain values alone."""
    parse_trace_request(text)
    return text


def add_ditron_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the group ``ditron`` to `parser` and returns it; usable as Megatron's ``extra_args_provider``.
    Idempotent."""
    if any(group.title == "ditron" for group in parser._action_groups):
        return parser
    listed = "; ".join(f"{name}: {about}" for name, about in FEATURES.items())
    group = parser.add_argument_group(title="ditron")
    group.add_argument(
        "--ditron",
        type=_for_argparse(parse_features),
        default=(),
        metavar="NAME[,NAME]",
        help="Overlap communication with computation in these parts of the model, without changing a bit of the "
        f"result. {listed}. What is not covered runs natively, with one log line saying why.",
    )
    for name in ("transport", "timeout_s", "policy"):
        setting = SETTINGS[name]
        group.add_argument(
            f"--ditron-{name.replace('_', '-')}",
            type=_for_argparse(setting.parser, "{!r}: "),
            metavar=f"{{{setting.type_name.replace(' ', '')}}}" if "," in setting.type_name else "SECONDS",
            help=f"{setting.help} Overrides {setting.variable}.",
        )
    group.add_argument(
        "--ditron-plan",
        metavar="FILE",
        help="File with the decisions of an earlier run, which are not measured again; new ones are added. "
        "Overrides DITRON_PLAN.",
    )
    group.add_argument(
        "--ditron-record",
        metavar="DIR",
        help="Notes the losses, the gradient norm and the time of every step there, and a digest of the parameters "
        "after the first, each hundredth and the last; also without --ditron. `python -m ditron_train compare` makes "
        "two such jobs and compares them.",
    )
    group.add_argument(
        "--ditron-record-trace",
        type=_for_argparse(_checked_trace_request),
        metavar="STEP[,RANK]",
        help="With --ditron-record: keeps there what the GPU of RANK (default 0) ran in that one step, as a Chrome "
        "trace (trace-rank<RANK>.json; Perfetto shows it). STEP: its number, or `middle`: in the middle of the steps "
        "that compare times. The time of the step is not noted; its result is as ever.",
    )
    return parser


def options_of(args: Any) -> Options:
    """The options of a job whose parsed namespace is ``args``: one that Megatron has loaded from a YAML file
    (``--yaml-cfg``) has lost the command line, and names features only if the file does. If nothing names
    features, ``DITRON`` does."""
    options = options_from_args(args) if hasattr(args, "ditron") else options_from_argv(sys.argv[1:])
    return options if options.features else with_environment(options)


def with_environment(options: Options) -> Options:
    """``options`` with the features that ``DITRON`` names, if it names any.

    Raises:
        SettingError: A feature is unknown, or another variable cannot be parsed.
    """
    named = get_settings().features
    if named is None:
        return options
    return replace(options, features=parse_features(named, "DITRON"), from_environment=True)


def options_from_args(args: Any) -> Options:
    """The options in a parsed namespace; fields that are missing there count as not given.

    Raises:
        SettingError: A feature is unknown, as a YAML file may name it.
    """
    features = parse_features(args.ditron) if getattr(args, "ditron", None) else ()
    trace: Any = getattr(args, "ditron_record_trace", None)
    words = ("transport", "timeout_s", "policy", "plan", "record")
    given: dict[str, Any] = {name: getattr(args, f"ditron_{name}", None) for name in words}
    sizes = {name: getattr(args, SIZE_ARGUMENTS[name], None) for name in features if name in SIZE_ARGUMENTS}
    if getattr(args, "use_mp_args_from_checkpoint_args", False):
        sizes = {}  # a checkpoint that is read later has them
    slices = getattr(args, "expert_tensor_parallel_size", None)  # None: as many as of other layers
    return Options(
        features=features,
        sizes={name: size for name, size in sizes.items() if size is not None},
        expert_slices=slices or getattr(args, "tensor_model_parallel_size", None) or 1,
        gathers_tokens=getattr(args, "moe_token_dispatcher_type", None) == "allgather",
        has_rings="a2a+p2p" in (getattr(args, "cp_comm_type", None) or ()),
        optimizer=getattr(args, "optimizer", None),
        fuses_wgrad=bool(getattr(args, "gradient_accumulation_fusion", False)),
        fuses_mlp=fuses_mlp(args),
        record_trace=None if trace is None else parse_trace_request(str(trace)),
        **given,
    )


def fuses_mlp(args: Any) -> bool:
    """Whether Megatron-LM gives the MLPs of such a job to Transformer Engine's operation fuser: from 0.19 on those of
    models whose layers are all of one kind. ``args`` are its arguments, or a configuration made from them."""
    is_asked = (
        getattr(args, "use_transformer_engine_op_fuser", False) and getattr(args, "transformer_impl", "") != "local"
    )
    has_kinds = any(getattr(args, name, None) for name in _KINDS_OF_LAYERS)
    return bool(is_asked) and not has_kinds and is_at_least("megatron-core", "0.19")


def options_from_argv(argv: Sequence[str]) -> Options:
    """The options among the words of a command line whose other words are not of this package."""
    parser = add_ditron_args(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    return options_from_args(parser.parse_known_args(list(argv))[0])
