"""The hook in Python processes: armed by a folder or a line, once, and without effect where nothing asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ditron_train.cli import main
from ditron_train.hook import STARTUP, install
from tests.support.patience import HANG_S

ROOT = Path(__file__).parent.parent.parent
_SHOW = "import sys; print('torch' in sys.modules, [type(one).__name__ for one in sys.meta_path].count('_Finder'))"


def _python(source: str, path: list[object], ditron: str | None = "tp", *flags: str) -> tuple[str, str]:
    """What a Python of its own says, on both streams; in a folder where no package is found by chance."""
    env = {name: value for name, value in os.environ.items() if name not in ("DITRON", "PYTHONPATH")}
    env |= {"PYTHONPATH": os.pathsep.join(map(str, path))} | ({} if ditron is None else {"DITRON": ditron})
    done = subprocess.run(
        [sys.executable, *flags, "-c", source], env=env, capture_output=True, text=True, timeout=HANG_S, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


@pytest.fixture
def site_packages(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(install, "_folders", lambda: [tmp_path])
    return tmp_path


def _with_line(folder: Path, source: str = _SHOW) -> str:
    """A program in an environment whose site-packages is ``folder``."""
    return f"import site; site.addsitedir({str(folder)!r})\n{source}"


def test_a_folder_for_one_job(capsys):
    assert main(["hook", "path"]) == 0
    (folder,) = capsys.readouterr().out.split()
    assert folder == STARTUP
    assert _python(_SHOW, [folder]) == ("False 1", "")  # the root of a checkout is found from the folder
    assert _python(_SHOW, [folder, ROOT]) == ("False 1", "")


def test_a_line_for_a_machine(site_packages, capsys):
    assert main(["hook", "status"]) == 0 and "not installed, and not on PYTHONPATH" in capsys.readouterr().out
    for logged in ("installed: ", "is installed already: "):
        assert main(["hook", "install"]) == 0
        assert capsys.readouterr().out.startswith(logged + str(site_packages))
    assert main(["hook", "status"]) == 0
    assert f"installed in this environment: {site_packages}" in capsys.readouterr().out
    assert _python(_with_line(site_packages), [ROOT]) == ("False 1", "")
    show = "import sys; print(*(name for name in sys.modules if 'ditron' in name))"
    assert _python(_with_line(site_packages, show), [ROOT], None) == ("", "")
    for logged in ("removed: ", "is not installed"):
        assert main(["hook", "remove"]) == 0 and capsys.readouterr().out.startswith(logged)
    assert list(site_packages.iterdir()) == []


def test_both_at_once(site_packages):
    install.install()
    assert _python(_with_line(site_packages), [STARTUP, STARTUP, ROOT]) == ("False 1", "")


def test_a_line_that_was_left_behind(site_packages):
    install.install()
    logged, warned = _python(_with_line(site_packages, "print(1)"), [], "tp", "-S")  # without the checkout's own line
    assert logged == "1" and warned.count("\n") == 1
    assert f"DITRON has no effect: ditron_train is not installed any more; delete {site_packages}" in warned
    assert _python(_with_line(site_packages, "print(1)"), [], None, "-S") == ("1", "")


def test_another_sitecustomize_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('theirs')")
    assert _python("print('mine')", [STARTUP, tmp_path, ROOT]) == ("theirs\nmine", "")
    assert _python("print('mine')", [tmp_path, STARTUP, ROOT]) == ("theirs\nmine", "")


def test_a_program_without_megatron():
    """An unknown feature, too: nobody asks."""
    assert _python("import json; print(json.dumps(1))", [STARTUP, ROOT], "warp") == ("1", "")


@pytest.mark.parametrize("action", ["path", "status"])
def test_it_needs_no_library(action):
    code = f"import sys; from ditron_train.cli import main; main(['hook', {action!r}]); print('torch' in sys.modules)"
    assert _python(code, [ROOT])[0].endswith("False")


def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(install, "_folders", lambda: [tmp_path / "missing"])
    assert main(["hook", "install"]) == 2 and "error: " in capsys.readouterr().err
