"""The command of long runs."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch.distributed as dist

from ditron_train.runtime.errors import SettingError
from ditron_train.tools.arguments import add_common_arguments
from ditron_train.tools.session import bench_session
from ditron_train.tools.stamp import collect_stamp
from ditron_train.tools.tables import terminal
from ditron_train.tools.verify.outcome import Stress
from ditron_train.tp import get_tp_context
from tests.soak.repeated_ops import endure
from tests.soak.soak import MAX_DRIFT_BYTES, Soak, add_piece, last_epoch, write_soak

FIRST_EPOCH = 2**31 - 64  # so that every run crosses the wrap


def parser() -> argparse.ArgumentParser:
    """Its options."""
    options = argparse.ArgumentParser(prog="python -m tests.soak", description="ops, compared again and again")
    options.add_argument("--ops", type=int, required=True, metavar="N", help="how many")
    options.add_argument("--seconds", type=float, metavar="S", help="begin none after S seconds")
    options.add_argument("--seed", type=int, default=0, metavar="N", help="of the data (0)")
    options.add_argument("--straggler-ms", type=float, default=0.0, metavar="MS", help="a rank is up to this late")
    options.add_argument("--first-epoch", type=int, default=FIRST_EPOCH, metavar="N", help="where epochs begin")
    options.add_argument("--results", type=Path, metavar="FILE", help="adds the run to a file of pieces")
    add_common_arguments(options, model_option=False, writes_results=False)
    return options


def run(arguments: argparse.Namespace, most_drift_bytes: int = MAX_DRIFT_BYTES) -> int:
    """Returns 0 if every bit was equal and no rank's memory grew by ``most_drift_bytes``, else 1; alike on every rank.

    Raises:
        SettingError: No number of ops, or fewer than 2 ranks.
    """
    if arguments.ops < 1:
        raise SettingError("--ops has to be above 0")
    with bench_session("soak", arguments, may_share_gpus=True) as session:
        if session.world_size < 2:
            raise SettingError("long runs take 2 ranks or more: torchrun --nproc-per-node N -m tests.soak")
        context = get_tp_context(dist.group.WORLD, session.device, first_epoch=arguments.first_epoch)
        soak = Soak("ops", arguments.ops, last_epoch(context))
        stress = Stress(straggler_ms=arguments.straggler_ms)
        endure(session, soak, context, stress, seed=arguments.seed, limit_s=arguments.seconds)
        if session.rank == 0:
            terminal().print(soak.sentence(), highlight=False)
            for description in soak.different:
                terminal().print(f"DIFFERENT: {description}", highlight=False)
            if arguments.output is not None:
                settings = {name: getattr(arguments, name) for name in ("ops", "seed", "straggler_ms")}
                write_soak(arguments.output, collect_stamp(session.device, session.world_size, **settings), soak)
            if arguments.results is not None:
                add_piece(arguments.results, soak)
        stays = session.agree(max(soak.host_drift_bytes, soak.device_drift_bytes) < most_drift_bytes)
        return 0 if stays and not soak.num_different else 1
