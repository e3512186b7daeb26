"""What the workers of ``test_walk`` run."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

import ditron_train
from ditron_train.tp import ag_gemm, column_linear, get_tp_context
from ditron_train.tp.choices import GatherPlan

PACKAGE = Path(ditron_train.__file__).parent


def walks_of_input(mode: str | None) -> list[list[str]]:
    """Of every call that is given ``ag_gemm``'s input, its address or a view of it: the files from the public function
    down to it, one after another. ``mode``: how ``ag_gemm`` moves rows; None: the function is ``column_linear``."""
    context = get_tp_context(dist.group.WORLD, torch.device("cpu"))
    x, weight = torch.ones(16, 32), torch.ones(32, 32)
    function, options = (column_linear, {}) if mode is None else (ag_gemm, {"plan": GatherPlan(mode, 1)})
    function(x, weight, context=context, **options)  # the first call of a shape prepares it
    walks: list[list[str]] = []

    def is_input(value: object) -> bool:
        if isinstance(value, (tuple, list)):
            return any(map(is_input, value))
        if isinstance(value, torch.Tensor):
            return value.untyped_storage().data_ptr() == x.data_ptr()
        return type(value) is int and value == x.data_ptr()

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or _file(frame) is None:
            return
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4)]
        if is_input([frame.f_locals.get(name) for name in names]):
            stack: list[str] = []
            below: FrameType | None = frame
            while below is not None and below.f_code is not walks_of_input.__code__:
                file = _file(below)
                stack += [file] if file is not None and file not in stack[-1:] else []
                below = _caller(below)
            walks.append(stack[::-1])

    sys.setprofile(watch)
    try:
        function(x, weight, context=context, **options)
    finally:
        sys.setprofile(None)
    return walks


def _caller(frame: FrameType) -> FrameType | None:
    """Who called; of a callback that a caller further up wrote, that one."""
    caller = frame.f_back
    if frame.f_code.co_flags & inspect.CO_NESTED:
        while caller is not None and caller.f_code.co_filename != frame.f_code.co_filename:
            caller = caller.f_back
    return caller


def _file(frame: FrameType) -> str | None:
    """In the package; None of other code."""
    path = Path(frame.f_code.co_filename)
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else None
