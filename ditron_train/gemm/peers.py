"""Storing an output tile into a peer's memory, from the epilogue of a GEMM."""

import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.gemm.kernels import store_tile

__all__ = ["MAX_DESCRIPTOR_RANKS", "store_tile_to_peer"]

MAX_DESCRIPTOR_RANKS = 8  # a kernel takes one descriptor a peer, each an argument of its own


@triton.jit
def store_tile_to_peer(
    peer, acc, row, col, slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7,
    slots_addresses, slot_stride, num_slot_rows, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_STORE: tl.constexpr, WORLD_SIZE: tl.constexpr,
    USE_DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Stores a tile into ``peer``'s buffer [num_slot_rows, N] (rows ``slot_stride`` elements apart) at (row, col).

    Through the peer's descriptor (a tuple of descriptors is no kernel argument, hence eight), since pointer stores to
    a peer stall the tensor cores; through pointers in groups of more than eight. Asynchronous like ``store_tile``:
    before the tile is signalled, ``dl.bulk_store_wait``.
    """
    if USE_DESCRIPTORS:
        if peer == 0:
            store_tile(slots0, acc, row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
        if WORLD_SIZE > 1:
            if peer == 1:
                store_tile(slots1, acc, row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
        if WORLD_SIZE > 2:
            if peer == 2:
                store_tile(slots2, acc, row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
        if WORLD_SIZE > 3:
            if peer == 3:
                store_tile(slots3, acc, row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
        if WORLD_SIZE > 4:
            if peer == 4:
                store_tile(slots4, acc, row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
        if WORLD_SIZE > 5:
            if peer == 5:
                store_tile(slots5, acc, row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
        if WORLD_SIZE > 6:
            if peer == 6:
                store_tile(slots6, acc, row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
        if WORLD_SIZE > 7:
            if peer == 7:
                store_tile(slots7, acc, row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
    else:
        base = dl.symm_at(slots_addresses, peer, slots0.dtype)
        rows = row + tl.arange(0, BLOCK_M)
        cols = col + tl.arange(0, BLOCK_N)
        offsets = rows[:, None].to(tl.int64) * slot_stride + cols[None, :]
        mask = (rows[:, None] < num_slot_rows) & (cols[None, :] < N)
        tl.store(base + offsets, acc.to(slots0.dtype), mask=mask)
