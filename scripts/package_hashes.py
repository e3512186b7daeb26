"""The files that CI may install, by their hashes: ``hashes.txt``. To read it needs nothing but the standard library.

    python scripts/package_hashes.py NAME==VERSION ...      prints requirements with hashes
    python scripts/package_hashes.py                        writes it anew: by uv, with Python 3.11 or newer

It holds what the versions of ``constraints.txt`` ask for on Linux on x86-64, for every Python that is supported: with
torch's CPU build if an index here has one, with its CUDA build, and beside it the tritons of
``test_other_triton.sh``. A version has as many hashes as there are files of it for these Pythons.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent.parent / "hashes.txt"
PYTHONS = ("3.11", "3.12", "3.13", "3.10")  # the first decides what the others take, too, if they can
_OLD = "3.10"
_PLATFORM = "x86_64-manylinux_2_39"  # pip takes other files of a version if the C library is older: all are listed
_HEAD = """\
# Files that CI may install (scripts/package_hashes.py writes this; scripts/environment.py has pip compare). Linux on
# x86-64, Python 3.10 to 3.13. Versions that this package does not constrain are what these ask for. Of torch there are
# two builds: a version with +cpu, and the CUDA build for machines whose index has no other.
"""


def read(text: str | None = None) -> dict[tuple[str, str], list[str]]:
    """Hashes by name and version, those of other Pythons left out if a line says so."""
    found: dict[tuple[str, str], list[str]] = {}
    text = FILE.read_text(encoding="utf-8") if text is None else text
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if not line or line.startswith("#"):
            continue
        pin, *hashes = line.split(" --hash=")
        pin, _, marker = pin.partition(";")
        if marker and (sys.version_info[:2] < (3, 11)) != ("<" in marker):
            continue
        name, version = pin.strip().split("==")
        found[name, version] = [one.strip() for one in hashes]
    return found


def versions(known: Mapping[tuple[str, str], object]) -> dict[str, str]:
    """The version of each package that has but one."""
    names = [name for name, _ in known]
    return {name: version for name, version in known if names.count(name) == 1}


def requirements(report: Mapping[str, Any], known: Mapping[tuple[str, str], list[str]]) -> str:
    """What pip's report would install, as requirements with hashes.

    Raises:
        LookupError: Something has no hash here.
    """
    lines = []
    for item in report["install"]:
        name, version = _key(item)
        if (name, version) not in known:
            raise LookupError(
                f"{name}=={version} has no hash in {FILE.name}: python scripts/package_hashes.py adds it"
            )
        lines.append(f"{name}=={version}{''.join(f' --hash={one}' for one in known[name, version])}\n")
    return "".join(lines)


def _key(item: Mapping[str, Any]) -> tuple[str, str]:
    metadata = item["metadata"]
    return re.sub(r"[-_.]+", "-", metadata["name"]).lower(), metadata["version"]


def _resolve(wanted: list[str], python: str, *options: str) -> list[Any]:
    """What a machine with this Python would install; nothing if an index here lacks some of it."""
    import tomllib

    done = subprocess.run(
        ["uv", "pip", "compile", "-", "--quiet", "--format", "pylock.toml", "--no-build",
         "--python-version", python, "--python-platform", _PLATFORM, *options],
        input="\n".join(wanted), capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        print(f"python {python}, {wanted[0]}: {done.stderr}", file=sys.stderr)
        return []
    return list(tomllib.loads(done.stdout)["packages"])


def _groups(python: str) -> Iterable[list[str]]:
    """What is installed together, one group after the other."""
    import environment

    pins = environment.read_pins((int(python[0]), int(python[2:])))
    pinned = {name: f"{name}=={pins[name]}" for name in (*environment.PURPOSES["ci"], *environment.DOCS)}
    docs = [pinned.pop(name) for name in environment.DOCS if name not in environment.LINT]
    others = [word for name, word in pinned.items() if name not in ("torch", "triton", "megatron-core", "setuptools")]
    yield [f"{pinned['torch']}+cpu", pinned["triton"], pinned["setuptools"], *others]
    yield [f"torch=={environment.CUDA_TORCH}", f"triton=={environment.triton_for(environment.CUDA_TORCH)}",
           "cuda-bindings", *others]  # fmt: skip
    yield docs  # mkdocs-material needs a Python newer than _OLD


def _alone() -> Iterable[str]:
    """What is installed without its dependencies."""
    import environment

    yield f"megatron-core=={environment.read_pins()['megatron-core']}"
    yield f"setuptools=={environment.read_pins()['setuptools']}"
    text = (FILE.parent / "scripts" / "test_other_triton.sh").read_text(encoding="utf-8")
    tritons = re.search(r"^versions=\((.*?)\)", text, re.MULTILINE)
    assert tritons is not None, "test_other_triton.sh names no versions"
    yield from (f"triton=={version}" for version in tritons[1].split())


def main() -> int:
    """Prints the hashes of what is named; without a name asks uv for every Python, and writes the file."""
    if sys.argv[1:]:
        named = [dict(zip(("name", "version"), word.split("=="), strict=True)) for word in sys.argv[1:]]
        try:
            print(requirements({"install": [{"metadata": one} for one in named]}, read()), end="")
        except LookupError as error:
            print(f"error: {error.args[0]}", file=sys.stderr)
            return 1
        return 0
    _write(*_files())
    return 0


def _files() -> tuple[dict[tuple[str, str], set[str]], dict[tuple[str, str], set[str]]]:
    """Hashes, and Pythons, by name and version."""
    files: dict[tuple[str, str], set[str]] = {}
    pythons: dict[tuple[str, str], set[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for python in PYTHONS:
            answers = [_resolve([word], python, "--no-deps") for word in _alone()]
            for index, group in enumerate(_groups(python)):
                kept = Path(folder, f"{index}.txt")
                found = _resolve(group, python, *["-c", str(kept)] * (python not in (PYTHONS[0], _OLD)))
                if python == PYTHONS[0]:
                    kept.write_text("".join(f"{item['name']}=={item['version']}\n" for item in found))
                answers.append(found)
            for item in (item for found in answers for item in found):
                key = item["name"], item["version"]
                files.setdefault(key, set()).update(f"sha256:{file['hashes']['sha256']}" for file in item["wheels"])
                pythons.setdefault(key, set()).add(python)
    return files, pythons


def _write(files: Mapping[tuple[str, str], set[str]], pythons: Mapping[tuple[str, str], set[str]]) -> None:
    lines = []
    for name, version in sorted(files):
        siblings = [pythons[key] for key in files if key[0] == name]
        is_old, is_split = pythons[name, version] == {_OLD}, len(siblings) > 1 and {_OLD} in siblings
        marker = f" ; python_version {'<' if is_old else '>='} '3.11'" if is_split else ""
        hashes = sorted(files[name, version])
        lines.append(f"{name}=={version}{marker}" + "".join(f" \\\n    --hash={one}" for one in hashes) + "\n")
    FILE.write_text(_HEAD + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
