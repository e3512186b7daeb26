"""``compare``: two jobs of the user's own command, every figure exact; a stand-in for Megatron-LM's training loop."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ditron_train.megatron.plugin import record_steps
from ditron_train.runtime.errors import SettingError
from ditron_train.tools.compare import comparison
from ditron_train.tools.compare.comparison import add_arguments, run
from ditron_train.tools.compare.launch import LAUNCHER, RunningJob, may_start_together, with_launcher
from ditron_train.tools.compare.row import write_row
from ditron_train.tools.compare.side_by_side import show
from ditron_train.tools.compare.steps import PARAMETERS, Runs, differences, read_job
from ditron_train.tools.nothing_compared import NothingComparedError
from ditron_train.tools.results import read_results, write_results
from tests.support.patience import HANG_S
from tests.support.processes import run_workers

ARGUMENTS = """
import argparse

def add_megatron_arguments(parser):
    parser.add_argument("--train-iters", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=8)
    parser.add_argument("--noise", choices=("none", "fused", "always"), default="none")
    return parser

def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args()
"""

TRAINING = """
import os
import torch
from megatron.training.arguments import parse_args

_args = _column = None

def column_layer():
    # that `--ditron tp` accelerates, in a tensor parallel group of all ranks
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig
    from ditron_train.cpu import interpreter, megatron_shim

    interpreter.install()
    megatron_shim.install()
    size = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    megatron_shim.seed(0)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=size, params_dtype=torch.float32,
                               tensor_model_parallel_size=size, sequence_parallel=True, **megatron_shim.CPU_CONFIG)
    return ColumnParallelLinear(8, 16, config=config, init_method=torch.nn.init.ones_, bias=False)

def get_args():
    return _args

def train_step(
    forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, forward_backward_func,
    iteration=None,
):
    from ditron_train.megatron import active_features
    optimizer.zero_grad()
    if _column is not None:
        _column(torch.ones(4, 1, 8))
    loss = (model(torch.full((2, 8), 1.0 + iteration)) ** 2).mean()
    loss.backward()
    noisy = _args.noise == "always" or (_args.noise == "fused" and active_features())
    if noisy and iteration == 2:  # one bit of one weight, of the last rank
        with torch.no_grad():
            if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
                seed = os.getpid() if _args.noise == "always" else 1
                model.weight.view(torch.int32).view(-1)[seed % 8] ^= 1 + seed % 1000
    norm = model.weight.grad.norm().item()
    optimizer.step()
    return {"lm loss": loss.detach()}, 0, False, False, 0, norm, None, 0

def pretrain():
    global _args, _column
    parse_args()  # as Megatron-LM does where it reads a checkpoint's arguments: twice
    _args = parse_args()
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    _column = column_layer() if torch.distributed.get_world_size() > 1 else None
    for iteration in range(_args.train_iters):
        train_step(None, None, model, optimizer, None, None, None, iteration=iteration)
    print("TRAINED", flush=True)
    torch.distributed.destroy_process_group()  # gloo's threads may abort a process that ends without it
"""


@pytest.fixture
def script(megatron_training, warm_python):
    main = "from megatron.training.training import pretrain\nif __name__ == '__main__':\n    pretrain()\n"
    return megatron_training(main, arguments=ARGUMENTS, training=TRAINING)


def _compare(tmp_path, *words):
    env = dict(
        os.environ, PYTHONPATH=os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]), TRITON_INTERPRET="1"
    )
    command = [sys.executable, "-m", "ditron_train", "compare", "--ditron", "tp", "--output", tmp_path / "out", *words]
    return subprocess.run(
        list(map(str, command)), check=False, env=env, capture_output=True, text=True, timeout=HANG_S
    )


@pytest.fixture
def compare_here(tmp_path, monkeypatch, capsys):
    """``compare`` without a process of its own: its status, and what it says."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]))

    def compare(*words):
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        status = run(parser.parse_args(["--ditron", "tp", "--output", str(tmp_path / "out"), *map(str, words)]))
        return status, capsys.readouterr().out

    return compare


