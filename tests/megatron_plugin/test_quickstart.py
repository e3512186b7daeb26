"""The main job on two CPU processes, small: every parallelism, its files, and bad input."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.patience import HANG_S
from tests.support.processes import run_workers_once

pytest.importorskip("megatron.core")

FOLDER = Path("examples") / "megatron"
SMALL = ["--layers", "2", "--hidden", "64", "--sequence", "32", "--batch", "1", "--steps", "2"]


def _check(output, folder, patched):
    assert patched in output
    feature = patched.removesuffix(": on")
    assert int(re.search(rf"calls of the fused path:.*\b{feature} (\d+)", output)[1]) > 0
    assert "largest difference of a loss" in output and "time per step: native" in output
    losses = json.loads((folder / "losses.json").read_text())
    assert len(losses["native_loss"]) == len(losses["ditron_loss"]) == 2
    assert losses["native_loss"][1] != losses["native_loss"][0]
    assert losses["largest_loss_difference"] < 1e-4
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_as_the_script_starts_it(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    env = dict(
        os.environ,
        PYTHONPATH=os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
        OMP_NUM_THREADS="1",
        TRITON_INTERPRET="1",
        CUDA_VISIBLE_DEVICES="",
        GLOO_SOCKET_IFNAME="lo",
    )
    command = [sys.executable, "scripts/launch.py", "2", str(FOLDER / "quickstart.py"), *SMALL,
               "--out", str(tmp_path / "out"), "--data", str(text)]  # fmt: skip
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    _check(done.stdout + done.stderr, tmp_path / "out", "tp: on")


def _main(folder, words):
    """The example's own ``main`` in a worker, which has joined its group already; returns its exit status or last
    words."""
    sys.path.insert(0, str(FOLDER))
    dist.init_process_group = lambda *arguments, **options: None
    sys.argv = ["quickstart.py", *SMALL, "--out", folder, *words]
    try:
        return importlib.import_module("quickstart").main()
    except SystemExit as stopped:
        return stopped.code


def _run(folder, words, world_size=2):
    outcomes = run_workers_once(world_size, _main, str(folder), words)
    assert not any(outcome.error for outcome in outcomes), [outcome.traceback for outcome in outcomes]
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize(
    "words, patched",
    [
        (["--pp", "2"], "pp: on"),
        (["--sp", "2"], "sp: on"),
        (["--experts", "4", "--ep", "2"], "ep: on"),
        (["--optimizer", "muon"], "muon: on"),
    ],
    ids=["pp", "sp", "ep", "muon"],
)
def test_losses_agree_and_files_are_written(tmp_path, capsys, words, patched):
    assert _run(tmp_path, words) == [0, 0]
    _check(capsys.readouterr().out, tmp_path, patched)


def test_three_parallelisms_at_once(tmp_path, capsys):
    """Groups of different ranks come to their ops in different orders, and wait for each other only where they have
    to."""
    words = ["--tp", "2", "--pp", "2", "--experts", "4", "--ep", "2", "--ditron", "tp,ep,pp"]
    assert _run(tmp_path, words, world_size=4) == [0, 0, 0, 0]
    output = capsys.readouterr().out
    for patched in ("tp: on", "ep: on", "pp: on"):
        _check(output, tmp_path, patched)


def test_the_distributed_optimizer(tmp_path, capsys):
    words = ["--tp", "2", "--distributed-optimizer"]
    assert _run(tmp_path, words, world_size=4) == [0, 0, 0, 0]
    _check(capsys.readouterr().out, tmp_path, "tp: on")


@pytest.mark.parametrize(
    "words, names, world_size",
    [
        (["--tp", "1", "--ditron", "tp"], "tp", 2),  # its ranks are data-parallel
        (["--pp", "2", "--ditron", "tp,pp"], "tp", 2),  # pp alone is compared
        ([], "tp", 1),
    ],
    ids=["no tensor parallelism", "one of two", "one rank"],
)
def test_features_without_a_fused_call_fail(tmp_path, capsys, words, names, world_size):
    assert _run(tmp_path, words, world_size) == [2] * world_size
    assert f"error: nothing was compared: {names}: no fused call ran" in " ".join(capsys.readouterr().out.split())


def test_unreadable_data_is_the_same_error_on_every_rank(tmp_path):
    path = tmp_path / "missing.txt"
    words = _run(tmp_path, ["--data", str(path)])
    assert words[0].startswith(f"error: rank 0: cannot read --data {path}: No such file") and words[0] == words[1]


def test_sizes_that_do_not_divide(tmp_path):
    words = _run(tmp_path, ["--tp", "2", "--pp", "2"])
    assert words[0].startswith("error: 2 processes do not divide into TP 2 x PP 2 x SP 1") and words[0] == words[1]
    words = _run(tmp_path, ["--hidden", "100"])
    assert words == ["error: 100 features into heads of 32 do not divide"] * 2
    words = _run(tmp_path, ["--sequence", "33"])
    assert words == ["error: 33 bytes over TP x SP do not divide"] * 2
    assert _run(tmp_path, ["--steps", "0"]) == [2, 2]


def test_fp8_needs_gpus(tmp_path):
    words = _run(tmp_path, ["--fp8", "tensorwise"])
    assert words == ["error: --fp8 tensorwise needs GPUs and Transformer Engine's layers (--spec te)"] * 2
    assert _run(tmp_path, ["--fp8", "mxfp8"]) == [2, 2]
