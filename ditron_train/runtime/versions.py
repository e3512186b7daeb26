"""The versions that this package works with, stated once.

``SUPPORTED`` is read by the packaging (``setup.py`` makes the dependencies from it), by ``check_versions()`` at run
time and by ``python -m ditron_train doctor``. Nothing but the standard library is imported at module level, so that
``setup.py`` can run this file before anything is installed.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple


class Supported(NamedTuple):
    """One dependency and the range of it that is supported.

    Attributes:
        name: How it is called in messages; what pip calls it unless ``distributions`` says otherwise.
        specifier: Versions that are supported (PEP 440).
        why: What sets the limits.
        module: Top module; an imported one is asked for its version first.
        distributions: Names under which pip may know it, the first one found counts.
        required: Whether the package cannot work without it.
        where_used: Whether it is checked where it is used, not at the start of every job.
        self_checked: Versions below the range that are tried, after a self-check, as newer ones are (PEP 440).
    """

    name: str
    specifier: str
    why: str
    module: str = ""
    distributions: tuple[str, ...] = ()
    required: bool = False
    where_used: bool = False
    self_checked: str = ""


_PYTHON = "3.11 and 3.12 run all tests; 3.10 and 3.13 ran small trainings and tests of the lower layers on CPUs"
_TORCH = "2.11 ran on GPUs; 2.13, 2.14 and 2.15 ran on CPUs alone"
_TRITON = (
    "3.6 and 3.9 ran on GPUs; the kernels of 3.7 and 3.8 order memory as those of 3.6, and run in the interpreter"
)
_NUMPY = "without a GPU below 2.4 beside Triton 3.6, in whose interpreter later ones break range()"
_MEGATRON = "0.16.1 is the reference; 0.17.1, 0.18.2, 0.19.0 and 0.20.0 of 2026-08-22 trained small models on CPUs"
_SLIME_MEGATRON = ">=0.16.0rc0.dev0,<=0.16.0rc0"
_NVSHMEM = "3.4.5 was tried, with torch 2.11 and Triton 3.6; checked when NVSHMEM starts"
_TE = "2.10 ran on GPUs; of those to 2.20 names and signatures were read, and linear layers in FP8 ran on CPUs"
_NVSHMEM4PY = ("nvshmem4py-cu13", "nvshmem4py-cu12")
_NVIDIA_NVSHMEM = ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")
_TE_NAMES = ("transformer-engine", "transformer_engine")

SUPPORTED: tuple[Supported, ...] = (
    Supported("python", ">=3.10,<3.14", _PYTHON, required=True),
    Supported("torch", ">=2.11,<2.16", _TORCH, "torch", ("torch",), required=True),
    Supported("triton", ">=3.6,<3.10", _TRITON, "triton", ("triton",), required=True),
    Supported("numpy", ">=1.26,<3", _NUMPY, "numpy", ("numpy",), required=True),
    Supported(
        "megatron-core", ">=0.16.1,<0.21", _MEGATRON, "megatron.core", ("megatron-core",), self_checked=_SLIME_MEGATRON
    ),
    Supported("nvshmem4py", ">=0.4,<0.5", "0.4.1 was tried", "nvshmem", _NVSHMEM4PY, where_used=True),
    Supported("nvidia-nvshmem", ">=3.4.5,<3.5", _NVSHMEM, "", _NVIDIA_NVSHMEM, where_used=True),
    Supported("transformer-engine", ">=2.10,<2.21", _TE, "transformer_engine", _TE_NAMES),
)

# The Triton that PyPI's CUDA build of each torch asks for, exactly: from this minor version of torch on.
PAIRS: tuple[tuple[str, str], ...] = (("2.11", "3.6"), ("2.12", "3.7"), ("2.14", "3.8"), ("2.15", "3.9"))


def find_version(entry: Supported) -> str | None:
    """Returns the version of ``entry`` that is (or would be) imported here, None if it is not installed."""
    if entry.name == "python":
        return platform.python_version()
    loaded = getattr(sys.modules.get(entry.module), "__version__", None) if entry.module else None
    if isinstance(loaded, str):
        return loaded
    if entry.name == "megatron-core" and (checkout := _megatron_version()) is not None:
        return checkout
    for distribution in entry.distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _megatron_version() -> str | None:
    """Of the ``megatron.core`` that would be imported: one in a checkout on the path is in no list of packages."""
    try:
        found = importlib.util.find_spec("megatron.core")
    except ImportError:
        return None
    if found is None or found.origin is None:
        return None
    with suppress(OSError):
        text = Path(found.origin).with_name("package_info.py").read_text(encoding="utf-8")
        numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE))
        if len(numbers) == 3:
            candidate = re.search(r"^PRE_RELEASE = ['\"]([\w.]*)['\"]", text, re.MULTILINE)
            return f"{numbers['MAJOR']}.{numbers['MINOR']}.{numbers['PATCH']}{candidate[1] if candidate else ''}"
    return None


@cache
def driver_version() -> str | None:
    """The NVIDIA driver's version, None without one."""
    if not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True).stdout.split()
    return lines[0] if lines else None