def _alone(monkeypatch, *words):
    """As torchrun would start one rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launched = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in launched.items():
        monkeypatch.setenv(name, str(value))
    return [sys.executable, *words]


def _torchrun(ranks, *words):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *words]


def run_notes(*folders):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(["--notes", *map(str, folders)]))


def test_equal_jobs_of_two_ranks(script, tmp_path):
    pytest.importorskip("megatron.core")
    results = tmp_path / "results"
    traced = ("--trace", "--trace-rank", 1)
    words = (*traced, "--results", results, "--model", "tiny", "--skip", 2)
    done = _compare(tmp_path, *words, "--", *_torchrun(2, script))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "equal: all 20 figures of 4 steps on 2 ranks" in done.stdout
    )  # a loss and a norm a step, two digests, two ranks
    assert "time of a step, behind the first 2: natively" in done.stdout
    (path,) = results.glob("*x2/training.json")
    stamp, (row,) = read_results(path)
    assert stamp.torch == torch.__version__ and stamp.count == 2 and stamp.settings["TRITON_INTERPRET"] == "1"
    assert (row.op, row.model, row.world_size, row.shape) == ("training_step tp", "tiny", 2, {"hidden_size": 8})
    assert row.bitwise_equal and row.native_us > 0 and row.ditron_us > 0
    assert row.command.endswith("-m ditron_train.megatron.run train.py") and str(tmp_path) not in row.command
    assert row.trace["GEMMs, with communication in them or without"][1] > 0 and row.versions["torch"] == stamp.torch
    assert [len(times) for times in row.jobs_ms.values()] == [2, 2] and row.spread >= 0
    assert row.native_us == pytest.approx(sum(row.jobs_ms["native"]) * 500, rel=0.01, abs=20)
    assert row.plan == read_job(tmp_path / "out" / "fused").plan and "tp column" in row.plan[0]
    assert row.fused_calls == {"tp": 8} and row.memory_gib is None  # a layer, four steps, two ranks; no GPU
    steps = read_job(tmp_path / "out" / "fused").ranks[0]
    assert [step.fused_calls for step in steps] == [{"tp": 1}] * 4 and steps[-1].symmetric_bytes > 0
    assert not any(read_job(tmp_path / "out" / "native").most(name) for name in ("symmetric_bytes", "reserved_bytes"))
    assert "symmetric memory of all groups: " in (tmp_path / "out" / "fused.log").read_text()
    assert "rank 1 in step 3, ms" in done.stdout and "addmm" in done.stdout
    for name in ("native", "fused"):
        assert sorted(path.name for path in (tmp_path / "out" / name).iterdir()) == [
            "rank0.jsonl",
            "rank1.jsonl",
            "trace-rank1.json",
        ]
        assert [step.number for step in read_job(tmp_path / "out" / name).ranks[0] if step.seconds is None] == [1, 3]
    order = [tmp_path / "out" / f"{name}.log" for name in ("native", "fused", "fused-2", "native-2")]
    assert sorted(order, key=lambda path: path.stat().st_mtime_ns) == order
    again = read_job(tmp_path / "out" / "native-2")
    assert "means of the jobs natively " in done.stdout and (len(again), len(again.ranks)) == (4, 2)
    assert read_job(tmp_path / "out" / "fused").header["features"] == ["tp"]
    assert again.header["features"] == ["wgrad"] and again.features == ()
    assert "TRAINED" in (tmp_path / "out" / "native.log").read_text()
    assert "tp: on for models built from now on" in (tmp_path / "out" / "fused.log").read_text()
    assert "tp: on" not in (tmp_path / "out" / "native.log").read_text()
    assert run_notes(tmp_path / "out" / "native", tmp_path / "out" / "fused") == 0
    with pytest.raises(SettingError, match="ran with --ditron tp"):
        run_notes(tmp_path / "out" / "fused", tmp_path / "out" / "native")


def test_one_bit_of_one_weight_is_found(monkeypatch, script, compare_here, tmp_path):
    pytest.importorskip("megatron.core")
    results = tmp_path / "results"
    status, logged = compare_here("--results", results, *_alone(monkeypatch, script, "--noise", "fused"))
    assert status == 1, logged
    assert "DIFFERENT: " in logged and "of step 4 on rank 0" in logged
    assert "kernel" not in logged and not list(tmp_path.glob("out/*/trace*"))
    assert _only_row(results).bits_words == "**DIFFER**"
    assert read_job(tmp_path / "out" / "native").header["trace"] is None


def _only_row(folder):
    (path,) = folder.glob("*/training.json")
    (row,) = read_results(path)[1]
    return row


def test_native_that_does_not_repeat_itself_is_named(monkeypatch, script, compare_here, tmp_path):
    pytest.importorskip("megatron.core")
    results = tmp_path / "results"
    monkeypatch.setattr(Runs, "fused_calls", {"tp": 1})  # one rank has no fused call
    status, logged = compare_here("--results", results, *_alone(monkeypatch, script, "--noise", "always"))
    assert status == 0, logged
    assert "native does not repeat itself: " in logged and "all before that is equal" in logged
    assert _only_row(results).bits_words == "Megatron's own differ"


def test_a_job_without_a_fused_call_compares_nothing(script, tmp_path):
    """One rank, whose layers all run natively: native beside native is not reported as equal."""
    pytest.importorskip("megatron.core")
    results = tmp_path / "results"
    done = _compare(tmp_path, "--order", "AB", "--results", results, "--", *_torchrun(1, script))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "error: nothing was compared: tp: no fused call ran in a job with ditron_train" in done.stderr
    assert "time of a step" in done.stdout and "equal: " not in done.stdout and not list(results.glob("*/*.json"))


@pytest.mark.parametrize(
    "fused_losses, native_again, words",
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], "equal"),
        ([1.0, 2.0, 3.0], [1.0, 2.0, 4.0], "equal"),
        ([1.0, 2.0, 4.0], [1.0, 2.0, 5.0], "Megatron's own differ"),
        ([1.0, 5.0, 3.0], [1.0, 2.0, 4.0], "**DIFFER**"),
    ],
)
def test_what_differs_before_megatrons_own_jobs_do_is_fused(
    monkeypatch, script, compare_here, tmp_path, fused_losses, native_again, words
):
    jobs = {"native": [1.0, 2.0, 3.0], "fused": fused_losses, "native-2": native_again}
    for name, losses in jobs.items():
        _write(tmp_path / name, 0, 1, losses, **(FUSED if name == "fused" else {}))
    native, fused, again = (read_job(tmp_path / name) for name in jobs)
    monkeypatch.setattr(comparison, "_train_all", lambda arguments: Runs([native, again], [fused]))
    status, _ = compare_here("--skip", 1, "--results", tmp_path / "results", *_alone(monkeypatch, script))
    assert _only_row(tmp_path / "results").bits_words == words
    assert status == (words == "**DIFFER**")


def test_a_job_that_fails(script, compare_here, tmp_path):
    script.write_text("raise SystemExit('nothing to train')")
    done = _compare(tmp_path, sys.executable, script)
    assert done.returncode == 2 and "the job ended with status 1" in done.stderr and "nothing to train" in done.stderr
    script.write_text("import atexit\natexit.register(print, *range(20), sep='\\n')\nraise ValueError('no data')")
    with pytest.raises(SettingError, match="its first error: ValueError: no data\n"):
        compare_here(sys.executable, script)
    script.write_text("print('no loop here')")
    with pytest.raises(SettingError, match="did the script reach Megatron-LM's training loop?"):
        compare_here(sys.executable, script)


@pytest.mark.parametrize(
    "words, says",
    [
        ([], "no Python script in"),
        (["torchrun", "-m", "pretrain"], "no Python script in"),
        (["torchrun", "nowhere.py"], "cannot read the script nowhere.py"),
        (["torchrun", __file__, "--ditron", "tp"], "--ditron stands in front"),
        (["torchrun", __file__, "--load", "a", "--save", "a"], "--save in the command: .*; leave it out"),
        (["torchrun", "-m", LAUNCHER, __file__, "--save=a"], "--save in the command"),
    ],
)
def test_commands_that_cannot_be_used(words, says):
    with pytest.raises(SettingError, match=says):
        with_launcher(words)


@pytest.mark.parametrize(
    "words, says",
    [
        (["--output", "/proc/nowhere", "torchrun", __file__], "cannot write into /proc/nowhere"),
        (["--results", "/proc/nowhere", "torchrun", __file__], "cannot write into /proc/nowhere"),
        (["--skip", "-1", "torchrun", __file__], "--skip has to be 0 or more"),
        (["--notes", "a", "b"], "--notes trains nothing"),
        (["--ditron", "wgrad", "torchrun", __file__], "wgrad is on natively, too"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_trained(monkeypatch, tmp_path, words, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ditron_train.tools.compare.comparison.RunningJob", lambda *_, **__: pytest.fail("trained"))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SettingError, match=says):
        run(parser.parse_args(["--ditron", "tp", *words]))


def test_a_command_that_cannot_be_leaves_no_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SettingError, match="no Python script in"):
        run(parser.parse_args(["--ditron", "tp", "torchrun", "-m", "pretrain"]))
    assert not list(tmp_path.iterdir())


def test_under_torchrun_every_rank_would_start_jobs(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SettingError, match="compare starts torchrun itself"):
        run(parser.parse_args(["--ditron", "tp", "pretrain_gpt.py"]))


def test_where_the_launcher_goes():
    assert with_launcher(["torchrun", "-x", __file__, "--a.py"]) == [
        "torchrun",
        "-x",
        "-m",
        LAUNCHER,
        __file__,
        "--a.py",
    ]
    there = ["torchrun", "-m", LAUNCHER, __file__, "--load", "a", "--save-interval", "5"]
    assert with_launcher(there) == there


def test_a_command_that_does_not_exist(tmp_path):
    with pytest.raises(SettingError, match="cannot start no-such-program"):
        RunningJob(["no-such-program"], tmp_path / "log", tmp_path)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_job_ends_with_the_command_that_started_it(tmp_path, sent):
    code = f"""
