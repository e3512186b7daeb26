"""Repeating one kernel launch cheaply.

Triton binds, specialises and hashes every argument at every launch, and compares the globals that a kernel read: 50 to
150 us of host time for a kernel with descriptors. A ``KernelLaunch`` goes that way once and then calls the compiled
kernel directly: what the specialisation depended on is remembered and compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ditron_train.runtime.device import is_interpreter

__all__ = ["KernelLaunch"]

_MAX_KEPT = 256  # an integer that differs from call to call would be kept for ever


def _specialization(arguments: tuple) -> tuple:
    """What Triton specialises on: alignment of addresses, values of integers (stricter than Triton: the value itself)."""
    key = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            key.append(argument.data_ptr() & 15)
        elif isinstance(argument, int):
            key.append(argument)
    return tuple(key)


class KernelLaunch:
    """One kernel with its grid and constants, launched again and again with arguments of one kind.

    Args:
        kernel: A ``@triton.jit`` function whose constexpr parameters come last.
        num_programs: Size of the one-dimensional grid.
        constants: Values of the constexpr parameters, in the kernel's order.
        num_warps: As in a Triton launch.
        num_stages: As in a Triton launch.
    """

    def __init__(
        self, kernel: Callable, num_programs: int, constants: dict[str, Any], *, num_warps: int = 4, num_stages: int = 3
    ) -> None:
        names = list(kernel.arg_names)
        assert names[len(names) - len(constants) :] == list(constants), f"{names} does not end with {list(constants)}"
        self._kernel = kernel
        self._num_programs = num_programs
        self._constants = constants
        self._options = {"num_warps": num_warps, "num_stages": num_stages}
        self._values = tuple(constants.values())
        self._compiled: dict[tuple, Any] = {}

    def __call__(self, *arguments: Any, stream: torch.cuda.Stream | None = None) -> None:
        """Launches on ``stream`` (default: the current stream of the current device)."""
        key = _specialization(arguments)
        compiled = self._compiled.get(key)
        if compiled is None:
            self._first(key, arguments, stream)
            return
        handle = stream.cuda_stream if stream is not None else _current_stream()
        compiled.run(
            self._num_programs, 1, 1, handle, compiled.function, compiled.packed_metadata, None, None, None,
            *arguments, *self._values,
        )  # fmt: skip

    def compile(self, *arguments: Any) -> None:
        """Compiles for such arguments without launching; inside ``triton``'s ``AsyncCompileMode`` it does not wait for it."""
        if not is_interpreter():
            self._kernel.warmup(*arguments, grid=(self._num_programs,), **self._constants, **self._options)

    @property
    def identity(self) -> tuple:
        """Kernel, constants and options: launches with the same one run the same code, but for what Triton specialises on."""
        return (self._kernel.__name__, *self._constants.items(), *self._options.items())

    def _first(self, key: tuple, arguments: tuple, stream: torch.cuda.Stream | None) -> None:
        """The launch through Triton, which compiles; the interpreter takes it every time."""
        if stream is None:
            compiled = self._kernel[(self._num_programs,)](*arguments, **self._constants, **self._options)
        else:
            with torch.cuda.stream(stream):
                compiled = self._kernel[(self._num_programs,)](*arguments, **self._constants, **self._options)
        if not is_interpreter() and _runs_directly(compiled):
            if len(self._compiled) >= _MAX_KEPT:
                self._compiled.clear()
            self._compiled[key] = compiled


def _current_stream() -> int:
    return torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())


def _runs_directly(compiled: Any) -> bool:
    """Whether this Triton's compiled kernel offers what ``__call__`` uses, and nobody has hooked launches."""
    import triton

    for name in ("launch_enter_hook", "launch_exit_hook"):
        hook = getattr(triton.knobs.runtime, name, None)
        if getattr(hook, "calls", hook):
            return False
    return all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata"))
