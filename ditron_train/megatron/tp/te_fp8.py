"""Transformer Engine's tensor parallel linear layers in FP8 (part of feature ``tp``).

In FP8 a layer is more than its products: quantizers, scales, amax histories, copies of weights that are kept between
microbatches, which state is updated after which backward. All of that is left to Transformer Engine: the code of its
own layers runs, in a copy in which its three functions that communicate and multiply are replaced (``te_passes``).
From 2.15 on ``Linear``'s passes are functions of its module, which are copied likewise; from 2.18 on each pass says
over which ranks a quantizer asks for the largest amax. A version whose code calls others runs natively.

Imported only if Transformer Engine is installed.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache
from typing import Any, Literal, NamedTuple

import torch

from ditron_train.megatron.shared.other_names import called, rebind_globals
from ditron_train.megatron.tp import te_block_passes, te_blocks, te_passes, te_tensor_passes
from ditron_train.megatron.tp.spec import Kind
from ditron_train.megatron.tp.te_coverage import FP8_RECIPES, unsupported_reason_recipe_name
from ditron_train.policy import CpuBound
from ditron_train.runtime.derivatives import refuse_second_derivatives
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.tp.context import TPContext

#: What a scale is for: a tensor, blocks with scales that are powers of two, or blocks with any scales.
Scaling = Literal["tensor", "block", "block fp32"]

*_PER_TENSOR, _BLOCKS = FP8_RECIPES


class _Layer(NamedTuple):
    """Where and how a tensor parallel layer's call runs."""

    kind: Kind
    context: TPContext
    scaling: Scaling
    features: tuple[int, int]
    cpu_bound: CpuBound | None

    def forward(self) -> te_passes.Pass | None:
        """What its forward communicates and multiplies by; None: natively."""
        return forward_pass(self.kind, self.context, self.scaling, self.features)

    def backward(self, needs_dgrad: bool) -> te_passes.Pass | None:
        """As ``forward``, of its backward."""
        if self.cpu_bound is not None:
            self.cpu_bound.look()
        return backward_pass(self.kind, self.context, self.scaling, self.features, needs_dgrad=needs_dgrad)


_INPUT = "inp"  # what Transformer Engine's autograd functions call a layer's input
_GIVES_GROUP = "set_quantizer_amax_reduction_group"  # from 2.18 on; before, a quantizer had its group once and for all

_standing: set[type] = set()  # what ``overlapped_base`` has made
_chosen: ContextVar[_Layer | None] = ContextVar("ditron_train_te_layer", default=None)


def _is_a(recipe: Any, *names: str) -> bool:
    """Whether a recipe is of one of these classes of Transformer Engine's; Megatron has subclasses of some."""
    return any(owner.__name__ in names for owner in type(recipe).__mro__)


def unsupported_reason_recipe(recipe: Any) -> str | None:
    """Why layers are not overlapped that compute in FP8 by this recipe of Transformer Engine's, or None."""
    if getattr(recipe, "backward_override", None) is not None:
        return "the backward is not in FP8 (backward_override)"
    if _is_a(recipe, *_PER_TENSOR):
        is_split = hasattr(recipe, "fp8_gemm_fprop") and recipe.fp8_gemm_fprop.use_split_accumulator
        return "the forward product has a split accumulator" if is_split else None
    if not _is_a(recipe, _BLOCKS):
        return unsupported_reason_recipe_name(type(recipe).__name__)
    if (recipe.x_block_scaling_dim, recipe.w_block_scaling_dim, recipe.grad_block_scaling_dim) != (1, 2, 1):
        return "blocks of another shape than 128 of inputs and gradients, 128 x 128 of weights"
    return te_blocks.unsupported_reason_form()


def scaling_of(recipe: Any) -> Scaling:
    """What a scale of a recipe is for that ``unsupported_reason_recipe`` has nothing against."""
    if not _is_a(recipe, _BLOCKS):
        return "tensor"
    params = (recipe.fp8_quant_fwd_inp, recipe.fp8_quant_fwd_weight, recipe.fp8_quant_bwd_grad)
    return "block" if all(param.power_2_scale for param in params) else "block fp32"


def _passes(scaling: Scaling) -> Any:
    return te_tensor_passes if scaling == "tensor" else te_block_passes


