"""Times the ways to run ops of tp, sp and ep on this machine and writes the quickest into a table (under torchrun).

For every shape class it first tries ways of moving data, then tile sizes with the two best of them, and native, too
(cuBLAS and NCCL). Candidates whose bits differ from native's are dropped. Times are medians of the maximum over
ranks, so all ranks see the same and choose alike. Point DITRON_TUNING to the file to use it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import ditron_train
from ditron_train.data.provenance import nccl_version
from ditron_train.data.rates import MachineRates
from ditron_train.data.tuning_table import TuningTable, parse_table, read_table
from ditron_train.runtime.device import device_name
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.logs import get_logger
from ditron_train.runtime.versions import driver_version, find_versions
from ditron_train.symm.exchange import exchange
from ditron_train.tools.arguments import add_count, add_shape_argument
from ditron_train.tools.cases import Shape
from ditron_train.tools.cases.tp_gemm import AG_GEMM, GEMM_AR, GEMM_RS, local_shapes
from ditron_train.tools.catalog import PACKAGES, megatron_groups, spaces_of
from ditron_train.tools.nothing_compared import require_compared
from ditron_train.tools.op_rows import shapes_for
from ditron_train.tools.session import BenchSession, bench_session
from ditron_train.tools.tables import terminal
from ditron_train.tools.tune.rates import Observed, fit_rates
from ditron_train.tools.tune.search import ShapeClass, Turns, search, trials_of
from ditron_train.tools.tune.space import SearchSpace
from ditron_train.tools.tune.tp_space import GemmSpace
from ditron_train.tools.verify.cases import model_sizes
from ditron_train.tp.context import get_tp_context

_ROW_BYTES = 16  # rows of symmetric memory are whole so many bytes
_NOT_BY_DEFAULT = ("gemm_rs nn",)  # runs if a weight is frozen, or no copy engine can be driven


def _spaces() -> dict[str, SearchSpace[Any, Any]]:
    """The ops that have a choice, by their name in a table."""
    return {space.table_op: space for room in PACKAGES for space in spaces_of(room)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``tune``."""
    parser.set_defaults(job=())  # Megatron's arguments, which the command line has after a --
    parser.add_argument(
        "--op",
        action="append",
        choices=list(_spaces()),
        help=f"op and layout, may be repeated (default: all but {', '.join(_NOT_BY_DEFAULT)})",
    )
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help="shapes published for this model (may be repeated; default: all, and a LLaMA-70B layer)",
    )
    add_shape_argument(parser, "global sizes of one linear layer, tried as column and as row layer (may be repeated)")
    parser.add_argument(
        "--output",
        dest="table",
        type=Path,
        default=Path("tuning.json"),
        metavar="FILE",
        help="table to write; what it holds of other classes and group sizes stays (default %(default)s)",
    )
    add_count(parser, "rounds", "how often candidates take turns", on_gpu=4, on_cpu=1)
    add_count(parser, "repetitions", "timed calls of each turn", on_gpu=4, on_cpu=1)
    text = "seconds that the quickest ways of a long op run alone at the end, at the clock that the power limit allows"
    add_count(parser, "sustained-s", text, on_gpu=2, on_cpu=0)


def run(arguments: argparse.Namespace) -> int:
    """Tunes what the command line asks for and writes the table; returns 1 if bits of a candidate differed.

    Raises:
        NothingComparedError: An op that ``--op`` names, or any op, has no shape to be tried at.
        SettingError: The output exists and is no table of this device, or cannot be written; or a shape does not
            divide over the ranks.
    """
    with bench_session("tune", arguments) as session, ExitStack() as stack:
        table = _agreed_table(arguments.table, session)
        planned = _planned(arguments, session)
        for groups in {space.case.groups: None for space, _ in planned if space.case.groups is not None}:
            stack.enter_context(megatron_groups(groups, session))
        classes = [one for space, shapes in planned for one in trials_of(session, space, shapes)]
        num_steps = sum(one.space.rounds * len(one.trials) for one in classes)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), disable=session.rank != 0) as progress:
            task = progress.add_task("compiling", total=num_steps)
            search(
                classes,
                Turns(arguments.rounds, arguments.repetitions, arguments.sustained_s),
                session,
                advance=lambda what: progress.update(task, advance=1, description=what),
                keep=lambda: _save(table, classes, arguments.table, session),
            )
        shown = _as_table(classes, session)  # by every rank: the name of a class may be agreed on
        if session.rank == 0:
            terminal().print(shown)
            get_logger("tune").info("written: %s (to use it: DITRON_TUNING=%s)", arguments.table, arguments.table)
        return 1 if any(shape_class.differing for shape_class in classes) else 0


def _save(table: TuningTable, classes: list[ShapeClass], path: Path, session: BenchSession) -> None:
    """Writes what is known so far."""
    table.rates = _rates(classes, session) or table.rates
    table.made_with = _made_with()
    for one in classes:
        num_ranks = 1 if one.space.is_local else session.world_size
        table.put(one.space.table_op, num_ranks, one.space.shape_class(one.first), one.entry())
    if session.rank == 0:
        table.save(path)


def _rates(classes: list[ShapeClass], session: BenchSession) -> MachineRates | None:
    """Rates of the machine from the parts of AG-GEMM and GEMM-RS, if any was timed."""
    observed = []
    for one in classes:
        for trial, result in zip(one.trials, one.results, strict=True):
            if isinstance(one.space, GemmSpace) and result.parts_us:
                parts = result.parts_us
                problem = one.space.case.op.problem(trial.calls[0])
                observed.append(Observed(problem, parts["gemm"], parts["comm"], parts.get("link")))
    if not observed:
        return None
    return fit_rates(observed, get_tp_context(dist.group.WORLD, session.device).machine)


