"""House rules that a program can check."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "ditron_train"
MAY_PRINT = {"cli.py", "__main__.py", "text.py"}


def python_files() -> list[Path]:
    folders = (PACKAGE, ROOT / "tests", ROOT / "scripts", ROOT / "examples")
    return [ROOT / "setup.py", *(path for folder in folders for path in sorted(folder.rglob("*.py")))]


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_parses_on_python_3_10() -> None:
    for path in python_files():
        ast.parse(path.read_text(encoding="utf-8"), relative(path), feature_version=(3, 10))


def prints(source: str) -> list[int]:
    """Lines that call ``print``."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


def test_no_print_in_the_library() -> None:
    assert prints("def f():\n    print(1)\n    table.print(1)") == [2]
    found = {relative(path): prints(path.read_text(encoding="utf-8")) for path in package_files()}
    assert {name: lines for name, lines in found.items() if lines and Path(name).name not in MAY_PRINT} == {}


FACTORIES = (
    "arange as_tensor asarray empty empty_strided eye full linspace ones rand randint randn randperm tensor zeros"
)


def anywhere(source: str) -> list[int]:
    """Lines that make a tensor wherever ``torch.set_default_device`` says."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    factories = {f"torch.{name}" for name in FACTORIES.split()}
    made = [call for call in calls if ast.unparse(call.func) in factories]
    # ``**options`` may name a device.
    return [call.lineno for call in made if not {word.arg for word in call.keywords} & {"device", None}]


def test_tensors_are_made_on_a_device_that_is_named() -> None:
    assert anywhere("torch.ones(2)\ntorch.ones(2, device=x)\ntl.zeros(2)\ntorch.ones(2, **options)") == [1]
    found = {relative(path): anywhere(path.read_text(encoding="utf-8")) for path in package_files()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def undocumented(source: str) -> list[str]:
    """Public functions, classes and methods without a docstring, and the module itself."""
    tree = ast.parse(source)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    public = [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    # What overrides a method of a base class is described there.
    classes = [node for node in public if isinstance(node, ast.ClassDef) and not node.bases]
    public += [
        item for node in classes for item in node.body if isinstance(item, kinds) and not item.name.startswith("_")
    ]
    nameless = [] if ast.get_docstring(tree) else ["the module"]
    return nameless + [node.name for node in public if not ast.get_docstring(node)]


def test_modules_and_public_names_have_docstrings() -> None:
    assert undocumented("def f(): pass\ndef _g(): pass\nclass C:\n    def h(self): pass") == [
        "the module",
        "f",
        "C",
        "h",
    ]
    found = {relative(path): undocumented(path.read_text(encoding="utf-8")) for path in package_files()}
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "gpu").rglob("*.py")), ids=relative)
def test_no_tolerance_on_gpus(path: Path) -> None:
    assert not re.search(r"allclose|assert_close|isclose", path.read_text(encoding="utf-8"))


def test_scripts_are_valid_shell() -> None:
    for script in [*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"]:
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_no_package_shadows_megatron() -> None:
    """With an ``__init__.py`` these folders would hide Megatron's namespace package."""
    assert not list(ROOT.glob("*/megatron/__init__.py")) or list(ROOT.glob("*/megatron/__init__.py")) == [
        PACKAGE / "megatron" / "__init__.py"
    ]


def test_ci_checks_format_rules_and_types_and_runs_the_tests() -> None:
    steps = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for step in ("ruff format --check .", "ruff check .", "-m mypy", "bash scripts/test.sh", "test_other_triton.sh"):
        assert step in steps


def test_pre_commit_has_the_pinned_ruff() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    pinned = re.search(r"^ruff==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.findall(r"ruff-pre-commit\n    rev: v(.+)", hooks) == [pinned.group(1)]
