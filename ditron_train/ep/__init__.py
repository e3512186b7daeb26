"""Expert parallelism: tokens sent once to a rank and fanned out there, grouped GEMMs, rows returned in the native
order."""

from ditron_train.ep.combine import SumOrder, combine, index_add_order
from ditron_train.ep.context import EPContext, get_ep_context
from ditron_train.ep.dispatch import dispatch, dispatch_ahead
from ditron_train.ep.dispatcher import ExpertCall, combine_rows, dispatch_linear, dispatch_tokens, linear_combine
from ditron_train.ep.handle import EPHandle, LayoutShape
from ditron_train.ep.layout import PendingLayout, begin_layout, min_rows_before
from ditron_train.ep.plan import PAIRS, Pair
from ditron_train.ep.rails import RailContext, get_rail_context

__all__ = [
    "PAIRS",
    "EPContext",
    "ExpertCall",
    "EPHandle",
    "LayoutShape",
    "Pair",
    "PendingLayout",
    "RailContext",
    "SumOrder",
    "begin_layout",
    "combine",
    "combine_rows",
    "dispatch",
    "dispatch_ahead",
    "dispatch_linear",
    "dispatch_tokens",
    "min_rows_before",
    "get_ep_context",
    "get_rail_context",
    "index_add_order",
    "linear_combine",
]
