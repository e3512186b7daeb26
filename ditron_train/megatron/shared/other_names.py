"""Runs another library's code with other functions in the place of some that it calls by name."""

from __future__ import annotations

import inspect
import types
from typing import Any


def with_names(function: Any, names: dict[str, Any]) -> Any:
    """The same code, in which global ``names`` are others; without what decorates it."""
    function = inspect.unwrap(function)
    names = {**function.__globals__, **names}
    copied = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def called(function: Any) -> set[str]:
    """Every name that the code of ``function`` asks for, in functions inside it, too."""
    found, codes = set(), [inspect.unwrap(function).__code__]
    while codes:
        code = codes.pop()
        found.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return found
