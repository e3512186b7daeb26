"""A QKV projection of Transformer Engine's in FP8 whose product goes to the ranks of its heads as it is computed (part
of feature ``sp``).

The code of Transformer Engine's own layer runs, and its forward product is a GEMM-A2A. What autograd passes on behind
the layer is a stand-in without values; the gradient that comes back to it is that of the product, exchanged. So what
is quantized, and when, is as natively. Imported only where Transformer Engine is installed.
"""

from __future__ import annotations

from typing import Any

import torch

from ditron_train.megatron.tp.te_fp8 import call_with
from ditron_train.megatron.tp.te_passes import Pass
from ditron_train.megatron.tp.te_tensor_passes import operands
from ditron_train.runtime.derivatives import refuse_second_derivatives
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.sp import HeadsLayout, SPContext, gather_sequence, gemm_a2a

__all__ = ["qkv_in_heads"]


class _QkvForward(Pass):
    """The product of one QKV layer, whose columns go to the ranks of their heads.

    Args:
        lead: Of the layer's input, ``[s / W, b]``.
        options: Context, layout and table of rows.
    """

    def __init__(self, lead: tuple[int, ...], options: dict[str, Any]) -> None:
        self.lead, self.options = lead, options
        self.parts: tuple[torch.Tensor, ...] = ()

    def multiply(self, weight: Any, rows: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """See `Pass`: the result is a stand-in of one element."""
        x, w, scales = operands(rows, weight)
        x = x.view(*self.lead, x.shape[-1])
        self.parts = gemm_a2a(x, w, scales=scales, bias=kwargs.get("bias"), **self.options)
        stand_in = torch.empty(1, dtype=kwargs["out_dtype"], device=x.device)
        return stand_in.expand(self.lead[0] * self.lead[1], w.shape[0]), None, None, None


class _QkvPasses:
    """See ``te_fp8.Passes``: the backward is native."""

    def __init__(self, forward: _QkvForward) -> None:
        self._forward = forward

    def forward(self) -> Pass:
        return self._forward

    def backward(self, needs_dgrad: bool) -> None:
        return None


@outside_compile
class _Parts(torch.autograd.Function):
    """q, k and v that a layer has computed in place of ``stand_in``; their gradients become that of the product."""

    @staticmethod
    def forward(ctx: Any, stand_in: torch.Tensor, forward: _QkvForward) -> tuple[torch.Tensor, ...]:
        ctx.options, ctx.shape = forward.options, stand_in.shape
        parts, forward.parts = forward.parts, ()
        return parts

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_derivatives("a QKV projection in FP8")
        # Where it lies the next op of the context writes: the layer's backward, next, quantizes it and needs it no
        # more.
        return gather_sequence(grads, meanwhile=lambda: None, **ctx.options).view(ctx.shape), None


def qkv_in_heads(
    layer: Any,
    x: torch.Tensor,
    lead: tuple[int, int],
    *,
    context: SPContext,
    layout: HeadsLayout,
    row_table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """q, k and v of this rank's heads, [s, b, heads, d], by a layer whose ``te_fp8.why_not_code`` is None.

    Args:
        layer: Without a bias that it returns.
        x: Its input.
        lead: Leading dimensions of what it multiplies, ``[s / W, b]``.
        context: Of the context parallel group.
        layout: Columns of one rank.
        row_table: As of ``sp.gemm_a2a``.
    """
    forward = _QkvForward(lead, dict(context=context, layout=layout, row_table=row_table))
    stand_in, _ = call_with(layer, x, _QkvPasses(forward))
    parts: tuple[torch.Tensor, ...] = _Parts.apply(stand_in, forward)
    return parts
