"""Autograd of Ulysses sequence parallelism.

With P the exchange before attention (local rows, all heads -> all rows, own heads: a permutation over the group), so
that P^T is the exchange after it:

=====================  ==========================  =================================  ====================
..                     forward                     dgrad                              wgrad
=====================  ==========================  =================================  ====================
``qkv_projection``     (q, k, v) = P(x W^T + c)    dx = P^T(dq, dk, dv) W             dW = P^T(..)^T x
``output_projection``  y = P^T(o) W^T              do = P(dy W)                       dW = dy^T P^T(o)
``heads_exchange``     P(q, k, v)                  P^T(dq, dk, dv)
``sequence_exchange``  P^T(o)                      P(do)
=====================  ==========================  =================================  ====================

An attention that has both projections may leave the output projection's dW to the other one's backward
(``late_wgrad``): there it hides the exchange of dq, dk and dv, during which there is no other work, and dx is a plain
GEMM. dy and P^T(o) live that much longer (times: ``docs/measurements/sp.md``).

Norms of heads may come between a projection and its exchange (``head_norms``). Backward then needs the gradient before
them for dgrad, so the rows are gathered by themselves.

wgrad is one GEMM over all local rows in order, as Megatron computes it. The bias c is added after the product was
rounded, and its gradient is P^T(..) summed over the local rows, both as Megatron's own linear layer does; or, as
Transformer Engine does, c is rounded with the product, and its gradient is what the weight gradient's GEMM gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch

from ditron_train.runtime.derivatives import refuse_second_derivatives
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.sp.a2a_gemm import a2a_gemm
from ditron_train.sp.context import SPContext
from ditron_train.sp.exchange import gather_sequence, to_heads, to_sequence
from ditron_train.sp.gemm_a2a import gemm_a2a
from ditron_train.sp.head_norms import Norms, backward_of_norms, normalised, parameters_of
from ditron_train.sp.layouts import HeadsLayout
from ditron_train.sp.transfer_sizes import hides_gather


class InputShards(Protocol):
    """How a tensor parallel rank holds the input of its QKV projection, and gathers it before the GEMM."""

    def start_gather(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Starts to make the whole input of this rank's part of the sequence from ``x``; the result waits for it."""

    def start_reduce(self, grad: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Starts to make ``x``'s gradient from that of the whole input; the result waits for it."""


#: Takes grad_output [rows, N] and input [rows, K]; returns the weight's gradient [N, K] (None if it kept it
#: itself).
Wgrad = Callable[[torch.Tensor, torch.Tensor], "torch.Tensor | None"]


class LateWgrad:
    """The output projection's weight gradient, left to the backward of the QKV projection in the same graph.

    Autograd sees the weight as an input of the QKV projection; a frozen weight has no gradient.

    Args:
        weight: The output projection's.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self._compute: Callable[[], torch.Tensor | None] | None = None

    def leave(self, compute: Callable[[], torch.Tensor | None]) -> None:
        """The first backward: ``compute`` returns the gradient."""
        self._compute = compute

    def take(self) -> Callable[[], torch.Tensor | None] | None:
        """The later backward: what was left, once."""
        compute, self._compute = self._compute, None
        return compute


@outside_compile
def late_wgrad(weight_qkv: torch.Tensor, weight_out: torch.Tensor) -> LateWgrad | None:
    """A ``LateWgrad`` for the two projections of one attention, or None: both have to be trained, and the gradient has
    to take longer than the exchange it hides."""
    if not (torch.is_grad_enabled() and weight_qkv.requires_grad and weight_out.requires_grad):
        return None
    if weight_out.is_cuda and not hides_gather(
        weight_out.shape[0], weight_out.shape[1], weight_qkv.shape[0], weight_qkv.element_size()
    ):
        return None
    return LateWgrad(weight_out)


def _plain_wgrad(grad_output: torch.Tensor, total_input: torch.Tensor) -> torch.Tensor:
    return grad_output.t().matmul(total_input)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


@outside_compile
class _QkvProjection(torch.autograd.Function):
    """(q, k, v) = P(x W^T + c); see the module's table."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        context: SPContext,
        layout: HeadsLayout,
        row_table: torch.Tensor | None,
        wgrad: Wgrad,
        shards: InputShards | None,
        late: LateWgrad | None,
        rounds_once: bool,
        norms: Norms,
        late_weight: torch.Tensor | None,  # an input, so that its gradient is a result of this backward
        *parameters: torch.Tensor,  # of the norms, likewise
    ) -> tuple[torch.Tensor, ...]:
        ctx.norms, needs_mixed = norms, bool(norms) and any(ctx.needs_input_grad)
        ctx.late = late
        ctx.options, ctx.wgrad = dict(context=context, layout=layout, row_table=row_table), wgrad
        ctx.shards = shards
        inside = bias if rounds_once else None
        total_x = x if shards is None else shards.start_gather(x)()
        parts = gemm_a2a(total_x, weight, bias=inside, return_mixed=needs_mixed, **ctx.options)
        parts, mixed = (parts[:-1], parts[-1]) if needs_mixed else (parts, None)
        if bias is not None and not rounds_once:
            if mixed is not None:
                mixed.add_(bias)
            own = bias.view(context.world_size, layout.num_groups, -1)[context.rank]
            for part, width, part_bias in zip(parts, layout.widths, own.split(list(layout.widths), dim=1)):
                part.view(*part.shape[:-2], layout.num_groups, width).add_(part_bias)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, mixed)
        return normalised(parts, norms)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_derivatives("qkv_projection")
        x, weight, mixed = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        context, layout = ctx.options["context"], ctx.options["layout"]
        grad_x: Any = None
        grad_weight = grad_bias = grad_rows = grad_late = None
        of_norms: list[torch.Tensor | None] = []
        compute_late = ctx.late.take() if ctx.late is not None and ctx.needs_input_grad[11] else None
        total_x = ctx.shards.start_gather(x) if needs_weight and ctx.shards is not None else lambda: x

        def meanwhile() -> None:
            nonlocal grad_late
            grad_late = None if compute_late is None else compute_late()

        if needs_x and compute_late is None and mixed is None:
            keep: Literal["no", "borrow"] = (
                "borrow" if needs_weight or needs_bias else "no"
            )  # used up before the next op
            result = a2a_gemm(grads, weight, weight_layout="nn", return_gathered=keep, **ctx.options)
            grad_x, grad_rows = (result, None) if keep == "no" else result
        else:
            grad_rows = gather_sequence(grads, meanwhile=meanwhile, **ctx.options)
            lead = grads[0].shape[0] // context.world_size, *grads[0].shape[1:-2]
            if mixed is not None:
                grad_mixed, of_norms = backward_of_norms(
                    mixed, grad_rows.view(*lead, -1), ctx.norms, layout, context.world_size
                )
                grad_rows = grad_mixed.flatten(0, -2)
            if needs_x:
                grad_x = torch.matmul(grad_rows, weight).view(*lead, -1)
        if needs_x and ctx.shards is not None:
            grad_x = ctx.shards.start_reduce(grad_x)
        if needs_weight:
            grad_weight = ctx.wgrad(grad_rows, _rows(total_x()))
        if needs_bias:
            of_bias = getattr(ctx.wgrad, "bias_gradient", None)
            grad_bias = grad_rows.sum(dim=0) if of_bias is None else of_bias(grad_rows)
        if needs_x and ctx.shards is not None:
            grad_x = grad_x()
        return (grad_x, grad_weight, grad_bias, *(None,) * 8, grad_late, *of_norms)


