"""Long runs of ``verify``: memory that grows, of a process or of a GPU, is told and fails on all ranks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch.distributed as dist

from ditron_train.tools.verify import repeated_ops, verifier
from ditron_train.tools.verify.soak import MAX_DRIFT_BYTES, Soak, SoakMeter, add_piece
from tests.support.processes import run_workers


class _GpuThatFills(SoakMeter):
    """Of rank 1 alone, by so many bytes."""

    grown_bytes = 0

    def finish(self, last_epoch: int) -> None:
        super().finish(last_epoch)
        self._soak.host_bytes = [1, 1]
        self._soak.device_bytes = [5, 5 + (self.grown_bytes if dist.get_rank() == 1 else 0)]


def _verify_ops(grown_bytes: int) -> int:
    parser = argparse.ArgumentParser()
    verifier.add_arguments(parser)
    _GpuThatFills.grown_bytes = grown_bytes
    repeated_ops.SoakMeter = _GpuThatFills
    try:
        return verifier.run(parser.parse_args(["--ops", "2"]))
    finally:
        repeated_ops.SoakMeter = SoakMeter


def test_memory_of_one_gpu_that_grows_fails_on_all() -> None:
    assert run_workers(2, _verify_ops, MAX_DRIFT_BYTES) == [1, 1]
    assert run_workers(2, _verify_ops, MAX_DRIFT_BYTES - 1) == [0, 0]


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
