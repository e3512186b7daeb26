"""What of a training job would run by the fused path, told from Megatron's arguments before it is started.

No model is built, no GPU is needed. Reasons for the native path are those of the log: the layers' own functions give
them. What depends on measuring or on other ranks is decided in the job.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ditron_train.runtime.settings import get_settings, under_policy
from ditron_train.tools.job import Job, read_job
from ditron_train.tools.job.arguments import require_megatron
from ditron_train.tools.text import aligned

#: When a part that is covered runs by the fused path, by policy.
_WHEN = {
    "strict": "if its bits are native's and it is faster, measured at its first call",
    "fast": "if it is faster, measured at its first call",
    "bits": "if its bits are native's, compared at its first call",
    "force": "in every call",
}


@dataclass(frozen=True)
class JobReport:
    """A job's parts, and what of its features has nothing to do in it.

    Attributes:
        job: What the arguments describe.
        parts: What the features that were asked for (all of them, without ``--ditron``) could accelerate.
        idle: Features without anything to accelerate, and what could not be asked, in words.
        policy: Which decides in the job: its own argument, or the environment's.
    """

    job: Job
    parts: list
    idle: list[str]
    policy: str = "strict"

    def to_json(self) -> str:
        """Returns everything as one JSON object."""
        parts = [asdict(part) for part in self.parts]
        values = {"parts": parts, "idle": self.idle, "policy": self.policy, "unknown": self.job.unknown}
        return json.dumps({**values, "without_effect": self.job.without_effect()}, indent=1)

    def to_text(self, *, verbose: bool = False) -> str:
        """Returns the report for people."""
        rows = [
            (f"--ditron {part.feature}", part.name, "fused", _WHEN[self.policy])
            if part.native_because is None
            else (f"--ditron {part.feature}", part.name, "native", part.native_because)
            for part in self.parts
        ]
        lines = ["what of this job would run by the fused path, on Hopper inside a node", aligned(rows), *self.idle]
        lines += self.job.passed_over
        if verbose:
            lines.append(f"without an effect here: {' '.join(self.job.without_effect()) or 'none'}")
        return "\n".join(line for line in lines if line)


def examine_job(words: Sequence[str], *, allow_unknown: bool = False) -> JobReport:
    """Judges the job that a command, a file, or Megatron's arguments describe (`tools.job.read_job`).

    Raises:
        SettingError: An argument is unknown, a size is missing or cannot be.
        NotSupportedError: megatron-core is not installed.
    """
    require_megatron("doctor")
    from ditron_train.megatron.plugin.arguments import FEATURES
    from ditron_train.tools.job.parts import parts_of

    job = read_job(words, allow_unknown=allow_unknown)
    with under_policy(job.ditron_policy or get_settings().policy):
        policy = get_settings().policy  # refused here if there is none of this name
        parts, idle = parts_of(job, tuple(job.ditron or FEATURES))
    if any(target.startswith("heterogeneous_layers_config") for target in job.given.values()):
        idle.append("--heterogeneous-layers-config-...: layers of the arguments' sizes were asked, not of their own")
    if job.overlap_moe_expert_parallel_comm and policy in ("strict", "fast"):
        idle.append("--overlap-moe-expert-parallel-comm: dispatch and combine are timed in the job's first steps")
    if job.has("use_mp_args_from_checkpoint_args"):
        idle.append(
            "--use-mp-args-from-checkpoint-args: the arguments' parallel sizes were asked, not the checkpoint's"
        )
    return JobReport(job, parts, idle, policy)