def _agreed_table(path: Path, session: BenchSession) -> TuningTable:
    """What is there already, as rank 0 reads it."""
    device = device_name(session.device)
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
    text, refusal = exchange(dist.group.WORLD, (text, refusal))[0]  # type: ignore[arg-type]
    if refusal is not None:
        raise SettingError(refusal)
    return parse_table(text, str(path))


def _planned(arguments: argparse.Namespace, session: BenchSession) -> list[tuple[SearchSpace[Any, Any], list[Shape]]]:
    """The ops asked for and their shapes."""
    spaces = _spaces()
    wanted = arguments.op or [name for name in spaces if name not in _NOT_BY_DEFAULT]
    layers = _linear_layers(arguments, session)
    planned: list[tuple[SearchSpace[Any, Any], list[Shape]]] = []
    for name in wanted:
        space = spaces[name]
        shapes = _gemms_of(space, layers) if isinstance(space, GemmSpace) else _shapes_of(space, arguments, session)
        distinct = {tuple(shape.sizes.items()): shape for shape in shapes}
        refusals = [
            why for shape in distinct.values() if (why := space.case.unsupported_shape(shape, session.world_size))
        ]
        if refusals and not arguments.op and not isinstance(space, GemmSpace):
            get_logger("tune").info("%s is left out: %s", name, refusals[0])
            continue
        if refusals:
            raise SettingError(refusals[0])
        if isinstance(space, GemmSpace):
            _check_rows(space, distinct.values(), session)
        if distinct:
            planned.append((space, list(distinct.values())))
    names = [space.table_op for space, _ in planned]
    counts = {name: names.count(name) for name in arguments.op or ()} or {"tune": len(names)}
    require_compared(counts, "it has no shape here")
    return planned


def _linear_layers(arguments: argparse.Namespace, session: BenchSession) -> list[tuple[str, Shape]]:
    """Layers by the op of their forward: what ``--shape``, ``--model`` and a model's sizes name, or all that is
    published."""
    on_gpu = session.device.type == "cuda"
    layers: list[tuple[str, Shape]] = []
    names_model = bool(arguments.job)
    names_shapes = bool(arguments.shape or arguments.model)
    if names_shapes or not names_model:
        for case in (AG_GEMM, GEMM_RS, GEMM_AR):
            layers += [(case.op.kind, shape) for shape in shapes_for(case, arguments, session.world_size, on_gpu)]
    if names_model or not names_shapes:
        model = model_sizes(arguments.job, on_gpu)
        for case in (AG_GEMM, GEMM_RS, GEMM_AR):
            layers += [(case.op.kind, shape) for shape in case.shapes_of_model(model, session.world_size)]
    return layers


def _gemms_of(space: GemmSpace, layers: list[tuple[str, Shape]]) -> list[Shape]:
    """The GEMMs of every layer that this op runs: forward, or the data gradient in backward."""
    forward = [shape for op, shape in layers if op == space.case.op.kind]
    if space.case.op.layout == "nt":
        return forward
    partner = "gemm_rs" if space.case.op.kind == "ag_gemm" else "ag_gemm"  # the layers whose data gradient this op is
    backward = [shape.sizes for op, shape in layers if op == partner]
    return [Shape("dgrad", {"m": sizes["m"], "n": sizes["k"], "k": sizes["n"]}) for sizes in backward]


def _check_rows(space: GemmSpace, shapes: Iterable[Shape], session: BenchSession) -> None:
    itemsize = session.dtype.itemsize
    for shape in shapes:
        (_, k), (n, _) = local_shapes(space.case.op.kind, shape, session.world_size)
        if k * itemsize % _ROW_BYTES or n * itemsize % _ROW_BYTES:
            raise SettingError(f"tune: rows of {k} and {n} {session.dtype} are not whole {_ROW_BYTES} bytes")


def _shapes_of(space: SearchSpace[Any, Any], arguments: argparse.Namespace, session: BenchSession) -> list[Shape]:
    """Of an op that is no linear layer: a model's, or what is published; nothing if ``--shape`` names layers."""
    on_gpu = session.device.type == "cuda"
    if arguments.job:
        return list(space.case.shapes_of_model(model_sizes(arguments.job, on_gpu), session.world_size))
    if arguments.shape and not arguments.op:
        return []
    published = list(space.shapes(session.world_size, on_gpu))
    return [shape for shape in published if not arguments.model or shape.model in arguments.model]


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


def _as_table(classes: list[ShapeClass], session: BenchSession) -> Table:
    shown = Table(title=f"{session.world_size} x {device_name(session.device)}", title_justify="left")
    names = ("op", "class", "choice", "fused us", "default us", "native us", "tried", "other bits")
    for name in names:
        shown.add_column(name, no_wrap=True, justify="left" if name in ("op", "class", "choice") else "right")
    times = ("ditron_us", "default_us", "native_us", "tried")
    for one in classes:
        entry = one.entry()
        hidden = {*times, "shape", "native"}
        choice = "native" if entry["native"] else ", ".join(f"{k} {v}" for k, v in entry.items() if k not in hidden)
        cells = [str(entry.get(name) if entry.get(name) is not None else "") for name in times]
        shown.add_row(one.space.table_op, one.space.shape_class(one.first), choice, *cells, str(len(one.differing)))
    return shown
