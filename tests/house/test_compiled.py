"""Code that is compiled around layers and ops reaches nothing of this package that is not marked
``@outside_compile``."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent.parent / "ditron_train"
ROOMS = ("tp", "sp", "ep", "pp", "optim")


def is_marked(node: ast.FunctionDef | ast.ClassDef) -> bool:
    return any(ast.unparse(decorator) == "outside_compile" for decorator in node.decorator_list)


def takes_tensors(function: ast.FunctionDef) -> bool:
    arguments = function.args
    given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return any(
        argument.annotation is not None and "torch.Tensor" in ast.unparse(argument.annotation) for argument in given
    )


def stands_in(node: ast.ClassDef) -> bool:
    """Whether a class has a method that code of others calls in the place of a native one."""
    methods = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
    return bool(node.bases) and any(not name.startswith("__") for name in methods)


def unmarked(source: str, public: set[str], *, stand_ins: bool) -> list[str]:
    """Functions of autograd, ops among the names ``public`` and, if asked for, classes that stand in for others."""
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base) for base in node.bases]
            reached = "torch.autograd.Function" in bases or (
                stand_ins and stands_in(node) and node.name.startswith("Ditron")
            )
        else:
            reached = isinstance(node, ast.FunctionDef) and node.name in public and takes_tensors(node)
        if reached and not is_marked(node):
            found.append(node.name)
    return found


def public_names(room: str) -> dict[str, set[str]]:
    """What a subpackage's ``__init__`` hands on, by the file that it comes from."""
    names: dict[str, set[str]] = {}
    for node in ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            names.setdefault(f"{node.module.split('.')[-1]}.py", set()).update(alias.name for alias in node.names)
    return names


@pytest.mark.parametrize("room", [*ROOMS, "megatron"])
def test_what_compiled_code_reaches_is_marked(room: str) -> None:
    public, found = public_names(room), {}
    for path in (PACKAGE / room).rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        found[path.name] = unmarked(source, public.get(path.name, set()), stand_ins=room == "megatron")
    assert {name: left for name, left in found.items() if left} == {}


@pytest.mark.parametrize(
    "source",
    [
        "class _Linear(torch.autograd.Function):\n    pass",
        "def op(x: torch.Tensor): pass",
        "def op(*, parts: Sequence[torch.Tensor]): pass",
        "@torch.no_grad()\ndef op(x: torch.Tensor): pass",
        "class DitronLayer(Layer):\n    def forward(self, x): pass",
    ],
)
def test_the_check_sees_what_is_missing(source: str) -> None:
    assert len(unmarked(source, {"op"}, stand_ins=True)) == 1


def test_the_check_lets_through_what_is_right() -> None:
    functions = "@outside_compile\ndef op(x: torch.Tensor): pass\ndef shape(x: int): pass\n"
    source = f"{functions}class DitronLayer(Layer):\n    def __init__(self): 0"
    assert unmarked(source, {"op", "shape"}, stand_ins=True) == []
