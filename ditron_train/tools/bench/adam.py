"""Benchmark of the optimizer's step: clipping, Adam and the cast to bf16 of what one rank of the distributed optimizer
has. Native is the installed FusedAdam with Megatron's passes around it."""

from __future__ import annotations

import argparse

from ditron_train.tools.arguments import add_common_arguments, add_shape_argument
from ditron_train.tools.cases.adam import CASES
from ditron_train.tools.op_rows import run_in_tensor_group


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench adam``."""
    add_common_arguments(parser)
    add_shape_argument(parser, "elements of a rank instead of the table's", "ELEMENTS")


def run(arguments: argparse.Namespace) -> int:
    """Measures what the command line asks for, shows and writes it; returns 1 if bits differ.

    Raises:
        SettingError: A size below 1, or an unknown model.
    """
    return run_in_tensor_group("adam", CASES, arguments)
