"""Commands in forks of a process that has imported their libraries: they see and end as by an interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import warm_python
from tests.support.patience import HANG_S

_SEES = """
import os, resource, signal, sys
print(sys.argv, sys.path[:2], sys.warnoptions, os.getcwd(), os.environ.get("SEEN"), os.umask(0), __name__, __file__)
print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), resource.getrlimit(resource.RLIMIT_NOFILE))
print(os.getpid() != os.getppid(), sys.stdin.read(), sys.modules["__main__"].__dict__ is globals())
sys.stderr.write("said")
"""


def _run(program: str, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *words], capture_output=True, text=True, timeout=HANG_S, **options)


def _is_warm(*words: str, **options: object) -> bool:
    done = _run(warm_python.executable(), *words, "-c", "import sys; print('torch' in sys.modules)", **options)
    assert done.returncode == 0, done.stderr
    return done.stdout == "True\n"


@pytest.mark.parametrize("options", [[], ["-u", "-W", "ignore"]])
@pytest.mark.parametrize("kind", ["script", "module"])
def test_a_command_sees_what_it_would_see_by_itself(tmp_path: Path, kind: str, options: list[str]) -> None:
    (tmp_path / "sees.py").write_text(_SEES)
    words = [*options, *(["-m", "sees"] if kind == "module" else [str(tmp_path / "sees.py")]), "--one", "two"]
    given = dict(cwd=tmp_path, env={**os.environ, "SEEN": "this"}, input="typed", umask=0o27)
    warm, cold = (_run(program, *words, **given) for program in (warm_python.executable(), sys.executable))
    assert (warm.returncode, warm.stdout, warm.stderr) == (0, cold.stdout, "said")
    assert str(tmp_path) in cold.stdout and "typed" in cold.stdout


@pytest.mark.parametrize(
    "code, status, stderr",
    [
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('a word')", 1, "a word\n"),
        ("import atexit, sys; atexit.register(print, 'at the end', file=sys.stderr)", 0, "at the end\n"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
    ],
)
def test_a_command_ends_as_by_itself(code: str, status: int, stderr: str) -> None:
    done = _run(warm_python.executable(), "-c", code)
    assert done.returncode == status and done.stderr.endswith(stderr) and bool(done.stderr) == bool(stderr)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_the_command(tmp_path: Path, sent: signal.Signals) -> None:
    code = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(1000)"
    started = subprocess.Popen(
        [warm_python.executable(), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    number = int(started.stdout.readline())
    assert number != started.pid
    started.send_signal(sent)
    _, logged = started.communicate(timeout=HANG_S)
    assert started.returncode == -sent and ("KeyboardInterrupt" in logged) == (sent == signal.SIGINT)
    deadline = time.monotonic() + HANG_S
    while Path(f"/proc/{number}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_forks_share_no_random_numbers() -> None:
    code = "import numpy, os, random; print(numpy.random.rand(), random.random(), os.urandom(8).hex())"
    assert len({number for _ in range(2) for number in _run(warm_python.executable(), "-c", code).stdout.split()}) == 6


def test_what_needs_an_interpreter_of_its_own_gets_one(tmp_path: Path) -> None:
    assert _is_warm() and _is_warm("-u")
    assert not _is_warm("-O")
    assert not _is_warm(env={**os.environ, "TRITON_INTERPRET": "0"})
    assert not _is_warm(env={**os.environ, "PYTHONHASHSEED": "1"})
    reading, writing = os.pipe()
    assert not _is_warm(pass_fds=(writing,))
    os.close(reading)
    os.close(writing)
    (tmp_path / "sitecustomize.py").write_text("")
    assert not _is_warm(env={**os.environ, "PYTHONPATH": str(tmp_path)})
