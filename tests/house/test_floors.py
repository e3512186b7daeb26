"""A subpackage imports only from layers below it; only the top layer and the tools import megatron."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "ditron_train"
# Numbers of the house in README; where one subpackage of a floor stands over another, the lower one has the lower
# fraction.
FLOORS = {
    "hook": 0.0,
    "runtime": 0.0,
    "data": 0.3,
    "symm": 0.5,
    "lang": 1.0,
    "stream": 1.5,
    "policy": 1.7,
    "schedule": 2.0,
    "gemm": 2.5,
    "costs": 2.7,
    "tp": 3.0,
    "sp": 3.0,
    "ep": 3.0,
    "pp": 3.0,
    "optim": 3.0,
    "loss": 3.0,
    "embedding": 3.0,
    "megatron": 5.0,
}
TOOLS = {"tools", "cpu", "cli", "__main__"}
MAY_IMPORT_MEGATRON = {"megatron", *TOOLS}


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(source: str) -> list[str]:
    """Every module imported anywhere in ``source``, in functions too; ``from a import b`` counts as ``a.b``."""
    modules = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
    return modules


def violations(room: str, source: str) -> list[str]:
    """What ``source``, standing in ``room``, imports against the rules."""
    found = []
    for module in imported_modules(source):
        parts = module.split(".")
        if parts[0] == "megatron" and room not in MAY_IMPORT_MEGATRON:
            found.append(f"{room} imports {module}")
        if parts[0] != "ditron_train" or room in TOOLS or len(parts) == 1:
            continue
        other = parts[1]
        is_package = (PACKAGE / other).is_dir()
        if other == room or not (is_package or (PACKAGE / f"{other}.py").exists()):
            continue  # an attribute of the package itself, such as its version
        if other in TOOLS or FLOORS[other] >= FLOORS[room]:
            found.append(f"{room} imports {module}")
    return found


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(path) for path in package_files()} - {"__init__"}
    assert rooms <= set(FLOORS) | TOOLS


def test_imports_go_down() -> None:
    files = {
        path: violations(room_of(path), path.read_text(encoding="utf-8"))
        for path in package_files()
        if room_of(path) != "__init__"
    }
    assert {path.relative_to(PACKAGE).as_posix(): found for path, found in files.items() if found} == {}


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("runtime", "from ditron_train.symm import get_arena"),
        ("tp", "def f():\n    from ditron_train.optim import muon"),
        ("gemm", "import ditron_train.tp.ag_gemm"),
        ("lang", "from ditron_train.stream.waits import x"),
        ("symm", "from ditron_train.cpu import interpreter"),
        ("tp", "import megatron.core"),
        ("policy", "from megatron.core import parallel_state"),
        ("megatron", "from ditron_train.tools import catalog"),
    ],
)
def test_the_check_sees_what_is_wrong(room: str, source: str) -> None:
    assert len(violations(room, source)) == 1


def test_the_check_lets_through_what_is_right() -> None:
    assert (
        violations("gemm", "import ditron_train.lang as dl\nfrom ditron_train.schedule.tiles import gather_tile") == []
    )
    assert violations("megatron", "import megatron.core\nfrom ditron_train.tp import ag_gemm") == []
    assert violations("tools", "import megatron.core\nfrom ditron_train.megatron import apply") == []
