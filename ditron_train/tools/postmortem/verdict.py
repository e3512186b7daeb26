"""Merges the last calls of all ranks, as they stand in a folder, and names the first rank that diverged."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.flight_recorder import FILE_PATTERN
from ditron_train.tools.postmortem.diverge import Divergence, find_divergence
from ditron_train.tools.postmortem.files import Call, RankFile, read_folder
from ditron_train.tools.tables import terminal

_STATES = {"running": "no last word", "raised": "raised", "ended": "ended"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``postmortem``."""
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="what DITRON_POSTMORTEM named, or the errors' log line"
    )
    parser.add_argument(
        "--last", type=int, default=5, metavar="N", help="calls to show of each rank (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 if all ranks went the same way, else 1.

    Raises:
        SettingError: The folder holds no records, they cannot be read, or a negative number of calls is asked for.
    """
    if arguments.last < 0:
        raise SettingError("--last has to be 0 or more")
    files = read_folder(arguments.folder)
    divergence = find_divergence(files)
    if arguments.json:
        terminal().print(_to_json(files, divergence), highlight=False, markup=False, soft_wrap=True)
    else:
        _show(files, divergence, arguments.last)
        num_others = len(list(arguments.folder.glob(FILE_PATTERN))) - len(files)
        if num_others:
            terminal().print(f"left out: {num_others} files that earlier jobs have left here", highlight=False)
    return 0 if divergence is None else 1


def _to_json(files: Sequence[RankFile], divergence: Divergence | None) -> str:
    ranks = [
        {**asdict(file), "calls": len(file.calls), "groups": [asdict(group) for group in file.groups]}
        for file in files
    ]
    return json.dumps({"divergence": asdict(divergence) if divergence else None, "ranks": ranks}, indent=1)


def _show(files: Sequence[RankFile], divergence: Divergence | None, last: int) -> None:
    console = terminal()
    table = Table(title=f"{len(files)} of {files[0].world_size} ranks", title_justify="left")
    for name in ("rank", "host", "end", "calls kept", "last call", "at", "error"):
        table.add_column(name)
    for file in files:
        call = file.calls[-1] if file.calls else None
        error = f"{file.error['kind']}: {file.error['text']}" if file.error else ""
        table.add_row(
            str(file.rank),
            escape(f"{file.host} {file.pid}"),
            _STATES.get(file.state, file.state),
            str(len(file.calls)),
            escape(_words(call)),
            _clock(call),
            escape(error[:400]),
            style="bold red" if divergence is not None and file.rank in divergence.ranks else None,
        )
    console.print(table)
    for file in files if last else ():
        console.print(f"rank {file.rank}: the last {min(last, len(file.calls))} calls", highlight=False)
        for call in _around(file, divergence, last):
            console.print(f"  {_clock(call)}  {_words(call)}", highlight=False, markup=False)
    console.print(
        "no rank diverged" if divergence is None else f"first to diverge: {divergence.text}",
        highlight=False,
        markup=False,
    )
    if all(file.state == "running" for file in files):
        words = "no rank left a last word: killed together, as torchrun does when one of them ends, or still running; "
        console.print(f"{words}which ended first stands in the launcher's output", highlight=False)


def _around(file: RankFile, divergence: Divergence | None, last: int) -> Sequence[Call]:
    """The last calls, or those up to the one at which a rank differed."""
    calls = file.calls
    if divergence is not None and divergence.kind == "differs":
        places = [
            i for i, call in enumerate(calls) if call.group == divergence.group and call.number == divergence.number
        ]
        calls = calls[: places[0] + 1] if places else calls
    return calls[max(len(calls) - last, 0) :]


def _words(call: Call | None) -> str:
    return "" if call is None else f"group {call.group.name} #{call.number} {call.text}"


def _clock(call: Call | None) -> str:
    return "" if call is None else datetime.fromtimestamp(call.time_ns / 1e9).strftime("%H:%M:%S.%f")
