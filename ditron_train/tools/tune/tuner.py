"""Times the ways to run each tensor-parallel op on this machine and writes the quickest into a table (under torchrun).

For every shape class it first tries ways of moving data, then tile sizes with the two best of them, beside native
(cuBLAS and NCCL). Candidates whose bits differ from native's are thrown out. Times are medians of the maximum over
ranks, so all ranks see the same and choose alike. Point DITRON_TUNING to the file to use it.
"""

from __future__ import annotations

import argparse
import os
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import ditron_train
from ditron_train.runtime.device import driver_version
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.logs import get_logger
from ditron_train.runtime.provenance import nccl_version
from ditron_train.runtime.tuning_table import TuningTable, parse_table, read_table
from ditron_train.runtime.versions import find_versions
from ditron_train.symm.exchange import exchange
from ditron_train.tools.arguments import add_shape_argument
from ditron_train.tools.bench.tp import cases_of
from ditron_train.tools.bench.tp_contenders import Case
from ditron_train.tools.session import BenchSession, bench_session
from ditron_train.tools.tables import terminal
from ditron_train.tools.tune.rates import fit_rates
from ditron_train.tools.tune.search import STAGES, ShapeClass, Turns, search
from ditron_train.tools.tune.trial import Trial
from ditron_train.tools.verify.cases import add_model_arguments, model_cases, model_sizes
from ditron_train.tp import TPContext, get_context
from ditron_train.tp.choices import Problem

__all__ = ["add_arguments", "run"]

