"""The main job on two CPU processes, small: every parallelism, its files, and bad input."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("megatron.core")

SMALL = ["--layers", "2", "--hidden", "64", "--sequence", "32", "--batch", "1", "--steps", "2"]


def _run(tmp_path, *words, processes=2):
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]), OMP_NUM_THREADS="1",
               TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo")  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
               "examples/megatron/quickstart.py", *SMALL, "--out", str(tmp_path / "out"), *words]  # fmt: skip
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(
    "words, patched",
    [
        ([], "tp: on"),
        (["--pp", "2"], "pp: on"),
        (["--sp", "2"], "sp: on"),
        (["--experts", "4", "--ep", "2"], "ep: on"),
        (["--optimizer", "muon"], "muon: on"),
        (["--tp", "1", "--distributed-optimizer"], "tp: on"),
    ],
    ids=["tp", "pp", "sp", "ep", "muon", "distributed"],
)
def test_losses_agree_and_files_are_written(tmp_path, words, patched):
    if not words:
        text = tmp_path / "text.txt"
        text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
        words = ["--data", str(text)]
    done = _run(tmp_path, *words)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    output = done.stdout + done.stderr
    assert patched in output
    assert "largest difference of a loss" in output and "time per step: native" in output
    losses = json.loads((tmp_path / "out" / "losses.json").read_text())
    assert len(losses["native_loss"]) == len(losses["ditron_loss"]) == 2
    assert losses["native_loss"][1] != losses["native_loss"][0]
    assert losses["largest_loss_difference"] < 1e-4
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_unreadable_data_is_the_same_error_on_every_rank(tmp_path):
    path = tmp_path / "missing.txt"
    done = _run(tmp_path, "--data", str(path))
    assert done.returncode != 0
    assert done.stderr.count(f"error: rank 0: cannot read --data {path}: No such file") == 2, done.stderr[-3000:]
    assert 'quickstart.py", line' not in done.stderr  # no traceback of ours


def test_sizes_that_do_not_divide(tmp_path):
    done = _run(tmp_path, "--tp", "2", "--pp", "2")
    assert done.returncode != 0
    assert done.stderr.count("error: 2 processes do not divide into TP 2 x PP 2 x SP 1") == 2
