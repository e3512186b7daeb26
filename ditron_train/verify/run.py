"""``python -m ditron_train verify``: every case, one table, exit status 1 where a single bit differs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ditron_train.bench.rows import Row, write_results
from ditron_train.bench.session import BenchSession, add_common_arguments, bench_session
from ditron_train.bench.stamp import collect_stamp
from ditron_train.bench.tables import terminal
from ditron_train.runtime.errors import NotSupportedError, SettingError
from ditron_train.verify.cases import Case, add_case_arguments, model_cases, random_cases, shape_cases
from ditron_train.verify.outcome import RESULTS, Outcome, Stress

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``verify``."""
    add_case_arguments(parser)
    stress = parser.add_argument_group("stress")
    stress.add_argument("--repeat", type=int, default=1, metavar="N", help="compare each case N times, on new data")
    stress.add_argument("--straggler-ms", type=float, default=0.0, metavar="MS", help="a random rank is up to this late")
    stress.add_argument("--poison", action="store_true", help="fill symmetric buffers with NaN in front of every op")
    add_common_arguments(parser.add_argument_group("timing"))


def run(arguments: argparse.Namespace) -> int:
    """Verifies what the command line names.

    Returns:
        0 where every bit is equal, else 1; the same on every rank.

    Raises:
        SettingError: A size, a count or a shape that cannot be.
        NotSupportedError: megatron-core, the reference, is not installed.
    """
    if arguments.repeat < 1 or arguments.random < 0 or arguments.straggler_ms < 0:
        raise SettingError("--repeat has to be above 0, --random and --straggler-ms not below")
    try:
        from ditron_train.bench.megatron_tp import megatron_world
    except ImportError as error:
        raise NotSupportedError(f"verify compares with megatron-core: {error}; pip install 'ditron_train[megatron]'") from None
    from ditron_train.verify.compare import compare

    # Whatever is proven equal is verified, be it faster on this machine or not.
    os.environ.setdefault("DITRON_POLICY", "bits")
    stress = Stress(arguments.repeat, arguments.straggler_ms, arguments.poison)
    with bench_session("verify", arguments) as session, megatron_world(session):
        named, chosen_at_random = _cases(arguments, session)
        outcomes: list[Outcome] = []
        total = len(named) + arguments.random
        for number, case in enumerate(_with_progress(named, chosen_at_random, total, session)):
            timed = case.name != "random"
            outcomes.append(compare(session, case, stress, seed=arguments.seed + 100 * number, timed=timed))
        _show(session, outcomes, arguments)
        _write(session, [outcome for outcome in outcomes if outcome.native_us], arguments, outcomes)
        return 0 if all(outcome.equal for outcome in outcomes) else 1


def _cases(arguments: argparse.Namespace, session: BenchSession) -> tuple[list[Case], Iterable[Case]]:
    on_gpu = session.device.type == "cuda"
    dtype = getattr(torch, arguments.dtype or ("bfloat16" if on_gpu else "float32"))
    named = shape_cases(arguments, dtype)
    if not named and not arguments.random:
        named = model_cases(arguments, dtype, on_gpu)
    for case in named:
        case.local_shapes(session.world_size)  # raises for all before anything runs
    return named, random_cases(arguments.random, arguments.seed, session.world_size, on_gpu)


def _with_progress(named: list[Case], others: Iterable[Case], total: int, session: BenchSession) -> Iterable[Case]:
    columns = (TextColumn("verify"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=terminal(), disable=session.rank != 0) as progress:
        task = progress.add_task("", total=total)
        for case in (*named, *others):
            progress.update(task, description=f"{case.name} {case.kind} {case.m}x{case.n}x{case.k}")
            yield case
            progress.advance(task)


def _show(session: BenchSession, outcomes: Sequence[Outcome], arguments: argparse.Namespace) -> None:
    if session.rank != 0:
        return
    shown = [outcome for outcome in outcomes if outcome.case.name != "random" or not outcome.equal]
    if shown:
        table = Table(title=f"{session.world_size} ranks, {arguments.repeat} comparisons of each", title_justify="left")
        for name in ("layer", "op", "m x n x k", "dtype", *RESULTS, "native ms", "ditron ms", "verdict"):
            table.add_column(name)
        for outcome in shown:
            case = outcome.case
            bits = [_bits(outcome, result) for result in RESULTS]
            times = ["" if t is None else f"{t / 1e3:.3f}" for t in (outcome.native_us, outcome.ditron_us)]
            sizes, dtype = f"{case.m} x {case.n} x {case.k}", str(case.dtype).removeprefix("torch.")
            style = None if outcome.equal else "bold red"
            table.add_row(case.name, case.kind, sizes, dtype, *bits, *times, outcome.verdict, style=style)
        terminal().print(table)
    terminal().print(_summary(outcomes, arguments))


def _bits(outcome: Outcome, result: str) -> str:
    if not outcome.is_ours:
        return "native"
    count = outcome.num_different[result]
    return "equal" if count == 0 else f"{count} DIFFERENT"


def _summary(outcomes: Sequence[Outcome], arguments: argparse.Namespace) -> str:
    ours = [outcome for outcome in outcomes if outcome.is_ours]
    different = [outcome for outcome in outcomes if not outcome.equal]
    compared = len(ours) * arguments.repeat
    text = f"{len(outcomes)} shapes: {len(ours)} run ours ({compared} comparisons), {len(outcomes) - len(ours)} natively"
    return f"{text}; {len(different)} different" if different else f"{text}; every bit is equal"


def _write(session: BenchSession, timed: Sequence[Outcome], arguments: argparse.Namespace, outcomes: Sequence[Outcome]) -> None:
    """Timed cases as rows of ``verify.json`` where ``--output`` names a folder; the summary goes into the stamp."""
    if session.rank != 0 or arguments.output is None or not timed:
        return
    rows = [
        Row(
            op=f"{outcome.case.kind}_linear",
            direction="forward_backward",
            model=outcome.case.name,
            world_size=session.world_size,
            dtype=str(outcome.case.dtype).removeprefix("torch."),
            shape={"m": outcome.case.m, "n": outcome.case.n, "k": outcome.case.k},
            native_us=outcome.native_us,
            ditron_us=outcome.ditron_us,
            bitwise_equal=outcome.equal,
            comm_sms=0,
        )
        for outcome in timed
    ]
    stamp = collect_stamp(
        session.device,
        session.world_size,
        summary=_summary(outcomes, arguments),
        repeat=arguments.repeat,
        straggler_ms=arguments.straggler_ms,
        poison=arguments.poison,
        random=arguments.random,
        seed=arguments.seed,
    )
    write_results(arguments.output, "verify", stamp, rows)
