"""Trains natively and with ditron_train by your own command, torchrun and all, and compares the losses and gradient
norms of every step, and the parameters after the first, each hundredth and the last one, on every rank, bit for bit;
then the time of a step. Each is trained twice, natively first and last: what comes later finds warmer GPUs. The
command follows the options of this one."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ditron_train.megatron.plugin.arguments import WGRAD, parse_features
from ditron_train.megatron.plugin.record_trace import steps_of_warmup, trace_path
from ditron_train.runtime.errors import SettingError
from ditron_train.tools.arguments import check_folder
from ditron_train.tools.compare.launch import RunningJob, may_start_together, running_jobs, with_fp8, with_launcher
from ditron_train.tools.compare.memory import memory_gib
from ditron_train.tools.compare.row import write_row
from ditron_train.tools.compare.side_by_side import show
from ditron_train.tools.compare.steps import Job, Runs, differences, differing_values, read_job
from ditron_train.tools.compare.traces import StepTrace, is_traced, read_step_trace, show_traces, trace_table
from ditron_train.tools.fp8.recipes import add_fp8_argument, check_fp8
from ditron_train.tools.job.command import split_text
from ditron_train.tools.nothing_compared import require_compared

_NO_CALL = "no fused call ran in a job with ditron_train (its log says why each layer ran natively)"
_UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``compare``."""
    parser.add_argument(
        "--ditron", type=_features, metavar="NAME[,NAME]", help="what to accelerate, as at the launcher"
    )
    add_fp8_argument(parser, "adds Megatron's --fp8-format and --fp8-recipe to the command")
    parser.add_argument(
        "--notes",
        type=Path,
        nargs=2,
        metavar=("NATIVE", "FUSED"),
        help="trains nothing: what two jobs with --ditron-record wrote, across nodes for instance",
    )
    parser.add_argument(
        "--skip",
        type=int,
        metavar="N",
        help="steps at the beginning that are not timed (default: half of them, at most 10)",
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="both jobs also record one step, in the middle of those that are timed: a table of what "
        "the device does in it, "
        "natively and fused, and <output>/{native,fused}/trace-rank<RANK>.json, which Perfetto shows",
    )
    parser.add_argument(
        "--order",
        choices=("AB", "ABA", "ABBA"),
        default="ABBA",
        help="which jobs run one after the other, A natively, B with ditron_train (default %(default)s): GPUs are "
        "slower when they are warm, so each kind has to come early and late",
    )
    parser.add_argument(
        "--within",
        type=float,
        metavar="S",
        help="jobs after the second are left out if all jobs together would take more than so many seconds",
    )
    parser.add_argument(
        "--trace-rank", type=int, default=0, metavar="RANK", help="where --trace records (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("compare"), metavar="DIR", help="logs and notes (default %(default)s)"
    )
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="adds a row to <DIR>/<device>x<ranks>/training.json"
    )
    parser.add_argument(
        "--model", default="training", metavar="NAME", help="what the row is called (default %(default)s)"
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND", help="torchrun ... pretrain_gpt.py ..."
    )


