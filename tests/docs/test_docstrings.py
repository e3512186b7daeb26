"""What docstrings and comments of the package name in backticks exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PACKAGE = Path(__file__).parents[2] / "ditron_train"
#: Without `megatron`: most such names are the library's.
ROOMS = sorted({path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"megatron", "tools", "cpu"})
_NAME = re.compile(rf"`+((?:ditron_train|testing|{'|'.join(ROOMS)})(?:\.\w+)+)`+")
_FILES = {"py", "json", "md"}


def _next(found: Any, name: str) -> Any:
    """What ``name`` is in ``found``, a module or a class; None if there is none."""
    if isinstance(found, ModuleType) and not hasattr(found, name):
        try:
            return importlib.import_module(f"{found.__name__}.{name}")
        except ModuleNotFoundError:
            return None
    return getattr(found, name, None)


def dead_names(source: str) -> list[str]:
    """Names of modules, and of what is in them, that do not exist."""
    dead = []
    for reference in _NAME.findall(source):
        parts = reference.removeprefix("ditron_train.").split(".")
        found: Any = importlib.import_module("ditron_train")
        for part in parts:
            found = None if found is None else _next(found, part)
        if found is None and parts[-1] not in _FILES:
            dead.append(reference)
    return dead


@pytest.mark.parametrize("room", sorted(path.name for path in PACKAGE.iterdir() if path.is_dir()))
def test_names_in_docstrings_exist(room: str) -> None:
    files = sorted((PACKAGE / room).rglob("*.py"))
    found = {str(path.relative_to(PACKAGE)): dead_names(path.read_text(encoding="utf-8")) for path in files}
    assert {file: names for file, names in found.items() if names} == {}


def test_a_dead_name_is_seen() -> None:
    assert dead_names("``runtime.device.kernel_target`` and ``symm.Channel.check``, `a.b`") == []
    dead = ["runtime.kernel_target", "tp.tuning", "testing.megatron_cpu", "ditron_train.tp.tuning"]
    assert dead_names(" ".join(f"``{name}``" for name in dead)) == dead
