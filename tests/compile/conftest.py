"""Kernels compile while other tests run, in two processes that take what time those leave over; their tests come
last."""

from __future__ import annotations

import importlib.util
import pathlib
from dataclasses import replace

import pytest

from tests.support.compile_check import TARGETS, Compilation, CompileReport, KernelSpec, compile_specs

_HERE = pathlib.Path(__file__).parent
_STARTED = pytest.StashKey[list[Compilation]]()


def room_specs() -> list[KernelSpec]:
    """What the subpackages list."""
    specs = []
    for path in sorted(_HERE.glob("specs_*.py")):
        module_spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(module_spec)
        module_spec.loader.exec_module(module)
        specs += module.SPECS
    assert len({spec.name for spec in specs}) == len(specs), "two specs have one name"
    return specs


def compiled_for_cuda(only: str = "") -> list[CompileReport]:
    """Reports of the kernels with ``only`` in their name, for every CUDA target."""
    chosen = [spec for spec in room_specs() if only in spec.name]
    specs = [replace(spec, targets=tuple(target for target in spec.targets if target != "hip")) for spec in chosen]
    return list(compile_specs(specs).values())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"spec", "target"} <= {*metafunc.fixturenames}:
        cases = [
            pytest.param(spec, target, id=f"{spec.name}-{target}") for spec in room_specs() for target in spec.targets
        ]
        metafunc.parametrize("spec, target", cases)
    if "hopper_spec" in metafunc.fixturenames:
        specs = [spec for spec in room_specs() if "sm_90" in spec.targets]
        metafunc.parametrize("hopper_spec", [pytest.param(spec, id=spec.name) for spec in specs])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent == _HERE)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts what the selected tests need."""
    targets: dict[str, tuple[KernelSpec, set[str]]] = {}
    for item in session.items:
        parameters = item.callspec.params if hasattr(item, "callspec") and item.path.parent == _HERE else {}
        spec = parameters.get("spec", parameters.get("hopper_spec"))
        if spec is not None:
            targets.setdefault(spec.name, (spec, set()))[1].add(parameters.get("target", "sm_90"))
    if not targets and any("reports" in getattr(item, "fixturenames", ()) for item in session.items):
        targets = {spec.name: (spec, {*TARGETS} - {"hip"}) for spec in room_specs()}  # the golden records alone
    specs = [replace(spec, targets=tuple(t for t in spec.targets if t in chosen)) for spec, chosen in targets.values()]
    started = session.stash[_STARTED] = []
    if not session.config.option.collectonly:
        niceness = 19 if any(item.path.parent != _HERE for item in session.items) else 0
        started += [Compilation(half, niceness=niceness) for half in (specs[::2], specs[1::2]) if half]


def pytest_sessionfinish(session: pytest.Session) -> None:
    for compilation in session.stash.get(_STARTED, []):
        compilation.stop()


@pytest.fixture(scope="session")
def compilations(request: pytest.FixtureRequest) -> list[Compilation]:
    """Of all kernels whose tests are selected."""
    return request.session.stash[_STARTED]
