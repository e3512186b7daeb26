"""Benchmark of the cross entropy: loss and gradient of a microbatch's logits, whose vocabulary the ranks share.

Native is megatron-core's unfused cross entropy; the peer is its fused one, whose bits differ from the unfused one's.
"""

from __future__ import annotations

import argparse

from ditron_train.tools.arguments import add_common_arguments, add_shape_argument
from ditron_train.tools.catalog import cases_of
from ditron_train.tools.op_rows import run_in_tensor_group


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench loss``."""
    add_common_arguments(parser)
    add_shape_argument(parser, "instead of the table's", "TOKENS VOCABULARY")


def run(arguments: argparse.Namespace) -> int:
    """Measures what the command line asks for, shows and writes it; returns 1 if bits differ.

    Raises:
        SettingError: A size below 1, or an unknown model.
    """
    return run_in_tensor_group("loss", cases_of("loss"), arguments)
