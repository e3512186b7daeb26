"""Which exchanges of a linear layer over nodes go by rails, and which the policy leaves to the process group."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ditron_train.megatron.tp.linear_call import LinearCall
from ditron_train.policy import Decision
from ditron_train.policy.probe import compares
from ditron_train.runtime.settings import get_settings
from ditron_train.tp.nodes_context import NodesTPContext

Product = tuple[int, int, int]  # rows, columns and K of all that a rank multiplies
_ORDERS = {1: "ascending", -1: "descending", 0: "native"}


def _gathered(call: LinearCall, context: NodesTPContext) -> Product:
    """The product of a column layer's forward."""
    rows, (n, k) = call.x.shape[:-1].numel(), call.weight.shape
    return rows * context.world_size, n, k


def _summed(call: LinearCall, context: NodesTPContext, is_column: bool) -> Product:
    """The product that is added up over ranks: in a column layer's backward, or in a row layer's forward."""
    rows, (n, k) = call.x.shape[:-1].numel(), call.weight.shape
    return (rows * context.world_size, k, n) if is_column else (rows, n, k)


def words_over_nodes(call: LinearCall, context: NodesTPContext, *, is_column: bool) -> str:
    """How the exchanges go, for a plan's key."""
    product, dtype = _summed(call, context, is_column), call.x.dtype
    step = context.ring_step(*product[:2], dtype) if context.sums_by_rails(*product, dtype) else 0
    is_left = is_column and not context.gathers_by_rails(*_gathered(call, context))
    words = f", over {context.nodes.num_nodes} nodes, {_ORDERS[step]} sums"
    return words + ", native gather" * is_left + ", forward" * call.is_forward


def decide_over_nodes(
    decide: Callable[[LinearCall], Decision], call: LinearCall, context: NodesTPContext, *, is_column: bool
) -> Decision:
    """Whether the layer runs by rails (collective).

    Where times count, the forward alone is asked first, since an evaluation runs nothing else: where rails are not
    faster there, its exchange is left to the process group. Then forward and backward are asked together, once more
    without sums by rails where those were not faster.

    Args:
        decide: Of one way to run the layer.
        call: The layer's.
        context: Of the group; its ``left`` gets what is left to the process group.
        is_column: Whether the layer gathers in its forward, else it adds up there.
    """
    gathered, summed, dtype = _gathered(call, context), _summed(call, context, is_column), call.x.dtype
    decision = Decision(False, "none of its exchanges was faster by rails", None, None, None)
    if get_settings().policy in ("strict", "fast") and compares(call.x.device):
        decision = decide(call._replace(is_forward=True))
        if not decision.use_ditron:
            context.left.add(("gather", *gathered) if is_column else ("sums", *summed))
    while _uses_rails(context, gathered, summed, dtype, is_column):
        decision = decide(call)
        if decision.use_ditron or not context.sums_by_rails(*summed, dtype):
            break
        context.left.add(("sums", *summed))
    return decision


def _uses_rails(
    context: NodesTPContext, gathered: Product, summed: Product, dtype: torch.dtype, is_column: bool
) -> bool:
    """Whether anything goes by rails; a row layer's backward always gathers by them."""
    return not is_column or context.gathers_by_rails(*gathered) or context.sums_by_rails(*summed, dtype)
