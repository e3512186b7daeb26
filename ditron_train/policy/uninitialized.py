"""What new memory holds: PyTorch's fill of deterministic mode, and fills that reveal reads of unwritten memory.

Under ``torch.use_deterministic_algorithms(True)`` PyTorch fills every new tensor with NaN (integers with the largest
value) unless ``torch.utils.deterministic.fill_uninitialized_memory`` is off. The fill changes no result of a program
that reads only what it has written.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ditron_train.runtime.device import is_capturing

_NEW = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
_TORCH = os.path.dirname(torch.__file__)
_INTERPOSED = ("__torch_function__", "__torch_dispatch__")
_torch_mode: Any = torch.utils.deterministic  # an instance, of which stubs say nothing


def fills_new_tensors() -> bool:
    """Whether PyTorch fills new tensors now."""
    return torch.are_deterministic_algorithms_enabled() and bool(_torch_mode.fill_uninitialized_memory)


def set_torch_fill(is_on: bool) -> None:
    """Turns PyTorch's own fill on or off (on has no effect outside of deterministic mode)."""
    _torch_mode.fill_uninitialized_memory = is_on


@contextmanager
def torch_fill(is_on: bool) -> Iterator[None]:
    """A context in which PyTorch's own fill is on or off."""
    before = _torch_mode.fill_uninitialized_memory
    set_torch_fill(is_on)
    try:
        yield
    finally:
        set_torch_fill(before)


def is_filling() -> bool:
    """Whether ``FillNewTensors`` is active: every op takes more host time then, so times mean nothing."""
    return any(isinstance(mode, FillNewTensors) for mode in _get_current_dispatch_mode_stack())


class FillNewTensors(TorchDispatchMode):
    """A mode in which new tensors are filled, also in backward; but not memory that a compiled kernel or a C++
    operator allocates itself, and not during the capture of a CUDA graph.

    Args:
        is_finite: Whether to fill with finite values; else as PyTorch's own fill.
        limit: Fill only the first ``limit`` new tensors; None: all.

    Attributes:
        count: New tensors so far.
        origin: Where the last filled tensor was made: the operator, and the innermost line outside of PyTorch.
    """

    def __init__(self, *, is_finite: bool, limit: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_finite, self._limit = is_finite, limit
        self.count = 0
        self.origin = ""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True, since under any other mode ``torch.compile`` would fall back to eager code, with other bits, for
        good."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        num_bytes = args[0].untyped_storage().nbytes() if name == "resize_" else 0
        result = func(*args, **(kwargs or {}))
        is_new = name in _NEW or (name == "resize_" and result.untyped_storage().nbytes() > num_bytes)
        if is_new and type(result) is torch.Tensor and result.device.type in ("cpu", "cuda"):
            if not is_capturing(result.device):
                self._count(func, result, num_bytes)
        return result

    def _count(self, func: Any, tensor: torch.Tensor, num_bytes: int) -> None:
        """Counts a new tensor, and fills it from ``num_bytes`` on if it is within ``limit``."""
        self.count += 1
        if self.count == self._limit:
            self.origin = f"{func} at {_innermost_line()}"
        if self._limit is not None and self.count > self._limit:
            return
        if num_bytes:
            size, new = tensor.untyped_storage().nbytes() - num_bytes, tensor.new_empty(0, dtype=torch.uint8)
            new.set_(tensor.untyped_storage(), num_bytes, (size,)).fill_(self._value(new.dtype))  # type: ignore[call-overload]
            return
        with suppress(RuntimeError, TypeError):  # types without values, memory that overlaps itself
            tensor.fill_(self._value(tensor.dtype))

    def _value(self, dtype: torch.dtype) -> float:
        if dtype.is_floating_point or dtype.is_complex:
            return 0.75 if self._is_finite else math.nan
        largest = 1 if dtype == torch.bool else torch.iinfo(dtype).max
        return int(dtype != torch.bool) if self._is_finite else largest


def _innermost_line() -> str:
    """File and line of the innermost frame that belongs neither to PyTorch nor to this mode."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__ and not name.startswith(_TORCH) and frame.f_code.co_name not in _INTERPOSED:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "no line of Python (backward of an operator)"