@outside_compile
class _OutputProjection(torch.autograd.Function):
    """y = P^T(o) W^T; see the module's table."""

    @staticmethod
    def forward(
        ctx: Any,
        attended: torch.Tensor,
        weight: torch.Tensor,
        context: SPContext,
        layout: HeadsLayout,
        row_table: torch.Tensor | None,
        wgrad: Wgrad,
        late: LateWgrad | None,
        goes_back: bool,
    ) -> torch.Tensor:
        ctx.late = late
        keep = goes_back and (ctx.needs_input_grad[1] or late is not None)
        ctx.options, ctx.wgrad = dict(context=context, layout=layout, row_table=row_table), wgrad
        result: Any = a2a_gemm((attended,), weight, return_gathered="copy" if keep else "no", **ctx.options)
        out, gathered = result if keep else (result, None)
        ctx.save_for_backward(weight, gathered)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_derivatives("output_projection")
        weight, gathered = ctx.saved_tensors
        needs_attended, needs_weight = ctx.needs_input_grad[:2]
        grad_attended = grad_weight = None
        wgrad = ctx.wgrad

        def compute_wgrad() -> torch.Tensor | None:
            nonlocal grad_weight
            grad_weight = wgrad(_rows(grad_out), gathered)
            return grad_weight

        if ctx.late is not None:
            ctx.late.leave(compute_wgrad)
        if needs_attended:
            meanwhile = compute_wgrad if needs_weight else None
            (grad_attended,) = gemm_a2a(grad_out, weight, weight_layout="nn", meanwhile=meanwhile, **ctx.options)
        elif needs_weight:
            compute_wgrad()
        return grad_attended, grad_weight, None, None, None, None, None, None