import pathlib, sys
from ditron_train.tools.compare.launch import RunningJob, running_jobs
folder = pathlib.Path("{tmp_path}")
with running_jobs() as jobs:
    for name in ("later", "pid"):
        words = ["sh", "-c", f"echo $$ > {{folder}}/{{name}}; exec sleep 60"]
        jobs.append(RunningJob(words, folder / f"{{name}}.log", folder / f"{{name}}.notes", is_held=name == "later"))
    (folder / "started").write_text("both")
    jobs[1].finish(lambda: None)
"""
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    started = subprocess.Popen(
        [sys.executable, "-c", code], env=dict(os.environ, PYTHONPATH=path), stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    files = [tmp_path / "later", tmp_path / "pid"]
    while not all(file.exists() and file.read_text().strip() for file in [*files, tmp_path / "started"]):
        assert time.monotonic() < deadline and started.poll() is None
        time.sleep(0.05)
    started.send_signal(sent)
    started.wait(30)
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)
    assert not list(tmp_path.glob("*.notes/*"))


def test_jobs_of_torchruns_own_ports_start_together(script, tmp_path):
    """The first job does not train before the second one's script has run to its parser, and that goes no further."""
    pytest.importorskip("megatron.core")
    words = ["torchrun", "-m", LAUNCHER, "train.py", "--standalone"]
    assert not may_start_together(words) and may_start_together(["torchrun", "--standalone", *words[1:]])
    module = tmp_path / "megatron" / "training" / "training.py"
    text = module.read_text().replace(
        "def pretrain():\n    global _args\n",
        f"""def pretrain():
    global _args
    import pathlib, sys, time
    native, fused = (pathlib.Path({str(tmp_path)!r}) / f"{{name}}.began" for name in ("native", "fused"))
    mine, other = (native, fused) if "wgrad" in sys.argv else (fused, native)
    mine.touch()
    deadline = time.monotonic() + {HANG_S / 4}
    while not other.exists():
        assert time.monotonic() < deadline, "the other job has not started"
        time.sleep(0.1)
""",
    )
    module.write_text(text)
    done = _compare(tmp_path, "--order", "AB", "--", *_torchrun(1, script))
    assert done.returncode == 2 and "nothing was compared: tp" in done.stderr, done.stdout + done.stderr
    native, fused_losses = (tmp_path / "out" / name / "rank0.jsonl" for name in ("native", "fused"))
    assert native.stat().st_mtime_ns < fused_losses.stat().st_mtime_ns - 1e8, "one trains behind the other"
    for name in ("native", "fused"):
        assert not (tmp_path / "out" / name / "waiting").exists()


