"""Ops of which a kernel is refused, as when memory runs out: each launch in turn, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from ditron_train.runtime.launch import KernelLaunch


class Refused(RuntimeError):
    """Stands for ``torch.OutOfMemoryError``."""


def check_refused_launches(context: Any, call: Callable[[int], Sequence[torch.Tensor]]) -> int:
    """Whatever launch of ``call(repeat)`` is refused: the streams are joined behind it, and the next call is right.
    Returns how many launches a call has.

    ``call`` gives the same results on each repeat, of memory of its own.
    """
    expected = [tensor.clone() for tensor in call(0)]
    state = {"is_forked": False, "left": -1}
    launch, fork, join = KernelLaunch.__call__, context.fork, context.join

    def counted(self: KernelLaunch, *arguments: Any, **more: Any) -> None:
        if state["left"] == 0:
            state["left"] = -1
            raise Refused
        state["left"] -= 1
        launch(self, *arguments, **more)

    def noted_fork() -> Any:
        state["is_forked"] = True
        return fork()

    def noted_join() -> None:
        state["is_forked"] = False
        join()

    with mock.patch.object(KernelLaunch, "__call__", counted):
        with mock.patch.object(context, "fork", noted_fork), mock.patch.object(context, "join", noted_join):
            for number in range(20):
                state["left"] = number
                try:
                    call(2 * number + 1)
                except Refused:
                    assert not state["is_forked"], f"launch {number} was refused"
                    state["left"] = -1
                    found = call(2 * number + 2)
                    assert not state["is_forked"]
                    assert all(map(torch.equal, found, expected)), f"after launch {number} was refused"
                else:
                    return number
    raise AssertionError("more launches than these ops have")
