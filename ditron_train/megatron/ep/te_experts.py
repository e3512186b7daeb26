"""Transformer Engine's grouped experts without a host sync (part of feature ``ep``, with ``DITRON_EP_CAPACITY``), and
with grouped quantization of a layer in FP8.

``TEGroupedMLP`` passes what it gets as ``tokens_per_expert`` through ``tolist()`` to its two grouped linear layers.
With a capacity these counts exist on the device alone: ``DeviceCounts`` takes the place of the list, and the linear
layers run our grouped GEMMs for it. Imported only if Transformer Engine is installed.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEColumnParallelGroupedLinear, TERowParallelGroupedLinear
from megatron.core.transformer.moe.experts import TEGroupedMLP
from transformer_engine.pytorch.cpu_offload import is_cpu_offload_enabled
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

from ditron_train.ep import EPHandle
from ditron_train.ep.dispatcher import group_linear
from ditron_train.ep.gemm_combine import layout_tiles
from ditron_train.ep.grouped_gemm import RowTiles, are_whole
from ditron_train.ep.plan import triton_wgrad_has_native_bits
from ditron_train.megatron.compat.config import unsupported_reason_grouped_layer
from ditron_train.megatron.ep.coverage import unsupported_reason_fp8_options, unsupported_reason_fp8_recipe
from ditron_train.megatron.ep.experts import (
    DitronTEGroupedMLP,
    experts_group,
    triton_wgrad_into,
    unsupported_reason_called,
    unsupported_reason_options,
)
from ditron_train.megatron.ep.fp8_rows_spec import FP8_ROWS, Fp8RowsCall
from ditron_train.megatron.ep.te_quantise import (
    LOG_NAME,
    RowsKind,
    grouped_base,
    grouped_quantization,
    unsupported_reason_code,
)
from ditron_train.megatron.shared.in_place import EqualsBaseClass
from ditron_train.megatron.shared.interfaces import computes_in_fp8, unsupported_reason_otherwise
from ditron_train.policy import gate, log_native
from ditron_train.policy.gate import INTERFACE_ERRORS
from ditron_train.runtime.device import is_capturing
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.runtime.settings import get_settings

_GROUPED_BASE: Any = grouped_base()


class DeviceCounts:
    """Rows of each local expert of one handle, known on the device alone."""

    def __init__(self, handle: EPHandle) -> None:
        self._handle = handle

    def tolist(self) -> DeviceCounts:
        """Itself: there is no list to be had without a host sync."""
        return self

    @property
    def tiles(self) -> RowTiles:
        """The tiles of the rows."""
        return layout_tiles(self._handle)


def _grouped_kinds(linear: Any, x: torch.Tensor) -> frozenset[RowsKind]:
    """Which rows a layer in FP8 quantises for all experts at once: those that are covered, with Transformer Engine's
    bits, and faster."""
    group = experts_group()
    if group is None or not _asks_for_rows(os.environ.get("DITRON_FP8_ROWS")):
        return frozenset()
    try:
        reason, calls = _asked(linear, x, group)
    except INTERFACE_ERRORS as error:
        reason, calls = unsupported_reason_otherwise("Transformer Engine", error), []
    if reason is not None:
        log_native(LOG_NAME, reason)
    return frozenset(call.kind for call in calls if gate.is_fused(FP8_ROWS, call))


def _asked(linear: Any, x: torch.Tensor, group: Any) -> tuple[str | None, list[Fp8RowsCall]]:
    """Why rows are quantised natively, or None; the rows, and the gradients of results, that the policy is asked
    about: those that a step of training quantises with their transposes."""
    reason = unsupported_reason_grouped_layer(linear) or _unsupported_reason_fp8(linear, x.device)
    if reason is not None or not torch.is_grad_enabled():
        return reason, []
    recipe = FP8GlobalStateManager.get_fp8_recipe()
    grad_format = "E5M2" if recipe.fp8_format.name == "HYBRID" else "E4M3"
    n, k = linear.weight0.shape
    sides = ((k, "E4M3", recipe.fp8_quant_fwd_inp, n), (n, grad_format, recipe.fp8_quant_bwd_grad, k))
    kinds = [(RowsKind(own, name, side.power_2_scale, side.amax_epsilon), other) for own, name, side, other in sides]
    return None, [
        Fp8RowsCall(x, linear.num_gemms, group, kind, width, are_grads=bool(place))
        for place, (kind, width) in enumerate(kinds)
    ]


@cache
def _asks_for_rows(setting: str | None) -> bool:
    """``setting``: of the environment, so that another one is asked anew."""
    return get_settings().fp8_rows == "on"


def _unsupported_reason_fp8(linear: Any, device: torch.device) -> str | None:
    is_captured = FP8GlobalStateManager.fp8_graph_capturing() or is_capturing(device)
    if FP8GlobalStateManager.is_fp8_calibration() or is_captured:
        return "FP8 is calibrated or captured"
    recipe = FP8GlobalStateManager.get_fp8_recipe()
    if getattr(recipe, "backward_override", None) is not None:
        return "the backward is not in FP8 (backward_override)"
    is_plain = linear.te_quant_params is None and not linear.use_bias and not is_cpu_offload_enabled()
    reason = unsupported_reason_fp8_options(is_plain=is_plain, has_fp8_parameters=linear.primary_weights_in_fp8)
    names = [one.__name__ for one in type(recipe).__mro__]  # Megatron has subclasses of some
    reason = reason or unsupported_reason_fp8_recipe(names)
    if reason is not None:
        return reason
    if hasattr(recipe, "fp8_gemm_fprop") and recipe.fp8_gemm_fprop.use_split_accumulator:
        return "the forward product has a split accumulator"
    if torch.is_autocast_enabled(device.type):
        return "autocast is on"
    return unsupported_reason_code()


@outside_compile
class _TakesDeviceCounts:
    """Mixed into a grouped linear layer: our grouped GEMM for ``DeviceCounts``, the inherited one for a list."""

    num_gemms: int

    def forward(self, x: torch.Tensor, m_splits: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not isinstance(m_splits, DeviceCounts):
            is_fp8 = computes_in_fp8(FP8GlobalStateManager)
            with grouped_quantization(_grouped_kinds(self, x) if is_fp8 else frozenset()):
                return super().forward(x, m_splits)  # type: ignore[misc]
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        return group_linear(x, weights, m_splits.tiles, triton_wgrad_into(self)), None


class DitronTEColumnParallelGroupedLinear(
    _TakesDeviceCounts,
    TEColumnParallelGroupedLinear,
    _GROUPED_BASE,
    metaclass=EqualsBaseClass,
    native=TEColumnParallelGroupedLinear,
):
    """First linear layer of the experts."""


class DitronTERowParallelGroupedLinear(
    _TakesDeviceCounts,
    TERowParallelGroupedLinear,
    _GROUPED_BASE,
    metaclass=EqualsBaseClass,
    native=TERowParallelGroupedLinear,
):
    """Second linear layer of the experts."""


def class_map() -> dict[type, type]:
    """Transformer Engine's grouped experts and their linear layers, and the fused path."""
    return {
        TEGroupedMLP: DitronTEGroupedMLP,
        TEColumnParallelGroupedLinear: DitronTEColumnParallelGroupedLinear,
        TERowParallelGroupedLinear: DitronTERowParallelGroupedLinear,
    }


