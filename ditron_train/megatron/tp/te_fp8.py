"""Transformer Engine's tensor parallel linear layers in FP8 (part of feature ``tp``).

In FP8 a layer is more than its products: quantizers, scales, amax histories, copies of weights that are kept between
microbatches, who updates what behind which backward. All of that is left to Transformer Engine: the code of its own
layers runs, in a copy in which its three functions that communicate and multiply are replaced (``te_passes``). A
version whose code calls others runs natively.

Imported only where Transformer Engine is installed.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import torch

from ditron_train.megatron.shared.other_names import called, with_names
from ditron_train.megatron.tp import te_passes
from ditron_train.megatron.tp.spec import Kind
from ditron_train.runtime.derivatives import refuse_second_derivatives
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.tp.context import TPContext

__all__ = ["overlapped_base", "overlapping", "why_not_code"]


class _Layer(NamedTuple):
    """Where a layer's call runs."""

    kind: Kind
    context: TPContext


_standing: set[type] = set()  # what ``overlapped_base`` has made
_chosen: ContextVar[_Layer | None] = ContextVar("ditron_train_te_layer", default=None)


@contextlib.contextmanager
def overlapping(kind: Kind, context: TPContext) -> Iterator[None]:
    """Inside, a layer on ``overlapped_base`` is overlapped in its forward, and later in its backward."""
    token = _chosen.set(_Layer(kind, context))
    try:
        yield
    finally:
        _chosen.reset(token)


def _native_layer(layer_class: type) -> type | None:
    """Transformer Engine's class among those that ``layer_class`` inherits from."""
    for owner in layer_class.__mro__:
        module = getattr(owner, "__module__", "")
        if module.startswith("transformer_engine.") and "forward" in vars(owner) and owner not in _standing:
            return owner
    return None


@cache
def why_not_code(layer_class: type) -> str | None:
    """Why the code of this Transformer Engine's layer cannot run with other functions, or None."""
    native: Any = _native_layer(layer_class)
    if native is None:
        return "it is no layer of Transformer Engine"
    function = getattr(importlib.import_module(native.__module__), f"_{native.__name__}", None)
    base = importlib.import_module("transformer_engine.pytorch.module.base").TransformerEngineBaseModule
    if function is None or not hasattr(base, "grad_output_preprocess"):
        return "this version of Transformer Engine has layers of another build"
    wanted = {
        native.forward: {function.__name__},
        function.forward: set(te_passes.STAND_INS),
        function.backward: {*te_passes.STAND_INS, "TransformerEngineBaseModule"},
        base.grad_output_preprocess: {"gather_along_first_dim"},
    }
    missing = sorted(name for code, names in wanted.items() for name in names - called(code))
    return f"this version of Transformer Engine does not call {', '.join(missing)}" if missing else None


def _function_of(native: type) -> type:
    """Transformer Engine's autograd function of a layer with the functions of the pass: a subclass."""
    module = importlib.import_module(native.__module__)
    function, base = getattr(module, f"_{native.__name__}"), module.TransformerEngineBaseModule
    preprocess = with_names(base.grad_output_preprocess, te_passes.STAND_INS)
    names = {**te_passes.STAND_INS, "TransformerEngineBaseModule": _Namespace(base, preprocess)}
    run_forward, run_backward = (with_names(code, names) for code in (function.forward, function.backward))

    class Overlapped(function):  # type: ignore[misc, valid-type]
        """Forward and backward are the code of the native one."""

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            chosen = _chosen.get()
            assert chosen is not None, "the layer's forward was called without ``overlapping``"
            if ctx is not None:  # None where no gradient is wanted
                ctx.ditron_layer = chosen
            with te_passes.passing(te_passes.forward_pass(*chosen)):
                return run_forward(ctx, *args)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            refuse_second_derivatives("a linear layer in FP8")
            active = te_passes.backward_pass(*ctx.ditron_layer, needs_dgrad=ctx.requires_dgrad)
            with te_passes.passing(active):
                return run_backward(ctx, *grads)

    return outside_compile(Overlapped)


class _Namespace:
    """``TransformerEngineBaseModule`` as the code of an autograd function asks for it."""

    def __init__(self, base: Any, grad_output_preprocess: Any) -> None:
        self._base, self.grad_output_preprocess = base, grad_output_preprocess

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


@cache
def _forward_of(native: type) -> Any:
    """The forward of a layer of Transformer Engine with ours for its autograd function."""
    return with_names(native.forward, {f"_{native.__name__}": _function_of(native)})  # type: ignore[attr-defined]


def overlapped_base(layer_class: type) -> type:
    """What a subclass of megatron-core's ``layer_class`` has behind it among its bases, so that it stands between
    megatron-core's forward and Transformer Engine's; a class without anything where that is not there."""
    native: Any = _native_layer(layer_class)
    if native is None:
        return type("NoTransformerEngine", (), {})

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = native.forward if _chosen.get() is None else _forward_of(native)
        return run(self, *args, **kwargs)

    # It stands for Transformer Engine's own forward, whose module it names.
    base = type(f"Overlapped{native.__name__}", (native,), {"forward": forward, "__module__": native.__module__})
    _standing.add(base)
    return base
