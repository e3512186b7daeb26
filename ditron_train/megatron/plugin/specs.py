"""Rewrites a finished layer spec: the same tree with some of its module classes exchanged."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any


def is_spec(spec: Any) -> bool:
    """Whether ``rewrite_spec`` can walk through ``spec``: it can hold module classes, or is one."""
    return isinstance(
        spec, (type, functools.partial, types.MethodType, dict, list, tuple)
    ) or dataclasses.is_dataclass(spec)


def rewrite_spec(spec: Any, classes: Mapping[type, type]) -> tuple[Any, int]:
    """Returns a copy of `spec` in which every class that is a key of `classes` is its value, and in how many places.

    Walks through ``ModuleSpec`` and other dataclasses (``TransformerBlockSubmodules.layer_specs`` included), lists,
    tuples, dictionaries, ``functools.partial`` and class methods that build. The given spec is not changed; parts
    without a replacement are shared with it.
    """
    if isinstance(spec, type):
        return classes.get(spec, spec), int(spec in classes)
    if isinstance(spec, types.MethodType):
        if not isinstance(spec.__self__, type) or spec.__self__ not in classes:
            return spec, 0
        return getattr(classes[spec.__self__], spec.__name__), 1
    made: Any
    if isinstance(spec, functools.partial):
        (function, arguments, keywords), count = rewrite_spec((spec.func, spec.args, spec.keywords), classes)
        made = functools.partial(function, *arguments, **keywords)
    elif dataclasses.is_dataclass(spec) and not type(spec).__name__.endswith("Config"):
        # A model configuration among the parameters is not part of the tree.
        parts, count = rewrite_spec(
            {field.name: _part(spec, field.name) for field in dataclasses.fields(spec)}, classes
        )
        if not count:
            return spec, 0
        made = object.__new__(type(spec))  # keeps attributes that are not fields, and needs no init=True
        made.__dict__.update(vars(spec), **parts)
    elif isinstance(spec, dict):
        values, count = rewrite_spec(list(spec.values()), classes)
        made = dict(zip(spec, values))
    elif type(spec) in (list, tuple):
        rewritten = [rewrite_spec(value, classes) for value in spec]
        made, count = type(spec)(value for value, _ in rewritten), sum(number for _, number in rewritten)
    else:
        return spec, 0
    return (made if count else spec), count


def _part(spec: Any, name: str) -> Any:
    """A field of ``spec``; a module that a ``ModuleSpec`` names by where it is imported from is imported."""
    value = getattr(spec, name)
    if name == "module" and isinstance(value, tuple) and type(spec).__name__ == "ModuleSpec":
        from megatron.core.transformer.spec_utils import import_module

        return import_module(value)
    return value
