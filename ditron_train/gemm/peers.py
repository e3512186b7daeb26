"""Storing an output tile into a peer's memory, from the epilogue of a GEMM."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.gemm.kernels import store_tile

MAX_DESCRIPTOR_RANKS = 8  # a kernel takes one descriptor a peer, each an argument of its own


class PeerTiles(NamedTuple):
    """Buffers [num_rows, N] of all ranks, made inside a kernel.

    Attributes:
        descs: ``MAX_DESCRIPTOR_RANKS`` descriptors, of all ranks if they are used.
        addresses: Of every rank's buffer, int64.
        stride: Elements between rows.
        num_rows: Rows of a buffer.
        N: Columns.
    """

    descs: Any
    addresses: Any
    stride: Any
    num_rows: Any
    N: Any


@triton.jit
def store_tile_to_peer(
    peer, acc, row, col, peers, TILE: tl.constexpr, WORLD_SIZE: tl.constexpr, USE_DESCRIPTORS: tl.constexpr
):
    """Stores a tile into ``peer``'s buffer of ``peers`` (``PeerTiles``) at (row, col).

    Through descriptors, since pointer stores to a peer stall the tensor cores; through pointers in groups of more than
    ``MAX_DESCRIPTOR_RANKS``. Asynchronous like ``store_tile``: before the tile is signalled, ``dl.bulk_store_wait``.
    """
    if USE_DESCRIPTORS:
        for rank in tl.static_range(WORLD_SIZE):
            if peer == rank:
                store_tile(peers.descs[rank], acc, row, col, TILE.block_m, TILE.block_n, TILE.split_store)
    else:
        base = dl.symm_at(peers.addresses, peer, peers.descs[0].dtype)
        rows = row + tl.arange(0, TILE.block_m)
        cols = col + tl.arange(0, TILE.block_n)
        offsets = rows[:, None].to(tl.int64) * peers.stride + cols[None, :]
        mask = (rows[:, None] < peers.num_rows) & (cols[None, :] < peers.N)
        tl.store(base + offsets, acc.to(peers.descs[0].dtype), mask=mask)
