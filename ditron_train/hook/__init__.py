"""Activation by the environment: ``DITRON=tp,ep`` is enough, in any program that trains with megatron-core.

Opt-in, by one of two files: `STARTUP`, a folder for ``PYTHONPATH`` (for one job), or a ``.pth`` line in the
environment (``python -m ditron_train hook install``; for a machine). Both import this module when Python starts, and
call `arm`. It then watches two modules of megatron-core. Features are switched on when the program first calls
``initialize_model_parallel`` or builds a ``MegatronModule``; nothing is imported before, and a program without
Megatron is not touched.

Only the standard library is imported here: this runs at the start of every Python process of a job.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

#: The folder for ``PYTHONPATH``.
STARTUP = str(Path(__file__).with_name("startup"))
VARIABLE = "DITRON"

_MODULE = "megatron.core.transformer.module"
_MEGATRON, _RENDEZVOUS = "ditron_train.megatron", "ditron_train.megatron.plugin.job_start"

_awaited: dict[str, Callable[[ModuleType], None]] = {}
_activations: list[Callable[[], None]] = []
#: Points that a program passes, and those that it has passed.
_ACTIVATION, _MODEL = "features were switched on", "a module was built"
_passed: set[str] = set()
#: Key of the job's store that says that features are switched on in some rank.
_ON = "ditron_train is on"


class _Loader(importlib.abc.Loader):
    """Loads a module as its own loader does, then calls what waits for it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _awaited[module.__name__](module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of ``_awaited`` where Python's own finder does."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname not in _awaited:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Calls ``action(module)`` once module ``name`` has been imported, before anybody else sees it; at once if it was
    imported before. A second action for the same name is ignored."""
    if name in _awaited:
        return
    _awaited[name] = action
    if name in sys.modules:
        action(sys.modules[name])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def arm(activate: Callable[[], None] | None = None) -> None:
    """Switches features on when Megatron first makes its groups or builds a module. Idempotent.

    Args:
        activate: What switches them on; None: `ditron_train.megatron.enable` if ``DITRON`` is set. A process in
            which it is not still hears of ranks in which it is, so that a job whose ranks differ ends with one error.
    """
    if activate is not None:
        _activations.append(activate)
    after_import("megatron.core.parallel_state", _hook_groups)
    watch_models()


def has_built() -> bool:
    """Whether a module of Megatron's has been built since `arm`."""
    return _MODEL in _passed


def _is_on() -> bool:
    return bool(_activations or os.environ.get(VARIABLE))


def _rendezvous() -> Any:
    """The module in which ranks meet, once features are switched on; None if it cannot be imported here."""
    is_first = _ACTIVATION not in _passed
    _passed.add(_ACTIVATION)
    try:
        megatron, rendezvous = map(importlib.import_module, (_MEGATRON, _RENDEZVOUS))
    except ImportError as error:
        if is_first:
            logging.getLogger("ditron_train").warning("%s is set, but everything is native: %s", VARIABLE, error)
        return None
    for activate in (_activations or [megatron.enable]) if is_first else []:
        activate()
    return rendezvous


def _store() -> Any:
    return importlib.import_module("torch.distributed.distributed_c10d")._get_default_store()


def _is_on_elsewhere() -> bool:
    """Whether features are on in another rank of this job; nobody waits."""
    with suppress(Exception):  # a store that cannot say
        return bool(_store().check([_ON]))
    return False


def _hook_groups(module: ModuleType) -> None:
    native = module.initialize_model_parallel

    @functools.wraps(native)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
        rendezvous = _rendezvous() if _is_on() else None
        if rendezvous is not None:
            with suppress(Exception):  # no job, or a store of another kind: ``native`` or ``after_groups`` says more
                _store().set(_ON, "")  # before the groups are made, for which every rank waits
        native(*args, **kwargs)
        if rendezvous is None and not _is_on() and _is_on_elsewhere():
            rendezvous = importlib.import_module(_RENDEZVOUS)
        if rendezvous is not None:
            rendezvous.after_groups()

    initialize_model_parallel.ditron_native = native  # type: ignore[attr-defined]
    module.initialize_model_parallel = initialize_model_parallel  # type: ignore[attr-defined]


def _hook_modules(module: ModuleType) -> None:
    native = module.MegatronModule.__init__

    @functools.wraps(native)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        rendezvous = _rendezvous() if _is_on() else sys.modules.get(_RENDEZVOUS)
        _passed.add(_MODEL)
        if rendezvous is not None:
            rendezvous.before_model()
        native(self, *args, **kwargs)

    module.MegatronModule.__init__ = __init__


def watch_models() -> None:
    """Has the ranks meet at a model, also if nothing else is armed (a script that calls `apply`)."""
    after_import(_MODULE, _hook_modules)
