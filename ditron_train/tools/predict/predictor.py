"""Predicts a training step from Megatron's own arguments, natively and with ours, on any machine and without a GPU.

Times by component, memory, what to switch on, and how the gain changes with more nodes; a bar chart with --picture.
How far the model is from what was measured: docs/guides/predict.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.logs import get_logger
from ditron_train.runtime.profiles import network_named, profile_named, shipped_profiles
from ditron_train.tools.arguments import check_folder, check_matplotlib
from ditron_train.tools.predict.cluster import Cluster
from ditron_train.tools.predict.layers import FEATURES
from ditron_train.tools.predict.megatron_arguments import Job, parse_job
from ditron_train.tools.predict.memory import memory_bytes
from ditron_train.tools.predict.otherwise import estimated_otherwise
from ditron_train.tools.predict.step import Step, predict_step
from ditron_train.tools.tables import terminal

_MOST_GPUS = 128
_MOST_OF_A_JOB = 1 << 16
_WORTH = 1.002  # less is not worth a line
_LATE = 0.1  # of a step that waits for the host: more is
_GIB = 2.0**30
#: What Megatron has to be told, too, for a feature to have something to do.
_NEEDS = {
    "tp": "--sequence-parallel",
    "sp": "--cp-comm-type a2a",
    "ep": "--moe-token-dispatcher-type alltoall",
    "pp": "--pipeline-model-parallel-size above 1",
    "muon": "--optimizer muon or dist_muon",
}
_REDUCED = "the all-reduces of a job without --sequence-parallel"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``predict``; they may stand behind Megatron's, too."""
    _add_options(parser)
    parser.add_argument(
        "job", nargs=argparse.REMAINDER, metavar="-- ARGUMENTS", help="pretrain_gpt.py's own arguments"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        default="h200",
        metavar="NAME",
        help=f"{', '.join(name.partition('-')[2] for name in shipped_profiles())}, or a file of bench profile "
        "(default %(default)s)",
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines (default %(default)s)")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--network", default="ib-400", metavar="NAME", help="ib-200, ib-400, ib-800, or GB/s of one GPU one way"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="a bar chart (PNG; needs matplotlib)")


def run(arguments: argparse.Namespace) -> int:
    """Shows the prediction.

    Raises:
        SettingError: Sizes are missing or do not divide, or no profile is called so.
    """
    options = argparse.ArgumentParser(prog="python -m ditron_train predict", allow_abbrev=False, add_help=False)
    _add_options(options)
    arguments, words = options.parse_known_args([word for word in arguments.job if word != "--"], arguments)
    if min(arguments.nodes, arguments.gpus_per_node) < 1:
        raise SettingError("--nodes and --gpus-per-node have to be above 0")
    if arguments.nodes * arguments.gpus_per_node > _MOST_OF_A_JOB:
        raise SettingError(f"no more than {_MOST_OF_A_JOB} GPUs are estimated")
    if arguments.picture is not None:
        check_matplotlib()
        check_folder(arguments.picture.parent)
    job = parse_job(words)
    network = network_named(arguments.network)
    cluster = Cluster(profile_named(arguments.device), arguments.nodes, arguments.gpus_per_node, network)
    step = predict_step(job, cluster)
    _show(job, cluster, step)
    if arguments.picture is not None:
        from ditron_train.tools.predict.chart import draw_step

        draw_step(job, cluster, step, arguments.picture)
        get_logger("predict").info("written: %s", arguments.picture)
    return 0


