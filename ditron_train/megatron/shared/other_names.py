"""Runs another library's code with other functions in the place of some that it calls by name."""

from __future__ import annotations

import inspect
import types
from typing import Any


def with_names(function: Any, names: dict[str, Any]) -> Any:
    """The same code, in which global ``names`` are others, in functions of its module that it calls, too; without
    what decorates it."""
    function = inspect.unwrap(function)
    shared = {**function.__globals__, **names}
    for name, one in _functions_called(function).items():
        if name not in names and called(one) & names.keys():
            shared[name] = _with_globals(one, shared)
    return _with_globals(function, shared)


def called(function: Any) -> set[str]:
    """Every name that the code of ``function`` asks for, in functions inside it and in those of its module that it
    calls, too."""
    function = inspect.unwrap(function)
    return _names_in(function).union(*(_names_in(one) for one in _functions_called(function).values()))


def _with_globals(function: Any, names: dict[str, Any]) -> Any:
    copied = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _names_in(function: Any) -> set[str]:
    found, codes = set(), [function.__code__]
    while codes:
        code = codes.pop()
        found.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return found


def _functions_called(function: Any) -> dict[str, Any]:
    """Functions of the same module that ``function`` calls, by itself or through them. A decorated one does more than
    its code: it is no such function."""
    found: dict[str, Any] = {}
    waiting = [function]
    while waiting:
        for name in _names_in(waiting.pop()) - found.keys():
            one = function.__globals__.get(name)
            if isinstance(one, types.FunctionType) and one.__globals__ is function.__globals__:
                if not hasattr(one, "__wrapped__"):
                    found[name] = one
                    waiting.append(one)
    return found
