"""Benchmark of the embedding in deterministic mode: rows of a microbatch's words, and the weight's gradient."""

from __future__ import annotations

import argparse

from ditron_train.tools.arguments import add_common_arguments, add_shape_argument
from ditron_train.tools.catalog import cases_of
from ditron_train.tools.op_rows import run_in_tensor_group


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench det``."""
    add_common_arguments(parser)
    add_shape_argument(parser, "instead of the table's", "TOKENS HIDDEN VOCABULARY")


def run(arguments: argparse.Namespace) -> int:
    """Measures what the command line asks for, shows and writes it; returns 1 if bits differ.

    Raises:
        SettingError: A size below 1, or an unknown model.
    """
    return run_in_tensor_group("det", cases_of("det"), arguments)
