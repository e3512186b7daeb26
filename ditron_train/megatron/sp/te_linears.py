"""An attention's projections as Transformer Engine's layers compute them (part of feature ``sp``).

Imported only if Transformer Engine is installed.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
)

from ditron_train.megatron.shared.te_wgrad import TELinearWgrad, wgrad_of
from ditron_train.megatron.sp.projections import Projections
from ditron_train.megatron.tp.te_coverage import unsupported_reason_delayed
from ditron_train.megatron.tp.te_layers import normalised
from ditron_train.megatron.tp.te_routes import unsupported_reason_covered


class TELinears(Projections):
    """The projections of Transformer Engine's spec."""

    qkv_kinds = (TEColumnParallelLinear, TELayerNormColumnParallelLinear)
    out_kind = TERowParallelLinear
    rounds_bias_once = True

    def _unsupported_reason_qkv(self, layer: Any) -> str | None:
        return "the bias of q, k and v is not added by their layer" if layer.te_return_bias else None

    def _unsupported_reason_out(self, layer: Any) -> str | None:
        kind = layer.symmetric_ar_type
        if kind is not None and layer.tp_size > 1 and not layer.sequence_parallel:
            return f"symmetric_ar_type is {kind}, which adds up over tensor parallel ranks in an order of its own"
        return None

    def _unsupported_reason_layer(self, layer: Any, x: torch.Tensor) -> str | None:
        return unsupported_reason_covered(layer, x) or unsupported_reason_delayed(layer)

    def _qkv_input(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return normalised(layer, x) if isinstance(layer, TELayerNormColumnParallelLinear) else x

    def _qkv_bias(self, layer: Any) -> torch.Tensor | None:
        return layer.bias if layer.use_bias and layer.apply_bias else None

    def _wgrad(self, layer: Any) -> TELinearWgrad:
        return wgrad_of(layer)

    def _with_bias(self, layer: Any, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if layer.gemm_bias_unfused_add:
            out = out + layer.bias
        return out, layer.bias if layer.te_return_bias else None
