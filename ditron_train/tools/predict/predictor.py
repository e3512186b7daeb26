"""Estimates what a job would gain with --ditron, from Megatron's own arguments, on any machine and without a GPU.

The gain is what fused ops save by their estimated costs, out of the step time that you state with --step-ms. Without
it a rough model gives the step. Parts that would run natively, by the reasons of doctor -- ARGUMENTS, gain nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ditron_train.data.device_profiles import network_named, profile_named, shipped_profiles
from ditron_train.megatron.plugin.arguments import FEATURES, WITH_OTHERS
from ditron_train.runtime.errors import SettingError
from ditron_train.tools.job import Job, read_job
from ditron_train.tools.job.arguments import add_job_options, require_megatron
from ditron_train.tools.predict.estimates import Cluster, Parts, estimate_step
from ditron_train.tools.text import aligned, show_text

#: Measured gain less estimated gain, of nine in ten of the committed steps; how many these are. A test holds both.
GAIN_ERRORS, NUM_STEPS = (-0.07, 0.13), 47
#: What the parts leave out (launches, waits, lower clocks): the median of the committed steps, and what is then the
#: error of nine in ten of them.
ROUGH_FACTOR, ROUGH_ERRORS = 1.15, (-0.29, 0.07)
_MOST_GPUS = 1 << 16
_LEAST_MS = 0.05  # of a step: less is not shown as a gain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``predict``; Megatron's arguments follow ``--``."""
    names = ", ".join(name.partition("-")[2] for name in shipped_profiles())
    parser.add_argument(
        "--step-ms", type=float, metavar="MS", help="how long a step of your job takes without --ditron"
    )
    parser.add_argument("--device", default="h200", metavar="NAME", help=f"{names} (default %(default)s)")
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="machines (default: as the launcher in the command says)"
    )
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="(default: as the launcher says, or 8)")
    parser.add_argument(
        "--network", default="ib-400", metavar="NAME", help="ib-200, ib-400, ib-800, or GB/s of one GPU one way"
    )
    add_job_options(parser)


@dataclass(frozen=True)
class Prediction:
    """What a job would gain.

    Attributes:
        step_ms: Of a native step, and ``is_rough``: by the rough model.
        parts: By name, what is accelerated: native and fused, ms of a step.
        native: By name, what stays native and why; "" if nothing is gained.
        idle: Features with nothing to do, and what is not estimated.
        gain: Estimated speedup of the step.
        between: The speedups that nine in ten of the measured steps allow.
    """

    step_ms: float
    is_rough: bool
    parts: dict[str, tuple[float, float]]
    native: dict[str, str]
    idle: list[str]
    gain: float
    between: tuple[float, float]


def predict(job: Job, cluster: Cluster, features: Sequence[str], step_ms: float | None = None) -> Prediction:
    """What ``features`` gain in ``job`` on ``cluster``, out of ``step_ms`` or of the rough step.

    Raises:
        SettingError: The sizes do not divide, or the step is shorter than what is in it.
    """
    from ditron_train.tools.job.parts import parts_of

    estimates = estimate_step(job, cluster)
    found, idle = parts_of(job, tuple(name for name in features if name not in WITH_OTHERS))
    parts, native = {}, {}
    for part in found:
        times = estimates.get(part.name)
        if part.native_because is not None:
            native[part.name] = part.native_because
        elif times is None:
            native[part.name] = "not estimated"
        elif times.native_us - times.ditron_us < 1e3 * _LEAST_MS:
            native[part.name] = _without_gain(job, cluster, part.feature)
        else:
            parts[part.name] = (times.native_us / 1e3, times.ditron_us / 1e3)
    rough_ms = ROUGH_FACTOR * sum(times.native_us for times in estimates.values()) / 1e3
    whole_ms = rough_ms if step_ms is None else step_ms
    in_it_ms, saved_ms = sum(times[0] for times in parts.values()), sum(a - b for a, b in parts.values())
    if whole_ms <= in_it_ms:
        raise SettingError(
            f"--step-ms {whole_ms:g} is less than the {in_it_ms:.0f} ms that parts of it alone take by the estimate: "
            f"is it a step of this job, on {cluster.world_size} x {cluster.profile.machine.device}?"
        )
    gain = whole_ms / (whole_ms - saved_ms)
    low, high = (max(gain + error, 1.0) if saved_ms else 1.0 for error in GAIN_ERRORS)
    return Prediction(whole_ms, step_ms is None, parts, native, [*idle, *_assumed(job, estimates)], gain, (low, high))


