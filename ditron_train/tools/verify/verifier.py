"""Compares every op with native, forward and backward, on every rank: one table, exit status 1 if a single bit
differs."""

from __future__ import annotations

import argparse
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ditron_train.policy.plan import load_plan
from ditron_train.runtime.errors import DitronError, NotSupportedError, SettingError
from ditron_train.runtime.logs import get_logger
from ditron_train.runtime.versions import pip_command
from ditron_train.tools.arguments import add_common_arguments, check_counts, check_folder
from ditron_train.tools.catalog import PACKAGES
from ditron_train.tools.fp8.recipes import add_fp8_argument, check_fp8
from ditron_train.tools.nothing_compared import require_compared
from ditron_train.tools.session import BenchSession, bench_session
from ditron_train.tools.tables import terminal
from ditron_train.tools.verify.cases import (
    Case,
    ModelSizes,
    add_case_arguments,
    model_cases,
    model_sizes,
    random_cases,
    shape_cases,
)
from ditron_train.tools.verify.outcome import Stress
from ditron_train.tools.verify.packages import (
    check_fp8_case,
    check_packages,
    parse_packages,
    verify_fp8_layers,
    verify_packages,
)
from ditron_train.tools.verify.result_table import Report

_FIRST_EPOCH = 2**31 - 64  # so that every run crosses the wrap
_MOST_STRAGGLER_MS = 1e6
_INTERPRETED_FLOPS = 3e8  # of the products of a comparison in a second, on two cores
_LONG_S, _MOST_INTERPRETED_S = 60, 3600
_ONE_RANK = "it needs at least 2 ranks (use torchrun --nproc-per-node 2 -m ditron_train verify)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``verify``."""
    parser.set_defaults(job=())  # Megatron's arguments, which the command line has after a --
    add_case_arguments(parser)
    parser.add_argument(
        "--packages",
        metavar="NAME,NAME",
        help=f"the ops of these, too, timed briefly: {', '.join(PACKAGES)}; all: {', '.join(parse_packages('all'))} "
        "(default: the linear layers, which have tp's ops in them, and nothing else)",
    )
    parser.add_argument("--rooms", dest="packages", help=argparse.SUPPRESS)  # until 0.3
    add_fp8_argument(parser, "the layers of Transformer Engine in this recipe, their state too")
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="decide as strict does, and keep it: a job with --ditron-plan FILE asks no more",
    )
    stress = parser.add_argument_group("stress")
    stress.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="compare each op N times, layers on new data"
    )
    stress.add_argument(
        "--straggler-ms", type=float, default=0.0, metavar="MS", help="a random rank is up to this late"
    )
    stress.add_argument(
        "--poison", action="store_true", help="fill the layers' symmetric buffers with NaN before every op"
    )
    stress.add_argument("--seconds", type=float, metavar="S", help="begin no random shape after S seconds")
    stress.add_argument(
        "--first-epoch",
        type=int,
        default=_FIRST_EPOCH,
        metavar="N",
        help="where epochs begin (default %(default)s: near the wrap)",
    )
    add_common_arguments(parser.add_argument_group("timing"), model_option=False, writes_results=False)


def run(arguments: argparse.Namespace) -> int:
    """Verifies what the command line names.

    Returns:
        0 if every bit is equal, else 1; the same on every rank.

    Raises:
        NothingComparedError: Of something that was asked for, all ran natively, and no plan was asked for.
        SettingError: A size, a count, a shape or a folder that cannot be.
        NotSupportedError: megatron-core, the reference, is not installed; FP8 without Transformer Engine.
    """
    packages = _check(arguments)
    try:
        from ditron_train.tools.bench.megatron_tp import megatron_world
    except ImportError as error:
        raise _missing(error) from None
    if arguments.plan is not None:
        load_plan(arguments.plan)  # raises for one that cannot be used, before anything is launched
        os.environ.update(DITRON_POLICY="strict", DITRON_PLAN=str(arguments.plan))
    # Whatever is proven equal is verified, be it faster on this machine or not.
    os.environ.setdefault("DITRON_POLICY", "bits")
    # What runs fused is listed in the table; of random shapes that is thousands.
    get_logger("policy").setLevel(logging.WARNING)
    with bench_session("verify", arguments) as session:
        on_gpu = session.device.type == "cuda"
        model = model_sizes(arguments.job, on_gpu)
        check_packages(packages, model, session.world_size, arguments.fp8)
        report = Report(session, arguments)
        try:
            with megatron_world(session):
                verification = _Verification(session, arguments, model, report)
                verification.compare()
            verify_packages(packages, model, report, verification.stress, arguments.seed, session, arguments.fp8)
        except (KeyboardInterrupt, DitronError):
            report.finish()  # what was compared until then
            raise
        return verification.finish()


def _missing(error: ImportError) -> Exception:
    """What to say if the reference, or what it or the ops need, cannot be imported."""
    name = (error.name or "").partition(".")[0]
    if name in ("", "megatron", "ditron_train"):
        return NotSupportedError(f"verify compares with megatron-core: {error}; {pip_command('megatron-core')}")
    return NotSupportedError(f"verify needs {name}: {error}; {pip_command(name)}")


