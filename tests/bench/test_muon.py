"""``bench muon`` on CPU processes: rows of both parts, bits equal."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from ditron_train.bench import muon
from ditron_train.bench.rows import read_results
from ditron_train.testing.processes import run_workers


def _run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    muon.add_arguments(parser)
    return muon.run(parser.parse_args([*words, "--repetitions", "1", "--warmup", "0", "--layers", "1"]))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_of_both_parts(world_size: int, tmp_path: Path) -> None:
    assert set(run_workers(world_size, _run, "--shape", "48", "32", "--output", str(tmp_path))) == {0}
    (path,) = tmp_path.glob("*/muon.json")
    stamp, rows = read_results(path)
    assert stamp.count == world_size and all(row.bitwise_equal for row in rows)
    assert [row.op for row in rows] == (["newton_schulz"] if world_size == 1 else []) + ["muon_step"]
    if world_size == 1:
        assert rows[0].shape == {"m": 48, "n": 32} and 0 < rows[0].limit_us < rows[0].native_us
    assert rows[-1].shape == {"num_layers": 1, "num_matrices": 4} and rows[-1].world_size == world_size
