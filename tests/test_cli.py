"""The command line: what it lists, refuses and returns."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import ditron_train
from ditron_train.cli import EXIT_STATUS, command_parsers, main
from tests.support.patience import HANG_S


def test_help_lists_only_what_exists(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "--help"])
    assert stopped.value.code == 0
    rooms = {path.stem for path in (Path(ditron_train.__file__).parent / "tools" / "bench").glob("*.py")}
    out = capsys.readouterr().out
    for room in ("tp", "pp", "sp", "ep", "muon"):
        assert (f"\n    {room} " in out) == (room in rooms)


def test_unknown_command_and_arguments(capsys: pytest.CaptureFixture) -> None:
    for words, says in (
        (["cure"], "invalid choice: 'cure'"),
        (["doctor", "--loud"], "unknown argument --loud"),
        (["predict", "--devise", "h100"], "unknown argument --devise; did you mean --device?"),
        (["postmortem", "--jsno", "x"], "did you mean --json?"),
        (["predict", "--hidden-size", "4096"], "unknown argument --hidden-size: Megatron's arguments follow a --"),
        (["verify", "--hidden-size", "4096"], "unknown argument --hidden-size: Megatron's arguments follow a --"),
        (["tune", "--op"], "expected one argument"),
    ):
        assert main(words) == 2, words
        err = capsys.readouterr().err
        assert says in err and err.startswith("error: ") and err.count("\n") == 1


def test_the_rank_that_torchrun_numbers_first_says_what_is_wrong(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["predict", "--device", "abacus", "--", "--num-layers", "1"]) == 2
    assert capsys.readouterr().err == ""


def test_help_is_plain_text_and_says_the_exit_statuses(capsys: pytest.CaptureFixture) -> None:
    for words in ([], *([name] for name in command_parsers() if " " not in name)):
        with pytest.raises(SystemExit) as stopped:
            main([*words, "--help"])
        assert stopped.value.code == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "`" not in text and "docs/" not in text and "scripts/" not in text
        assert EXIT_STATUS in text


def test_doctor_json(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    status = main(["doctor", "--json"])
    healthy = json.loads(capsys.readouterr().out)["healthy"]
    assert status == (0 if healthy else 1)
    monkeypatch.setenv("DITRON_TRANSPORT", "pigeons")
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["healthy"] is False


def test_a_plan_is_made_as_a_job_would_make_it(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core")
    for name in ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "CUDA_DEVICE_MAX_CONNECTIONS", "DITRON_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    assert main(["verify", "--plan", "/nowhere/plan.json"]) == 2
    assert "cannot write the plan /nowhere/plan.json" in capsys.readouterr().err
    assert "NVTE_ALLOW_NONDETERMINISTIC_ALGO" not in os.environ and os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_interrupted_and_hung(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Ctrl-C needs no traceback; a peer that did not come is something wrong, not a wrong command line."""
    from ditron_train.runtime.errors import PeerTimeoutError
    from ditron_train.tools.doctor import examination as doctor

    who = dict(
        op="ag_gemm",
        group="tp",
        waiting_rank=0,
        missing_rank=1,
        chunk=2,
        expected_epoch=3,
        seen_epoch=2,
        timeout_s=5.0,
    )
    for error, status, text in (
        (KeyboardInterrupt(), 130, "interrupted"),
        (PeerTimeoutError(**who), 1, "error: ag_gemm on group tp: rank 0 waited 5 s for rank 1"),
        (PermissionError(13, "Permission denied", "x"), 2, "Permission denied: 'x'"),
    ):

        def fail(error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(doctor, "examine", fail)
        assert main(["doctor"]) == status
        assert text in capsys.readouterr().err


def test_options_are_not_guessed(capsys: pytest.CaptureFixture) -> None:
    assert main(["trace", "--op", "ag_gemm", "--out", "x"]) == 2
    assert "unknown argument --out" in capsys.readouterr().err


def test_import_does_nothing_else() -> None:
    code = (
        "import sys, os; before = dict(os.environ); import ditron_train, ditron_train.cli\n"
        "assert dict(os.environ) == before\n"
        "assert not {'torch', 'triton', 'numpy', 'megatron'} & set(sys.modules), 'heavy imports'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def _without_torch(*words: str) -> subprocess.CompletedProcess[str]:
    return _without("torch", *words)


def _without(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    code = (
        f"import sys; sys.modules[{module!r}] = None\nfrom ditron_train.cli import main\nsys.exit(main({list(words)}))"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_missing_torch_is_said() -> None:
    done = _without_torch("doctor")
    assert (
        done.returncode == 2 and done.stderr == "error: torch is not installed here; pip install 'torch>=2.11,<2.16'\n"
    )


@pytest.mark.parametrize("module", ["torch", "triton"])
def test_the_doctor_says_in_json_what_it_sees_without(module: str) -> None:
    done = _without(module, "doctor", "--json")
    assert done.returncode == 1 and not done.stderr
    report = json.loads(done.stdout)
    assert report["healthy"] is False and report["features"] == []
    errors = [finding["text"] for finding in report["findings"] if finding["level"] == "error"]
    assert f"{module} is not installed" in errors
    facts = report["facts"]
    assert facts["versions"][module] is None and facts["versions"]["python"] and facts["shared_memory"]
    assert facts["interfaces"] == [name for _, name in socket.if_nameindex() if name != "lo"]


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("module", ["rich", "matplotlib"])
def test_doctor_and_predict_run_without(module: str) -> None:
    pytest.importorskip("megatron.core")
    job = "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --bf16".split()
    for words in (["doctor"], ["doctor", "--", *job], ["predict", "--", *job]):
        done = _without(module, *words)
        assert done.returncode in (0, 1) and done.stdout and "Traceback" not in done.stderr


def test_what_is_missing_is_named() -> None:
    pytest.importorskip("megatron.core")
    done = _without("triton", "verify")
    assert done.returncode == 2 and "megatron-core" not in done.stderr
    assert "triton" in done.stderr and "pip install 'triton>=" in done.stderr and done.stderr.count("\n") == 1


def test_records_are_read_without_torch(tmp_path: Path) -> None:
    done = _without_torch("postmortem", str(tmp_path))
    assert done.returncode == 2 and "holds no records" in done.stderr


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_the_launcher_ends_without_a_traceback(tmp_path: Path, sent: signal.Signals) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_DFL); print('ready', flush=True); time.sleep(60)"
    )
    launched = subprocess.Popen(
        [sys.executable, "scripts/launch.py", "1", str(script)],
        cwd=Path(ditron_train.__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert launched.stdout.readline() == "ready\n"
    launched.send_signal(sent)
    _, logged = launched.communicate(timeout=HANG_S)
    assert launched.returncode == 128 + sent and logged == f"ended by {sent.name}\n"


@pytest.mark.parametrize("local_rank", ["0", "1"])
@pytest.mark.parametrize(
    "raised", ["SettingError('DITRON_TIMEOUT_S is bad')", "SystemExit('error: DITRON_TIMEOUT_S is bad')"]
)
def test_a_scripts_user_error_is_one_line_on_each_machine(local_rank: str, raised: str) -> None:
    code = f"from ditron_train.runtime.errors import *\nwith user_errors():\n    raise {raised}"
    environment = {**os.environ, "LOCAL_RANK": local_rank}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == ("error: DITRON_TIMEOUT_S is bad\n" if local_rank == "0" else "")
