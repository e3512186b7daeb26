"""Classes of this package in layer specs, where Megatron asks which class is there."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any


class EqualsBaseClass(ABCMeta):
    """Metaclass of a class that compares equal to the class it replaces: ``class Fused(Native,
    metaclass=EqualsBaseClass, native=Native)``.

    Megatron compares the classes in a spec with its own, by ``==`` and ``in`` lists, and builds other layers, passes
    other arguments or refuses the model if they differ. Classes that inherit from such a class are equal only to
    themselves.

    Hashes stay apart: what is kept by class in dictionaries, such as the classes that torch's FSDP makes and what
    ``isinstance`` remembers of abstract classes, is never the other's.
    """

    _stands_for: type | None

    def __new__(
        mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], *, native: type | None = None
    ) -> EqualsBaseClass:
        return super().__new__(mcs, name, bases, {**namespace, "_stands_for": native})

    def __eq__(cls, other: object) -> bool:
        return other is cls or (other is not None and other is cls._stands_for)

    __hash__ = ABCMeta.__hash__
