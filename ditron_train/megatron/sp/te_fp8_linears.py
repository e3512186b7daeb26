"""An attention's projections where Transformer Engine's layers compute in FP8 (part of feature ``sp``).

The QKV projection is fused with its exchange (``te_fp8_passes``). The output projection computes natively behind the
exchange: its input is quantized when all of it has arrived. Imported only where Transformer Engine is installed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

from ditron_train.megatron.shared.interfaces import why_otherwise
from ditron_train.megatron.sp.coverage import why_not_fp8_norms, why_not_fp8_out, why_not_fp8_qkv
from ditron_train.megatron.sp.exchange import AttentionShape
from ditron_train.megatron.sp.fp8_spec import FP8_PROJECTION, Fp8ProjectionCall
from ditron_train.megatron.sp.hooks import why_not_hooks_of_out
from ditron_train.megatron.sp.te_fp8_passes import qkv_in_heads
from ditron_train.megatron.sp.te_linears import TELinears
from ditron_train.megatron.tp.te_fp8 import scaling_of
from ditron_train.megatron.tp.te_routes import why_not_fp8
from ditron_train.policy import gate
from ditron_train.policy.gate import INTERFACE_ERRORS
from ditron_train.sp import LateWgrad, SPContext, sequence_exchange
from ditron_train.sp.head_norms import Norms

__all__ = ["Fp8Linears"]


class Fp8Linears(TELinears):
    """The projections of Transformer Engine's spec in FP8."""

    def why_not(self, qkv: Any, out: Any, x: torch.Tensor) -> str | None:
        """See `Projections`."""
        if "forward" in vars(out):
            return "the output projection has a forward of its own"
        return self.why_not_front(qkv, x) or why_not_hooks_of_out(out)

    def why_not_norms(self, norms: Norms) -> str | None:
        """See `Projections`."""
        return why_not_fp8_norms(has_norms=bool(norms))

    def why_not_out(self, out: Any, x: torch.Tensor) -> str | None:
        """See `Projections`."""
        return why_not_fp8_out()

    def _why_not_layer(self, layer: Any, x: torch.Tensor) -> str | None:
        try:
            reason = why_not_fp8(layer, x)
            if reason is None:
                scaling = scaling_of(FP8GlobalStateManager.get_fp8_recipe())
                reason = why_not_fp8_qkv(has_blocks=scaling != "tensor")
        except INTERFACE_ERRORS as error:
            reason = why_otherwise("Transformer Engine", error)
        return reason

    def route(
        self,
        group: dist.ProcessGroup,
        shape: AttentionShape,
        input_shape: tuple[int, ...],
        layers: tuple[Any, Any],
        like: torch.Tensor,
        norms: Norms = (),
    ) -> SPContext | None:
        """See `Projections`."""
        qkv, _ = layers
        has_bias = bool(qkv.use_bias and qkv.apply_bias)
        call = Fp8ProjectionCall(group, shape, (input_shape[0], input_shape[1]), like, qkv.weight, has_bias)
        return gate.context_for(FP8_PROJECTION, call)

    def project_qkv(
        self,
        layer: Any,
        x: torch.Tensor,
        context: SPContext,
        shape: AttentionShape,
        row_table: torch.Tensor | None = None,
        late: LateWgrad | None = None,
        norms: Norms = (),
    ) -> tuple[torch.Tensor, ...]:
        """See `Projections`."""
        gathers = layer.sequence_parallel and layer.tp_size > 1
        lead = (x.shape[0] * (layer.tp_size if gathers else 1), x.shape[1])
        layout = shape.qkv_layout(context.world_size)
        return qkv_in_heads(layer, x, lead, context=context, layout=layout, row_table=row_table)

    def project_out(
        self,
        layer: Any,
        attended: torch.Tensor,
        context: SPContext,
        shape: AttentionShape,
        row_table: torch.Tensor | None = None,
        late: LateWgrad | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Projections`."""
        layout = shape.output_layout(context.world_size)
        (rows,) = sequence_exchange((attended,), context=context, layout=layout, row_table=row_table)
        found: tuple[torch.Tensor, torch.Tensor | None] = type(layer).forward(layer, rows.flatten(-2))
        return found
