"""Long runs: results that differ and memory that grows, of a process or of a GPU, are told and fail on all ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ditron_train.runtime.errors import SettingError
from ditron_train.symm.arena import close_all_arenas
from tests.soak import repeated_ops
from tests.soak.run import parser, run
from tests.soak.soak import MAX_DRIFT_BYTES, Soak, SoakMeter, add_piece
from tests.support.processes import run_workers


class _GpuThatFills(SoakMeter):
    """Of rank 1 alone, by so many bytes."""

    grown_bytes = 0

    def finish(self, last_epoch: int) -> None:
        super().finish(last_epoch)
        self._soak.host_bytes = [1, 1]
        self._soak.device_bytes = [5, 5 + (self.grown_bytes if dist.get_rank() == 1 else 0)]


def _run(grown_bytes: int) -> int:
    close_all_arenas()
    _GpuThatFills.grown_bytes = grown_bytes
    repeated_ops.SoakMeter = _GpuThatFills
    try:
        return run(parser().parse_args(["--ops", "2"]))
    finally:
        repeated_ops.SoakMeter = SoakMeter


def _run_alone(*words: str) -> int:
    """With a context of its own; memory of a worker that other tests have used says nothing."""
    close_all_arenas()
    return run(parser().parse_args([*words, "--first-epoch", str(2**31 - 4)]), most_drift_bytes=1 << 30)


def test_memory_of_one_gpu_that_grows_fails_on_all() -> None:
    assert run_workers(2, _run, MAX_DRIFT_BYTES) == [1, 1]
    assert run_workers(2, _run, MAX_DRIFT_BYTES - 1) == [0, 0]


def test_both_drifts_are_told(tmp_path: Path) -> None:
    soak = Soak("ops", 10, 0, done=10, compared=10, host_bytes=[0, 1 << 20])
    assert soak.sentence().endswith("memory drift 1.00 MiB")
    soak.device_bytes = [1 << 20, 1 << 22, 3 << 20]
    assert soak.sentence().endswith("memory drift 1.00 MiB, of the GPU 2.00 MiB")
    path = tmp_path / "pieces.json"
    for _ in range(2):
        add_piece(path, soak)
    held = json.loads(path.read_text())
    assert held["total"]["device_drift_bytes"] == 4 << 20 and held["total"]["host_drift_bytes"] == 2 << 20
    assert [piece["device_drift_bytes"] for piece in held["pieces"]] == [2 << 20] * 2
    for piece in held["pieces"]:  # of an older version
        del piece["device_drift_bytes"]
    path.write_text(json.dumps(held))
    add_piece(path, soak)
    assert json.loads(path.read_text())["total"]["device_drift_bytes"] == 6 << 20


@pytest.mark.slow
def test_a_run_crosses_the_wrap_and_is_summed_up(tmp_path: Path) -> None:
    words = ("--ops", "1200", "--seed", "3", "--output", str(tmp_path))
    assert run_workers(2, _run_alone, *words) == [0, 0]
    ops = json.loads(next(tmp_path.glob("*/soak/ops.json")).read_text())["summary"]
    assert ops["done"] == ops["compared"] == 1200 and ops["by_kind"] == {
        "tp all_gather": 2, "pp exchange": 1181, "tp ag_gemm": 2, "tp reduce_scatter": 2, "tp gemm_rs": 2,
        "tp gemm_ar": 1, "sp step": 4, "ep step": 5, "muon step": 1,
    }  # fmt: skip
    assert ops["first_epoch"] == 2**31 - 4 and ops["last_epoch"] >= 2**31 and len(ops["host_bytes"]) > 5


def _run_with_one_wrong_result(rank: int) -> int:
    close_all_arenas()
    right = repeated_ops.all_gather

    def wrong(x: torch.Tensor, **options: object) -> torch.Tensor:
        y = right(x, **options)
        return y + 1 if dist.get_rank() == rank else y

    repeated_ops.all_gather = wrong
    try:
        return run(parser().parse_args(["--ops", "2", "--seconds", "60"]))
    finally:
        repeated_ops.all_gather = right


def test_a_wrong_result_fails_on_all() -> None:
    assert run_workers(2, _run_with_one_wrong_result, 1) == [1, 1]


def test_time_limit(tmp_path: Path) -> None:
    results = tmp_path / "ops.json"
    words = ("--ops", "1000000", "--seconds", "4", "--results", str(results))
    for pieces in (1, 2):
        assert run_workers(2, _run_alone, *words) == [0, 0]
        held = json.loads(results.read_text())
        assert len(held["pieces"]) == pieces and 100 < held["total"]["done"] < 1000000
        assert held["total"]["done"] == sum(held["total"]["by_kind"].values())


def _refused(*words: str) -> str:
    try:
        run(parser().parse_args(words))
    except SettingError as error:
        return str(error)
    return "accepted"


def test_what_cannot_be_is_refused() -> None:
    assert "2 ranks or more" in run_workers(1, _refused, "--ops", "5")[0]
    assert "--ops has to be above 0" in run_workers(1, _refused, "--ops", "0")[0]