STAMP = {name: None for name in ("driver", "nccl", "nvshmem", "megatron_core", "transformer_engine", "commit")}
STAMP |= {
    "device": "NVIDIA H200",
    "count": 1,
    "torch": "2",
    "triton": "3",
    "ditron_train": "0",
    "date": "2026-01-01",
    "settings": {},
}


#: Of a job with a feature that ran.
FUSED = {"features": ["tp"], "fused_calls": {"tp": 7}}


def _write(folder, rank, world_size, losses, sizes=None, stamp=STAMP, features=(), **others):
    folder.mkdir(exist_ok=True)
    header = {
        "world_size": world_size,
        "features": list(features),
        "train_iters": len(losses),
        "dtype": "torch.bfloat16",
        "sizes": sizes or {},
    }
    header |= {} if stamp is None else {"stamp": stamp}
    steps = [
        {
            "losses": {"lm loss": float(loss).hex()},
            "grad_norm": None,
            "seconds": None if i == 0 else 0.1 * (rank + 1),
            "step": i + 1,
        }
        for i, loss in enumerate(losses)
    ]
    steps[-1].update(others)
    (folder / f"rank{rank}.jsonl").write_text("\n".join(map(json.dumps, [header, *steps])) + "\n")


def test_differences_by_step_then_rank(tmp_path, capsys):
    for kind, changed in (("one", 2.0), ("other", 2.0 + 2**-22)):
        _write(tmp_path / kind, 0, 2, [1.0, 2.0, 3.0, changed], **FUSED)
        _write(tmp_path / kind, 1, 2, [1.0, changed, float("nan"), 4.0], digest="ab" if kind == "one" else "cd")
    one, other = read_job(tmp_path / "one"), read_job(tmp_path / "other")
    found = differences(one, other)
    assert [(d.step, d.rank, d.name) for d in found] == [(2, 1, "lm loss"), (4, 0, "lm loss"), (4, 1, "parameters")]
    assert differences(one, one) == []
    assert one.step_ms(2) == pytest.approx(200.0)  # the slower rank's
    runs = Runs([one], [other])
    assert not show(runs, found, [], 2)
    assert "DIFFERENT: lm loss of step 2 on rank 1: 2, 2.00000024 and 2 more" in capsys.readouterr().out
    assert show(runs, found, found[:1], 2) and "does not repeat itself" in capsys.readouterr().out
    assert not show(runs, found, found[1:], 2), "native repeats step 2, and the fused path differs there"


def test_more_steps_than_the_other_is_a_difference(tmp_path, capsys):
    _write(tmp_path / "one", 0, 1, [1.0, 2.0])
    _write(tmp_path / "other", 0, 1, [1.0, 2.0, 3.0])
    one, other = read_job(tmp_path / "one"), read_job(tmp_path / "other")
    assert not show(Runs([one], [other, one]), differences(one, other), [], 1)
    assert not show(Runs([one], [one, other]), [], [], 1)
    assert "DIFFERENT: 2 steps natively, 3 with ditron_train" in capsys.readouterr().out
    assert not show(Runs([one, one, other], [one, one]), [], [], 1), "natively, too"
    assert "DIFFERENT: 2 steps natively, 3 natively the next time" in capsys.readouterr().out