def _show(job: Job, cluster: Cluster, step: Step) -> None:
    out, name = terminal(), cluster.profile.machine.device
    out.print(_times(step, f"{cluster.world_size} x {name}, TP {job.tp}, PP {job.pp}, CP {job.cp}, EP {job.ep}"))
    hidden = ", ".join(f"{us / 1e3:.1f} ms {who}" for us, who in zip(step.hidden, ("natively", "with ours")))
    out.print(f"exchanges under computation: {hidden}")
    late = step.native.get("host", 0.0) / step.native_us
    if late > _LATE:
        out.print(f"for {100 * late:.0f} % of Megatron's step the GPU waits for the host: {_less_late(job)}")
    memory = memory_bytes(job, cluster.world_size)
    whole = sum(memory.values()) / _GIB
    parts = ", ".join(f"{what} {size / _GIB:.1f}" for what, size in memory.items())
    verdict = "fits" if whole < cluster.profile.memory_gib else "does NOT fit"
    out.print(f"memory: {whole:.1f} of {cluster.profile.memory_gib:g} GiB, {verdict} ({parts})")
    useful = useful_features(job, cluster)
    for feature, speedup in useful.items():
        needs = _NEEDS[feature] if feature != "tp" or "sequence_parallel" in job.flags else _REDUCED
        out.print(f"--ditron {feature}: {speedup:.3f}x, with {needs}")
    if not useful:
        out.print(f"nothing to switch on: no feature gains more than {100 * (_WORTH - 1):.1f} % here")
    for gpus, scaled_step in scaled(job, cluster):
        out.print(
            f"{gpus} GPUs, as many sequences each: {scaled_step.native_us / 1e3:.1f} -> "
            f"{scaled_step.ditron_us / 1e3:.1f} ms, {scaled_step.speedup:.3f}x"
        )
    for what, speedups in by_degree(job, cluster).items():
        said = ", ".join(f"{ranks}: {speedup:.3f}x" for ranks, speedup in speedups.items())
        out.print(f"speed over Megatron by {what} on these GPUs: {said}")
    if job.fp8 is not None:
        out.print(f"FP8, {job.fp8}: linear layers and experts; activations in memory are counted as in bf16")
    elif "fp8_format" in job.words:
        out.print(f"FP8 by {job.words['fp8_recipe']} is not known here: products are estimated in bf16")
    otherwise = estimated_otherwise(job)
    for argument, words in otherwise.items():
        out.print(f"{argument}: {words}")
    ignored = [argument for argument in job.ignored if argument not in otherwise]
    if ignored:
        out.print(f"not looked at: {' '.join(ignored)}")
    if cluster.profile.about:
        out.print(f"{name}: {cluster.profile.about}")


def _less_late(job: Job) -> str:
    """What helps a host that is late."""
    if job.model.experts is not None:
        return "its times differ between jobs, larger microbatches or fewer experts a rank make it matter less"
    graphs = " or --cuda-graph-impl local" if job.words.get("cuda_graph_impl", "none") == "none" else ""
    return f"its times differ between jobs, larger microbatches{graphs} make it matter less"


def _times(step: Step, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("component", "Megatron ms", "with ours ms"):
        table.add_column(column, justify="left" if column == "component" else "right")
    for kind in step.native:
        table.add_row(kind, f"{step.native[kind] / 1e3:.1f}", f"{step.ditron.get(kind, 0.0) / 1e3:.1f}")
    table.add_row("step", f"{step.native_us / 1e3:.1f}", f"{step.ditron_us / 1e3:.1f} ({step.speedup:.3f}x)")
    return table


def useful_features(job: Job, cluster: Cluster) -> dict[str, float]:
    """Features that gain something by themselves, and how much, the largest first."""
    gains = {feature: predict_step(job, cluster, {feature}).speedup for feature in FEATURES}
    kept = {feature: gain for feature, gain in gains.items() if gain > _WORTH}
    return dict(sorted(kept.items(), key=lambda item: -item[1]))


def by_degree(job: Job, cluster: Cluster) -> dict[str, dict[int, float]]:
    """The gain with other sizes of the groups that exchange most, one kind after another, where the job has it."""
    found: dict[str, dict[int, float]] = {}
    for kind in ("tp", "cp", "ep"):
        if getattr(job, kind) == 1:
            continue
        speedups = {}
        for size in (2, 4, 8, 16, 32):
            sizes = {kind: size}
            if kind == "tp" and job.expert_slices == job.tp:
                sizes["expert_slices"] = size
            try:
                speedups[size] = predict_step(replace(job, **sizes), cluster).speedup  # type: ignore[arg-type]
            except SettingError:  # it does not divide
                continue
        found[kind.upper()] = speedups
    return found


def scaled(job: Job, cluster: Cluster) -> Iterator[tuple[int, Step]]:
    """The same job on twice as many nodes, and again, up to 128 GPUs, with as many sequences for each replica."""
    nodes = 2 * cluster.nodes
    while nodes * cluster.per_node <= _MOST_GPUS:
        factor = nodes // cluster.nodes
        larger = replace(job, global_batch=job.global_batch and job.global_batch * factor)
        yield nodes * cluster.per_node, predict_step(larger, replace(cluster, nodes=nodes))
        nodes *= 2