def forward_pass(
    kind: Kind, context: TPContext | None, scaling: Scaling = "tensor", features: tuple[int, int] = (0, 0)
) -> te_passes.Pass | None:
    """The forward of a layer with ``context`` and a weight of ``features``; None natively."""
    if context is None:
        return None
    passes = _passes(scaling)
    made: te_passes.Pass = (passes.ColumnForward if kind == "column" else passes.RowForward)(context)
    made.features = features
    return made


def backward_pass(
    kind: Kind,
    context: TPContext | None,
    scaling: Scaling = "tensor",
    features: tuple[int, int] = (0, 0),
    *,
    needs_dgrad: bool = True,
) -> te_passes.Pass | None:
    """The backward of a layer with ``context`` and a weight of ``features``; None natively."""
    if context is None:
        return None
    passes = _passes(scaling)
    made: te_passes.Pass = (
        passes.ColumnBackward(context) if kind == "column" else passes.RowBackward(context, needs_dgrad)
    )
    made.features = features
    return made


@contextlib.contextmanager
def overlapping(
    kind: Kind,
    context: TPContext,
    scaling: Scaling = "tensor",
    features: tuple[int, int] = (0, 0),
    cpu_bound: CpuBound | None = None,
) -> Iterator[None]:
    """Inside, a layer on ``overlapped_base`` is overlapped in its forward, and later in its backward, at which
    ``cpu_bound`` looks, too."""
    token = _chosen.set(_Layer(kind, context, scaling, features, cpu_bound))
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


def _arguments(function: Any) -> list[str]:
    """What autograd passes to a function, by name; the first of its forward's is the context."""
    return list(inspect.signature(function.forward).parameters)[1:]


@cache
def unsupported_reason_code(layer_class: type) -> str | None:
    """Why the code of this Transformer Engine's layer cannot run with other functions, or None."""
    native: Any = _native_layer(layer_class)
    if native is None:
        return "it is no layer of Transformer Engine"
    function = getattr(importlib.import_module(native.__module__), f"_{native.__name__}", None)
    base = importlib.import_module("transformer_engine.pytorch.module.base").TransformerEngineBaseModule
    if function is None or not hasattr(base, "grad_output_preprocess") or _INPUT not in _arguments(function):
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
    preprocess = rebind_globals(base.grad_output_preprocess, te_passes.STAND_INS)
    names = {**te_passes.STAND_INS, "TransformerEngineBaseModule": _Namespace(base, preprocess)}
    if hasattr(module, _GIVES_GROUP):
        names[_GIVES_GROUP] = te_passes.giving_group(getattr(module, _GIVES_GROUP))
    run_forward, run_backward = (rebind_globals(code, names) for code in (function.forward, function.backward))
    place = _arguments(function).index(_INPUT)

    class Overlapped(function):  # type: ignore[misc, valid-type]
        """Forward and backward are the code of the native one."""

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            chosen = _chosen.get()
            assert chosen is not None, "the layer's forward was called without ``overlapping``"
            if ctx is not None:  # None if no gradient is wanted
                ctx.ditron_layer = chosen
            with te_passes.passing(chosen.forward()):
                return run_forward(ctx, *args)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            refuse_second_derivatives("a linear layer in FP8")
            # Where Transformer Engine keeps the same differs from version to version.
            with te_passes.passing(ctx.ditron_layer.backward(ctx.needs_input_grad[place])):
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
    """The forward of a layer of Transformer Engine with the fused path for its autograd function."""
    return rebind_globals(native.forward, {f"_{native.__name__}": _function_of(native)})  # type: ignore[attr-defined]


def overlapped_base(layer_class: type) -> type:
    """What a subclass of megatron-core's ``layer_class`` inherits from last, so that it comes between
    megatron-core's forward and Transformer Engine's; an empty class if that is not there."""
    native: Any = _native_layer(layer_class)
    if native is None:
        return type("NoTransformerEngine", (), {})

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A result or a gradient that is quantized is multiplied otherwise; Megatron asks for none.
        is_native = _chosen.get() is None or kwargs.get("fp8_output") or kwargs.get("fp8_grad")
        return (native.forward if is_native else _forward_of(native))(self, *args, **kwargs)

    # It stands for Transformer Engine's own forward, whose module it names.
    base = type(f"Overlapped{native.__name__}", (native,), {"forward": forward, "__module__": native.__module__})
    _standing.add(base)
    return base
