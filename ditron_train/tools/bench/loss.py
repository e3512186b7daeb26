"""Benchmark of the cross entropy: loss and gradient of a microbatch's logits, whose vocabulary the ranks share.

Native is megatron-core's unfused cross entropy; the peer is its fused one, whose bits differ from the unfused one's.
"""

from __future__ import annotations

import argparse

from ditron_train.tools.arguments import add_common_arguments, check_sizes, choose_models
from ditron_train.tools.cases.loss import CASES, loss_shape
from ditron_train.tools.op_rows import add_row
from ditron_train.tools.session import bench_session


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench loss``."""
    add_common_arguments(parser)
    parser.add_argument(
        "--shape", nargs=2, type=int, action="append", metavar=("TOKENS", "VOCABULARY"), help="instead of the table's"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measures what the command line asks for, shows and writes it; returns 1 if bits differ.

    Raises:
        SettingError: A size below 1, or an unknown model.
    """
    from ditron_train.tools.bench.megatron_tp import megatron_world

    with bench_session("loss", arguments) as session, megatron_world(session):
        check_sizes("--shape", arguments.shape)
        (case,) = CASES
        known = case.shapes(session.world_size, session.device.type == "cuda")
        names = choose_models(arguments.model, [shape.model for shape in known])
        shapes = [loss_shape("custom", *sizes) for sizes in arguments.shape or ()]
        for shape in shapes or [shape for shape in known if shape.model in names]:
            add_row(session, case, shape)
            session.save()
        return session.finish()
