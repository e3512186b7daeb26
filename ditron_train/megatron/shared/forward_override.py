"""Replaces the forward of a module without changing its class."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: Where the forwards are that the fused ones know. Not all of megatron-core: for inference, and for attentions of
#: other kinds, it has subclasses of these layers whose forwards do more.
_KNOWN = (
    "megatron.core.tensor_parallel.layers",
    "megatron.core.extensions.transformer_engine",
    "megatron.core.transformer.moe.experts",
    "megatron.core.transformer.dot_product_attention",
    "transformer_engine.",
    "ditron_train.",
)


def signed_as(native: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Decorates an override that passes on whatever it is called with: tools see the signature of ``native``."""

    def sign(function: _Function) -> _Function:
        function.__signature__ = inspect.signature(native)  # type: ignore[attr-defined]
        return function

    return sign


@contextlib.contextmanager
def calling(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[torch.nn.Module]:
    """``module`` with another ``forward``: called inside, its hooks run (a distributed optimizer gathers weights in
    them)."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield module
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def unsupported_reason_stand_in(module: torch.nn.Module) -> str | None:
    """Why the forward of ``module`` may not be replaced, or None: an adapter, a quantizer or a subclass has put
    one of its own there, which would not be called."""
    methods = (getattr(type(module), name, None) for name in ("forward", "_forward_impl"))
    known = all(getattr(method, "__module__", "").startswith(_KNOWN) for method in methods if method is not None)
    return None if known and "forward" not in vars(module) else f"{type(module).__name__} has a forward of its own"
