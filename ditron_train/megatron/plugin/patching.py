"""Replaces what megatron-core uses by name, for runs whose source is not edited; everything is reversible.

Two kinds of replacement:

- `redirect_construction(native, fused)`: calling the class `native` builds a `fused`, a subclass of it. Every alias
  of the class keeps its identity, whenever it was or will be imported, so ``isinstance`` and ``spec.module in (...)``
  tests inside megatron-core continue to work. The right tool wherever the fused path is a subclass.
- `replace_symbol(native, fused)`: every name bound to the object `native` in any module of a package is bound to
  `fused` instead. For functions and for classes that cannot be subclassed. Modules imported later are reached only if
  they import the name from a module that was already patched.
- `replace_entry(namespace, key, fused)`: one entry of a dictionary, for classes that a registry names.

All are idempotent; `undo_all` restores the state before the first of them.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from ditron_train.megatron.plugin.subclasses import fused_subclass

_redirected: dict[type, type] = {}
_hooked: set[type] = set()
_replaced: list[tuple[dict[str, Any], str, Any, Any]] = []


def redirect_construction(native: type, fused: type) -> None:
    """Make ``native(...)`` build an instance of its subclass `fused`, and other subclasses of `native` what
    `subclasses.fused_subclass` says.

    Raises:
        TypeError: `fused` is not a subclass of `native`.
        RuntimeError: `native` is already redirected to another class.
    """
    if not issubclass(fused, native):
        raise TypeError(f"{fused.__qualname__} is not a subclass of {native.__qualname__}")
    if _redirected.setdefault(native, fused) is not fused:
        raise RuntimeError(f"{native.__qualname__} is already redirected to {_redirected[native].__qualname__}")
    if native not in _hooked:
        _hook_construction(native)


def _hook_construction(native: type) -> None:
    """Give `native` a ``__new__`` that looks its class up; it is never removed, since CPython cannot remove one
    cleanly.

    Without arguments, which all of megatron-core's constructors take, a copy or an unpickled object is made: it stays
    what it was.
    """
    inherited = native.__new__

    def construct(cls: type, *args: Any, **kwargs: Any) -> Any:
        target, fused = cls, _redirected.get(native)
        if fused is not None and (args or kwargs):
            if cls is native:
                target = fused
            elif not any(base is one for base in cls.__mro__ for one in _redirected.values()):
                target = fused_subclass(cls, native, fused)
        if inherited is object.__new__:
            return object.__new__(target)
        return inherited(target, *args, **kwargs)

    construct.__signature__ = inspect.signature(native.__init__)  # type: ignore[attr-defined,misc]  # for tools
    native.__new__ = staticmethod(construct)  # type: ignore[method-assign,assignment]
    _hooked.add(native)


def is_redirected(native: type) -> bool:
    """Whether constructing `native` currently builds something else."""
    return native in _redirected


def replace_symbol(native: Any, fused: Any, *, package: str = "megatron") -> int:
    """Bind every module-level name that refers to `native` in `package` to `fused`; returns how many were bound.

    Calling it again reaches modules that were imported since, and changes nothing elsewhere.
    """
    count = 0
    for name, module in list(sys.modules.items()):
        if module is None or not (name == package or name.startswith(package + ".")):
            continue
        namespace = vars(module)
        for key in [key for key, value in list(namespace.items()) if value is native]:
            _replaced.append((namespace, key, native, fused))
            namespace[key] = fused
            count += 1
    return count


def replace_entry(namespace: dict[str, Any], key: str, fused: Any) -> None:
    """Bind `key` of `namespace`, where megatron-core looks a class up, to `fused`; nothing if it is so already."""
    if namespace[key] is not fused:
        _replaced.append((namespace, key, namespace[key], fused))
        namespace[key] = fused


def undo_all() -> None:
    """Take back every redirection and replacement. Names that someone else has bound since are left alone."""
    while _replaced:
        namespace, key, native, fused = _replaced.pop()
        if namespace.get(key) is fused:
            namespace[key] = native
    _redirected.clear()
