"""``bench muon`` on CPU processes: rows of both parts, bits equal."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from ditron_train.tools.bench import muon
from ditron_train.tools.cases.muon import newton_schulz_flops, symmetry_ceiling
from ditron_train.tools.results import read_results
from tests.support.processes import run_workers


def _run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    muon.add_arguments(parser)
    return muon.run(parser.parse_args([*words, "--repetitions", "1", "--warmup", "0", "--layers", "1"]))


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_of_both_parts(world_size: int, tmp_path: Path) -> None:
    shape = ("--shape", "48", "32") if world_size == 1 else ()
    assert set(run_workers(world_size, _run, *shape, "--output", str(tmp_path))) == {0}
    (path,) = tmp_path.glob("*/muon.json")
    stamp, rows = read_results(path)
    assert stamp.count == world_size and all(row.bitwise_equal for row in rows)
    assert [row.op for row in rows] == (["newton_schulz"] if world_size == 1 else []) + ["muon_step"]
    if world_size == 1:
        tflops = newton_schulz_flops(48, 32) / rows[0].ditron_us / 1e6  # next to none on a slow machine
        assert rows[0].shape == {"m": 48, "n": 32} and rows[0].tflops == pytest.approx(tflops, rel=0.01, abs=6e-5)
        assert rows[0].native_us / rows[0].limit_us == pytest.approx((2 * 48 + 32) / (1.5 * 48 + 0.5 * 32), rel=1e-3)
    assert (
        rows[-1].shape == {"num_layers": 1, "num_matrices": 1 if world_size == 1 else 4}
        and rows[-1].world_size == world_size
    )


def test_the_ceiling_of_symmetry() -> None:
    assert symmetry_ceiling(4096, 4096) == 1.5
    assert symmetry_ceiling(4096, 1024) == symmetry_ceiling(1024, 4096) == pytest.approx(18 / 13)
