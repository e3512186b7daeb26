"""``bench muon`` on CPU processes: rows of both parts, bits equal."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from ditron_train.tools.bench import muon
from ditron_train.tools.cases.muon import newton_schulz_flops, symmetry_ceiling
from ditron_train.tools.results import Row, Stamp, read_results
from documents.roofline import draw_roofline, has_roofline
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


def test_the_roofline_is_drawn_from_rows(tmp_path: Path) -> None:
    row = Row(
        op="newton_schulz",
        direction="forward",
        model="square",
        world_size=1,
        dtype="bfloat16",
        shape={"m": 4096, "n": 4096},
        native_us=3000.0,
        ditron_us=2000.0,
        bitwise_equal=True,
        comm_sms=0,
        tflops=newton_schulz_flops(4096, 4096) / 2e9,
    )
    assert row.tflops == pytest.approx(1030.8, abs=0.1)
    stamp = Stamp(
        device="NVIDIA H200", count=1, driver=None, torch="2", triton="3", nccl=None, nvshmem=None, megatron_core=None,
        transformer_engine=None, ditron_train="0.1.0", commit=None, date="2026-11-21",
    )  # fmt: skip
    assert has_roofline([row]) and not has_roofline([replace(row, tflops=None)])
    for device in ("NVIDIA H200", "CPU"):
        draw_roofline([row], replace(stamp, device=device), tmp_path / f"{device}.png")
        assert (tmp_path / f"{device}.png").read_bytes().startswith(b"\x89PNG")


def test_the_ceiling_of_symmetry() -> None:
    assert symmetry_ceiling(4096, 4096) == 1.5
    assert symmetry_ceiling(4096, 1024) == symmetry_ceiling(1024, 4096) == pytest.approx(18 / 13)