@outside_compile
class _Exchange(torch.autograd.Function):
    """P or its inverse, which is each other's backward."""

    @staticmethod
    def forward(
        ctx: Any,
        towards_heads: bool,
        context: SPContext,
        layout: HeadsLayout,
        row_table: torch.Tensor | None,
        *parts: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.towards_heads, ctx.options = towards_heads, dict(context=context, layout=layout, row_table=row_table)
        return (to_heads if towards_heads else to_sequence)(parts, **ctx.options)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_derivatives("the exchange of heads and sequence")
        inverse = to_sequence if ctx.towards_heads else to_heads
        return (None, None, None, None, *inverse(grads, **ctx.options))


@outside_compile
def qkv_projection(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    context: SPContext,
    layout: HeadsLayout,
    bias: torch.Tensor | None = None,
    row_table: torch.Tensor | None = None,
    wgrad: Wgrad | None = None,
    shards: InputShards | None = None,
    late: LateWgrad | None = None,
    rounds_once: bool = False,
    norms: Norms = (),
) -> tuple[torch.Tensor, ...]:
    """q, k and v of this rank's heads for the whole sequence; differentiable.

    Args:
        x: [s / world, b, hidden], this rank's two chunks (with ``shards`` what that makes them from).
        weight: [world * layout.num_columns, hidden], rows group by group.
        context: The group's context.
        layout: Columns of one rank (``qkv_layout``).
        bias: [world * layout.num_columns], or None.
        row_table: As ``gemm_a2a``.
        wgrad: Computes the weight's gradient; ``grad.T @ x`` if None.
        shards: How x is held by the ranks of a tensor parallel group; None if this rank has all of it and no other
            needs its gradient.
        late: What the output projection of the same attention is given, too: its weight's gradient is computed here.
        rounds_once: The bias is added inside the GEMM, before its rounding, as Transformer Engine does it.
        norms: One for each part, over heads [..., head size] (None: none); empty if no part has one.

    Returns:
        One tensor a part, [s, b, heads of this rank, head size].

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``gemm_a2a``.
    """
    if bias is not None and bias.shape != (context.world_size * layout.num_columns,):
        raise NotSupportedError(
            f"qkv_projection: bias {tuple(bias.shape)} for {context.world_size * layout.num_columns} columns"
        )
    late_weight, parameters = None if late is None else late.weight, parameters_of(norms)
    if norms and not torch.is_grad_enabled():  # as of ``output_projection``: who needs no gradient copies nothing
        x, weight, late_weight, parameters = (
            x.detach(),
            weight.detach(),
            None,
            [parameter.detach() for parameter in parameters],
        )
        bias = None if bias is None else bias.detach()
    return _QkvProjection.apply(
        x, weight, bias, context, layout, row_table, wgrad or _plain_wgrad, shards, late, rounds_once, norms,
        late_weight, *parameters,
    )  # fmt: skip


@outside_compile
def output_projection(
    attended: torch.Tensor,
    weight: torch.Tensor,
    *,
    context: SPContext,
    layout: HeadsLayout,
    row_table: torch.Tensor | None = None,
    wgrad: Wgrad | None = None,
    late: LateWgrad | None = None,
) -> torch.Tensor:
    """The attention's output of all heads, for this rank's two chunks, projected; differentiable.

    Args:
        attended: [s, b, heads of this rank, head size].
        weight: [hidden, world * layout.num_columns].
        context: The group's context.
        layout: Columns of one rank, one part.
        row_table: As ``gemm_a2a``.
        wgrad: As ``qkv_projection``.
        late: Where the weight's gradient is left to the backward of the QKV projection; None: it is computed here.

    Returns:
        [s / world, b, hidden].

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``a2a_gemm``.
    """
    if late is not None:
        weight = weight.detach()
    # Evaluation, and the first pass of what is recomputed, copy nothing for backward.
    goes_back = torch.is_grad_enabled()
    return _OutputProjection.apply(
        attended, weight, context, layout, row_table, wgrad or _plain_wgrad, late, goes_back
    )


@outside_compile
def heads_exchange(
    parts: Sequence[torch.Tensor], *, context: SPContext, layout: HeadsLayout, row_table: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """``ops.to_heads``, differentiable: for layers with operations (q and k norms) between projection and exchange."""
    return _Exchange.apply(True, context, layout, row_table, *parts)


@outside_compile
def sequence_exchange(
    parts: Sequence[torch.Tensor], *, context: SPContext, layout: HeadsLayout, row_table: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """``ops.to_sequence``, differentiable."""
    return _Exchange.apply(False, context, layout, row_table, *parts)
