"""Records one call of an op, natively and fused: Chrome traces, and where the time went (under torchrun)."""

from __future__ import annotations

import argparse
from pathlib import Path

from ditron_train.tools.arguments import add_shape_argument
from ditron_train.tools.fp8.recipes import add_fp8_argument, check_fp8
from ditron_train.tools.trace.record import record_op, traced_ops


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``trace``."""
    parser.add_argument("--op", required=True, choices=traced_ops(), help="what to record")
    add_shape_argument(
        parser, "of ag_gemm and gemm_rs (default: LLaMA-70B's; a run without a GPU: 256 each)", repeated=False
    )
    parser.add_argument("--model", metavar="NAME", help="at this model's shape, as bench calls it")
    parser.add_argument(
        "--output", type=Path, default=Path("trace"), metavar="DIR", help="where the files go (default %(default)s)"
    )
    add_fp8_argument(parser, "record Transformer Engine's layers in this recipe")


def run(arguments: argparse.Namespace) -> int:
    """Writes two Chrome traces and prints where the time went; returns 0.

    Raises:
        SettingError: Sizes that do not divide, options that do not go together, a folder that cannot be written.
        NotSupportedError: What the op needs is not there.
    """
    check_fp8(arguments.fp8, "trace")
    return record_op(arguments.op, arguments.shape, arguments.output, arguments.fp8, arguments.model)
