"""Expert parallelism: tokens sent once to a rank and fanned out there, grouped GEMMs, rows returned in the native
order."""

from ditron_train.ep.context import EPContext, get_ep_context
from ditron_train.ep.expert_functions import PAIRS, ExpertCall, Pair, dispatch_linear, linear_combine
from ditron_train.ep.functions import combine_rows, dispatch_tokens
from ditron_train.ep.layout import Layout, LayoutShape
from ditron_train.ep.ops import combine, dispatch, dispatch_ahead
from ditron_train.ep.orders import SumOrder, index_add_order
from ditron_train.ep.planning import PendingLayout, begin_layout, fewest_rows_before
from ditron_train.ep.rail_context import RailContext, get_rail_context

__all__ = [
    "PAIRS",
    "EPContext",
    "ExpertCall",
    "Layout",
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
    "fewest_rows_before",
    "get_ep_context",
    "get_rail_context",
    "index_add_order",
    "linear_combine",
]
