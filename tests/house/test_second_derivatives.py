"""No autograd function of the package drops second derivatives without a word."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest
import torch

from ditron_train.runtime.errors import NotSupportedError

PACKAGE = Path(__file__).parent.parent.parent / "ditron_train"


def autograd_functions(source: str) -> list[ast.ClassDef]:
    """Every class in ``source``, at any depth, with ``Function`` among its bases."""
    return [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).split(".")[-1] == "Function" for base in node.bases)
    ]


def first_call(function: ast.FunctionDef) -> str:
    """The name of what the first statement after the docstring calls."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    first = body[0].value if isinstance(body[0], ast.Expr) else None
    return ast.unparse(first.func) if isinstance(first, ast.Call) else ""


FUNCTIONS = [
    (path, node)
    for path in sorted(PACKAGE.rglob("*.py"))
    for node in autograd_functions(path.read_text(encoding="utf-8"))
]


def test_there_are_some() -> None:
    assert len(FUNCTIONS) >= 11


@pytest.mark.parametrize("path, node", FUNCTIONS, ids=lambda value: getattr(value, "name", None))
def test_every_backward_refuses_first(path: Path, node: ast.ClassDef) -> None:
    (backward,) = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "backward"]
    assert first_call(backward) == "refuse_second_derivatives"


@pytest.mark.parametrize("path, node", FUNCTIONS, ids=lambda value: getattr(value, "name", None))
def test_every_backward_raises_where_a_graph_is_made_of_it(path: Path, node: ast.ClassDef) -> None:
    """With nothing saved and no gradients: it raises before it looks at either."""
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    try:
        found = getattr(importlib.import_module(name), node.name)
    except ImportError as error:  # transformer_engine, where it is not installed
        pytest.skip(str(error))
    wanted = [
        parameter
        for parameter in inspect.signature(found.backward).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_POSITIONAL
    ]
    with torch.enable_grad(), pytest.raises(NotSupportedError, match="second derivatives"):
        found.backward(*[None] * len(wanted))
