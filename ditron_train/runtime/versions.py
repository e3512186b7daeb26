"""The versions that this package works with, stated once.

``SUPPORTED`` is read by the packaging (``setup.py`` makes the dependencies from it), by ``check_versions()`` at run
time and by ``python -m ditron_train doctor``. Nothing but the standard library is imported at module level, so that
``setup.py`` can run this file before anything is installed.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import NamedTuple

__all__ = [
    "SUPPORTED",
    "Supported",
    "check_versions",
    "find_version",
    "find_versions",
    "is_supported",
    "pip_command",
    "specifier_here",
    "version_problems",
]


class Supported(NamedTuple):
    """One dependency and the range of it that is supported.

    Attributes:
        name: How it is called in messages; what pip calls it unless ``distributions`` says otherwise.
        specifier: Versions that are supported (PEP 440).
        required: Whether the package cannot work without it.
        module: Top module; an imported one is asked for its version first.
        distributions: Names under which pip may know it, the first one found counts.
        why: What sets the limits.
        interpreted: A narrower range where kernels are interpreted (``TRITON_INTERPRET=1``).
    """

    name: str
    specifier: str
    required: bool
    module: str
    distributions: tuple[str, ...]
    why: str
    interpreted: str = ""


SUPPORTED: tuple[Supported, ...] = (
    Supported("python", ">=3.10,<3.13", True, "", (), "3.11 and 3.12 are tested; the code parses on 3.10"),
    Supported(
        "torch", ">=2.11,<2.14", True, "torch", ("torch",), "symmetric memory as of 2.11; 2.13 is the newest one tried"
    ),
    Supported(
        "triton",
        ">=3.6,<3.7",
        True,
        "triton",
        ("triton",),
        "memory order of the kernels was checked in the code of 3.6",
    ),
    Supported(
        "numpy",
        ">=1.26,<3",
        True,
        "numpy",
        ("numpy",),
        "without a GPU below 2.4, which breaks range() in Triton 3.6's interpreter",
        interpreted=">=1.26,<2.4",
    ),
    Supported(
        "megatron-core", ">=0.16.1,<0.17", False, "megatron.core", ("megatron-core",), "0.16.1 is the reference"
    ),
    Supported("nvshmem4py", ">=0.4,<0.5", False, "nvshmem", ("nvshmem4py-cu13", "nvshmem4py-cu12"), "0.4.1 was tried"),
    Supported(
        "nvidia-nvshmem",
        ">=3.4.5,<3.5",
        False,
        "",
        ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12"),
        "has to match torch 2.11 and Triton 3.6",
    ),
    Supported(
        "transformer-engine",
        ">=2.10,<2.12",
        False,
        "transformer_engine",
        ("transformer-engine", "transformer_engine"),
        "2.10 was tried; megatron-core 0.16.1 asks for less than 2.12",
    ),
)


def find_version(entry: Supported) -> str | None:
    """Returns the version of ``entry`` that is (or would be) imported here, None where it is not installed."""
    if entry.name == "python":
        return platform.python_version()
    loaded = getattr(sys.modules.get(entry.module), "__version__", None) if entry.module else None
    if isinstance(loaded, str):
        return loaded
    for distribution in entry.distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def find_versions() -> dict[str, str | None]:
    """Returns the version of everything in ``SUPPORTED`` by name, None where it is not installed."""
    return {entry.name: find_version(entry) for entry in SUPPORTED}


def is_supported(entry: Supported, version: str, specifier: str | None = None) -> bool:
    """Whether ``version`` lies in the range of ``entry`` that holds here, or in ``specifier``; a local part such as
    ``+cu130`` does not matter."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(specifier or specifier_here(entry)).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def specifier_here(entry: Supported) -> str:
    """The range of ``entry`` that holds in this process: the narrower one where kernels are interpreted."""
    interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
    return entry.interpreted if entry.interpreted and interpreted else entry.specifier


def pip_command(name: str, specifier: str | None = None) -> str:
    """How ``name`` is installed: one of ``SUPPORTED``, in the range that holds here (or ``specifier``), or what pip
    calls it."""
    entry = next((entry for entry in SUPPORTED if entry.name == name), None)
    if entry is None:
        return f"pip install {name}"
    distribution = entry.distributions[0] if entry.distributions else name
    extra = "[pytorch]" if name == "transformer-engine" else ""
    return f"pip install '{distribution}{extra}{specifier or specifier_here(entry)}'"


def version_problems(versions: dict[str, str | None] | None = None) -> list[str]:
    """Returns one sentence for each dependency that is missing or outside its range.

    Args:
        versions: What is installed, as ``find_versions()`` gives it (the default).
    """
    versions = find_versions() if versions is None else versions
    problems = []
    for entry in SUPPORTED:
        version = versions.get(entry.name)
        if version is None:
            if entry.required:
                problems.append(f"{entry.name} is not installed; {entry.specifier} is needed")
            continue
        if not is_supported(entry, version):
            fix = f"; {pip_command(entry.name)}" if entry.distributions else ""
            problems.append(
                f"{entry.name} {version} is outside the supported range {specifier_here(entry)} ({entry.why}){fix}"
            )
    return problems


def check_versions() -> None:
    """Checks everything that is installed here against ``SUPPORTED``.

    Raises:
        VersionError: Something required is missing, or something installed is outside its range; names all of them.
    """
    problems = version_problems()
    if problems:
        from ditron_train.runtime.errors import VersionError

        raise VersionError("; ".join(problems))