def test_the_verdict_names_the_steps_whose_digests_were_compared(tmp_path, capsys):
    """A job that ends before the step it was told is the last, by ``--exit-interval`` for instance, has no digest of
    the last parameters."""
    for name, first, last in (("whole", "ab", "cd"), ("early", "ab", None), ("none", None, None)):
        for rank in range(2):
            _write(tmp_path / name, rank, 2, [1.0, 2.0, 3.0], **FUSED, **({} if last is None else {"digest": last}))
            path = tmp_path / name / f"rank{rank}.jsonl"
            header, step, *others = path.read_text().splitlines()
            step = json.dumps({**json.loads(step), "digest": first})
            path.write_text("\n".join([header, step, *others]) + "\n")
    for name, says in (
        ("whole", "equal: all 10 figures of 3 steps on 2 ranks (losses, gradient norms, digests of the optimizer's "
                  "parameters after steps 1, 3)"),
        ("early", "equal: all 8 figures of 3 steps on 2 ranks (losses, gradient norms, digests of the optimizer's "
                  "parameters after step 1); parameters after the last step, 3, were NOT compared"),
        ("none", "equal: all 6 figures of 3 steps on 2 ranks (losses, gradient norms); parameters after the last "
                 "step, 3, were NOT compared"),
    ):  # fmt: skip
        job = read_job(tmp_path / name)
        assert show(Runs([job], [job]), [], [], 1)
        out = " ".join(capsys.readouterr().out.split())
        assert says in out and ("NOT compared" in out) == (name != "whole")


def test_notes_that_cannot_be_read(tmp_path):
    with pytest.raises(SettingError, match="no rank noted a step"):
        read_job(tmp_path)
    _write(tmp_path / "half", 0, 2, [1.0])
    with pytest.raises(SettingError, match="1 of 2 ranks"):
        read_job(tmp_path / "half")
    for text in ("{", "{\n", "[1]\n", "1\n", "{}\n", '{"world_size": 2}\n'):
        (tmp_path / "half" / "rank1.jsonl").write_text(text)
        with pytest.raises(SettingError, match="does not hold the notes"):
            read_job(tmp_path / "half")
    _write(tmp_path / "half", 1, 2, [1.0])
    (tmp_path / "half" / "rankle.jsonl").write_text("of somebody else")
    with (tmp_path / "half" / "rank1.jsonl").open("a") as notes:
        notes.write('{"step": 2, "los')  # killed while it wrote
    assert len(read_job(tmp_path / "half")) == 1


@pytest.mark.parametrize(
    "world_size, others, says",
    [
        (2, {}, "ranks 1, 2"),
        (1, {"sizes": {"hidden_size": 16}}, "hidden_size 8, 16"),
        (1, {"sizes": {}}, "hidden_size 8, -"),
        (1, {"step": 7}, "first step 1, 7"),
    ],
)
def test_jobs_that_did_not_train_the_same(tmp_path, world_size, others, says):
    others = {"sizes": {"hidden_size": 8}, **others}
    _write(tmp_path / "one", 0, 1, [1.0], sizes={"hidden_size": 8})
    for rank in range(world_size):
        _write(tmp_path / "other", rank, world_size, [1.0], **others)
    with pytest.raises(SettingError, match=f"did not train the same: {says}$"):
        run_notes(tmp_path / "one", tmp_path / "other")
    with pytest.raises(NothingComparedError, match="nothing was compared: --ditron: no fused call ran"):
        run_notes(tmp_path / "one", tmp_path / "one")
    _write(tmp_path / "fused", 0, 1, [1.0], sizes={"hidden_size": 8}, **FUSED)
    assert run_notes(tmp_path / "one", tmp_path / "fused") == 0


@pytest.mark.parametrize("calls, names", [({"tp": 5}, "ep"), ({}, "tp, ep"), ({"tp": 0, "ep": 3}, "tp")])
def test_every_feature_has_to_have_run(tmp_path, capsys, calls, names):
    _write(tmp_path / "native", 0, 1, [1.0, 2.0])
    _write(tmp_path / "fused", 0, 1, [1.0, 2.0], features=["tp", "ep", "wgrad"], fused_calls=calls)
    with pytest.raises(NothingComparedError, match=f"nothing was compared: {names}: no fused call ran"):
        run_notes(tmp_path / "native", tmp_path / "fused")
    assert ("equal: all" in capsys.readouterr().out) == any(calls.values())


def test_a_job_that_differs_is_different_although_no_fused_call_ran(tmp_path, capsys):
    _write(tmp_path / "native", 0, 1, [1.0, 2.0])
    _write(tmp_path / "fused", 0, 1, [1.0, 3.0], features=["tp"])
    assert run_notes(tmp_path / "native", tmp_path / "fused") == 1
    assert "DIFFERENT: lm loss of step 2" in capsys.readouterr().out


