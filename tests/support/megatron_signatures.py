"""Signatures of what ``ditron_train.megatron`` overrides or replaces, read from the source of any Megatron-core.

    python -m tests.support.megatron_signatures /checkout/of/megatron-lm [...]

writes those of each checkout into ``tests/native/megatron_signatures.json``, one entry a version. Nothing of Megatron
is imported: what Transformer Engine is needed for is read, too.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

RECORD = Path(__file__).parents[1] / "native" / "megatron_signatures.json"
_FUSED = Path(__file__).parents[2] / "ditron_train" / "megatron"
#: Functions that are replaced by name, or called with arguments of this package.
_FUNCTIONS = {
    "parallel_state.py": ("initialize_model_parallel",),
    "tensor_parallel/layers.py": ("linear_with_grad_accumulation_and_async_allreduce",),
    "fusions/fused_bias_swiglu.py": ("weighted_bias_swiglu_impl",),
    "fusions/fused_bias_geglu.py": ("weighted_bias_quick_geglu_impl",),
    "fusions/fused_weighted_squared_relu.py": ("weighted_squared_relu_impl",),
    "transformer/moe/moe_utils.py": ("get_capacity", "get_default_pg_collection"),
}
#: A class of this package that stands in for a class without being one of its kind.
_CONSTRUCTORS = ("TensorParallelMuon",)


class _Classes:
    """Classes of a folder by name, with their methods, inherited ones too as far as their source is in the folder."""

    def __init__(self, folder: Path) -> None:
        self._found: dict[str, list[ast.ClassDef]] = {}
        for path in sorted(folder.rglob("*.py")):
            for node in ast.walk(_parsed(path)):
                if isinstance(node, ast.ClassDef):
                    self._found.setdefault(node.name, []).append(node)

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def names(self) -> Iterator[str]:
        """All of them."""
        yield from self._found

    def bases(self, name: str) -> list[str]:
        """Names of the bases of a class; more than one definition stands for whether something is installed: the
        longest counts."""
        node = max(self._found[name], key=lambda one: len(one.body))
        named = [ast.unparse(base) for base in node.bases]
        return [base.rpartition(".")[2] for base in named if not base.startswith("te.")]  # Transformer Engine's

    def methods(self, name: str) -> dict[str, ast.FunctionDef]:
        """Functions of a class and of its bases by name."""
        found: dict[str, ast.FunctionDef] = {}
        if name not in self:
            return found
        for base in reversed(self.bases(name)):
            found.update(self.methods(base))
        body = max(self._found[name], key=lambda one: len(one.body)).body
        found.update({node.name: node for node in body if isinstance(node, ast.FunctionDef)})
        return found


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _written(function: ast.FunctionDef) -> str:
    """Its parameters without annotations."""
    arguments = ast.parse(f"lambda {ast.unparse(_bare(function.args))}: 0", mode="eval").body
    assert isinstance(arguments, ast.Lambda)
    return ast.unparse(arguments.args)


def _bare(arguments: ast.arguments) -> ast.arguments:
    copy: ast.arguments = ast.parse(f"def f({ast.unparse(arguments)}): ...").body[0].args  # type: ignore[attr-defined]
    for node in ast.walk(copy):
        if isinstance(node, ast.arg):
            node.annotation = None
    return copy


@functools.cache
def our_overrides() -> dict[str, str]:
    """Our parameters of every method that overrides one of Megatron's, by Megatron's class and method."""
    fused, overrides = _Classes(_FUSED), {}
    for name in fused.names():
        for native in (base for base in fused.bases(name) if base not in fused and name.startswith("Ditron")):
            overrides.update({f"{native}.{method}": _written(node) for method, node in fused.methods(name).items()})
    return overrides


def native_signatures(core: Path) -> dict[str, str]:
    """Of the folder ``megatron/core``: the parameters of what is overridden, replaced or called, as far as it is
    there."""
    classes, found = _Classes(core), {}
    for key in our_overrides():
        name, method = key.split(".")
        if method in (methods := classes.methods(name)):
            found[key] = _written(methods[method])
    for name in _CONSTRUCTORS:
        found[f"{name}.__init__"] = _written(classes.methods(name)["__init__"])
    for path, names in _FUNCTIONS.items():
        nodes = [node for node in _parsed(core / path).body if isinstance(node, ast.FunctionDef)]
        found.update({node.name: _written(node) for node in nodes if node.name in names})
    return dict(sorted(found.items()))


def written_version(core: Path) -> str:
    """What the folder ``megatron/core`` says that it is."""
    numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", (core / "package_info.py").read_text(), re.MULTILINE))
    return f"{numbers['MAJOR']}.{numbers['MINOR']}.{numbers['PATCH']}"


def unsupported_reason_callable_as(fused: str, native: str) -> str | None:
    """Why a function with parameters ``fused`` cannot be called in all ways in which one with ``native`` can be, or
    None."""
    mine, theirs = (_parameters(text) for text in (fused, native))
    by_position = mine.posonlyargs + mine.args
    for index, one in enumerate(theirs.posonlyargs + theirs.args):
        if index < len(by_position) and (by_position[index].arg == one.arg or index < len(theirs.posonlyargs)):
            continue
        if index >= len(by_position) and mine.vararg is not None and mine.kwarg is not None:
            continue
        if one.arg in [other.arg for other in mine.kwonlyargs] or mine.kwarg is not None and _is_optional(theirs, one):
            continue  # by keyword, as Megatron passes what has a default
        return f"{one.arg} is not taken"
    known = [one.arg for one in by_position + mine.kwonlyargs]
    for one in theirs.kwonlyargs:
        if one.arg not in known and mine.kwarg is None:
            return f"{one.arg} is not taken"
    if len(_required(mine)) > len(_required(theirs)):
        return f"{', '.join(_required(mine)[len(_required(theirs)) :])} is asked for"
    return None


def _parameters(text: str) -> ast.arguments:
    return ast.parse(f"def f({text}): ...").body[0].args  # type: ignore[attr-defined,no-any-return]


def _required(arguments: ast.arguments) -> list[str]:
    positional = arguments.posonlyargs + arguments.args
    return [one.arg for one in positional[: len(positional) - len(arguments.defaults)]]


def _is_optional(arguments: ast.arguments, one: ast.arg) -> bool:
    return one.arg not in _required(arguments)


def main() -> None:
    """Writes what the checkouts named on the command line have beside what was written before."""
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    for checkout in sys.argv[1:]:
        core = Path(checkout) / "megatron" / "core"
        record[written_version(core)] = native_signatures(core)
    RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