def _features(text: str) -> str:
    try:
        return ",".join(parse_features(text))
    except SettingError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 if all that native repeats is equal, 1 if something differs or a row breaks the rule on memory.

    Raises:
        NothingComparedError: A feature had no fused call, so native was compared with native.
        SettingError: The command or the notes cannot be used, a job failed, or a trace is not there or cannot be read.
    """
    _check(arguments)
    folders = arguments.notes or [arguments.output / name for name in ("native", "fused")]
    runs = Runs(*([read_job(folder)] for folder in folders)) if arguments.notes else _train_all(arguments)
    native, fused = runs.native[0], runs.fused[0]
    for job in runs.fused:
        _check_alike(native, job)
    found = [difference for job in runs.fused for difference in differences(native, job)]
    if found and not arguments.notes and len(runs.native) == 1:  # is it native that does not repeat itself?
        with running_jobs() as jobs:
            jobs.append(_start(_command(arguments), "A", 1, arguments))
            runs.native.append(_follow(jobs[0], "A", 1, arguments))
    for job in runs.native[1:]:
        _check_alike(native, job)
    own = [difference for job in runs.native[1:] for difference in differences(native, job)]
    skip = arguments.skip if arguments.skip is not None else steps_of_warmup(len(native))
    is_equal = show(runs, found, own, skip)
    traces: tuple[StepTrace, StepTrace] | None = None
    if arguments.trace or (is_traced(native) and is_traced(fused)):
        traces = read_step_trace(folders[0], native), read_step_trace(folders[1], fused)
        show_traces(*traces, times_ms=runs.times_ms(skip))
    counts = runs.fused_calls or {"--ditron": 0}
    if arguments.results is not None and (any(counts.values()) or not is_equal):
        command = None if arguments.notes else _command(arguments)
        table = None if traces is None else trace_table(*traces)
        verdict: dict[str, Any] = dict(is_equal=is_equal and not found)
        verdict["native_repeats"] = False if found and is_equal else None  # they differ from where native jobs do, too
        path = write_row(arguments.results, arguments.model, runs, skip, command, table, **verdict)
        words = "no row was written: no step was timed" if path is None else f"written: {path}"
        Console(stderr=True).print(words, markup=False, highlight=False)
        is_equal = is_equal and (memory_gib(runs) or {}).get("excess", 0) <= 0  # which `show` has printed
    if is_equal:
        require_compared(counts, _NO_CALL)
    return 0 if is_equal else 1


def _check(arguments: argparse.Namespace) -> None:
    """Refuses what cannot be before anything is trained.

    Raises:
        SettingError: Options that say nothing together, a folder that cannot be written, or torchrun in front of this
            command.
    """
    if arguments.skip is not None and arguments.skip < 0:
        raise SettingError("--skip has to be 0 or more")
    if arguments.trace_rank < 0:
        raise SettingError("--trace-rank has to be 0 or more")
    if arguments.notes and (arguments.ditron or arguments.command or arguments.fp8):
        raise SettingError("--notes trains nothing: leave out --ditron, --fp8 and the command")
    check_fp8(arguments.fp8, "compare")
    if arguments.ditron == WGRAD:
        raise SettingError("--ditron wgrad is on natively, too: name what to compare beside it")
    if not arguments.notes:
        if _UNDER_TORCHRUN in os.environ:
            raise SettingError(
                "compare starts torchrun itself: python -m ditron_train compare --ditron tp torchrun "
                "... pretrain_gpt.py ..."
            )
        _command(arguments)  # a command that cannot be leaves no folder behind
        check_folder(arguments.output)
    if arguments.results is not None:
        check_folder(arguments.results)


def _check_alike(native: Job, other: Job) -> None:
    """Refuses two jobs whose notes say that they did not train the same, or that the first is no native one.

    Raises:
        SettingError: Such jobs.
    """
    if native.features:
        raise SettingError(f"what the fused path is compared with ran with --ditron {','.join(native.features)}")
    trained = [
        {
            "ranks": job.header["world_size"],
            "dtype": job.header["dtype"],
            **job.header["sizes"],
            "first step": job.ranks[0][0].number,
        }
        for job in (native, other)
    ]
    if differing := differing_values(*trained):
        raise SettingError(f"the two jobs did not train the same: {differing}")


def _command(arguments: argparse.Namespace) -> list[str]:
    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if len(words) == 1 and " " in words[0].strip():
        words = split_text(words[0])  # a pasted command
    return with_fp8(with_launcher(words), arguments.fp8)


def _train_all(arguments: argparse.Namespace) -> Runs:
    """The jobs in their order; those behind the second only if time is left for them."""
    if arguments.ditron is None:
        raise SettingError("--ditron names what to accelerate: compare --ditron tp torchrun ... pretrain_gpt.py ...")
    words, order = _command(arguments), arguments.order
    turns = [(kind, order[:place].count(kind)) for place, kind in enumerate(order)]
    runs, began_s, longest_s = Runs([], []), time.monotonic(), 0.0
    with running_jobs() as jobs:
        for place, (kind, index) in enumerate(turns):
            job_began_s = time.monotonic()
            is_needed = not (runs.native and runs.fused)
            if not is_needed and arguments.within is not None and job_began_s + longest_s > began_s + arguments.within:
                break
            if place == len(jobs):
                are_held = may_start_together(words)
                for turn in turns[place:] if are_held else turns[place : place + 1]:
                    jobs.append(_start(words, *turn, arguments, is_held=are_held))
            trained = runs.native if kind == "A" else runs.fused
            trained.append(_follow(jobs[place], kind, index, arguments))
            longest_s = max(longest_s, time.monotonic() - job_began_s)
    return runs


def _name(kind: str, index: int) -> str:
    return {"A": "native", "B": "fused"}[kind] + (f"-{index + 1}" if index else "")


def _start(
    words: Sequence[str], kind: str, index: int, arguments: argparse.Namespace, *, is_held: bool = False
) -> RunningJob:
    """Starts a job, natively (``A``) or with the fused path: its notes in a folder of ``--output``, its log beside
    them. The first of each kind is traced, if traces are asked for. ``is_held``: it waits for its turn in front of its
    set-up.
    """
    more = ["--ditron", WGRAD if kind == "A" else arguments.ditron]
    if arguments.trace and index == 0:
        more += ["--ditron-record-trace", f"middle,{arguments.trace_rank}"]
    name = _name(kind, index)
    folder = (arguments.output / name).resolve()
    for old in (*folder.glob("rank*.jsonl"), *folder.glob(trace_path(folder, "*").name)):
        old.unlink()
    command = [*words, *more, "--ditron-record", str(folder)]
    return RunningJob(command, arguments.output / f"{name}.log", folder, is_held=is_held)


def _follow(job: RunningJob, kind: str, index: int, arguments: argparse.Namespace) -> Job:
    """Lets a job train, shows how far it is, and reads its notes."""
    name = _name(kind, index)
    folder = arguments.output / name
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(name, total=None)
        job.finish(
            _watcher(folder / "rank0.jsonl", lambda done, total: progress.update(task, completed=done, total=total))
        )
    return read_job(folder)


def _watcher(path: Path, report: Callable[[int, int | None], None]) -> Callable[[], None]:
    """Reports which step a rank's file has come to, and which will be the last; looks at every fifth call."""
    calls = itertools.count()

    def watch() -> None:
        if next(calls) % 5 or not path.is_file():
            return
        header, *steps = path.read_text(encoding="utf-8").split("\n")[:-1] or [""]  # the last line may be half written
        if steps:
            report(json.loads(steps[-1])["step"], json.loads(header)["train_iters"])

    return watch
