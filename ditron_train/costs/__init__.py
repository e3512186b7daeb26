"""What parts of a step take, from the rates of a machine: GEMMs, attention, passes over memory, exchanges.

The cost models of the parallelisms put them together; choices of ways to run an op, and ``predict``, use them.
"""

from ditron_train.costs.estimate import Estimate
from ditron_train.costs.exchanges import (
    Span,
    all_to_all_us,
    beside_us,
    copied_us,
    message_us,
    one_node,
    rail_us,
    ring_us,
    send_us,
)
from ditron_train.costs.fp8 import CAST_BYTES, Product, Recipe, cast_us, operands, product_rates, quantised_us
from ditron_train.costs.products import (
    FP8_TARGETS,
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
    "CAST_BYTES",
    "FP8_TARGETS",
    "Estimate",
    "Product",
    "Recipe",
    "Span",
    "all_to_all_us",
    "attention_us",
    "beside_us",
    "cast_us",
    "copied_us",
    "cublas_us",
    "gemm_us",
    "grouped_us",
    "message_us",
    "num_waves",
    "one_node",
    "operands",
    "pass_us",
    "product_rates",
    "quantised_us",
    "rail_us",
    "ring_us",
    "send_us",
    "throttled_us",
    "tile_us",
]
