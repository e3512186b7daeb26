"""Compares one of the standard jobs (benchmarks/jobs) natively and by the fused path.

    python scripts/jobs.py dense-70b-tp --megatron-lm ../Megatron-LM
    python scripts/jobs.py dense-70b-tp --megatron-lm ../Megatron-LM --compare "--within 600" -- --num-layers 4
    python scripts/jobs.py dense-70b-tp-pp --megatron-lm ../Megatron-LM --simulated
    python scripts/jobs.py --all 2 --show
    python scripts/jobs.py --all 2 --within 1500 --megatron-lm ../Megatron-LM --compare "--results benchmarks/results"
    python scripts/jobs.py dense-70b-tp --gpus 4 --megatron-lm ../Megatron-LM

Several jobs run one after the other, and ``--all N`` are those that run whole on N GPUs. Logs and notes of each are in
``compare/<job>``. What stands behind ``--`` goes to Megatron behind the job's own arguments, and so replaces them.
``--show`` prints the commands and trains nothing. ``--simulated`` is for bits alone: ranks share whatever GPUs there
are, each rank holds as few layers and experts as the job's kind allows, and nothing is timed or written to results.
``--gpus N`` runs a job of one kind of parallelism in groups of N ranks instead of its own: all experts, heads or
matrices are divided by N, a stage keeps its layers and a replica its tokens.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "jobs"
COMMON = "common"
#: Has ranks share GPUs if there are fewer of these.
SHARED = ROOT / "tests" / "gpu" / "shared_pretrain.py"
SIMULATED_EXPERTS, SIMULATED_STEPS = 32, 6
#: Under which Megatron repeats itself, bit for bit.
ENVIRONMENT = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NCCL_ALGO": "Ring",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}


@dataclass(frozen=True)
class StandardJob:
    """One file of ``benchmarks/jobs``.

    Attributes:
        name: Of the file, without its suffix.
        about: What is trained, in words.
        ditron: What ``--ditron`` names.
        gpus: How many it needs.
        arguments: Megatron's, the common ones in front.
        environment: Variables that differ from `ENVIRONMENT`.
    """

    name: str
    about: str
    ditron: str
    gpus: int
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


def job_names() -> list[str]:
    """Every standard job."""
    return sorted(path.stem for path in FOLDER.glob("*.txt") if path.stem != COMMON)


def _words(text: str) -> list[str]:
    return shlex.split(text, comments=True)


def read_job(name: str) -> StandardJob:
    """Reads one.

    Raises:
        ValueError: There is none of that name, or its head is not ``about``, ``ditron`` and ``gpus``.
    """
    if name not in job_names():
        raise ValueError(f"no standard job {name!r}; there are: {', '.join(job_names())}")
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    fields = r"# (?P<about>.+)\n# ditron: (?P<ditron>[a-z,]+)\n# gpus: (?P<gpus>\d+)\n(# environment: (?P<env>.+)\n)?"
    head = re.match(fields, text)
    if head is None:
        raise ValueError(f"{name}.txt does not begin with what it is, '# ditron: NAMES' and '# gpus: NUMBER'")
    common = (FOLDER / f"{COMMON}.txt").read_text(encoding="utf-8")
    words = (*_words(common), *_words(text))
    environment = dict(word.split("=", 1) for word in _words(head["env"] or ""))
    return StandardJob(name, head["about"], head["ditron"], int(head["gpus"]), words, environment)


def _value(job: StandardJob, option: str) -> int | None:
    """Of an option that stands in the job's arguments."""
    return int(job.arguments[job.arguments.index(option) + 1]) if option in job.arguments else None


_STAGES = "--pipeline-model-parallel-size"
_SIZES = ("--tensor-model-parallel-size", "--context-parallel-size", _STAGES)
_EXPERTS, _BATCH = "--expert-model-parallel-size", "--global-batch-size"


def resized(job: StandardJob, num_gpus: int) -> StandardJob:
    """The job on another number of GPUs: groups that all its ranks are in get them all, and if replicas become
    more the batch grows with them.

    Raises:
        ValueError: Its ranks are in groups of several kinds, which could grow in several ways.
    """
    if num_gpus == job.gpus:
        return job
    sizes = {option: _value(job, option) or 1 for option in _SIZES}
    divided = [size for size in sizes.values() if size > 1]
    if any(size != job.gpus for size in divided) or len(divided) > 1:
        raise ValueError(
            f"{job.name} divides its {job.gpus} ranks in several ways: no other number of them is standard"
        )
    grown = {
        option: num_gpus for option, size in {**sizes, _EXPERTS: _value(job, _EXPERTS)}.items() if size == job.gpus
    }
    if _STAGES in grown:  # a stage keeps its layers
        grown["--num-layers"] = (_value(job, "--num-layers") or 1) * num_gpus // job.gpus
    if not divided:
        grown[_BATCH] = (_value(job, _BATCH) or 1) * num_gpus // job.gpus
    words = list(job.arguments)
    for option, size in grown.items():
        words[words.index(option) + 1] = str(size)
    return replace(job, gpus=num_gpus, arguments=tuple(words))


