"""What the installed Triton's launcher gives the driver, so that a launch can be repeated without the launcher.

The function of C behind Triton's wrappers takes its arguments in an order that is Triton's own and changes from
version to version: 3.6 wants them one by one, 3.7 a tuple of them behind annotations and a signature. So nobody here
knows that order: Triton's own launcher runs once with a function in the place of that of C, and what it is given is
kept.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch

_STREAM = 0x5EA_0F_57_EA5  # stands for the stream while a call is recorded: no other argument has its identity

_PLAIN = (int, float, bool, str)  # what most arguments are


class RecordedCall(NamedTuple):
    """One launch as the driver's function takes it.

    Attributes:
        launch: The function of C.
        before: Its arguments in front of the stream.
        after: Its arguments behind the stream.
    """

    launch: Callable[..., Any]
    before: tuple[Any, ...]
    after: tuple[Any, ...]


class _Standing:
    """A compiled kernel whose launcher is another one; everything else is the kernel's."""

    def __init__(self, compiled: Any, run: Any) -> None:
        self._compiled, self.run = compiled, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def launch_metadata(self, *arguments: Any) -> None:
        """None: it is made for hooks alone."""


def compiled_kernel(launched: Any) -> Any:
    """The compiled kernel of what a launch gave back: inside ``AsyncCompileMode`` Triton 3.9 gives a promise of it."""
    from triton import FutureKernel

    return launched.result() if isinstance(launched, FutureKernel) else launched


def has_launch_hooks() -> bool:
    """Whether somebody wants to hear of launches: a profiler."""
    return any(getattr(hook, "calls", hook) for hook in _hooks())


def _hooks() -> list[Any]:
    import triton

    runtime = triton.knobs.runtime
    return [getattr(runtime, name, None) for name in ("launch_enter_hook", "launch_exit_hook")]


class CallRecorder:
    """Records launches of one compiled kernel: what every launch needs is taken apart once.

    Made by ``recorder_of``.
    """

    def __init__(
        self,
        compiled: Any,
        num_programs: int,
        launch: Callable[..., Any],
        recording: Callable[..., Any],
        calls: list[Any],
    ) -> None:
        recorder = copy.copy(compiled.run)
        recorder.launch = recording
        self._launch, self._calls = launch, calls
        self._run = type(compiled).__getitem__(_Standing(compiled, recorder), (num_programs, 1, 1))

    def __call__(self, arguments: tuple[Any, ...]) -> RecordedCall | None:
        """What a launch with ``arguments`` gives the driver; None if somebody wants to hear of launches, or the
        stream has no place of its own.

        Nothing is launched. Descriptors are encoded once, and tensors, those of tuples too, are given as their
        addresses: nothing here keeps memory alive.
        """
        if has_launch_hooks():
            return None
        stream = int(str(_STREAM))  # an object of its own
        self._run(*arguments, stream=stream)
        given = self._calls.pop()
        places = [index for index, value in enumerate(given) if value is stream]
        if len(places) != 1:
            return None
        hooks = _hooks()
        kept = tuple(_as_address(value, hooks) for value in given)
        return RecordedCall(self._launch, kept[: places[0]], kept[places[0] + 1 :])


def recorder_of(compiled: Any, num_programs: int) -> CallRecorder | None:
    """Records launches of ``compiled``; None if this Triton's launcher is of a kind that cannot be recorded, or
    does more at each launch than to call the driver."""
    run = compiled.run
    if getattr(run, "gsan_enabled", False):
        return None
    if getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1):  # allocated at each launch
        return None
    calls: list[tuple[Any, ...]] = []
    found = _with_another_end(getattr(run, "launch", None), lambda *given: calls.append(given))
    return None if found is None else CallRecorder(compiled, num_programs, *found, calls)


def _with_another_end(launch: Any, end: Callable[..., None]) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """(the function of C, ``launch`` with ``end`` in its place); None if ``launch`` is neither the function itself
    nor one closure around it."""
    if inspect.isbuiltin(launch):  # a kernel without descriptors
        return launch, end
    if not inspect.isfunction(launch):
        return None
    cells = launch.__closure__ or ()
    inner = [cell.cell_contents for cell in cells if inspect.isbuiltin(cell.cell_contents)]
    if len(inner) != 1:
        return None
    closure = tuple(CellType(end) if cell.cell_contents is inner[0] else cell for cell in cells)
    same = FunctionType(launch.__code__, launch.__globals__, launch.__name__, launch.__defaults__, closure)
    same.__kwdefaults__ = launch.__kwdefaults__
    return inner[0], same


def _as_address(value: Any, hooks: list[Any]) -> Any:
    """``value`` with tensors as their addresses and without ``hooks``, of which there are none that listen; a
    ``NamedTuple`` as a plain tuple, which the function of C takes apart sooner."""
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, (tuple, list)):
        kept = [_as_address(part, hooks) for part in value]
        return kept if isinstance(value, list) else tuple(kept)
    return None if any(value is hook for hook in hooks) else value
