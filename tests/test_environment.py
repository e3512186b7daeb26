"""The environment of the scripts: what is installed where torch is missing, kept, or to be had in one build only."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.patience import HANG_S

ROOT = Path(__file__).parent.parent


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``scripts/environment.py`` as a module; nothing of what it wants is installed, and pip installs nothing."""
    spec = importlib.util.spec_from_file_location("environment_script", ROOT / "scripts" / "environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delenv("TORCH", raising=False)
    monkeypatch.setattr(module, "installed", lambda python: {})
    return module


def _installs(module: ModuleType, folder: Path, gpu: bool, refused: str = "none") -> list[list[str]]:
    """What pip is asked for, group by group, where it has no build of torch with ``refused`` in its version."""
    asked: list[list[str]] = []

    def pip(python: Path, arguments: list[str]) -> None:
        asked.append([word for word in arguments if "==" in word])
        if any(word.startswith("torch==") and refused in word for word in arguments):
            raise module.SetupError("no such build")

    module._pip = pip
    (folder / "bin").mkdir(exist_ok=True)
    module.install(
        folder / "bin" / "python", ["torch", "triton", "numpy", "rich", "setuptools"], module.read_pins(), gpu
    )
    return asked


def _torch(group: list[str]) -> str:
    return next(word for word in group if word.startswith("torch=="))


def test_a_cpu_build_where_there_is_one(environment: ModuleType, tmp_path: Path) -> None:
    core, others = _installs(environment, tmp_path, gpu=False)
    assert _torch(core) == f"torch=={environment.read_pins()['torch']}+cpu" and [
        word.split("==")[0] for word in others
    ] == ["rich", "setuptools"]


def test_else_the_cuda_build(environment: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    refused, core, _ = _installs(environment, tmp_path, gpu=False, refused="+cpu")
    assert "+cpu" in _torch(refused) and _torch(core) == f"torch=={environment.CUDA_TORCH}"
    assert "CUDA libraries instead" in capsys.readouterr().err


def test_gpus_and_torch_by_name(environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _torch(_installs(environment, tmp_path, gpu=True)[0]) == f"torch=={environment.CUDA_TORCH}"
    monkeypatch.setenv("TORCH", "2.12.0")
    assert _torch(_installs(environment, tmp_path, gpu=False)[0]) == "torch==2.12.0"
    with pytest.raises(environment.SetupError, match="no such build"):
        _installs(environment, tmp_path, gpu=False, refused="2.12.0")


def test_pairs_are_those_of_the_package_and_lie_in_its_ranges(environment: ModuleType) -> None:
    from ditron_train.runtime import versions

    entries = {entry.name: entry for entry in versions.SUPPORTED}
    for torch, triton in environment.PAIRS:
        assert triton.startswith(f"{versions.triton_of(torch)}.")
        assert versions.is_supported(entries["torch"], torch) and versions.is_supported(entries["triton"], triton)
    assert {triton for _, triton in versions.PAIRS} == {triton.rpartition(".")[0] for _, triton in environment.PAIRS}
    assert environment.CUDA_TORCH in dict(environment.PAIRS)


def test_shell_scripts_take_the_pythons_of_the_package() -> None:
    from ditron_train.runtime.versions import SUPPORTED

    low, high = re.findall(r"3\.(\d+)", next(entry.specifier for entry in SUPPORTED if entry.name == "python"))
    text = (ROOT / "scripts" / "common.sh").read_text()
    assert f"(3, {low}) <= sys.version_info[:2] < (3, {high})" in text
    assert f"no Python 3.{low} to 3.{int(high) - 1} found" in text
    assert all(f"python3.{minor}" in text for minor in range(int(low), int(high)))


@pytest.mark.parametrize(
    "there, gpu, named, expected",
    [
        ({"torch": "2.15.0+cu132"}, True, None, "triton==3.9.0"),
        ({"torch": "2.12.1"}, False, None, "triton==3.7.1"),
        ({"torch": "2.13.0+cpu"}, False, None, "triton==3.6.0"),  # it asks for none: the pair that was tried
        ({"triton": "3.8.0"}, True, None, "torch==2.14.1"),
        ({"triton": "3.7.1"}, True, None, "torch==2.13.0"),
        ({"triton": "3.8.0"}, False, None, "torch==2.13.0+cpu"),
        ({}, True, None, "torch==2.11.0 triton==3.6.0"),
        ({}, True, "2.15.0", "torch==2.15.0 triton==3.9.0"),
        ({}, False, "2.14.0", "torch==2.14.0 triton==3.8.0"),
    ],
)
def test_torch_and_triton_are_a_pair(
    environment: ModuleType, tmp_path: Path, monkeypatch, there: dict, gpu: bool, named: str | None, expected: str
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(environment, "installed", lambda python: there)
    monkeypatch.setattr(environment, "_pip", lambda python, words: asked.extend(w for w in words if "==" in w))
    if named:
        monkeypatch.setenv("TORCH", named)
    (tmp_path / "bin").mkdir()
    names = [name for name in ("torch", "triton") if name not in there]
    environment.install(tmp_path / "bin" / "python", names, environment.read_pins(), gpu)
    assert " ".join(asked) == expected
    constraints = (tmp_path / "constraints.txt").read_text()
    assert all(f"{name}=={version}\n" in constraints for name, version in there.items())  # what is there stays


def test_pins_of_an_older_python_overrule(environment: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = environment.read_pins()
    monkeypatch.setattr(environment.sys, "version_info", (3, 10, 13))
    assert (newest["numpy"], environment.read_pins()["numpy"]) == ("2.3.5", "2.2.6")
    assert environment.read_pins().keys() == newest.keys()


_NO_ANSWER = (
    "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by "
    "'NewConnectionError('<pip.HTTPSConnection at 0x7fba>: Failed to establish a new connection: [Errno -3] Temporary "
    "failure in name resolution')': /\nERROR: Cannot install torch==2.13.0+cpu because these package versions have "
    "conflicting dependencies.\n"
)
_OF_OTHERS = (
    "ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu "
    "(from versions: 2.11.0, 2.13.0)\n"
)


@pytest.mark.parametrize("logged, tries", [(_NO_ANSWER, 1), (_NO_ANSWER + _OF_OTHERS, 2), (_OF_OTHERS, 2)])
def test_without_a_network_there_is_no_second_try(
    environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: str, tries: int
) -> None:
    asked: list[str] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess:
        if "install" in command:
            asked.append(next(word for word in command if word.startswith("torch==")))
        return subprocess.CompletedProcess(command, int("install" in command), "", logged)

    monkeypatch.setattr(environment.subprocess, "run", run)
    (tmp_path / "bin").mkdir()
    with pytest.raises(environment.SetupError) as raised:
        environment.install(
            tmp_path / "bin" / "python", ["torch", "triton", "numpy"], environment.read_pins(), gpu=False
        )
    assert len(asked) == tries
    words = "pip reaches no package index (Temporary failure in name resolution), and torch=="
    assert str(raised.value).startswith(words) == (tries == 1)


def test_torch_chooses_its_own_setuptools(
    environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.11 asks for one below 82, which must not meet a pin of a newer one."""
    known: dict[str, str] = {}
    monkeypatch.setattr(environment, "installed", lambda python: known)

    def group(python: Path, names: list[str], pins: dict[str, str]) -> None:
        if "torch" in names:
            assert "setuptools" not in pins
            known.update(torch="2.11.0", setuptools="81.0.0")
        else:
            assert names == ["rich"] and pins["torch"] == environment.CUDA_TORCH

    monkeypatch.setattr(environment, "_install_group", group)
    environment.install(tmp_path, ["torch", "rich", "setuptools"], environment.read_pins(), True)
    assert known["torch"] == "2.11.0"


def test_an_environment_that_is_complete_is_not_written_to(
    environment: ModuleType, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(environment, "_output", lambda command: f"{tmp_path}\n")
    (link,) = (environment.link_outside(tmp_path), *tmp_path.glob("*.pth"))[1:]
    text = link.read_text()
    assert str(ROOT) in text.splitlines()
    os.utime(link, ns=(1, 1))
    environment.link_outside(tmp_path)
    assert link.stat().st_mtime_ns == 1
    link.write_text("of a checkout that was moved")
    environment.link_outside(tmp_path)
    assert link.read_text() == text


def test_a_second_run_by_the_environments_own_python(environment: ModuleType, tmp_path: Path) -> None:
    """As with the environment active: its own packages, which hold torch, stay out of its own path file, and what is
    outside stays in; else every start of Python would read that file again and again."""
    folder, outer = tmp_path / "env", tmp_path / "outer" / "site-packages"
    environment.venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    python = folder / "bin" / "python"
    own = Path(environment._output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    for module in (own / "torch.py", outer / "outside.py"):
        module.parent.mkdir(parents=True, exist_ok=True)
        module.touch()
    link = own / "ditron_train_checkout.pth"
    link.write_text(f"import site; site.addsitedir({str(outer)!r})\n")  # of the first run, by the outer Python
    link_again = "import sys; sys.path[:0] = sys.argv[2:]; import environment, pathlib; "
    link_again += "environment.link_outside(pathlib.Path(sys.argv[1]))"
    for _ in range(2):
        command = [python, "-c", link_again, python, ROOT / "scripts"]
        assert subprocess.run(command, capture_output=True, text=True, timeout=HANG_S).stderr == ""
        assert link.read_text() == f"{ROOT}\nimport site; site.addsitedir({str(outer)!r})\n"
    done = subprocess.run([python, "-c", "import outside, torch"], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0 and done.stderr == ""


def test_a_folder_that_cannot_be_written_is_named_with_the_way_out(
    environment: ModuleType, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(sys, "argv", ["environment.py", "/proc/none", "test"])
    assert environment.main() == 1
    assert "error: /proc/none: No such file or directory; VENV=/another/folder puts" in capsys.readouterr().err


def test_an_environment_whose_pip_cannot_be_made(environment: ModuleType, tmp_path: Path, monkeypatch, capsys) -> None:
    def create(self: object, folder: Path) -> None:
        raise subprocess.CalledProcessError(
            1, [folder / "bin" / "python", "-m", "ensurepip", "--upgrade", "--default-pip"]
        )

    monkeypatch.setattr(environment.venv.EnvBuilder, "create", create)
    monkeypatch.setattr(sys, "argv", ["environment.py", str(tmp_path / "env"), "test"])
    assert environment.main() == 1
    assert "-m ensurepip --upgrade failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "script, words", [("quickstart.sh", ["examples/megatron/quickstart.py"]), ("bench.sh", ["bench", "tp"])]
)
def test_scripts_run_where_they_are_called_and_stand_paths_with_spaces(
    tmp_path: Path, script: str, words: list[str]
) -> None:
    """The environment's interpreter is a stand-in that says where it is run and with what."""
    root, called_from, python, env = (tmp_path / name for name in ("check out", "else where", "my python", "v env"))
    for folder in (root / "scripts", called_from, env / "bin"):
        folder.mkdir(parents=True)
    for name in ("common.sh", script):
        shutil.copy(ROOT / "scripts" / name, root / "scripts")
    (root / "scripts" / "environment.py").write_text("import sys\nsys.exit(len(sys.argv) != 3)\n")
    stand_in = env / "bin" / "python"
    stand_in.write_text('#!/bin/sh\necho "in $PWD"\nfor word; do echo "$word"; done\n')
    stand_in.chmod(0o755)
    python.symlink_to(sys.executable)
    variables = {**os.environ, "PYTHON": str(python), "VENV": str(env), "NUM_GPUS": "0", "CDPATH": str(tmp_path)}
    command = ["bash", f"../check out/scripts/{script}", *words[1:], "--data", "my text.txt"]
    done = subprocess.run(command, cwd=called_from, env=variables, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[")]
    assert lines[:3] == [f"in {called_from}", str(root / "scripts" / "launch.py"), "2"]
    assert lines[-2:] == ["--data", "my text.txt"] and any(line.endswith(words[0]) for line in lines[3:])


def test_lint_tools_come_in_the_pinned_version_alone(environment: ModuleType) -> None:
    pins = environment.read_pins()
    wanted = environment.PURPOSES["ci"]
    there = {name: pins.get(name, "1") for name in wanted}
    assert environment.missing(wanted, there, pins) == []
    for name in ("ruff", "mypy"):
        assert environment.missing(wanted, {**there, name: f"{pins[name]}.1"}, pins) == [name]
    assert environment.missing(wanted, {**there, "rich": "1.0", "setuptools": "65.5"}, pins) == ["setuptools"]


def _wheel(folder: Path, name: str, needs: str = "") -> str:
    """A package without content, in version 1; its hash."""
    info = f"{name}-1.dist-info"
    files = {
        f"{name}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"
        + (f"Requires-Dist: {needs}\n" * bool(needs)),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = folder / f"{name}-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for member, content in files.items():
            wheel.writestr(member, content)
        wheel.writestr(f"{info}/RECORD", "".join(f"{member},,\n" for member in [*files, f"{info}/RECORD"]))
    return f"sha256:{sha256(path.read_bytes()).hexdigest()}"


@pytest.fixture
def two_packages(
    environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, dict[tuple[str, str], list[str]]]:
    """An empty environment, and the hashes of two packages, one of which asks for the other; pip has no others."""
    environment.venv.EnvBuilder(with_pip=False, symlinks=True).create(tmp_path / "env")
    (tmp_path / "wheels").mkdir()
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "wheels"),
        "PIP_CONFIG_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(name, value)
    hashes = {
        ("outer", "1"): [_wheel(tmp_path / "wheels", "outer", "inner")],
        ("inner", "1"): [_wheel(tmp_path / "wheels", "inner")],
    }
    return tmp_path / "env" / "bin" / "python", hashes


def test_known_files_are_installed_with_what_they_ask_for(environment: ModuleType, two_packages: tuple) -> None:
    python, hashes = two_packages
    environment.known_hashes.update(hashes)
    environment._pip(python, ["outer==1"])
    assert subprocess.run([python, "-c", "import outer, inner"]).returncode == 0


@pytest.mark.parametrize("changed", ["outer", "inner"])
def test_a_changed_file_is_refused(environment: ModuleType, two_packages: tuple, changed: str) -> None:
    """Of what is asked for by name, and of what that asks for; nothing is installed."""
    python, hashes = two_packages
    environment.known_hashes.update({**hashes, (changed, "1"): ["sha256:" + "0" * 64]})
    with pytest.raises(environment.WrongHash, match=r"(?s)DO NOT MATCH THE HASHES|Expected sha256 0000"):
        environment._pip(python, ["outer==1"])
    assert subprocess.run([python, "-c", "import outer"], capture_output=True).returncode != 0


def test_a_file_without_a_hash_is_refused(environment: ModuleType, two_packages: tuple) -> None:
    python, hashes = two_packages
    environment.known_hashes.update({("outer", "1"): hashes["outer", "1"]})
    with pytest.raises(environment.WrongHash, match=r"inner==1 has no hash in hashes.txt"):
        environment._pip(python, ["outer==1"])


def test_a_wrong_hash_of_torch_tries_no_other_build(environment: ModuleType, tmp_path: Path) -> None:
    def pip(python: Path, arguments: list[str]) -> None:
        raise environment.WrongHash("torch is another file")

    environment._pip = pip
    (tmp_path / "bin").mkdir()
    with pytest.raises(environment.WrongHash):
        environment.install(tmp_path / "bin" / "python", ["torch", "triton"], environment.read_pins(), gpu=False)


@pytest.mark.parametrize("python", [(3, 10), (3, 11), (3, 12), (3, 13)])
def test_every_constraint_has_hashes(environment: ModuleType, monkeypatch, python: tuple[int, int]) -> None:
    """Those of CI, and the tritons beside them; of torch the CPU build or the CUDA build."""
    monkeypatch.setattr(environment.package_hashes.sys, "version_info", (*python, 1))
    known = environment.package_hashes.read()
    pins = environment.read_pins()
    assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for hashes in known.values() for one in hashes)
    assert {(name, pins[name]) for name in environment.PURPOSES["ci"] if name != "torch"} <= known.keys()
    assert {(name, pins[name]) for name in environment.DOCS} <= known.keys()
    assert {("torch", f"{pins['torch']}+cpu"), ("torch", environment.CUDA_TORCH)} <= known.keys()
    assert set(environment.package_hashes._alone()) <= {f"{name}=={version}" for name, version in known}
    assert len(environment.package_hashes.versions(known)) > 30


def test_only_ci_asks_for_hashes(environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users may have indexes of their own, with builds of their own."""
    monkeypatch.setattr(
        environment, "make_venv", lambda folder: (_ for _ in ()).throw(environment.SetupError("later"))
    )
    for purpose in environment.PURPOSES:
        environment.known_hashes.clear()
        monkeypatch.setattr(sys, "argv", ["environment.py", str(tmp_path), purpose])
        assert environment.main() == 1 and bool(environment.known_hashes) == (purpose in ("ci", "docs"))
