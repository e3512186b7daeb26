"""Compares one of the standard jobs (benchmarks/jobs) by Megatron's path and by the fused one.

    python scripts/jobs.py dense-70b-tp --megatron-lm ../Megatron-LM
    python scripts/jobs.py dense-70b-tp --megatron-lm ../Megatron-LM --compare "--within 600" -- --num-layers 4

What stands behind ``--`` goes to Megatron behind the job's own arguments, and so replaces them. ``--show`` prints the
command and trains nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "jobs"
COMMON = "common"
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
    """

    name: str
    about: str
    ditron: str
    gpus: int
    arguments: tuple[str, ...]


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
    head = re.match(r"# (?P<about>.+)\n# ditron: (?P<ditron>[a-z,]+)\n# gpus: (?P<gpus>\d+)\n", text)
    if head is None:
        raise ValueError(f"{name}.txt does not begin with what it is, '# ditron: NAMES' and '# gpus: NUMBER'")
    common = (FOLDER / f"{COMMON}.txt").read_text(encoding="utf-8")
    words = (*_words(common), *_words(text))
    return StandardJob(name, head["about"], head["ditron"], int(head["gpus"]), words)


def command_of(job: StandardJob, script: Path, compare: Sequence[str] = (), more: Sequence[str] = ()) -> list[str]:
    """The command that compares a job.

    Args:
        job: Which.
        script: Megatron-LM's ``pretrain_gpt.py``.
        compare: More options of ``compare``.
        more: More arguments of Megatron, which replace the job's.
    """
    comparing = ["-m", "ditron_train", "compare", "--ditron", job.ditron, "--trace", "--model", job.name, *compare]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.gpus)]
    return [sys.executable, *comparing, sys.executable, *launcher, str(script), *job.arguments, *more]


def main() -> int:
    """Runs or shows the command; returns its status."""
    words, more = sys.argv[1:], []
    if "--" in words:
        place = words.index("--")
        words, more = words[:place], words[place + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=job_names())
    parser.add_argument("--megatron-lm", type=Path, default=Path(os.environ.get("MEGATRON_LM", "Megatron-LM")))
    parser.add_argument("--compare", default="", metavar="OPTIONS", help="more options of compare, in one word")
    parser.add_argument("--show", action="store_true", help="print the command and train nothing")
    arguments = parser.parse_args(words)
    job = read_job(arguments.job)
    command = command_of(job, arguments.megatron_lm / "pretrain_gpt.py", shlex.split(arguments.compare), more)
    if arguments.show:
        print(shlex.join(command))
        return 0
    path = os.pathsep.join([str(ROOT), str(arguments.megatron_lm.resolve()), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(command, env={**ENVIRONMENT, **os.environ, "PYTHONPATH": path}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
