"""Keeps torch.compile out of what ours do: code that a user has compiled around layers calls them as they are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["eager"]

_Function = TypeVar("_Function", bound=Callable)


def eager(function: _Function) -> _Function:
    """``function`` for callers that may be compiled: their graph ends in front of it, as at Transformer Engine's own layers.

    Ops talk to other ranks, keep addresses and launch kernels on streams of their own, which a compiler that looks into them does
    not see. Where it was never loaded (megatron-core does that on GPUs) there is nothing to keep out, and loading it takes seconds.
    """
    return torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function