def _check(arguments: argparse.Namespace) -> list[str]:
    """The names of ``--packages``; raises for whatever cannot be, before anything is launched."""
    if arguments.repeat < 1 or arguments.random < 0:
        raise SettingError("--repeat has to be above 0, --random 0 or more")
    if not 0 <= arguments.straggler_ms <= _MOST_STRAGGLER_MS:
        raise SettingError(f"--straggler-ms has to be from 0 to {_MOST_STRAGGLER_MS:g}")
    if not 0 <= arguments.seed < 2**32:
        raise SettingError("--seed has to be from 0 to 2**32 - 1")
    check_counts(arguments)
    if arguments.seconds is not None and not 0 < arguments.seconds < math.inf:
        raise SettingError("--seconds has to be a number above 0")
    if not 0 <= arguments.first_epoch < 2**31:
        raise SettingError("--first-epoch has to be from 0 to 2**31 - 1")
    if arguments.largest is not None and arguments.largest < 1:
        raise SettingError("--largest has to be above 0")
    if arguments.fp8 is not None:
        given = [f"--{name}" for name in ("random", "poison", "dtype") if getattr(arguments, name)]
        if given:
            raise SettingError(f"{', '.join(given)}: without --fp8, which verifies layers of a model and single ones")
        check_fp8(arguments.fp8, "verify")
    if arguments.output is not None:
        check_folder(arguments.output)
    return parse_packages(arguments.packages)


def _check_patience(cases: Sequence[Case]) -> None:
    """Says how long the interpreter takes, and refuses what takes longer than anyone waits."""
    seconds = sum(6.0 * case.m * case.n * case.k for case in cases) / _INTERPRETED_FLOPS
    if seconds > _MOST_INTERPRETED_S:
        raise SettingError(
            f"without a GPU Triton's interpreter would take about {seconds / 3600:.1f} hours for these layers: choose "
            "smaller sizes, or --column M N K for one layer"
        )
    if seconds > _LONG_S:
        get_logger("verify").info("about %.0f minutes in Triton's interpreter", seconds / 60)


class _Verification:
    """One run of the command."""

    def __init__(
        self, session: BenchSession, arguments: argparse.Namespace, model: ModelSizes, report: Report
    ) -> None:
        from ditron_train.tp import get_tp_context

        self.session, self.arguments, self.model, self.report = session, arguments, model, report
        self.on_gpu = session.device.type == "cuda"
        self.dtype = getattr(torch, arguments.dtype) if arguments.dtype else session.dtype
        self.named = self._named_cases()
        if not self.on_gpu:
            _check_patience(self.named)
        self.context = get_tp_context(dist.group.WORLD, session.device, first_epoch=arguments.first_epoch)
        self.stress = Stress(arguments.repeat, arguments.straggler_ms, arguments.poison)

    def compare(self) -> None:
        """The linear layers, one after the other, then random ones."""
        if self.arguments.fp8 is not None:
            verify_fp8_layers(self.named, self.report, self.stress, self.arguments.seed, self.arguments.fp8)
            self.report.compared[f"tp in {self.arguments.fp8}"] = len(self.report.rows)
            return
        if self.named:
            from ditron_train.tools.verify.compare import compare  # needs megatron-core
        for number, case in enumerate(self._progress(self.named, len(self.named))):
            seed = self.arguments.seed + 100 * number
            self.report.add_outcome(compare(self.session, case, self.stress, seed=seed, timed=True))
        if self.arguments.random:
            self._compare_random()

    def finish(self) -> int:
        """Shows everything; the exit status.

        Raises:
            NothingComparedError: Of something that was asked for, all ran natively.
        """
        self.report.finish()
        is_good, is_alone = self.report.is_equal, self.session.world_size == 1
        if is_good and (is_alone or self.arguments.plan is None):  # a plan may say that all of it runs natively
            random = {"--random": sum(one.is_fused for one in self.report.random)} if self.arguments.random else {}
            counts = {**self.report.compared, **random}
            require_compared(counts, _ONE_RANK if is_alone else "it runs natively here, by the policy")
        return 0 if is_good else 1

    def _named_cases(self) -> list[Case]:
        arguments = self.arguments
        named = shape_cases(arguments, self.dtype)
        is_of_packages = bool(arguments.packages) and self.session.world_size == 1  # whose layers would run natively
        if not (named or arguments.random or is_of_packages):
            named = model_cases(self.model, self.dtype)
            if not arguments.sequence_parallel:  # column layers are native then
                named = [case for case in named if case.kind == "row"]
        named = [replace(case, sequence_parallel=arguments.sequence_parallel) for case in named]
        for case in named:
            case.local_shapes(self.session.world_size)  # raises for all before anything runs
            if arguments.fp8 is not None:
                check_fp8_case(case, self.session.world_size, arguments.fp8)
        return named

    def _compare_random(self) -> None:
        from ditron_train.tools.verify.compare import compare

        session, arguments = self.session, self.arguments
        end_s = math.inf if arguments.seconds is None else time.monotonic() + arguments.seconds
        cases = random_cases(
            arguments.random, arguments.seed, session.world_size, self.on_gpu,
            largest=arguments.largest, dtype=self.dtype if arguments.dtype else None,
        )  # fmt: skip
        for number, case in enumerate(self._progress(cases, arguments.random)):
            if not session.agree(time.monotonic() < end_s):
                break
            case = replace(case, sequence_parallel=arguments.sequence_parallel)
            seed = arguments.seed + 100 * number
            self.report.random.append(compare(session, case, self.stress, seed=seed, timed=False))

    def _progress(self, cases: Iterable[Case], total: int) -> Iterator[Case]:
        columns = (
            TextColumn("verify"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        console = terminal()
        with Progress(*columns, console=console, disable=self.session.rank != 0 or total == 0) as progress:
            task = progress.add_task("", total=total)
            for case in cases:
                progress.update(task, description=f"{case.name} {case.kind} {case.m}x{case.n}x{case.k}")
                yield case
                progress.advance(task)