def test_records_of_older_versions_do_not_say_that_anything_was_fused(tmp_path):
    _write(tmp_path / "native", 0, 1, [1.0, 2.0])
    _write(tmp_path / "fused", 0, 1, [1.0, 2.0], features=["tp"])
    with pytest.raises(NothingComparedError, match="nothing was compared: tp"):
        run_notes(tmp_path / "native", tmp_path / "fused")


GIB = 1 << 30
#: Reserved and used bytes natively, the same and symmetric bytes of the fused job; by how many GiB it breaks the rule.
MEMORY = [
    ((50, 60), (50.3, 60.3, 0), 0.0),
    ((50, 60), (50.4, 60, 0), 0.1),
    ((50, 60), (50, 62, 2), -0.3),
    ((50, 60), (50, 62.5, 2), 0.2),
    ((50, 60), (51, 62, 2), 0.7),  # symmetric memory is not in what is reserved
    ((50, 60), (49, 59, 0), -1.3),
]


@pytest.mark.parametrize("native, fused, excess", MEMORY)
def test_the_rule_on_memory(tmp_path, capsys, monkeypatch, native, fused, excess):
    """The worst rank and the worst job of each kind count."""
    for name, (reserved, used, *symmetric), others in (("native", native, {}), ("fused", fused, FUSED)):
        for rank in range(2):
            low = 1 - rank  # rank 0 has less
            sizes = {"reserved_bytes": int((reserved - low) * GIB), "used_bytes": int((used - low) * GIB)}
            sizes["symmetric_bytes"] = int(sum(symmetric) * GIB)
            _write(tmp_path / name, rank, 2, [1.0, 2.0, 3.0], **others, **sizes)
    parser, folders = argparse.ArgumentParser(), (str(tmp_path / "native"), str(tmp_path / "fused"))
    add_arguments(parser)
    words = ["--notes", *folders, "--skip", "1", "--results", str(tmp_path / "results")]
    assert run(parser.parse_args(words)) == (1 if excess > 0 else 0)
    out = " ".join(capsys.readouterr().out.split())
    broken = f"MEMORY RULE BROKEN by {excess:.2f} GiB"
    assert (broken if excess > 0 else "memory is within the rule") in out
    assert f"peak reserved memory {native[0]:.2f} GiB natively, {fused[0]:.2f} GiB fused" in out
    row = _only_row(tmp_path / "results")
    assert row.memory_gib["excess"] == pytest.approx(excess, abs=2e-3) and row.bitwise_equal
    assert (row.memory_gib["native"], row.memory_gib["ditron_symmetric"]) == (native[0], fused[2])


def test_the_second_native_job_has_to_have_trained_the_same(monkeypatch, tmp_path):
    for name, step in (("one", 1), ("later", 7)):
        _write(tmp_path / name, 0, 1, [1.0], step=step)
    one, later = read_job(tmp_path / "one"), read_job(tmp_path / "later")
    monkeypatch.setattr("ditron_train.tools.compare.comparison._train_all", lambda _: Runs([one, later], [one, one]))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SettingError, match="did not train the same: first step 1, 7$"):
        run(parser.parse_args(["--ditron", "tp", "--output", str(tmp_path / "out"), "torchrun", __file__]))


def test_rows_of_other_models_stay(tmp_path):
    _write(tmp_path / "job", 0, 1, [1.0, 2.0, 3.0])
    job = read_job(tmp_path / "job")
    for model in ("a", "b", "a"):
        path = write_row(tmp_path, model, Runs([job], [job]), 1, is_equal=True)
    assert sorted(row.model for row in read_results(path)[1]) == ["a", "b"]
    assert write_row(tmp_path, "a", Runs([job], [job]), 9, is_equal=True) is None
    stamp, rows = read_results(path)
    write_results(tmp_path, "training", replace(stamp, commit="before"), rows)
    rows = read_results(write_row(tmp_path, "a", Runs([job], [job]), 1, is_equal=True))[1]
    assert {row.model: row.commit for row in rows} == {"a": None, "b": "before"}


@pytest.mark.parametrize(
    "is_equal, native_repeats, words",
    [(True, None, "equal"), (False, None, "**DIFFER**"), (False, False, "Megatron's own differ")],
)
def test_a_row_says_where_bits_say_nothing(tmp_path, is_equal, native_repeats, words):
    _write(tmp_path / "job", 0, 1, [1.0, 2.0, 3.0])
    job = read_job(tmp_path / "job")
    logged = dict(is_equal=is_equal, native_repeats=native_repeats)
    (row,) = read_results(write_row(tmp_path, "a", Runs([job], [job]), 1, **logged))[1]
    assert row.bits_words == words and row.native_repeats is native_repeats


