"""The main job on two CPU processes, small: every parallelism, its files, and bad input."""

import dataclasses
import importlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.patience import HANG_S
from tests.support.processes import run_workers_once

pytest.importorskip("megatron.core")

FOLDER = Path("examples") / "megatron"
SMALL = ["--layers", "2", "--hidden", "64", "--sequence", "32", "--batch", "1", "--steps", "2"]


def _check(output, folder, features):
    """Two steps whose losses, norms and gradients are all equal, with fused calls of every feature."""
    counts = [int(re.search(rf"fused calls on rank 0:.*\b{name} (\d+)", output)[1]) for name in features.split(",")]
    assert all(counts) and all(f"{name}: on for models" in output for name in features.split(","))
    verdict = "BITWISE IDENTICAL: 2 of 2 losses, 2 of 2 gradient norms; {} fused calls (exact CPU arithmetic on both"
    assert verdict.format(sum(counts)) in output and "time per step: native" in output
    losses = json.loads((folder / "losses.json").read_text())
    assert len(losses["native_loss"]) == 2 and losses["native_loss"] == losses["ditron_loss"]
    assert losses["native_loss"][1] != losses["native_loss"][0] and losses["bitwise_equal"]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("warm_python")
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
    _check(done.stdout + done.stderr, tmp_path / "out", "tp")


def _seed_fault(fault):
    """The fused run gets one wrong bit on its last rank: in a weight of its model, or in what a step gives."""
    import byte_gpt

    import ditron_train.megatron

    build_model, train, is_last = byte_gpt._build_model, byte_gpt.train, dist.get_rank() == dist.get_world_size() - 1

    def built(*arguments):
        model = build_model(*arguments)
        if ditron_train.megatron.active_features() and is_last:
            weight = next(p for name, p in model.named_parameters() if "linear_fc2" in name)
            weight.data.view(torch.int16)[0, 0] ^= 16  # the last bit may be rounded away
        return model

    def trained(*arguments):
        results = train(*arguments)
        if ditron_train.megatron.active_features() and is_last:
            changed = math.nextafter(getattr(results[0], fault), 9)
            results[0] = dataclasses.replace(results[0], **{fault: changed})
        return results

    if fault == "weight":
        byte_gpt._build_model = built
    else:
        byte_gpt.train = trained


def _main(folder, words, fault=None):
    """The example's own ``main`` in a worker, which has joined its group already; returns its exit status or last
    words."""
    sys.path.insert(0, str(FOLDER))
    if fault is not None:
        _seed_fault(fault)
    dist.init_process_group = lambda *arguments, **options: None
    sys.argv = ["quickstart.py", *SMALL, "--out", folder, *words]
    try:
        return importlib.import_module("quickstart").main()
    except SystemExit as stopped:
        return stopped.code


def _run(folder, words, world_size=2, fault=None):
    outcomes = run_workers_once(world_size, _main, str(folder), words, fault)
    assert not any(outcome.error for outcome in outcomes), [outcome.traceback for outcome in outcomes]
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize(
    "words, features",
    [
        (["--pp", "2"], "pp"),
        (["--sp", "2"], "sp"),
        (["--experts", "4", "--ep", "2"], "ep"),
        (["--optimizer", "muon"], "tp,muon"),
    ],
    ids=["pp", "sp", "ep", "muon"],
)
def test_bits_are_equal_and_files_are_written(tmp_path, capsys, words, features):
    assert _run(tmp_path, words) == [0, 0]
    _check(capsys.readouterr().out, tmp_path, features)


@pytest.mark.parametrize(
    "words, features",
    [
        ([], "tp"),  # whose sums have an order from 3 ranks on
        (["--tp", "2", "--sp", "2", "--optimizer", "muon"], "tp,sp,muon"),
        # Groups of different ranks come to their ops in different orders, and wait for each other only if they must.
        (["--tp", "2", "--pp", "2", "--experts", "4", "--ep", "2"], "tp,ep,pp"),
        (["--tp", "2", "--distributed-optimizer"], "tp"),
    ],
    ids=["tp", "tp,sp,muon", "tp,ep,pp", "distributed optimizer"],
)
def test_on_four_ranks(tmp_path, capsys, words, features):
    hidden = ["--hidden", "128"]  # four heads
    assert _run(tmp_path, [*hidden, *words, "--ditron", features], world_size=4) == [0, 0, 0, 0]
    _check(capsys.readouterr().out, tmp_path, features)


@pytest.mark.parametrize(
    "fault, counts",
    [
        ("weight", r"\d of 2 losses, \d of 2 gradient norms"),
        ("loss", "1 of 2 losses, 2 of 2 gradient norms"),
        ("gradient_norm", "2 of 2 losses, 1 of 2 gradient norms"),
    ],
)
def test_one_wrong_bit_fails(tmp_path, capsys, fault, counts):
    assert _run(tmp_path, [], fault=fault) == [1, 1]
    output = capsys.readouterr().out
    assert re.search(rf"NOT IDENTICAL: {counts}; 18 fused calls", output) and "BITWISE IDENTICAL" not in output
    assert re.search(r"differ from native; the first: .*, step 1", output)


def _verdict_of_gpus(norms):
    """The line and the exit status of runs of one step whose native gradient norms are ``norms``."""
    sys.path.insert(0, str(FOLDER))
    from byte_gpt import StepResult
    from comparison import Comparison
    from quickstart import _note, _verdict
    from rich.console import Console

    native, again = ([StepResult(1.5, norm, 20.0, {"weight": 7})] for norm in norms)
    console = Console(record=True, width=60)
    status = _verdict(Comparison(native, again, native), 9, _note(True, (20.0, 16.0)), console)
    return status, console.export_text().splitlines()[-1]


def test_the_line_on_gpus():
    words = "1 of 1 losses, 1 of 1 gradient norms; 9 fused calls; 1.25x (20.0 ms a step, fused 16.0 ms)"
    assert run_workers_once(1, _verdict_of_gpus, (2.0, 2.0))[0].value == (0, f"BITWISE IDENTICAL: {words}")


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
    assert _run(tmp_path, words, world_size) == [1] * world_size
    output = capsys.readouterr().out
    assert f"error: nothing was compared: {names}: no fused call ran" in output and "IDENTICAL" not in output


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
