"""Frameworks' subclasses of the classes that features replace.

A subclass that only wraps what it inherits (a head that scales its output, a layer with a constructor of its own) is
built as a subclass of both: ``class FusedSub(Sub, Fused)``, in whose method resolution order ``super().forward`` of
``Sub`` is fused. A subclass that replaces a method stays native, and the log names it: the fused path may not call
that method.
"""

from __future__ import annotations

import inspect
import itertools
import types
from typing import Any

from ditron_train.policy import log_native
from ditron_train.runtime.logs import log_once

#: What a subclass may define as it likes: nothing that computes.
_HARMLESS = {"extra_repr", "sharded_state_dict", "state_dict", "load_state_dict", "get_extra_state", "set_extra_state"}
_CALLED = {"__init__", "__call__", "__new__", "__getattr__", "__setattr__"}

_made: dict[tuple[type, type], type] = {}


def _wraps_super(method: Any, name: str) -> bool:
    """Whether ``method`` calls ``super().name``."""
    function = inspect.unwrap(getattr(method, "__func__", method))
    names = function.__code__.co_names if isinstance(function, types.FunctionType) else ()
    return "super" in names and name in names


def _defined(cls: type, native: type) -> list[tuple[str, Any]]:
    """What ``cls`` and its bases before ``native`` define of what ``native`` has, too."""
    bases = itertools.takewhile(lambda base: base is not native, cls.__mro__)
    named = [item for base in bases for item in vars(base).items() if hasattr(native, item[0])]
    return [(name, value) for name, value in named if name in _CALLED or not name.startswith(("__", "_abc_"))]


def replaced_methods(sub: type, native: type, fused: type) -> list[str]:
    """What of ``native`` its subclass ``sub`` replaces, or wraps although ``fused`` may not call it."""
    reached = {"__init__", "forward", *(name for name, _ in _defined(fused, native))}
    found = [
        name
        for name, value in _defined(sub, native)
        if name not in _HARMLESS and not (name in reached and _wraps_super(value, name))
    ]
    return list(dict.fromkeys(found))


def fused_subclass(sub: type, native: type, fused: type) -> type:
    """What ``sub(...)`` builds if ``native(...)`` builds a ``fused``: a subclass of both, or ``sub`` itself."""
    if (sub, fused) in _made:
        return _made[sub, fused]
    name = f"{sub.__module__}.{sub.__qualname__}"
    replaced, made = replaced_methods(sub, native, fused), sub
    if not replaced:
        qualified = "Ditron_" + "".join(sign if sign.isalnum() else "_" for sign in name)
        try:
            made = type(fused)(qualified, (sub, fused), {"__module__": __name__}, native=sub)
        except TypeError as error:  # their bases do not fit
            replaced = [str(error)]
        else:
            globals()[qualified] = made  # where pickles look
            made.__name__ = sub.__name__
            log_once(f"subclass {name}", f"{name}: on, as {native.__name__}, whose methods it wraps")
    if replaced:
        log_native(name, f"a subclass of {native.__name__} with its own {', '.join(replaced)}")
    _made[sub, fused] = made
    return made