def test_rows_are_stamped_with_the_machine_that_trained(tmp_path):
    for name, stamp in (
        ("old", None),
        ("job", STAMP),
        ("later", {**STAMP, "commit": "abc"}),
        ("other", {**STAMP, "torch": "3"}),
    ):
        _write(tmp_path / name, 0, 1, [1.0, 2.0, 3.0], stamp=stamp)
    old, job, later, other = (read_job(tmp_path / name) for name in ("old", "job", "later", "other"))
    path = write_row(tmp_path, "a", Runs([job], [later]), 1, is_equal=True)
    assert path == tmp_path / "H200x1" / "training.json" and read_results(path)[0].commit == "abc"
    with pytest.raises(SettingError, match="no row: the notes do not say on which machine"):
        write_row(tmp_path, "a", Runs([old], [job]), 1, is_equal=True)
    with pytest.raises(SettingError, match="no row: the two jobs ran with torch 2, 3"):
        write_row(tmp_path, "a", Runs([job], [other]), 1, is_equal=True)


def test_a_row_tells_how_it_is_measured_again(tmp_path, capsys):
    plan = ["tp column 8x8, 8x8: fused, faster (1 us, native 2 us)"]
    for name, features, ms, clock, joules in (
        ("a", ["wgrad"], 100, 1700, 60.0),
        ("b", ["tp", "wgrad"], 90, 1710, 58.0),
        ("c", ["tp", "wgrad"], 92, 1690, 60.2),
        ("d", ["wgrad"], 104, 1720, 62.4),
    ):
        measured = dict(seconds=ms / 1e3, clock_mhz=clock, joules=joules)
        _write(tmp_path / name, 0, 1, [1.0, 2.0], plan=plan, features=features, **measured)
    a, b, c, d = (read_job(tmp_path / name) for name in "abcd")
    command = ["/usr/bin/torchrun", "/somewhere/train.py", "--tokenizer-model=/data/a b.model", "--lr", "1e-3"]
    trace = {"nothing runs": [1.0, None]}
    path = write_row(tmp_path, "a", Runs([a, d], [b, c]), 1, command, trace, is_equal=True)
    (row,) = read_results(path)[1]
    assert row.command == "torchrun train.py '--tokenizer-model=a b.model' --lr 1e-3"
    assert (row.op, row.native_us, row.ditron_us) == ("training_step tp", 102_000.0, 91_000.0)
    assert row.jobs_ms == {"native": [100.0, 104.0], "ditron": [90.0, 92.0]} and row.spread == pytest.approx(
        4 / 102, 1e-2
    )
    assert row.clocks_mhz == {"native": 1710.0, "ditron": 1700.0}
    assert row.joules == {"native": 61.2, "ditron": 59.1}
    show(Runs([a, d], [b, c]), [], [], 1)
    assert "energy and power of a step on a GPU: 61 J, 600 W; 59 J, 649 W" in capsys.readouterr().out
    assert row.plan == plan and row.trace == trace and row.versions["megatron_core"] is None and row.tells_all
    assert not replace(row, plan=None).tells_all and not replace(row, trace=None).tells_all


