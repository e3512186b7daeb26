"""What parts of a step take, from the rates of a machine: GEMMs, attention, passes over memory, exchanges.

The rooms put them together (``cost_model.py`` of each), ``tune`` and ``predict`` ask.
"""

from ditron_train.costs.estimate import Estimate
from ditron_train.costs.exchanges import (
    Span,
    all_to_all_us,
    beside_us,
    copied_us,
    message_us,
    one_node,
    ring_us,
    send_us,
)
from ditron_train.costs.products import (
    attention_us,
    cublas_us,
    gemm_us,
    grouped_us,
    num_waves,
    pass_us,
    throttled_us,
    tile_us,
)

__all__ = [
    "Estimate",
    "Span",
    "all_to_all_us",
    "attention_us",
    "beside_us",
    "copied_us",
    "cublas_us",
    "gemm_us",
    "grouped_us",
    "message_us",
    "num_waves",
    "one_node",
    "pass_us",
    "ring_us",
    "send_us",
    "throttled_us",
    "tile_us",
]
