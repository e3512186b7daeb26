"""Whether a call of a linear layer of Transformer Engine is overlapped (part of feature ``tp``).

In FP8 the host is hardly ahead of the GPU, so what is asked at every call has to be short: a layer that is called as
before gets the answer that it got before. Imported only if Transformer Engine is installed.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch
from transformer_engine.pytorch.cpu_offload import is_cpu_offload_enabled
from transformer_engine.pytorch.export import is_in_onnx_export_mode
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

from ditron_train.megatron.shared.interfaces import unsupported_reason_otherwise
from ditron_train.megatron.tp.spec import Kind
from ditron_train.megatron.tp.te_coverage import (
    OFFLOADED,
    unsupported_reason_delayed,
    unsupported_reason_options,
    unsupported_reason_parameters,
)
from ditron_train.megatron.tp.te_fp8 import scaling_of, unsupported_reason_code, unsupported_reason_recipe
from ditron_train.policy import Answer, gate, log_native
from ditron_train.policy.gate import INTERFACE_ERRORS, key_of
from ditron_train.runtime.device import is_capturing

#: Of a layer: what its last answer depended on, and where the gate keeps it; None: it is not covered.
_known: weakref.WeakKeyDictionary[Any, tuple[tuple[Any, ...], tuple[Hashable, ...] | None]]
_known = weakref.WeakKeyDictionary()


def unsupported_reason_now(layer: Any, x: torch.Tensor) -> str | None:
    """Why a call of a layer runs natively, by its options and by what is switched on in the process, or None."""
    reason = unsupported_reason_options(layer, x)
    if reason is None and is_cpu_offload_enabled():
        reason = OFFLOADED
    if reason is None and (is_in_onnx_export_mode() or layer.is_debug_iter() or layer.fsdp_group is not None):
        reason = "ONNX export, debugging or FSDP scattering is on"
    return reason


def unsupported_reason_covered(layer: Any, x: torch.Tensor) -> str | None:
    """What Transformer Engine would do in this call that the op does not do, or would not do that it does."""
    try:
        if (
            FP8GlobalStateManager.is_fp8_enabled()
            or FP8GlobalStateManager.is_fp8_calibration()
            or layer.primary_weights_in_fp8
        ):
            return "the layer computes in FP8"
        return unsupported_reason_now(layer, x)
    except INTERFACE_ERRORS as error:
        return unsupported_reason_otherwise("Transformer Engine", error)


def unsupported_reason_fp8(layer: Any, x: torch.Tensor) -> str | None:
    """Why a call of a layer that computes in FP8 runs natively, or None."""
    if _is_unusual(x):
        return "FP8 is calibrated or captured"
    recipe = FP8GlobalStateManager.get_fp8_recipe()
    reason = unsupported_reason_recipe(recipe)
    if reason is None and layer.primary_weights_in_fp8:
        reason = unsupported_reason_parameters([one.__name__ for one in type(recipe).__mro__])
    if reason is not None:
        return reason
    if torch.is_autocast_enabled(x.device.type):
        return "autocast is on"
    return (
        unsupported_reason_now(layer, x)
        or unsupported_reason_delayed(layer)
        or unsupported_reason_code(layer.__class__)
    )


def _is_unusual(x: torch.Tensor) -> bool:
    is_captured = FP8GlobalStateManager.fp8_graph_capturing() or is_capturing(x.device)  # by TE, or by Megatron
    return bool(FP8GlobalStateManager.is_fp8_calibration() or is_captured)


def _state(layer: Any, x: torch.Tensor) -> tuple[Any, ...]:
    """All that changes between calls of a layer and that its answer depends on, recipes in place, too. What a layer
    is made with stays: userbuffers, weights in FP8, whether it returns what it has normalised."""
    weight, recipe = layer.weight, FP8GlobalStateManager.get_fp8_recipe()
    return (
        x.shape,
        x.dtype,
        x.device,
        id(weight),
        weight.shape,
        [None if one is None else one.dtype for one in vars(layer)["_parameters"].values()],
        weight.requires_grad,
        layer.te_quant_params is None,
        layer.parallel_mode,
        layer.tp_group,
        layer.fsdp_group is None,
        layer.wgrad_store.delay_wgrad_compute(),
        layer.is_debug_iter(),
        torch.is_autocast_enabled(x.device.type),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        is_cpu_offload_enabled(),
        is_in_onnx_export_mode(),
        type(recipe),
        list(vars(recipe).items()),
    )


def answer_in_fp8(layer: Any, kind: Kind, x: torch.Tensor) -> Answer | None:
    """The answer with the context to run this call of a layer in FP8 with, or None to run natively.

    Raises:
        MismatchError: The ranks' calls differ in shapes, types or recipes.
    """
    try:
        answer, requested = _answer(layer, kind, x)
    except INTERFACE_ERRORS as error:
        log_native(f"tp {kind} (TE, FP8)", unsupported_reason_otherwise("Transformer Engine", error))
        return None
    return answer if requested is None else _route(layer, *requested)


def _answer(layer: Any, kind: Kind, x: torch.Tensor) -> tuple[Answer | None, tuple[Any, ...] | None]:
    """The same if this rank knows it by itself, or what the gate is to be asked."""
    if _is_unusual(x):
        log_native(f"tp {kind} (TE, FP8)", str(unsupported_reason_fp8(layer, x)))
        return None, None
    state, known = _state(layer, x), _known.get(layer)
    if known is not None and known[0] == state:
        if known[1] is None:
            return None, None
        answer = gate.recall(known[1])
        if answer is not None:
            return (answer if answer.is_fused else None), None
    reason = unsupported_reason_fp8(layer, x)
    if reason is not None:
        _known[layer] = state, None
        log_native(f"tp {kind} (TE, FP8)", reason)
        return None, None
    return None, (*_asked(layer, kind, x), state)


def _asked(layer: Any, kind: Kind, x: torch.Tensor) -> tuple[Any, Any]:
    """The op and the call of it."""
    from ditron_train.megatron.tp.fp8_spec import FP8_COLUMN, FP8_ROW, Fp8Call

    recipe, weight = FP8GlobalStateManager.get_fp8_recipe(), layer.weight
    grad_format = "E5M2" if recipe.fp8_format.name == "HYBRID" else "E4M3"
    what = (grad_format, not weight.requires_grad, scaling_of(recipe), type(recipe).__name__)
    has_bias = bool(kind == "column" and layer.use_bias and layer.apply_bias)
    return FP8_COLUMN if kind == "column" else FP8_ROW, Fp8Call(x, weight, layer.tp_group, *what, has_bias)


def _route(layer: Any, spec: Any, call: Any, state: tuple[Any, ...]) -> Answer | None:
    """What the gate says; all ranks ask it."""
    if not gate.knows(spec, call):
        spec.check_ranks_agree(call)
    answer = gate.answer_for(spec, call)
    _known[layer] = state, key_of(spec, call)
    return answer if answer.is_fused or answer.observer is not None else None
