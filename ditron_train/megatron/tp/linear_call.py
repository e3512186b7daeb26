"""One call of a linear layer, as the policy and the tools see it.

Which exchanges of a linear layer over nodes go along rails (``symm.nodes``), and which the policy leaves to the
process group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from ditron_train.policy import Decision
from ditron_train.policy.decide import is_untimed
from ditron_train.policy.probe import compares
from ditron_train.runtime.settings import get_settings
from ditron_train.tp.context import TPContext
from ditron_train.tp.nodes import NodesTPContext


class LinearCall(NamedTuple):
    """One call of a linear layer on this rank.

    Attributes:
        x: Input ``[s, b, K]`` or ``[tokens, K]``: of ``column`` the local part of the sequence.
        weight: This rank's ``[N, K]``.
        group: Tensor parallel group.
        is_frozen: Whether the weight needs no gradient: dgrad of ``column``, which nothing hides then, is another
            kernel.
        grad_y: Gradient of the result, for comparisons.
        bias: What is added inside the product of ``column``, before its rounding (Transformer Engine's layers).
        is_forward: Of what is compared: whether it is the forward pass alone.
        instead_of: Of what is compared: the fused path by this context takes the place of Megatron's.
        by_te: Whether the layer's own products are Transformer Engine's.
    """

    x: torch.Tensor
    weight: torch.Tensor
    group: dist.ProcessGroup
    is_frozen: bool = False
    grad_y: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    is_forward: bool = False
    instead_of: NodesTPContext | None = None
    by_te: bool = False


_ORDERS = {1: "ascending", -1: "descending", 0: "native"}


def _summed(call: LinearCall, context: NodesTPContext, is_column: bool) -> tuple[int, int]:
    """Rows and columns of the product that is added up over ranks: in a column layer's backward, or in a row layer's
    forward."""
    rows, (n, k) = call.x.shape[:-1].numel(), call.weight.shape
    return (rows * context.world_size, k) if is_column else (rows, n)


def words_over_nodes(call: LinearCall, context: NodesTPContext, *, is_column: bool) -> str:
    """How the exchanges go, for a plan's key."""
    product, dtype = _summed(call, context, is_column), call.x.dtype
    step = context.ring_step(*product, dtype) if context.sums_by_rails(*product, dtype) else 0
    words = f", over {context.nodes.num_nodes} nodes, {_ORDERS[step]} sums" + ", native gather" * context.leaves_gather
    if call.instead_of is not None:
        left = "gather" if call.instead_of.leaves_gather else "sums"
        words += f" instead of native {left}"
    return words + ", forward" * call.is_forward


def decide_with_library(decide: Callable[[], Decision], context: TPContext) -> Decision:
    """The decision about a layer, first with products by this package's tiles. If these were compared and refused,
    since they are no faster or cuBLAS splits its sums, the same with cuBLAS's products, rank by rank (collective)."""
    decision = decide()
    is_final = is_untimed() or context.varies or context.arena.graph_captured
    if decision.use_ditron or decision.bits_equal is None or is_final:
        return decision
    with context.trying_library() as problems:
        by_library = decide()
    if not (problems and by_library.use_ditron):
        return decision
    context.by_library |= problems
    return by_library


def decide_over_nodes(
    decide: Callable[[LinearCall], Decision], call: LinearCall, context: NodesTPContext, *, is_column: bool
) -> Decision:
    """Whether the layer runs along rails (collective).

    The gather and the sums of a layer each go along rails or are left to the process group. A column layer gathers in
    forward and sums in backward, a row layer does the reverse. These combinations are compared, in this order:

    | policy | compared | with | if rejected |
    | --- | --- | --- | --- |
    | ``strict``, ``fast`` | the forward along rails | stock Megatron's forward | its exchange is left |
    | | the layer, both along rails | the layer with the backward's exchange left | that exchange is left |
    | | the layer as chosen so far | stock Megatron | native |
    | others, or no GPU | the layer, both along rails | stock Megatron | sums are left |
    | | the layer, gather along rails and sums left | stock Megatron | native |

    The forward is compared by itself since an evaluation runs nothing else. The second line is skipped if the first
    was rejected. If sums cannot go along rails (``sums_by_rails``), comparisons of them are skipped, and a column
    layer whose forward was rejected is native.

    Args:
        decide: Compares one way to run the layer with another.
        call: The layer's call.
        context: A context for this answer alone; ``leaves_gather`` and ``leaves_sums`` are set on it.
        is_column: Whether the layer gathers in its forward; else it adds up there.
    """
    summed, dtype = _summed(call, context, is_column), call.x.dtype
    can_sum = context.sums_by_rails(*summed, dtype)
    if get_settings().policy not in ("strict", "fast") or not compares(call.x.device):
        decision = decide(call)
        if can_sum and not decision.use_ditron:
            context.leaves_sums = True
            decision = decide(call)
        return decision
    forward = decide(call._replace(is_forward=True)) if is_column or can_sum else None
    if forward is not None and forward.use_ditron:
        if can_sum or not is_column:
            other = _without(context, gather=not is_column)
            if not decide(call._replace(instead_of=other)).use_ditron:
                context.leaves_gather, context.leaves_sums = other.leaves_gather, other.leaves_sums
        return decide(call)
    context.leaves_gather, context.leaves_sums = is_column, not is_column
    return forward if forward is not None and not can_sum else decide(call)


def _without(context: NodesTPContext, *, gather: bool) -> NodesTPContext:
    """The same context whose gather, or else whose sums, are the process group's."""
    made = context.for_answer()
    made.leaves_gather, made.leaves_sums = gather, not gather
    return made
