"""Measurement of ever-new lengths: the linear layers of a transformer layer, at microbatches of an RL job.

The lengths follow a GRPO run: 64 samples a step (log-normal responses), packed to a budget of tokens, each sequence
padded to the group. Native and fused layers share weights, and outputs and gradients of every microbatch are compared.
A few layers stand for all of the model: the first pass of a microbatch, with its proofs of bits and whatever else a
new length costs, stands for so many layers, and a second pass for the other layers, by both paths. Attention is left
out, and so is the time to compile.
"""

from __future__ import annotations

import argparse

import torch

from ditron_train.runtime.errors import SettingError
from ditron_train.tools.arguments import add_common_arguments, choose_models
from ditron_train.tools.session import bench_session


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``python -m tests.lengths``."""
    add_common_arguments(parser)
    on_gpu = torch.cuda.is_available()
    for name, default, text in (
        ("microbatches", 2000 if on_gpu else 8, "microbatches"),
        ("first", 100 if on_gpu else 3, "of them while everything is decided; as many more are left out"),
        ("first-layers", 16 if on_gpu else 2, "layers at these microbatches"),
        ("steady-layers", 1, "layers at the others"),
        ("budget", 8192 if on_gpu else 64, "most tokens of a microbatch"),
    ):
        parser.add_argument(f"--{name}", type=int, metavar="N", default=default, help=f"{text} (default {default})")


def run(arguments: argparse.Namespace) -> int:
    """Measures what the command line asks for, shows and writes it; returns 1 if bits differ.

    Raises:
        SettingError: An unknown model, or too few microbatches.
    """
    from ditron_train.tools.bench.megatron_tp import megatron_world
    from tests.lengths.measurement import MODELS, fixed_gain, measured_row

    on_gpu = torch.cuda.is_available()
    if arguments.microbatches <= 2 * arguments.first:
        raise SettingError(f"--microbatches has to be above {2 * arguments.first}, twice --first")
    with bench_session("lengths", arguments) as session, megatron_world(session):
        names = [name for name in MODELS if (name != "tiny") == on_gpu]
        names = choose_models(arguments.model, MODELS if arguments.model else names)
        gains = {name: fixed_gain(session, arguments, name) for name in names}
        for name, gain in gains.items():
            session.add(measured_row(session, arguments, name, gain))
            session.save()
        return session.finish()