def simulated_arguments(job: StandardJob) -> list[str]:
    """What replaces a job's arguments if it runs for bits alone: few steps, a layer a stage, few experts."""
    layers, more = _value(job, _STAGES) or 1, []
    if _value(job, "--num-layers-per-virtual-pipeline-stage") is not None:
        layers, more = 2 * layers, ["--num-layers-per-virtual-pipeline-stage", "1"]
    if _value(job, "--num-experts") is not None:
        more += ["--num-experts", str(SIMULATED_EXPERTS)]
    return ["--train-iters", str(SIMULATED_STEPS), "--num-layers", str(layers), *more]


def command_of(
    job: StandardJob, script: Path, compare: Sequence[str] = (), more: Sequence[str] = (), *, simulated: bool = False
) -> list[str]:
    """The command that compares a job.

    Args:
        job: Which.
        script: Megatron-LM's ``pretrain_gpt.py``.
        compare: More options of ``compare``.
        more: More arguments of Megatron, which replace the job's.
        simulated: Whether it is for bits alone, on fewer GPUs than ranks: each path once, untraced.
    """
    how = ["--output", f"compare/{job.name}", *(["--order", "AB"] if simulated else ["--trace", "--model", job.name])]
    comparing = ["-m", "ditron_train", "compare", "--ditron", job.ditron, *how, *compare]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.gpus)]
    scripts = [str(SHARED), str(script)] if simulated else [str(script)]
    own = [*job.arguments, *(simulated_arguments(job) if simulated else ())]
    return [sys.executable, *comparing, sys.executable, *launcher, *scripts, *own, *more]


def run_in_sequence(jobs: Sequence[StandardJob], run: Callable[[StandardJob], int], within: float | None) -> int:
    """Runs each of them, whatever became of those before; 0 if all ran and said 0.

    Args:
        jobs: In their order.
        run: Gives a job's status.
        within: Seconds; a job that would not end in them, if it took as long as the longest before, is not begun.
    """
    began_s, longest_s = time.monotonic(), 0.0
    ended: dict[str, str] = {}
    for job in jobs:
        job_began_s = time.monotonic()
        if within is not None and ended and job_began_s + longest_s > began_s + within:
            ended[job.name] = "not begun, no time is left"
            continue
        status = run(job)
        seconds = time.monotonic() - job_began_s
        longest_s = max(longest_s, seconds)
        ended[job.name] = f"{f'status {status}' if status else 'equal'}, {seconds:.0f} s"
    if len(jobs) > 1:
        print("\n".join(f"{name:26} {words}" for name, words in ended.items()))
    return int(not all(words.startswith("equal") for words in ended.values()))


def main() -> int:
    """Runs or shows the commands; returns their status."""
    words, more = sys.argv[1:], []
    if "--" in words:
        place = words.index("--")
        words, more = words[:place], words[place + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(job_names()))
    parser.add_argument("--all", type=int, metavar="GPUS", help="all jobs that run whole on so many GPUs")
    parser.add_argument(
        "--within", type=float, metavar="S", help="no job begins that would not end in so many seconds"
    )
    parser.add_argument("--gpus", type=int, metavar="GPUS", help="in groups of so many ranks")
    parser.add_argument("--megatron-lm", type=Path, default=Path(os.environ.get("MEGATRON_LM", "Megatron-LM")))
    parser.add_argument("--compare", default="", metavar="OPTIONS", help="more options of compare, in one word")
    parser.add_argument("--show", action="store_true", help="print the command and train nothing")
    parser.add_argument("--simulated", action="store_true", help="for bits alone, by ranks that share GPUs")
    arguments = parser.parse_args(words)
    if bool(arguments.jobs) == (arguments.all is not None):
        parser.error("name jobs, or --all GPUS")
    try:
        jobs = [read_job(name) for name in arguments.jobs or job_names()]
        if arguments.gpus is not None:
            jobs = [resized(job, arguments.gpus) for job in jobs]
    except ValueError as error:
        parser.error(str(error))
    if arguments.all is not None:
        jobs = [job for job in jobs if job.gpus <= arguments.all]
    if not jobs:
        parser.error(f"nothing was compared: no standard job runs whole on {arguments.all} GPUs")
    script, options = arguments.megatron_lm / "pretrain_gpt.py", shlex.split(arguments.compare)
    commands = {job.name: command_of(job, script, options, more, simulated=arguments.simulated) for job in jobs}
    if arguments.show:
        print("\n".join(map(shlex.join, commands.values())))
        return 0
    path = os.pathsep.join([str(ROOT), str(arguments.megatron_lm.resolve()), os.environ.get("PYTHONPATH", "")])
    policy = {"DITRON_POLICY": "bits"} if arguments.simulated else {}  # times of ranks that share a GPU decide nothing

    def run(job: StandardJob) -> int:
        env = {**ENVIRONMENT, **job.environment, **policy, **os.environ, "PYTHONPATH": path}
        return subprocess.run(commands[job.name], env=env, check=False).returncode

    return run_in_sequence(jobs, run, arguments.within)


if __name__ == "__main__":
    sys.exit(main())
