"""What copies of an optimizer keep beside its param groups and state."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch


class CopiedWithOptions(torch.optim.Optimizer):
    """An optimizer with options of its own, which copies and pickles keep, too. Hooks are left out, as those of
    torch are.

    The constructor of a subclass sets its options in front of the call of this one.
    """

    _options: tuple[str, ...]

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._options = tuple(vars(self))
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in self._options}
        return {**super().__getstate__(), **kept, "_options": self._options}

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiedWithOptions:
        """A copy whose options are the same objects: process groups cannot be copied."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        tensors = copy.deepcopy(super().__getstate__(), memo)
        copied.__setstate__({**self.__getstate__(), **tensors})
        return copied
