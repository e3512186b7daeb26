"""Layer 2: stateless orders of tiles, chunks and ranks; what kernels follow is a NumPy function, and a device function
that must equal it."""

from ditron_train.schedule.groups import groups_in_sequence
from ditron_train.schedule.orders import (
    arrival_order,
    chunk_order,
    delivery_order,
    gather_row_tile_order,
    lower_triangle_tile_order,
    order_in_block,
    rank_blocks,
    row_tile_owners,
    scatter_row_tile_order,
)

__all__ = [
    "arrival_order",
    "chunk_order",
    "delivery_order",
    "gather_row_tile_order",
    "groups_in_sequence",
    "lower_triangle_tile_order",
    "order_in_block",
    "rank_blocks",
    "row_tile_owners",
    "scatter_row_tile_order",
]
