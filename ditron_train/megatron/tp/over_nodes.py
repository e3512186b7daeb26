"""Which exchanges of a linear layer over nodes go by rails, and which the policy leaves to the process group."""

from __future__ import annotations

from collections.abc import Callable

from ditron_train.megatron.tp.linear_call import LinearCall
from ditron_train.policy import Decision
from ditron_train.policy.probe import compares
from ditron_train.runtime.settings import get_settings
from ditron_train.tp.nodes_context import NodesTPContext

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
    words = f", over {context.nodes.num_nodes} nodes, {_ORDERS[step]} sums"
    return words + ", native gather" * (is_column and context.leaves_gather) + ", forward" * call.is_forward


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
        context: Of this answer alone; it gets what is left to the process group.
        is_column: Whether the layer gathers in its forward, else it adds up there.
    """
    summed, dtype = _summed(call, context, is_column), call.x.dtype
    decision = Decision(False, "none of its exchanges was faster by rails", None, None, None)
    is_timed = get_settings().policy in ("strict", "fast") and compares(call.x.device)
    if is_timed and (is_column or context.sums_by_rails(*summed, dtype)):
        decision = decide(call._replace(is_forward=True))
        context.leaves_gather = is_column and not decision.use_ditron
        context.leaves_sums = not is_column and not decision.use_ditron
    # A row layer's backward always gathers by rails.
    while not is_column or not context.leaves_gather or context.sums_by_rails(*summed, dtype):
        decision = decide(call)
        if decision.use_ditron or not context.sums_by_rails(*summed, dtype):
            break
        context.leaves_sums = True
    return decision
