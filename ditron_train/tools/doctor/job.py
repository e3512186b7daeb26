"""What of a training job would run by the fused path, told from Megatron's arguments before it is started.

No model is built, no GPU is needed. Reasons for Megatron's path are those of the log: the layers' own functions give
them. What depends on measuring or on other ranks is decided in the job.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ditron_train.runtime.device import assuming_gpu
from ditron_train.runtime.errors import SettingError
from ditron_train.tools.doctor.job_config import config_of
from ditron_train.tools.doctor.job_parts import Part, parts_of
from ditron_train.tools.predict.megatron_arguments import parse_job
from ditron_train.tools.tables import terminal

__all__ = ["JobReport", "examine_job", "show_job"]

_TARGET = "sm_90"  # of the GPUs that are assumed: Hopper


@dataclass(frozen=True)
class JobReport:
    """A job's parts, and what of its features has nothing to do in it.

    Attributes:
        parts: What the features that were asked for (all of them, without ``--ditron``) could accelerate.
        idle: Features without anything to accelerate, and what could not be asked, in words.
    """

    parts: list[Part]
    idle: list[str]

    def to_json(self) -> str:
        """Returns everything as one JSON object."""
        return json.dumps({"parts": [asdict(part) for part in self.parts], "idle": self.idle}, indent=1)


def examine_job(words: str) -> JobReport:
    """Judges the job that ``pretrain_gpt.py``'s arguments describe; launchers and paths in front are passed over.

    Raises:
        SettingError: A size is missing, is no number, or does not divide; a feature is unknown.
        ImportError: megatron-core is not installed.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ditron_train.megatron.plugin.arguments import WGRAD, Options, available_features, parse_features

    try:
        split = shlex.split(words)
    except ValueError as error:
        raise SettingError(f"--job: {error}") from None
    job, config = parse_job(split), config_of(split)
    asked = job.words.get("ditron")
    features = tuple(available_features()) if asked is None else parse_features(asked)
    sizes = {"tp": job.tp, "sp": job.cp, "ep": job.ep, "pp": job.pp}
    options = Options(tuple(name for name in features if name != WGRAD), sizes=sizes, optimizer=job.optimizer)
    idle = list(options.idle())
    if any(name.startswith("heterogeneous_layers_config") for name in vars(config)):
        idle.append("--heterogeneous-layers-config-...: layers of the arguments' sizes were asked, not of their own")
    parts: list[Part] = []
    for name in options.overlapping:
        if any(line.startswith(f"{name}:") for line in idle):
            continue
        with assuming_gpu(_TARGET), FakeTensorMode(), torch.no_grad():
            found = parts_of(name, job, config)
        parts += found
        if not found:
            idle.append(f"{name}: the model has no such layers")
    return JobReport(parts, idle)


def show_job(report: JobReport, console: Console | None = None) -> None:
    """Prints the report to ``console`` (default: the terminal)."""
    console = console or terminal()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for part in report.parts:
        native = part.native_because is not None
        state = "[yellow]native[/]" if native else "[green]ours[/]"
        why = part.native_because or "where its bits are native's and it is faster, measured at its first call"
        table.add_row(f"[bold]--ditron {part.feature}[/]", escape(part.name), state, escape(why))
    console.print("[bold]what of this job would run by the fused path, on Hopper inside a node[/]")
    console.print(table)
    for line in report.idle:
        console.print(escape(line))
