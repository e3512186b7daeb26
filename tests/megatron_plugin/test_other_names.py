"""Another library's code with other functions in the place of some that it calls."""

from __future__ import annotations

import functools

from ditron_train.megatron.shared.other_names import called, rebind_globals

_SOURCE = """
def product(x):
    return ("native", x)


def again(x):
    return outer(x - 1)


def inner(x):
    return product(x)


def plain(x):
    return x


@decorate
def decorated(x):
    return product(x)


def outer(x):
    return again(x) if x > 1 else (lambda: (inner(plain(x)), decorated(x)))()
"""


def _module():
    """What a module of this source holds."""

    def decorate(function):
        return functools.wraps(function)(lambda x: ("decorated", *function(x)))

    names = {"decorate": decorate}
    exec(_SOURCE, names)
    return names


def test_functions_that_are_called_have_the_other_names_too():
    module = _module()
    replaced = rebind_globals(module["outer"], {"product": lambda x: ("fused", x)})
    assert replaced(2) == (("fused", 1), ("decorated", "native", 1))
    assert module["outer"](2) == (("native", 1), ("decorated", "native", 1)), "the native code is as it was"


def test_what_the_module_binds_later_is_seen():
    module = _module()
    replaced = rebind_globals(module["outer"], {"product": lambda x: ("fused", x)})
    module["plain"] = lambda x: 10 * x
    assert replaced(2)[0] == ("fused", 10)
    module["inner"] = None
    assert replaced(2)[0] == ("fused", 10), "the replaced names, and functions that use them, stay what they are"


def test_names_of_functions_that_are_called_count():
    names = called(_module()["outer"])
    assert {"outer", "again", "inner", "plain", "decorated", "product"} == names
    assert "product" not in called(_module()["plain"])
