"""Keeps ``torch.compile`` out of layers and ops: in compiled programs they run as they are written.

They exchange addresses, count epochs and launch kernels on streams of their own, which a compiler that looks into them
does not see. Transformer Engine's layers end a graph in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

_Target = TypeVar("_Target", bound=Callable[..., Any])

_REASON = "ditron_train keeps memory, streams and counts of its own in it"

# What ``torch.compiler.disable`` does costs a wrapper around every call, and seconds to load the compiler. Its parts
# do not: the mark ends a graph in front of a call, and the code's own strategy keeps the compiler off while it runs,
# and from what it calls.
_frames = torch._C._dynamo.eval_frame
_LEFT_ALONE = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


def outside_compile(target: _Target) -> _Target:
    """``target``, a function or a class with the functions that it defines, called as it is by code that is compiled
    around it.

    Nothing is wrapped: calls from code that is not compiled cost what they did. What ``target`` calls is not compiled
    either, but for functions that are compiled themselves. Wrappers made by decorators share their code with others
    and go on top.
    """
    if isinstance(target, type):
        for member in vars(target).values():
            function = getattr(member, "__func__", member)  # of static methods and class methods
            if isinstance(function, FunctionType) and not hasattr(function, "__wrapped__"):
                outside_compile(function)
        return target
    assert not hasattr(target, "__wrapped__"), f"{target.__qualname__} is a wrapper"
    target._torchdynamo_disable = True  # type: ignore[attr-defined]
    target._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    _frames.set_code_exec_strategy(target.__code__, _LEFT_ALONE)
    return target
