"""The shape of the package: no import circle, no private name of another room, no long kernel signature."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "ditron_train"
MAX_KERNEL_PARAMETERS = 24
AT_MOST_ONCE = ("run.py", "report.py", "tuning.py")
# What still stands against a rule. A name leaves its list when it is fixed; none is ever added.
KNOWN_CIRCLES: tuple[set[str], ...] = ()
KNOWN_PRIVATE: set[tuple[str, str]] = set()
KNOWN_LONG_SIGNATURES: set[tuple[str, str]] = set()


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def package_sources() -> dict[str, str]:
    return {module_name(path): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def syntax_tree(source: str) -> ast.Module:
    return ast.parse(source)


def room_of(module: str) -> str:
    """The subpackage of a module; the top layer and the tools are divided further, by folder."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2] if parts[:1] in (["megatron"], ["tools"]) else parts[:1])


def imports_of(module: str, source: str, modules: Iterable[str]) -> set[str]:
    """The other modules that ``source`` names in an import, anywhere; the packages around them are not counted."""
    found = set()
    for node in ast.walk(syntax_tree(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else str(node.module) for name in names}
    return {name for name in found if name in modules} - {module}


def circles(sources: Mapping[str, str]) -> list[set[str]]:
    """Groups of modules each of which reaches every other one by imports (Tarjan's components of two or more)."""
    graph = {module: imports_of(module, source, sources) for module, source in sources.items()}
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in order:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], order[other])
        if lowest[module] == order[module]:
            place = stack.index(module)
            if len(stack) - place > 1:
                found.append(set(stack[place:]))
            del stack[place:]

    for module in graph:
        if module not in order:
            visit(module)
    return found


def is_private(name: str) -> bool:
    public = ("_asdict", "_fields", "_make", "_replace", "_version")  # of named tuples and torch's tensors
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != "" and name not in public


def owner_of(attribute: ast.Attribute) -> str:
    return ast.unparse(attribute.value)