def find_versions() -> dict[str, str | None]:
    """Returns the version of everything in ``SUPPORTED`` by name, None if it is not installed."""
    return {entry.name: find_version(entry) for entry in SUPPORTED}


def is_supported(entry: Supported, version: str, specifier: str | None = None) -> bool:
    """Whether ``version`` is in the range of ``entry`` that holds here, or in ``specifier``; a local part such as
    ``+cu130`` does not matter."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(specifier or specifier_here(entry)).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def is_newer(entry: Supported, version: str) -> bool:
    """Whether ``version`` is above the range of ``entry``, or one that is self-checked: it may well work."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    lower = ",".join(part for part in entry.specifier.split(",") if not part.startswith("<"))
    if entry.self_checked and is_supported(entry, version, entry.self_checked):
        return True
    try:
        return not is_supported(entry, version, entry.specifier) and SpecifierSet(lower).contains(
            Version(version), prereleases=True
        )
    except InvalidVersion:
        return False


def specifier_here(entry: Supported, versions: dict[str, str | None] | None = None) -> str:
    """The range of ``entry`` that holds in this process, beside ``versions`` (default: what is installed)."""
    interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
    return interpreted_specifier(entry, versions) if interpreted else entry.specifier


def interpreted_specifier(entry: Supported, versions: dict[str, str | None] | None = None) -> str:
    """The range of ``entry`` when kernels are interpreted: Triton 3.6 does it with numpy below 2.4 alone."""
    if entry.name != "numpy":
        return entry.specifier
    triton = find_version(_entry("triton")) if versions is None else versions.get("triton")
    return ">=1.26,<2.4" if triton is not None and triton.startswith("3.6") else entry.specifier


def _entry(name: str) -> Supported:
    return next(entry for entry in SUPPORTED if entry.name == name)


def pip_command(name: str, specifier: str | None = None) -> str:
    """How ``name`` is installed: one of ``SUPPORTED``, in the range that holds here (or ``specifier``), or what pip
    calls it."""
    entry = next((entry for entry in SUPPORTED if entry.name == name), None)
    if entry is None:
        return f"pip install {name}"
    distribution = entry.distributions[0] if entry.distributions else name
    extra = "[pytorch]" if name == "transformer-engine" else ""
    return f"pip install '{distribution}{extra}{specifier or specifier_here(entry)}'"


def version_problems(versions: dict[str, str | None] | None = None, *, strict: bool = False) -> list[str]:
    """Returns one sentence for each dependency that is missing or that cannot be used here, with the fix.

    Args:
        versions: What is installed, as ``find_versions()`` gives it (the default).
        strict: Refuse what is newer than everything that was tried, too.
    """
    versions = find_versions() if versions is None else versions
    problems = []
    for entry in SUPPORTED:
        version = versions.get(entry.name)
        if version is None and entry.required:
            problems.append(f"{entry.name} is not installed; {entry.specifier} is needed")
        if version is not None and not entry.where_used:
            problems += _problems_of(entry, version, versions, strict)
    return problems or _foreign_pair(versions)


def _problems_of(entry: Supported, version: str, versions: dict[str, str | None], strict: bool) -> list[str]:
    specifier = specifier_here(entry, versions)
    if is_supported(entry, version, specifier) or (is_newer(entry, version) and not strict):
        return []
    fix = f"; {pip_command(entry.name, specifier)}" if entry.distributions else ""
    return [f"{entry.name} {version} is outside the supported range {specifier} ({entry.why}){fix}"]


