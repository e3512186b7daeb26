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
from ditron_train.cli import main
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
    with pytest.raises(SystemExit) as stopped:
        main(["cure"])
    assert stopped.value.code == 2
    assert main(["doctor", "--loud"]) == 2
    assert "unknown arguments: --loud" in capsys.readouterr().err


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
    from ditron_train.tools import doctor

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
    with pytest.raises(SystemExit) as stopped:
        main(["trace", "--o", "ag_gemm"])
    assert stopped.value.code == 2


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
    _, said = launched.communicate(timeout=HANG_S)
    assert launched.returncode == 128 + sent and said == f"ended by {sent.name}\n"
