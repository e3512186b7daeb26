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


def rewrite_spec(spec: Any, classes: Mapping[type, type]) -> Any:
    """Returns a copy of `spec` in which every class that is a key of `classes` is its value.

    Walks through ``ModuleSpec`` and other dataclasses (``TransformerBlockSubmodules.layer_specs`` included), lists,
    tuples, dictionaries, ``functools.partial`` and class methods that build. The given spec is not changed; parts
    without a replacement are shared with it.
    """
    if count_replacements(spec, classes) == 0:
        return spec
    if isinstance(spec, type):
        return classes.get(spec, spec)
    if isinstance(spec, types.MethodType):
        return getattr(classes[spec.__self__], spec.__name__)  # type: ignore[index]
    if isinstance(spec, functools.partial):
        return functools.partial(
            rewrite_spec(spec.func, classes),
            *(rewrite_spec(value, classes) for value in spec.args),
            **{key: rewrite_spec(value, classes) for key, value in spec.keywords.items()},
        )
    if dataclasses.is_dataclass(spec):
        return _rewrite_dataclass(spec, classes)
    if isinstance(spec, dict):
        return {key: rewrite_spec(value, classes) for key, value in spec.items()}
    return type(spec)(rewrite_spec(value, classes) for value in spec)


def _rewrite_dataclass(spec: Any, classes: Mapping[type, type]) -> Any:
    copy = object.__new__(type(spec))  # keeps attributes that are not fields, and needs no init=True
    copy.__dict__.update(vars(spec))
    for field in dataclasses.fields(spec):
        copy.__dict__[field.name] = rewrite_spec(_part(spec, field.name), classes)
    return copy


def _part(spec: Any, name: str) -> Any:
    """A field of ``spec``; a module that a ``ModuleSpec`` names by where it is imported from is imported."""
    value = getattr(spec, name)
    if name == "module" and isinstance(value, tuple) and type(spec).__name__ == "ModuleSpec":
        from megatron.core.transformer.spec_utils import import_module

        return import_module(value)
    return value


def count_replacements(spec: Any, classes: Mapping[type, type]) -> int:
    """How many places of `spec` hold a class that is a key of `classes`."""
    if isinstance(spec, type):
        return int(spec in classes)
    if isinstance(spec, types.MethodType):
        return int(spec.__self__ in classes) if isinstance(spec.__self__, type) else 0
    if isinstance(spec, functools.partial):
        return sum(count_replacements(part, classes) for part in (spec.func, spec.args, spec.keywords))
    if dataclasses.is_dataclass(spec):
        if type(spec).__name__.endswith(
            "Config"
        ):  # a model configuration among the parameters is not part of the tree
            return 0
        return sum(count_replacements(_part(spec, field.name), classes) for field in dataclasses.fields(spec))
    if isinstance(spec, dict):
        return sum(count_replacements(value, classes) for value in spec.values())
    if type(spec) in (list, tuple):
        return sum(count_replacements(value, classes) for value in spec)
    return 0