def test_energy_is_noted_from_step_to_step(monkeypatch, tmp_path):
    """As time is: from the end of the step before, its notes included; none of the first step and the traced one."""
    at_ends_and_behind_notes = [7_000, 8_000, 68_000, 69_000, 500_000, 501_000, 561_500, None, 700_000, 701_000]
    taken_mj = iter(at_ends_and_behind_notes)
    answers = {"is_available": True, "synchronize": None, "mem_get_info": (1 << 30, 3 << 30), "max_memory_reserved": 5}
    for name, value in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(record_steps, "sm_clock_mhz", lambda: 1500)
    monkeypatch.setattr(record_steps, "energy_mj", lambda: next(taken_mj))
    monkeypatch.setattr(record_steps, "collect_provenance", lambda *_: STAMP)
    monkeypatch.setattr(record_steps.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(record_steps.dist, "get_world_size", lambda: 1)
    recorder = record_steps.StepRecorder(tmp_path, ["tp"], SimpleNamespace(), torch.device("cpu"), 1, None)
    recorder._traced, recorder._tracer = 3, SimpleNamespace(stop=lambda: None)
    for _ in range(5):
        recorder.step(None, {}, None, SimpleNamespace(param_groups=[]))
    job = read_job(tmp_path)
    assert (job.most("reserved_bytes"), job.most("used_bytes"), job.most("symmetric_bytes")) == (5, 2 << 30, 0)
    assert [step.joules for step in job.ranks[0]] == [None, 60.0, None, 60.5, None]
    assert job.step_joules(1) == 60.25 and job.step_joules(4) is None and job.power_w(4) is None
    seconds = sum(job.ranks[0][index].seconds for index in (1, 3))
    assert job.power_w(1) == pytest.approx(120.5 / seconds)


def test_a_digest_after_the_first_each_hundredth_and_the_last_step(monkeypatch, tmp_path):
    monkeypatch.setattr(record_steps.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(record_steps.dist, "get_world_size", lambda: 1)
    arguments = SimpleNamespace(train_iters=207)
    recorder = record_steps.StepRecorder(tmp_path, [], arguments, torch.device("cpu"), 5, None)
    optimizer = SimpleNamespace(param_groups=[{"params": [torch.ones(3)]}])
    for iteration in range(4, 207):  # as after a checkpoint
        recorder.step(iteration, {}, None, optimizer)
    noted = [step.number for step in read_job(tmp_path).ranks[0] if step.figures.get(PARAMETERS)]
    assert noted == [5, 100, 200, 207]


@pytest.mark.parametrize("torchrun", [["torchrun"], ["torchrun", "--standalone"]], ids=["one_by_one", "together"])
def test_jobs_behind_the_second_only_where_time_is_left(monkeypatch, tmp_path, torchrun):
    _write(tmp_path / "native", 0, 1, [1.0, 2.0])
    _write(tmp_path / "fused", 0, 1, [1.0, 2.0], **FUSED)
    now, shown, jobs = [0.0], [], []
    monkeypatch.setattr("ditron_train.tools.compare.comparison.time.monotonic", lambda: now[0])
    monkeypatch.setattr("ditron_train.tools.compare.comparison.show", lambda runs, *_: shown.append(runs) or True)

    class Started:
        def __init__(self, words, log, folder, *, is_held):
            jobs.append([folder.name, is_held])

        def interrupt(self):
            pass

        def end(self):
            pass

    def follow(job, kind, index, arguments):
        now[0] += 100.0
        return read_job(tmp_path / ("native" if kind == "A" else "fused"))

    monkeypatch.setattr("ditron_train.tools.compare.comparison.RunningJob", Started)
    monkeypatch.setattr("ditron_train.tools.compare.comparison._follow", follow)
    for words, natively, fused_losses in (([], 2, 2), (["--within", "250"], 1, 1), (["--within", "300"], 1, 2),
                                  (["--within", "1"], 1, 1), (["--order", "ABA"], 2, 1)):  # fmt: skip
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        options = ["--ditron", "tp", "--output", str(tmp_path / "out"), *words]
        jobs.clear()
        assert run(parser.parse_args([*options, *torchrun, __file__])) == 0
        assert (len(shown[-1].native), len(shown[-1].fused)) == (natively, fused_losses), words
        order = ["native", "fused", *(["native-2"] if "ABA" in words else ["fused-2", "native-2"])]
        are_held = len(torchrun) > 1
        assert jobs == [[name, are_held] for name in order][: None if are_held else natively + fused_losses]


def test_a_digest_shows_every_bit():
    pytest.importorskip("megatron.core")
    from ditron_train.megatron.plugin.record_steps import digest

    tensors = [torch.randn(5000, 1000), torch.randn(33).bfloat16(), torch.randn(3).double()]
    whole = digest(tensors)
    assert digest(tensors) == whole and digest(reversed(tensors)) != whole
    for tensor, bits in zip(tensors, (torch.int32, torch.int16, torch.int64)):
        for place in (0, tensor.numel() // 2, tensor.numel() - 1):
            tensor.view(-1).view(bits)[place] ^= 1
            assert digest(tensors) != whole
            tensor.view(-1).view(bits)[place] ^= 1
    assert digest(tensors) == whole


def _digest_of_words(words):
    """As documented, in Python's numbers."""
    total, mask = 0, (1 << 64) - 1
    for place, word in enumerate(words):
        mixed = (place + 1) * 0x9E3779B97F4A7C15 & mask
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & mask
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
        total += ((mixed ^ mixed >> 31) | 1) * word
    return f"{total & mask:016x}"


def test_differences_of_neighbours_do_not_cancel_in_a_digest(monkeypatch):
    pytest.importorskip("megatron.core")
    monkeypatch.setattr(record_steps, "_PART", 5)  # neighbours in different parts, too
    values = torch.randn(1000)
    whole, bits = record_steps.digest([values]), values.view(torch.int32)
    assert whole == _digest_of_words(bits.tolist()) == record_steps.digest(values.split(7))
    for structure in ([1, -1], [1, -2, 1], [1, -1, -1, 1], [1, -3, 3, -1], [1, -1, 0, 0, -1, 1]):
        for first in (0, 3, 500):
            changed = bits.clone()
            changed[first : first + len(structure)] += torch.tensor(structure, dtype=torch.int32)
            assert record_steps.digest([changed.view(torch.float32)]) != whole, (structure, first)


def _digests_of_parts(whole):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from ditron_train.megatron.plugin.record_steps import digest

    ranks = dist.get_world_size()
    sharded = torch.nn.Parameter(distribute_tensor(whole, init_device_mesh("cpu", (ranks,)), [Shard(0)]))
    assert digest([sharded]) == digest([whole.chunk(ranks)[dist.get_rank()]]) != digest([whole])


def test_the_digest_of_a_parameter_that_fsdp_shards_is_of_this_ranks_part():
    pytest.importorskip("megatron.core")
    run_workers(2, _digests_of_parts, torch.randn(6, 4))


def test_a_script_without_the_loop_is_told(monkeypatch, tmp_path):
    pytest.importorskip("megatron.core")
    from ditron_train.megatron.plugin.record_steps import record_steps

    monkeypatch.delitem(sys.modules, "megatron.training.training", raising=False)
    with pytest.raises(SettingError, match="needs the training loop of Megatron-LM"):
        record_steps(tmp_path, ())
