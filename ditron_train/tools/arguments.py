"""What the command lines of benchmarks and of ``verify`` have in common, and what is refused before anything is
launched."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from ditron_train.runtime.errors import SettingError
from ditron_train.tools.results import RESULTS

_LEAST = {"repetitions": 1, "rounds": 1, "calls": 1, "divide": 1, "warmup": 0}


def add_common_arguments(
    parser: argparse._ActionsContainer,
    *,
    model_option: bool = True,
    writes_results: bool = True,
    parts: Iterable[str] = (),
) -> None:
    """Adds how often to measure and where results go.

    Args:
        parser: Or a group of one.
        model_option: Without ``--model`` if it means something else, or nothing.
        writes_results: Whether results are written, on GPUs, if no folder is named.
        parts: What ``--part`` takes.
    """
    on_gpu = torch.cuda.is_available()
    add_count(parser, "repetitions", "timed calls", on_gpu=15, on_cpu=3)
    add_count(parser, "warmup", "calls before them", on_gpu=4, on_cpu=1)
    where = f"{RESULTS}, none without a GPU" if writes_results else "none is written"
    text, default = f"folder of the JSON files (default: {where})", RESULTS if on_gpu and writes_results else None
    parser.add_argument("--output", type=Path, metavar="DIR", default=default, help=text)
    if model_option:
        parser.add_argument(
            "--model", action="append", metavar="NAME", help="only this model's shapes (may be repeated)"
        )
    if parts:
        parser.add_argument("--part", action="append", choices=list(parts), help="only this part (may be repeated)")


def add_count(parser: argparse._ActionsContainer, name: str, text: str, *, on_gpu: int, on_cpu: int) -> None:
    """Adds ``--name N``, whose default is less if there is no GPU; its help says both, whichever machine prints
    it."""
    default = on_gpu if torch.cuda.is_available() else on_cpu
    words = f"{text} (default {on_gpu}, without a GPU {on_cpu})"
    parser.add_argument(f"--{name}", type=int, metavar="N", default=default, help=words)


def add_shape_argument(
    parser: argparse._ActionsContainer, text: str, sizes: str = "M N K", *, repeated: bool = True
) -> None:
    """Adds ``--shape`` with these sizes: a list of shapes, or one if it is not ``repeated``; ``text`` is its
    help."""
    action, names = "append" if repeated else "store", tuple(sizes.split())
    parser.add_argument("--shape", nargs=len(names), type=int, action=action, metavar=names, help=text)


def refuse(reason: str | None) -> None:
    """Raises SettingError for a reason why what the command line asks for cannot be, if there is one."""
    if reason is not None:
        raise SettingError(reason)


def check_counts(arguments: argparse.Namespace) -> None:
    """Refuses what cannot be counted; a tool need not have all of these options.

    Raises:
        SettingError: A count below the least that makes sense.
    """
    for name, least in _LEAST.items():
        if getattr(arguments, name, least) < least:
            raise SettingError(f"--{name} has to be {'above 0' if least else '0 or more'}")


def check_folder(folder: Path) -> None:
    """Makes ``folder``: one that cannot be written is an error before anything is launched, not after an hour.

    Raises:
        SettingError: It cannot be made, or not be written into.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"cannot write into {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise SettingError(f"cannot write into {folder}")


def check_sizes(option: str, shapes: Iterable[Sequence[float]] | None) -> None:
    """Refuses sizes below the smallest that there is.

    Raises:
        SettingError: One of them is not above 0.
    """
    for shape in shapes or ():
        if not all(0 < size < math.inf for size in shape):
            raise SettingError(f"{option} {' '.join(map(str, shape))}: sizes have to be above 0")


def choose_models(wanted: Sequence[str] | None, models: Iterable[str]) -> list[str]:
    """Those of ``models`` that are wanted, in that order; all of them if none is named.

    Raises:
        SettingError: One is named that is not among them.
    """
    models = dict.fromkeys(models)
    unknown = sorted(set(wanted or ()) - set(models))
    if unknown:
        raise SettingError(f"unknown model {', '.join(unknown)}; there are {', '.join(models)}")
    return list(dict.fromkeys(wanted or models))
