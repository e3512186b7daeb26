"""The other rooms' ops against native: their benchmarks compare every bit before they time, so a short run of each is the check."""

from __future__ import annotations

import argparse
import importlib
import tempfile
from pathlib import Path

import torch.distributed as dist

from ditron_train.bench.rows import read_results
from ditron_train.bench.session import BenchSession
from ditron_train.runtime.errors import SettingError

__all__ = ["ROOMS", "parse_rooms", "verify_room"]

#: Options of each room's benchmark: what takes long and compares nothing more is left out.
_OPTIONS = {"sp": (), "ep": (), "pp": ("--no-limited",), "muon": ("--no-peer",)}
ROOMS = tuple(_OPTIONS)
_QUICK = ("--repetitions", "2", "--warmup", "1")


def parse_rooms(text: str | None) -> list[str]:
    """Names between commas.

    Raises:
        SettingError: An unknown name.
    """
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    unknown = sorted(set(names) - set(ROOMS))
    if unknown:
        raise SettingError(f"--rooms knows {', '.join(ROOMS)}, not {', '.join(unknown)}")
    return names


def verify_room(session: BenchSession, room: str) -> str:
    """Runs the room's benchmark shortly (collective), which shows its own table.

    Returns:
        One sentence; it holds ``DIFFERENT`` where a bit differed on any rank, the same on every rank.
    """
    module = importlib.import_module(f"ditron_train.bench.{room}")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    with tempfile.TemporaryDirectory() as folder:
        status = module.run(parser.parse_args([*_QUICK, *_OPTIONS[room], "--output", folder]))
        rows = [row for path in Path(folder).glob("*/*.json") for row in read_results(path)[1]]
    counts = [len(rows), sum(not row.bitwise_equal for row in rows)]
    said: list[list[int]] = [counts]
    dist.broadcast_object_list(said, src=0)  # rank 0 writes the rows
    num_rows, num_different = said[0]
    assert session.agree(status == (1 if num_different else 0))
    return f"{room}: {num_rows} comparisons, {f'{num_different} DIFFERENT' if num_different else 'every bit is equal'}"