@cache
def private_names(source: str) -> frozenset[str]:
    """Private names that a module makes: functions, classes, variables and attributes."""
    found = set()
    for node in ast.walk(syntax_tree(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and owner_of(node) in ("self", "cls"):
            found.add(node.attr)
    return frozenset(name for name in found if is_private(name))


def borrowed_private_names(module: str, sources: Mapping[str, str]) -> set[str]:
    """Private names of other modules that ``module`` imports or asks a module for, and of objects of other
    subpackages."""
    of_own_room, of_others = set(), set()
    for other, source in sources.items():
        (of_own_room if room_of(other) == room_of(module) else of_others).update(private_names(source))
    found, imported, strangers = set(), set(), set()
    tree = syntax_tree(sources[module])
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("ditron_train."):
            found |= {alias.name for alias in node.names if is_private(alias.name)}
            names = {f"{node.module}.{alias.name}": alias.asname or alias.name for alias in node.names}
            imported |= {name for full, name in names.items() if full in sources}
        elif isinstance(node, ast.ImportFrom):
            strangers |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            imported |= {alias.asname or alias.name for alias in node.names if alias.name in sources}
            strangers |= {(alias.asname or alias.name).split(".")[0] for alias in node.names} - {"ditron_train"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = owner_of(node)
            of_an_object = (
                owner.split(".")[0] not in strangers
                and owner not in ("self", "cls", "super()")
                and node.attr in of_others - of_own_room
            )
            if owner in imported or of_an_object:
                found.add(node.attr)
    return found


def long_signatures(source: str) -> set[str]:
    """Functions for the GPU with more than ``MAX_KERNEL_PARAMETERS``, constants and tensor descriptors apart."""
    found = set()
    for node in ast.walk(syntax_tree(source)):
        if not isinstance(node, ast.FunctionDef):
            continue
        decorators = {ast.unparse(decorator).split("(")[0].split(".")[-1] for decorator in node.decorator_list}
        counted = [
            argument
            for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            if not argument.arg.endswith("_desc") and "constexpr" not in ast.unparse(argument.annotation or argument)
        ]
        if "jit" in decorators and len(counted) > MAX_KERNEL_PARAMETERS:
            found.add(node.name)
    return found


def actions_on_import(source: str) -> list[str]:
    """Statements at the top of a module that do something: calls without a result, loops, deletions, raises."""
    does = (ast.For, ast.While, ast.With, ast.Delete, ast.Raise, ast.Assert, ast.AugAssign)
    return [
        ast.unparse(node)
        for node in syntax_tree(source).body
        if isinstance(node, does) or (isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant))
    ]


def test_no_modules_import_each_other_in_a_circle() -> None:
    found = circles(package_sources())
    assert [sorted(circle) for circle in found if not any(circle <= known for known in KNOWN_CIRCLES)] == []


def test_no_private_name_of_another_room() -> None:
    sources = package_sources()
    found = {(module, name) for module in sources for name in borrowed_private_names(module, sources)}
    assert sorted(found - KNOWN_PRIVATE) == []


def test_no_kernel_takes_too_many_parameters() -> None:
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    found = {(file, name) for file, source in files.items() for name in long_signatures(source)}
    assert sorted(found - KNOWN_LONG_SIGNATURES) == []


def test_module_names_that_say_little_stand_once() -> None:
    count = Counter(path.name for path in PACKAGE.rglob("*.py"))
    assert {name: count[name] for name in AT_MOST_ONCE if count[name] > 1} == {}


def test_nothing_happens_on_import() -> None:
    acts = {module: actions_on_import(source) for module, source in package_sources().items()}
    run = ("ditron_train.__main__", "ditron_train.hook.startup.sitecustomize")  # by name, or by Python at its start
    assert {module: found for module, found in acts.items() if found and module not in run} == {}


def test_the_check_sees_a_circle() -> None:
    sources = {
        "ditron_train.a": "from ditron_train.b import f",
        "ditron_train.b": "def f():\n    import ditron_train.c",
        "ditron_train.c": "from ditron_train import a",
        "ditron_train.d": "from ditron_train import a\nfrom ditron_train.c import g",
        "ditron_train": "",
    }
    assert circles(sources) == [{"ditron_train.a", "ditron_train.b", "ditron_train.c"}]
    sources["ditron_train.c"] = "import torch"
    assert circles(sources) == []


@pytest.mark.parametrize(
    ("borrows", "name"),
    [
        ("from ditron_train.symm.arena import _align", "_align"),
        ("from ditron_train.symm import arena\narena._align(1)", "_align"),
        ("import ditron_train.symm.arena\nditron_train.symm.arena._align(1)", "_align"),
        ("def f(arena): arena._quiesce()", "_quiesce"),
        ("def f(x): x.segment._base = 1", "_base"),
    ],
)
def test_the_check_sees_a_borrowed_private_name(borrows: str, name: str) -> None:
    arena = (
        "def _align(n): return n\nclass Arena:\n    def _quiesce(self): pass\n    def __init__(self): self._base = 0"
    )
    sources = {"ditron_train.symm": "", "ditron_train.symm.arena": arena, "ditron_train.pp.ops": borrows}
    assert borrowed_private_names("ditron_train.pp.ops", sources) == {name}


def test_the_check_lets_through_what_is_private_to_oneself_or_to_strangers() -> None:
    sources = {
        "ditron_train.pp.slots": "class Slots:\n    def __init__(self): self._tensor = 0",
        "ditron_train.pp.ops": "import torch\ntorch._C._base()\ndef f(slots): return slots._tensor, slots.__dict__",
        "ditron_train.symm.arena": "class Arena:\n    def __init__(self): self._tensor = self._base = 0",
    }
    assert borrowed_private_names("ditron_train.pp.ops", sources) == set()


@pytest.mark.parametrize("decorator", ["@triton.jit", "@triton.jit(noinline=True)", "@jit"])
def test_the_check_sees_a_long_signature(decorator: str) -> None:
    names = [f"p{index}" for index in range(MAX_KERNEL_PARAMETERS)]
    uncounted = ["x_desc", "BLOCK: tl.constexpr", "SIZE: 'tl.constexpr'"]
    fits, too_long = ", ".join([*names, *uncounted]), ", ".join([*names, "stride: int", *uncounted])
    assert long_signatures(f"{decorator}\ndef kernel({fits}): pass") == set()
    assert long_signatures(f"{decorator}\ndef kernel({too_long}): pass") == {"kernel"}
    assert long_signatures(f"def host({too_long}): pass") == set()


@pytest.mark.parametrize(
    "source", ["register()", "torch.library.define('a', 'b')", "for x in y: f(x)", "del x", "with f(): pass"]
)
def test_the_check_sees_an_action(source: str) -> None:
    assert actions_on_import(f'"""Words."""\nimport torch\nCONSTANT = 1\n{source}') != []
    assert actions_on_import('"""Words."""\nimport torch\nCONSTANT = f(1)\ndef f(): g()') == []