def unsupported_reason_capacity(experts: Any) -> str | None:
    """Why these experts need exact sizes on the host, or None."""
    reason = unsupported_reason_called(experts)
    if reason is not None:
        return reason
    for layer in (experts.linear_fc1, experts.linear_fc2):
        if not isinstance(layer, _TakesDeviceCounts):
            return f"{type(layer).__name__} takes its sizes on the host"
    config = experts.config
    reason = unsupported_reason_options(config)
    if reason is not None:
        return reason
    if config.gradient_accumulation_fusion and get_settings().policy in ("strict", "bits"):
        return "gradient_accumulation_fusion is on, and bits of gradients added in fp32 are not known to be native's"
    # Copies to the CPU run on other streams, which the results' memory does not know.
    if config.cpu_offloading or experts.offload_expert_fc1 or experts.offload_moe_act:
        return "activations are offloaded"
    if config.params_dtype not in (torch.bfloat16, torch.float16):
        return f"{config.params_dtype} is not covered"
    for layer in (experts.linear_fc1, experts.linear_fc2):
        if not are_whole(layer.weight0.shape, config.params_dtype):
            return f"rows of weights {tuple(layer.weight0.shape)} or of their results are not whole 16 bytes"
        if get_settings().policy != "force" and not triton_wgrad_has_native_bits(*layer.weight0.shape):
            return (
                f"weights {tuple(layer.weight0.shape)} are so small that cuBLAS may add up their gradients in another "
                "order"
            )
    return None