_OPS = ("ag_gemm nt", "ag_gemm nn", "gemm_rs nt", "gemm_rs nn")
_DEFAULT_OPS = _OPS[:3]  # the last runs where a weight is frozen, or copy engines cannot be driven
_ROW_BYTES = 16  # rows of symmetric memory are whole so many bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``tune``."""
    on_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--op",
        action="append",
        choices=_OPS,
        help=f"op and layout, may be repeated (default: {', '.join(_DEFAULT_OPS)})",
    )
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help="shapes published for this model (may be repeated; default: all, and a LLaMA-70B layer)",
    )
    add_shape_argument(parser, "global sizes of one linear layer, tried as column and as row layer (may be repeated)")
    add_model_arguments(parser)
    parser.add_argument(
        "--output",
        dest="table",
        type=Path,
        default=Path("tuning.json"),
        metavar="FILE",
        help="table to write; what it holds of other classes and group sizes stays (default %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=4 if on_gpu else 1,
        metavar="N",
        help="how often candidates take turns (default %(default)s)",
    )
    parser.add_argument(
        "--repetitions",
        type=int,
        default=4 if on_gpu else 1,
        metavar="N",
        help="timed calls of each turn (default %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Tunes what the command line asks for and writes the table; returns 1 where bits of a candidate differed.

    Raises:
        SettingError: The output exists and is no table of this device, or cannot be written; or a shape does not
            divide over the ranks.
    """
    with bench_session("tune", arguments) as session:
        context = get_context(dist.group.WORLD, session.device)
        table = _agreed_table(arguments.table, session, context)
        classes = _classes(_problems(arguments, session), session, context)
        num_steps = len(STAGES) * sum(len(shape_class.trials) for shape_class in classes)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), disable=session.rank != 0) as progress:
            task = progress.add_task("compiling", total=num_steps)
            search(
                classes,
                Turns(arguments.rounds, arguments.repetitions),
                session,
                context,
                advance=lambda what: progress.update(task, advance=1, description=what),
                keep=lambda: _save(table, classes, arguments.table, session, context),
            )
        if session.rank == 0:
            terminal().print(_as_table(classes, context))
            get_logger("tune").info("written: %s (to use it: DITRON_TUNING=%s)", arguments.table, arguments.table)
        return 1 if any(shape_class.differing for shape_class in classes) else 0


def _save(
    table: TuningTable, classes: list[ShapeClass], path: Path, session: BenchSession, context: TPContext
) -> None:
    """Writes what is known so far."""
    observed = [result.observed for shape_class in classes for result in shape_class.results if result.observed]
    table.rates = fit_rates(observed, context.machine)
    table.made_with = _made_with()
    for shape_class in classes:
        problem = shape_class.problem
        table.put(problem.table_op, problem.world_size, problem.shape_class, shape_class.entry())
    if session.rank == 0:
        table.save(path)


def _agreed_table(path: Path, session: BenchSession, context: TPContext) -> TuningTable:
    """What is there already, as rank 0 reads it."""
    device = context.machine.device
    text, refusal = None, None
    if session.rank == 0:
        try:
            table = read_table(path, device) if path.exists() else TuningTable(device)
            text = table.to_text()
            parent = path.absolute().parent
            if not parent.is_dir() or not os.access(parent, os.W_OK):
                why = "its folder is read-only" if parent.is_dir() else "there is no such folder"
                refusal = f"cannot write the tuning table {path}: {why}"
        except (SettingError, OSError) as error:
            refusal = str(error)
    text, refusal = exchange(dist.group.WORLD, (text, refusal))[0]
    if refusal is not None:
        raise SettingError(refusal)
    return parse_table(text, str(path))


def _cases(arguments: argparse.Namespace, session: BenchSession, dtype: torch.dtype) -> list[Case]:
    """Layers by their global sizes: what ``--shape``, ``--model`` and a model's sizes name, or all that is
    published."""
    cases = []
    names_layer = arguments.hidden_size is not None
    names_shapes = bool(arguments.shape or arguments.model)
    if names_shapes or not names_layer:
        cases += [case for op in ("ag_gemm", "gemm_rs") for case in cases_of(op, arguments, session)]
    if names_layer or not names_shapes:
        for layer in model_cases(model_sizes(arguments, session.device.type == "cuda"), dtype):
            layer.local_shapes(session.world_size)  # raises where it does not divide
            cases.append(
                Case("ag_gemm" if layer.kind == "column" else "gemm_rs", layer.name, layer.m, layer.n, layer.k)
            )
    return cases


def _problems(arguments: argparse.Namespace, session: BenchSession) -> list[Problem]:
    """The GEMMs of every layer asked for: forward, and the data gradient in backward."""
    dtype, world_size = session.dtype, session.world_size
    problems = []
    for case in _cases(arguments, session, dtype):
        problems.append(case.problem(dtype, world_size))
        if case.op == "ag_gemm":
            problems.append(Problem("gemm_rs", case.m, case.k, case.n // world_size, "nn", dtype, world_size))
        else:
            problems.append(Problem("ag_gemm", case.m, case.k // world_size, case.n, "nn", dtype, world_size))
    wanted = arguments.op or _DEFAULT_OPS
    problems = [problem for problem in dict.fromkeys(problems) if problem.table_op in wanted]
    for problem in problems:
        if problem.k * dtype.itemsize % _ROW_BYTES or problem.n * dtype.itemsize % _ROW_BYTES:
            raise SettingError(f"tune: rows of {problem.k} and {problem.n} {dtype} are not whole {_ROW_BYTES} bytes")
    return problems


def _classes(problems: list[Problem], session: BenchSession, context: TPContext) -> list[ShapeClass]:
    groups: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        groups.setdefault((problem.table_op, problem.shape_class), []).append(problem)
    return [ShapeClass([Trial(problem, session, context) for problem in group], context) for group in groups.values()]


def _made_with() -> dict[str, str]:
    versions = find_versions()
    made_with = {
        "ditron_train": ditron_train.__version__,
        "torch": torch.__version__,
        "triton": versions["triton"],
        "nccl": nccl_version(),
        "driver": driver_version(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }
    return {name: value for name, value in made_with.items() if value}


def _as_table(classes: list[ShapeClass], context: TPContext) -> Table:
    shown = Table(title=f"{context.world_size} x {context.machine.device}", title_justify="left")
    names = ("op", "class", "choice", "ours us", "default us", "native us", "tried", "other bits")
    for name in names:
        shown.add_column(name, no_wrap=True, justify="left" if name in ("op", "class", "choice") else "right")
    times = ("ditron_us", "default_us", "native_us", "tried")
    for shape_class in classes:
        entry = shape_class.entry()
        hidden = {*times, "shape", "native"}
        choice = "native" if entry["native"] else ", ".join(f"{k} {v}" for k, v in entry.items() if k not in hidden)
        cells = [str(entry.get(name) if entry.get(name) is not None else "") for name in times]
        problem = shape_class.problem
        shown.add_row(problem.table_op, problem.shape_class, choice, *cells, str(len(shape_class.differing)))
    return shown
