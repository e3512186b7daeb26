"""Makes a virtual environment in which everything that a script needs can be imported.

    python scripts/environment.py .venv quickstart        (or: test, bench, ci, docs)

Only the standard library is needed. A torch or triton that the calling interpreter can import is used as it is and
never replaced: the new environment then sees the outer one behind its own packages. What is missing is installed with
the versions of ``constraints.txt``; what is there already and in the supported range stays. Of torch and triton, if
one is there the other is its partner (``PAIRS``). ``TORCH=2.15.0`` names another version of torch to install.

For ``ci`` and ``docs`` pip takes no file but those of ``hashes.txt``; ``docs``, which makes the site, has no torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts")]
import package_hashes  # noqa: E402

# torch and the triton that its CUDA build asks for; CPU builds ask for none, and constraints.txt has the pair tried.
PAIRS = (("2.11.0", "3.6.0"), ("2.12.1", "3.7.1"), ("2.13.0", "3.7.1"), ("2.14.1", "3.8.0"), ("2.15.0", "3.9.0"))
CUDA_TORCH = "2.11.0"  # the newest of them that ran on GPUs
CORE = ("torch", "triton", "numpy")  # installed first, so that nothing else can pull another build of them
_OLDEST = {"setuptools": 77}  # pyproject.toml asks for it; venv puts an older one beside pip on Python 3.11
BASE = (*CORE, "packaging", "rich", "megatron-core", "matplotlib", "setuptools")
TEST = (*BASE, "pytest", "pytest-timeout", "hypothesis", "psutil", "einops")  # Megatron asks for einops in a2a+p2p
LINT = ("ruff", "mypy")  # in no other version than the one pinned: what they say differs between versions
DOCS = ("mkdocs", "mkdocs-material", "mkdocstrings-python", "ruff")  # ruff formats signatures
PURPOSES = {"quickstart": BASE, "bench": BASE, "test": TEST, "ci": (*TEST, *LINT), "docs": DOCS}
MODULES = {name: name.replace("-", "_") for needs in PURPOSES.values() for name in needs}  # what each is imported as
MODULES.update({"mkdocs-material": "material", "mkdocstrings-python": "mkdocstrings_handlers"})
MODULES.update({"megatron-core": "megatron.core", "cuda-bindings": "cuda.bindings"})
HASHED = ("ci", "docs")
known_hashes: dict[tuple[str, str], list[str]] = {}  # by name and version; empty if pip may take any file
# Run inside the environment: which of the modules named on the command line are there, and which version.
_LOOK = """
import importlib.util, json, sys
from importlib import metadata
found = {}
for name, module in json.loads(sys.argv[1]).items():
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        spec = None
    if spec is not None:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
print(json.dumps(found))
"""
_UNSUPPORTED = """
import json
from ditron_train.runtime.versions import SUPPORTED, find_version, is_supported
print(json.dumps([e.name for e in SUPPORTED if find_version(e) and not is_supported(e, find_version(e))]))
"""


class SetupError(Exception):
    """What stands in the way, in words for the person at the keyboard."""


class NoNetwork(SetupError):
    """No package index answers: another version would not be found either."""


class WrongHash(SetupError):
    """An index gives another file than the one that is known: no other version is tried either."""


def has_gpu() -> bool:
    """Whether an NVIDIA driver with at least one GPU answers here."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and "GPU 0" in subprocess.run([tool, "-L"], capture_output=True, text=True).stdout


