"""Draws when what runs in one call of an op, natively and with ours (under torchrun), or lays out the order in which
tiles run and chunks travel (anywhere)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ditron_train.runtime.errors import SettingError
from ditron_train.tools.arguments import add_shape_argument, check_folder, check_matplotlib
from ditron_train.tools.fp8.recipes import add_fp8_argument, check_fp8
from ditron_train.tools.tables import terminal
from ditron_train.tools.trace.record import record_op, traced_ops
from ditron_train.tools.trace.schedule import ScheduleRequest, plan_rank
from ditron_train.tools.trace.show_schedule import draw_schedules, show_schedules

_SHAPES = {"ag_gemm": (8192, 28672, 8192), "gemm_rs": (8192, 8192, 28672)}
_LAYOUT = {"world_size": 8, "ranks_per_node": None, "rows": None, "num_sms": 132}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``trace``."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--op", choices=traced_ops(), help="run it: traces and a picture")
    what.add_argument("--schedule", choices=_SHAPES, help="lay it out: a table and a picture, nothing runs")
    add_shape_argument(
        parser, "of ag_gemm and gemm_rs (default: LLaMA-70B's; a run without a GPU: 256 each)", repeated=False
    )
    parser.add_argument("--model", metavar="NAME", help="of --op: at this model's shape, as bench calls it")
    parser.add_argument(
        "--output", type=Path, default=Path("trace"), metavar="DIR", help="where the files go (default %(default)s)"
    )
    add_fp8_argument(parser, "of --op: record Transformer Engine's layers in this recipe")
    layout = parser.add_argument_group("of --schedule")
    layout.add_argument("--world-size", type=int, metavar="RANKS", help=f"default: {_LAYOUT['world_size']}")
    layout.add_argument("--ranks-per-node", type=int, metavar="RANKS", help="default: one node")
    layout.add_argument("--rows", type=_integers, metavar="R0,R1,...", help="rows of each rank where they differ")
    layout.add_argument("--num-sms", type=int, metavar="SMS", help=f"default: {_LAYOUT['num_sms']}")


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 512,512,256") from None


def run(arguments: argparse.Namespace) -> int:
    """Writes ``<op>.png`` and two Chrome traces, or ``schedule-<op>.png``; returns 0.

    Raises:
        SettingError: Sizes that do not divide, options that do not go together, a folder that cannot be written.
        NotSupportedError: What the op or the picture needs is not there.
    """
    check_matplotlib()
    if arguments.op:
        given = [name for name in _LAYOUT if getattr(arguments, name) is not None]
        if given:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise SettingError(f"{options}: of --schedule; --op runs on the ranks that are there")
        check_fp8(arguments.fp8, "trace")
        return record_op(arguments.op, arguments.shape, arguments.output, arguments.fp8, arguments.model)
    if arguments.fp8 or arguments.model:
        raise SettingError(f"--{'fp8' if arguments.fp8 else 'model'} is of --op")
    m, n, k = arguments.shape or _SHAPES[arguments.schedule]
    layout: dict[str, Any] = {
        name: default if getattr(arguments, name) is None else getattr(arguments, name)
        for name, default in _LAYOUT.items()
    }
    request = ScheduleRequest(op=arguments.schedule, m=m, n=n, k=k, row_counts=layout.pop("rows"), **layout)
    check_folder(arguments.output)
    schedules = [plan_rank(request, rank) for rank in range(request.world_size)]
    show_schedules(request, schedules)
    picture = arguments.output / f"schedule-{arguments.schedule}.png"
    draw_schedules(request, schedules, picture)
    terminal().print(f"written: {picture}", highlight=False)
    return 0