def is_at_least(name: str, lowest: str) -> bool:
    """Whether a library of ``SUPPORTED`` is here in the version ``lowest`` or a newer one."""
    from packaging.version import Version

    found = find_version(_entry(name))
    return found is not None and Version(found) >= Version(lowest)


def _foreign_pair(versions: dict[str, str | None]) -> list[str]:
    """A CUDA build of torch with an older Triton than the one that it was built for; a newer one has been tried."""
    from packaging.version import Version

    torch, triton = versions.get("torch"), versions.get("triton")
    wanted = triton_of(torch) if torch is not None else None
    if torch is None or triton is None or wanted is None or "+cpu" in torch:
        return []
    if Version(triton) >= Version(wanted):
        return []
    return [f"torch {torch} with triton {triton} is a mix that no index gives; pip install 'triton=={wanted}.*'"]


def triton_of(torch: str) -> str | None:
    """The minor version of Triton that PyPI's CUDA build of this ``torch`` asks for; None for one beyond ``PAIRS``."""
    from packaging.version import Version

    if is_newer(_entry("torch"), torch):
        return None
    known = [triton for lowest, triton in PAIRS if Version(torch) >= Version(lowest)]
    return known[-1] if known else None


def newer_libraries(versions: dict[str, str | None] | None = None) -> list[str]:
    """Returns name and version of each library that is newer than everything that was tried, as ``triton 3.10.0``."""
    found = find_versions() if versions is None else versions
    return [
        f"{entry.name} {found[entry.name]}"
        for entry in SUPPORTED
        if found.get(entry.name) is not None and not entry.where_used and is_newer(entry, str(found[entry.name]))
    ]


def version_warnings(versions: dict[str, str | None] | None = None) -> list[str]:
    """Returns a sentence of all libraries that are other than what was tried, and one of each that is there twice."""
    sentences, newer = [], newer_libraries(versions)
    if newer:
        listed = ", ".join(f"{library} (tried: {_entry(library.split()[0]).specifier})" for library in newer)
        sentences.append(
            f"other than what was tried: {listed}; what fails a self-check or is built otherwise runs natively, "
            "DITRON_VERSIONS=strict refuses it"
        )
    return sentences + installed_twice("torch", "triton") if versions is None else sentences


def installed_twice(*names: str) -> list[str]:
    """Returns a sentence for each of the libraries ``names`` of which several distributions are on the path, so that
    the version that is checked may be another than the one that is imported: which one comes first, and the fix."""
    sentences = []
    for entry in map(_entry, names):
        found = {
            os.path.realpath(str(one.locate_file(""))) + f" ({name.replace('_', '-')} {one.version})": None
            for name in entry.distributions
            for one in metadata.distributions(name=name)
        }
        if len(found) > 1:
            first, *others = found
            sentences.append(
                f"{entry.name} is installed {len(found)} times: what is in {first} comes first on the path, then "
                f"{', '.join(others)}; remove all but one"
            )
    return sentences


def check_versions() -> bool:
    """Checks everything that is installed here against ``SUPPORTED``, and says once what is newer or there twice.

    Returns:
        Whether something is other than what was tried.

    Raises:
        VersionError: Something required is missing, or something installed is outside its range; names all of them.
        SettingError: ``DITRON_VERSIONS`` is neither.
    """
    from ditron_train.runtime.settings import get_settings

    _tell(version_problems(strict=get_settings().versions == "strict"), version_warnings)
    return bool(newer_libraries())


def _tell(problems: list[str], warnings: Callable[[], list[str]]) -> None:
    """Raises VersionError if there are problems; else logs the warnings, each once."""
    from ditron_train.runtime.errors import VersionError
    from ditron_train.runtime.logs import log_once

    if problems:
        raise VersionError("; ".join(problems))
    for sentence in warnings():
        log_once(sentence, sentence, level=logging.WARNING)


def check_used(*names: str) -> None:
    """Checks what is only checked where it is used, and says once what is there twice.

    Raises:
        VersionError: One of ``names`` is installed outside its range, or newer under ``DITRON_VERSIONS=strict``.
    """
    from ditron_train.runtime.settings import get_settings

    versions, strict = find_versions(), get_settings().versions == "strict"
    problems = [
        problem
        for name in names
        if versions.get(name) is not None
        for problem in _problems_of(_entry(name), str(versions[name]), versions, strict)
    ]
    _tell(problems, lambda: installed_twice(*names))
