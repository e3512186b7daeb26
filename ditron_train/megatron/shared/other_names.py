"""Runs another library's code with other functions in place of some that it calls by name.

This is the one mechanism by which layers of Transformer Engine and functions of Megatron-LM that offer no method to
override are changed. A function is copied: its code stays, and its globals are those of its module with some names
replaced.
`te_fp8.py` does so for linear layers in FP8, `te_quantise.py` for experts in FP8, `te_all_gather.py` for packed
sequences, `batches.py` for Megatron-LM's `get_batch_on_this_tp_rank`. Each of them first asks `called` whether this
version calls the names at all, and leaves the native path alone if not. If a class can be overridden, layers do that
instead (`in_place.py`).
"""

from __future__ import annotations

import inspect
import types
from typing import Any

from ditron_train.runtime.outside_compile import outside_compile


def rebind_globals(function: Any, names: dict[str, Any]) -> Any:
    """The same code, in which global ``names`` are others, in functions of its module that it calls, too; without
    what decorates it.

    What the module binds to its other globals later, the copy sees from its next call on. What the copy itself assigns
    to a global does not reach the module. ``torch.compile`` does not look into the copy.
    """
    function = inspect.unwrap(function)
    native, replaced = function.__globals__, dict(names)
    shared = {**native, **names}
    for name, one in _functions_called(function).items():
        if name not in names and called(one) & names.keys():
            shared[name] = replaced[name] = _with_globals(one, shared)
    copied = _with_globals(function, shared)

    def call(*args: Any, **kwargs: Any) -> Any:
        shared.update(native)  # in C: 2 us, while a dictionary that asks the module for each name costs 60 ns a name
        shared.update(replaced)
        return copied(*args, **kwargs)

    return outside_compile(call)


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
