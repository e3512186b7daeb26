"""The catalog has every op that layers ask the gate about, and no class that declares an op grows without bound."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import ditron_train
from ditron_train.policy import Op
from ditron_train.tools import catalog
from ditron_train.tools.cases import BenchCase
from ditron_train.tools.tune.space import SearchSpace

PACKAGE = Path(ditron_train.__file__).parent
MOST_METHODS = 20  # the goal is 15: an op whose lengths vary has five more


def _modules_with(pattern: str) -> list[str]:
    """Modules of the package with a line that begins so."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE):
            found.append(".".join(("ditron_train", *path.relative_to(PACKAGE).with_suffix("").parts)))
    return found


@pytest.mark.parametrize(
    "name, listed",
    [("OPS", catalog._ASKED), ("CASES", catalog.PACKAGES), ("SPACES", catalog._SPACES)],
    ids=["ops", "cases", "spaces"],
)
def test_every_list_of_a_module_is_in_the_catalog(name: str, listed: dict[str, tuple[str, ...]]) -> None:
    assert _modules_with(rf"^{name}\b") == sorted({module for modules in listed.values() for module in modules})


def test_cases_of_a_recipe_are_in_the_catalog() -> None:
    listed = [module for modules in catalog.FP8_PACKAGES.values() for module in modules]
    assert _modules_with(r"^def fp8_cases\(") == sorted(listed)


def test_an_op_of_a_module_is_in_its_list() -> None:
    """What is declared beside a list of ops, too."""
    pytest.importorskip("megatron.core")
    known = {id(op) for room in {*catalog.PACKAGES, *catalog._ASKED} for op in catalog.ops_of(room)}
    missing, num_seen = [], 0
    for module in _modules_with(r"^class \w+\(\w*Op\["):
        try:
            values = vars(importlib.import_module(module)).items()
        except ModuleNotFoundError as error:
            assert (error.name or "").startswith("transformer_engine"), error
            continue
        ops = [(name, value) for name, value in values if isinstance(value, Op)]
        num_seen += len(ops)
        missing += [f"{module}.{name}" for name, value in ops if id(value) not in known]
    assert num_seen and missing == []


def _classes_below(base: type) -> set[type]:
    return {base}.union(*(_classes_below(subclass) for subclass in base.__subclasses__()))


def test_no_class_of_an_op_has_too_many_methods() -> None:
    pytest.importorskip("megatron.core")
    for room in catalog.PACKAGES:
        assert catalog.ops_of(room)
        catalog.spaces_of(room)
    classes = set().union(*(_classes_below(base) for base in (Op, BenchCase, SearchSpace)))
    counts = {one.__qualname__: sum(map(callable, vars(one).values())) for one in classes}
    assert {name: count for name, count in counts.items() if count > MOST_METHODS} == {}