def _without_gain(job: Job, cluster: Cluster, feature: str) -> str:
    tp, pp = job.tensor_model_parallel_size, job.pipeline_model_parallel_size
    sizes = {
        "tp": (tp, 1),
        "sp": (job.context_parallel_size, tp),
        "ep": (job.expert_model_parallel_size, job.expert_tensor_parallel_size),
        "pp": (pp, cluster.world_size // pp),
    }
    if feature in sizes and cluster.span(*sizes[feature]).nodes > 1:
        return "its group spans nodes, where nothing was measured: not estimated"
    return "no gain by the estimate"


def _assumed(job: Job, estimates: Parts) -> list[str]:
    """What of this job the estimates leave out, in words."""
    lines = []
    if job.vocabulary is None:
        lines.append("the tokenizer decides the vocabulary: output layer and loss are left out (add --vocab-size)")
    if not (job.bf16 or job.fp16):
        lines.append("without --bf16 or --fp16 all counts as in bf16")
    if job.fp8 and job.fp8_recipe not in ("tensorwise", "delayed", "blockwise") or job.fp4:
        lines.append("products of this recipe count as in bf16")
    if job.optimizer_cpu_offload:
        lines.append("--optimizer-cpu-offload: transfers to the CPU are left out")
    if job.context_parallel_size > 1 and "p2p" in str(job.cp_comm_type):
        lines.append("the ring of keys and values counts as covered")
    if "experts: dispatch and combine" in estimates and job.moe_token_dispatcher_type != "alltoall":
        lines.append(
            f"tokens count as moved by alltoall, not by {job.moe_token_dispatcher_type}; no gain is estimated"
        )
    if job.overlap_moe_expert_parallel_comm:
        lines.append("--overlap-moe-expert-parallel-comm: movement counts as without it")
    if job.tp_comm_overlap:
        lines.append("--tp-comm-overlap: linear layers count as without it")
    if job.cuda_graph_impl not in (None, "none"):
        lines.append("CUDA graphs: launches that they save are not counted")
    if job.is_hybrid_model or job.hybrid_layer_pattern or job.experimental_attention_variant:
        lines.append("scans of Mamba and of linear attention are left out; sparse attention counts as over all keys")
    return lines


def run(arguments: argparse.Namespace) -> int:
    """Shows the prediction.

    Raises:
        SettingError: Sizes are missing or do not divide, or no profile is called so.
    """
    warnings.simplefilter("ignore")  # of libraries that miss what a laptop does not have
    require_megatron("predict")
    if arguments.step_ms is not None and not 0 < arguments.step_ms < 1e9:
        raise SettingError("--step-ms has to be a number above 0")
    job = read_job(arguments.job, allow_unknown=arguments.allow_unknown)
    cluster = _cluster(arguments, job)
    features = job.ditron or tuple(FEATURES)
    prediction = predict(job, cluster, features, arguments.step_ms)
    if arguments.json:
        show_text(json.dumps({"gpus": cluster.world_size, **asdict(prediction), "unknown": job.unknown}, indent=1))
    else:
        show_text(_text(job, cluster, prediction, verbose=arguments.verbose))
    return 0


def _cluster(arguments: argparse.Namespace, job: Job) -> Cluster:
    """The GPUs as the options say, else as the launcher does, or as many nodes as the job needs at least."""
    per_node = arguments.gpus_per_node or job.sizes.get("gpus_per_node", 8)
    each = job.tensor_model_parallel_size * job.context_parallel_size
    if job.num_moe_experts:
        each = math.lcm(each, job.expert_model_parallel_size * job.expert_tensor_parallel_size)
    needed = each * job.pipeline_model_parallel_size
    nodes = arguments.nodes or job.sizes.get("nodes", 1)
    if arguments.nodes is None and per_node > 0 and nodes * per_node < needed:
        nodes = -(-needed // per_node)
    if min(nodes, per_node) < 1 or nodes * per_node > _MOST_GPUS:
        raise SettingError(f"--nodes times --gpus-per-node has to be from 1 to {_MOST_GPUS}")
    return Cluster(profile_named(arguments.device), nodes, per_node, network_named(arguments.network))


def _text(job: Job, cluster: Cluster, found: Prediction, *, verbose: bool) -> str:
    sizes = (f"{name} {size}" for name, size in (
        ("TP", job.tensor_model_parallel_size), ("PP", job.pipeline_model_parallel_size),
        ("CP", job.context_parallel_size), ("EP", job.expert_model_parallel_size)))  # fmt: skip
    lines = [f"{cluster.nodes} x {cluster.per_node} {cluster.profile.machine.device}, {', '.join(sizes)}", ""]
    low, high = found.between
    rows = [("ms of a step", "native", "fused", "saved")]
    rows += [(name, f"{a:.1f}", f"{b:.1f}", f"{a - b:.1f}") for name, (a, b) in found.parts.items()]
    rest = found.step_ms - sum(round(a, 1) for a, _ in found.parts.values())
    saved = sum(round(a, 1) - round(b, 1) for a, b in found.parts.values())
    rows.append(("everything else", f"{rest:.1f}", f"{rest:.1f}", "0.0"))
    title = "step, by the rough model" if found.is_rough else "step, as stated"
    rows.append((title, f"{found.step_ms:.1f}", f"{found.step_ms - saved:.1f}", f"{saved:.1f}"))
    lines += [aligned(rows, right=(1, 2, 3)), ""]
    if found.parts:
        less, more = (f"{abs(error):.2f}" for error in GAIN_ERRORS)
        lines.append(
            f"estimated gain: {found.gain:.3f}x; between {low:.2f}x and {high:.2f}x, since nine in ten of {NUM_STEPS} "
            f"measured steps gained from {less} less to {more} more than their estimate"
        )
    else:
        lines.append("estimated gain: none")
    if found.is_rough:
        errors = " to ".join(f"{100 * error:+.0f} %" for error in ROUGH_ERRORS)
        lines.append(f"the rough model is {errors} off in nine in ten of them: state your own step with --step-ms")
    if found.native:
        lines += ["", "native, or without a gain:", aligned((f"  {name}", why) for name, why in found.native.items())]
    lines += [line for line in ("", *found.idle) if found.idle]
    lines += job.passed_over
    if cluster.profile.about:
        lines.append(f"{cluster.profile.machine.device}: {cluster.profile.about}")
    if verbose:
        lines.append(f"without an effect here: {' '.join(job.without_effect()) or 'none'}")
    return "\n".join(lines)