def read_pins(python: tuple[int, ...] | None = None) -> dict[str, str]:
    """Returns the versions of ``constraints.txt`` by name, for this Python or another: a later line overrules an
    earlier one."""
    python, pins = python or sys.version_info[:2], {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        pin, _, marker = line.partition("; python_version < ")
        if not line or line.startswith("#"):
            continue
        if not marker or python < tuple(int(part) for part in marker.strip("\"'").split(".")):
            name, version = pin.split("==")
            pins[name] = version
    return pins


def check_interpreter() -> None:
    """Raises SetupError unless this interpreter is one that the project supports."""
    supported = runpy.run_path(str(ROOT / "ditron_train" / "runtime" / "versions.py"))["SUPPORTED"]
    wanted = next(entry for entry in supported if entry.name == "python").specifier
    low, high = (tuple(int(part) for part in bound.lstrip("<>=").split(".")) for bound in wanted.split(","))
    if not low <= sys.version_info[:2] < high:
        raise SetupError(f"Python {sys.version.split()[0]} is outside {wanted}; name another one: PYTHON=python3.12")


def make_venv(folder: Path) -> Path:
    """Creates the environment if it is not there yet and returns its interpreter."""
    python = folder / "bin" / "python"
    if python.exists():
        version = _output([python, "-c", "import sys; print(*sys.version_info[:2], sep='.')"]).strip()
        if version == ".".join(map(str, sys.version_info[:2])):
            return python
        raise SetupError(
            f"{folder} was made by Python {version}, this is {sys.version.split()[0]}: remove {folder} first"
        )
    _say(f"creating {folder} with Python {sys.version.split()[0]}")
    own_pip = importlib.util.find_spec("ensurepip") is not None
    if not own_pip and importlib.util.find_spec("pip") is None:
        raise SetupError(
            "this Python has neither ensurepip nor pip (Debian, Ubuntu: apt install python3-venv python3-pip)"
        )
    try:
        venv.EnvBuilder(with_pip=own_pip, symlinks=True).create(folder)
    except subprocess.CalledProcessError as error:
        raise SetupError(f"{folder} cannot be made: {' '.join(map(str, error.cmd[:4]))} failed") from None
    return python


def link_outside(python: Path) -> None:
    """Puts the checkout, and the outer environment if it has torch or triton, on the environment's path."""
    lines, own = [str(ROOT)], python.parent.parent.resolve()
    if any(importlib.util.find_spec(name) for name in ("torch", "triton")):
        outer = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        outer = [path for path in outer if not Path(path).resolve().is_relative_to(own)]  # this Python may be its own
        lines += [f"import site; site.addsitedir({path!r})" for path in outer]
    site = _output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    link, text = Path(site, "ditron_train_checkout.pth"), "\n".join(lines) + "\n"
    if not link.exists() or link.read_text() != text:  # an environment that is complete may be read-only
        link.write_text(text)


def installed(python: Path) -> dict[str, str]:
    """Returns what of ``MODULES`` the environment can import, with versions ("" if unknown)."""
    return json.loads(_output([python, "-c", _LOOK, json.dumps(MODULES)]))


def missing(wanted: Iterable[str], found: Mapping[str, str], pins: Mapping[str, str]) -> list[str]:
    """Which of ``wanted`` are not there, or in a version that does not do."""
    return [name for name in wanted if name not in found or not _will_do(name, found[name], pins)]


def _will_do(name: str, version: str, pins: Mapping[str, str]) -> bool:
    if name in LINT:
        return version == pins[name]
    return name not in _OLDEST or int((version or "0").split(".")[0]) >= _OLDEST[name]


def install(python: Path, names: list[str], pins: dict[str, str], gpu: bool) -> None:
    """Installs ``names``; what else is there stays. Of megatron-core none of its dependencies (this package installs
    them)."""
    kept = {name: version for name, version in installed(python).items() if name not in names}
    pins = {**pins, **{name: kept[name] for name in CORE if kept.get(name)}}
    core = [name for name in names if name in CORE]
    if core:
        pins["torch"] = _install_core(python, core, {name: pins[name] for name in CORE}, gpu)
    found = installed(python)  # torch brings its own
    others = [name for name in names if name not in (*CORE, "megatron-core")]
    _install_group(python, missing(others, found, pins), pins)
    if "megatron-core" in names:
        _pip(python, ["--no-deps", f"megatron-core=={pins['megatron-core']}"])


def _install_core(python: Path, names: list[str], pins: dict[str, str], gpu: bool) -> str:
    """Installs what is missing of ``CORE``, and what torch asks for; returns torch's version."""
    wanted = os.environ.get("TORCH")
    if "torch" in names and not gpu and wanted is None:
        version = f"{pins['torch']}+cpu"
        try:
            _install_group(python, names, {**pins, "torch": version})
            return version
        except (NoNetwork, WrongHash):
            raise
        except SetupError as error:
            print(error, file=sys.stderr)
            _say(
                f"trying torch {CUDA_TORCH} with its CUDA libraries instead (some 3 GB; it runs on the CPU, too). To "
                "avoid that,"
            )
            _say("install a CPU build as pytorch.org shows, and name the Python that can import it: PYTHON=...")
    if "torch" in names:
        pins = {**pins, "torch": wanted or (CUDA_TORCH if "triton" in names else torch_for(pins["triton"]))}
    if "triton" in names and "+cpu" not in pins["torch"]:
        pins = {**pins, "triton": triton_for(pins["torch"])}
    _install_group(python, names, pins)
    return pins["torch"]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def torch_for(triton: str) -> str:
    """The newest torch whose CUDA build goes with this ``triton``; the newest of all if none is known."""
    return next((torch for torch, its in reversed(PAIRS) if _minor(its) == _minor(triton)), PAIRS[-1][0])


def triton_for(torch: str) -> str:
    """The triton that the CUDA build of this ``torch`` asks for; the newest of all if none is known."""
    return next((triton for known, triton in PAIRS if _minor(known) == _minor(torch)), PAIRS[-1][1])


def _install_group(python: Path, names: list[str], pins: dict[str, str]) -> None:
    """Installs ``names``, and what they ask for, in the versions of ``pins``."""
    if names:
        constraints = python.parent.parent / "constraints.txt"
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        _pip(python, ["-c", str(constraints), *(f"{name}=={pins[name]}" if name in pins else name for name in names)])


def _pip(python: Path, arguments: list[str]) -> None:
    _say("installing " + " ".join(word for word in arguments if "==" in word or word in MODULES))
    if not known_hashes:
        _run_pip(python, arguments)
        return
    with tempfile.TemporaryDirectory() as folder:  # pip takes hashes of files alone that name all that is installed
        report, files, pins = (Path(folder, name) for name in ("report.json", "files.txt", "pins.txt"))
        named = {word.split("==")[0] for word in (*arguments, *read_pins())}
        others = (one for one in package_hashes.versions(known_hashes).items() if one[0] not in named)
        pins.write_text("".join(f"{name}=={version}\n" for name, version in others))
        _run_pip(python, ["--dry-run", "--report", str(report), "-c", str(pins), *arguments])
        try:
            files.write_text(package_hashes.requirements(json.loads(report.read_text()), known_hashes))
        except LookupError as error:
            raise WrongHash(str(error.args[0])) from None
        _run_pip(python, ["--no-deps", "--require-hashes", "-r", str(files)])


def _run_pip(python: Path, arguments: list[str]) -> None:
    command = [str(python), "-m", "pip"]
    if subprocess.run([*command, "--version"], capture_output=True).returncode != 0:
        command = [sys.executable, "-m", "pip", "--python", str(python)]
    command += ["install", "--quiet", "--disable-pip-version-check", "--progress-bar", "off", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return
    index_answers = re.search(r"from versions: (?!none)", done.stderr)
    if "Retry(total=0" in done.stderr and not index_answers:  # pip goes on, and blames versions that it has not seen
        reasons = re.findall(r"(?:\[Errno -?\d+\] |')([A-Z][^'\[\]]+)'\)", done.stderr)
        why = f" ({reasons[-1]})" if reasons else ""
        raise NoNetwork(
            f"pip reaches no package index{why}, and {' '.join(word for word in arguments if '==' in word)} is "
            "missing here. PIP_FIND_LINKS=/folder/of/wheels names wheels, PYTHON=... a Python that can import "
            "torch and triton"
        )
    tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
    kind = WrongHash if "DO NOT MATCH THE HASHES" in done.stderr else SetupError
    raise kind(f"pip could not install {' '.join(arguments)}:\n{tail}")


def check(python: Path, pins: dict[str, str], gpu: bool) -> None:
    """Replaces what is outside its supported range, torch and triton excepted: those are only reported."""
    wrong = json.loads(_output([python, "-c", _UNSUPPORTED]))
    fixable = [name for name in wrong if name in pins and name not in ("torch", "triton")]
    if fixable:
        install(python, fixable, pins, gpu)
    _output(
        [python, "-c", "import torch, triton; from ditron_train.runtime import versions; versions.check_versions()"]
    )


def _output(command: list[str | Path]) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        raise SetupError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"{command[0]} failed")
    return done.stdout


def _say(text: str) -> None:
    print(f"[environment] {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Sets the environment up; prints nothing if nothing is missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("purpose", choices=PURPOSES)
    arguments = parser.parse_args()
    os.environ.pop("PIP_USER", None)  # pip refuses --user inside an environment
    try:
        check_interpreter()
        if arguments.purpose in HASHED:
            known_hashes.update(package_hashes.read())
        python, pins, gpu = make_venv(arguments.folder.absolute()), read_pins(), has_gpu()
        link_outside(python)
        wanted, has_torch = [*PURPOSES[arguments.purpose]], "torch" in PURPOSES[arguments.purpose]
        wanted += ["cuda-bindings"] if gpu and has_torch else []
        lacking = missing(wanted, installed(python), pins)
        if lacking:
            install(python, lacking, pins, gpu)
        if has_torch:
            check(python, pins, gpu)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where = error.filename or arguments.folder
        print(
            f"error: {where}: {error.strerror}; VENV=/another/folder puts the environment elsewhere", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
