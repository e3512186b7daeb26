"""An attention's projections as megatron-core's local layers compute them (part of feature ``sp``)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from ditron_train.megatron.compat.config import unsupported_reason_weight
from ditron_train.megatron.shared.interfaces import unsupported_reason_otherwise
from ditron_train.megatron.shared.wgrad import NativeWgrad, bias_of
from ditron_train.megatron.sp.projections import Projections
from ditron_train.policy import log_native
from ditron_train.policy.gate import INTERFACE_ERRORS


def linears_of(layer: Any) -> Projections:
    """``LocalLinears``, or for Transformer Engine's layers ``TELinears``."""
    if isinstance(layer, RowParallelLinear) or not HAVE_TE:
        return LocalLinears()
    reason = _unsupported_reason_te()
    if reason is not None:  # its layers are none of the local kinds: native
        log_native("sp (TE)", reason)
        return LocalLinears()
    from ditron_train.megatron.sp.te_linears import TELinears

    return TELinears()


@functools.cache
def _unsupported_reason_te() -> str | None:
    """Why Transformer Engine's layers run natively, or None; asked once, since an import that fails is tried again
    each time."""
    try:
        from ditron_train.megatron.sp import te_linears  # noqa: F401
    except INTERFACE_ERRORS as error:
        return unsupported_reason_otherwise("Transformer Engine", error)
    return None


class LocalLinears(Projections):
    """The projections of the local spec."""

    qkv_kinds = (ColumnParallelLinear,)
    out_kind = RowParallelLinear

    def _unsupported_reason_qkv(self, layer: Any) -> str | None:
        if getattr(layer, "skip_bias_add", False) and layer.bias is not None:
            return "the bias of q, k and v is not added by their layer"
        if layer.disable_grad_reduce and not layer.sequence_parallel:
            return "the gradient of their input is added up elsewhere (disable_grad_reduce)"
        return unsupported_reason_weight(layer.weight)

    def _unsupported_reason_out(self, layer: Any) -> str | None:
        if (
            layer.explicit_expert_comm
            or not layer.input_is_parallel
            or layer.config._cpu_offloading_context is not None
        ):
            return "expert communication, an input that is not parallel, or CPU offloading is on"
        return unsupported_reason_weight(layer.weight)

    def _qkv_bias(self, layer: Any) -> torch.Tensor | None:
        return bias_of(layer.weight, layer.bias)

    def _wgrad(self, layer: Any) -> NativeWgrad:
        return NativeWgrad(layer.weight, layer.gradient_accumulation_fusion)

    def _with_bias(self, layer: Any, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if layer.skip_bias_add:
            return out, layer.bias
        return (out if layer.bias is None else out + layer.bias), None
