"""What of a training job would run by the fused path, told from Megatron's arguments before it is started.

No model is built, no GPU is needed. Reasons for Megatron's path are those of the log: the layers' own functions give
them. What depends on measuring or on other ranks is decided in the job.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ditron_train.runtime.device import assuming_gpu
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.settings import get_settings, under_policy
from ditron_train.tools.doctor.job_config import config_of
from ditron_train.tools.doctor.job_parts import Part, parts_of
from ditron_train.tools.predict.megatron_arguments import Job, parse_job
from ditron_train.tools.tables import terminal

__all__ = ["JobReport", "examine_job", "show_job"]

#: Where a part that is covered runs by the fused path, by policy.
_WHERE = {
    "strict": "where its bits are native's and it is faster, measured at its first call",
    "fast": "where it is faster, measured at its first call",
    "bits": "where its bits are native's, compared at its first call",
    "force": "in every call",
}
_TARGET = "sm_90"  # of the GPUs that are assumed: Hopper


@dataclass(frozen=True)
class JobReport:
    """A job's parts, and what of its features has nothing to do in it.

    Attributes:
        parts: What the features that were asked for (all of them, without ``--ditron``) could accelerate.
        idle: Features without anything to accelerate, and what could not be asked, in words.
        policy: Which decides in the job: its own argument, or the environment's.
    """

    parts: list[Part]
    idle: list[str]
    policy: str = "strict"

    def to_json(self) -> str:
        """Returns everything as one JSON object."""
        return json.dumps(
            {"parts": [asdict(part) for part in self.parts], "idle": self.idle, "policy": self.policy}, indent=1
        )


def examine_job(words: str) -> JobReport:
    """Judges the job that ``pretrain_gpt.py``'s arguments describe; launchers and paths in front are passed over.

    Raises:
        SettingError: A size is missing, is no number, or does not divide; a feature is unknown.
        ImportError: megatron-core is not installed.
    """
    try:
        split = shlex.split(words)
    except ValueError as error:
        raise SettingError(f"--job: {error}") from None
    job, config = parse_job(split), config_of(split)
    with under_policy(getattr(config, "ditron_policy", None) or get_settings().policy):
        policy = get_settings().policy  # refused here where there is none of this name
        return _examine(job, config, policy)


def _examine(job: Job, config: Any, policy: str) -> JobReport:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ditron_train.megatron.plugin.arguments import WGRAD, Options, available_features, parse_features

    asked = job.words.get("ditron")
    features = tuple(available_features()) if asked is None else parse_features(asked)
    sizes = {"tp": job.tp, "sp": job.cp, "ep": job.ep, "pp": job.pp}
    sizes = {name: size for name, size in sizes.items() if name in features}
    options = Options(
        tuple(name for name in features if name != WGRAD),
        sizes=sizes,
        expert_slices=job.expert_slices,
        gathers_tokens=config.moe_token_dispatcher_type == "allgather",
        optimizer=job.optimizer,
    )
    idle = list(options.idle())
    if asked is not None and features == (WGRAD,):
        idle.append(f"{WGRAD}: gradient accumulation fusion works without apex; nothing is overlapped")
    if any(name.startswith("heterogeneous_layers_config") for name in vars(config)):
        idle.append("--heterogeneous-layers-config-...: layers of the arguments' sizes were asked, not of their own")
    if getattr(config, "use_mp_args_from_checkpoint_args", False):
        idle.append(
            "--use-mp-args-from-checkpoint-args: the arguments' parallel sizes were asked, not the checkpoint's"
        )
    parts: list[Part] = []
    for name in options.overlapping:
        if any(line.startswith(f"{name}:") for line in idle):
            continue
        with assuming_gpu(_TARGET), FakeTensorMode(), torch.no_grad():
            found = parts_of(name, job, config)
        parts += found
        if not found:
            idle.append(f"{name}: the model has no such layers")
    return JobReport(parts, idle, policy)


def show_job(report: JobReport, console: Console | None = None) -> None:
    """Prints the report to ``console`` (default: the terminal)."""
    console = console or terminal()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for part in report.parts:
        native = part.native_because is not None
        state = "[yellow]native[/]" if native else "[green]ours[/]"
        why = part.native_because or _WHERE[report.policy]
        table.add_row(f"[bold]--ditron {part.feature}[/]", escape(part.name), state, escape(why))
    console.print("[bold]what of this job would run by the fused path, on Hopper inside a node[/]")
    console.print(table)
    for line in report.idle:
        console.print(escape(line))
