"""Kernels of Ulysses sequence parallelism that multiply: GEMM-A2A and A2A-GEMM.

Buffers, flags and ticket roles are those of ``kernels``. Sizes that change no code are not specialised on.
"""

import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.gemm.kernels import store_tile, tile_product
from ditron_train.gemm.peers import store_tile_to_peer
from ditron_train.schedule.tiles import grouped_tile

__all__ = ["a2a_gemm_kernel", "gemm_a2a_kernel"]


@triton.constexpr_function
def _has_bulk_stores(target):
    return target.startswith("sm_") and int(target[3:]) >= 90


@triton.jit
def _notify_stored(signal_address, epoch, TARGET: tl.constexpr):
    """``dl.bulk_store_wait`` and ``dl.notify`` of the flag at ``signal_address`` (int64) in one asm block.

    The compiler does not pipeline a loop in which it sees a barrier, so here it sees none.
    """
    if _has_bulk_stores(TARGET):
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred %first;
            .reg .u32 %thread;
            cp.async.bulk.wait_group 0;
            bar.sync 0;
            mov.u32 %thread, %tid.x;
            setp.eq.u32 %first, %thread, 0;
            @%first st.release.sys.global.u32 [$1], $2;
            mov.u32 $0, 0;
            }
            """,
            "=r,l,r",
            [signal_address, epoch],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        dl.notify(signal_address.to(tl.pointer_type(tl.int32)), epoch, TARGET)


@triton.jit(do_not_specialize=["M", "slot_rows"])
def gemm_a2a_kernel(
    a_desc,
    b_desc,
    slots0,
    slots1,
    slots2,
    slots3,
    slots4,
    slots5,
    slots6,
    slots7,
    slots_addresses,
    signals_addresses,
    ready_addresses,
    ready_ptr,
    signature_ptr,
    tickets_ptr,
    control_ptr,
    M,
    N,
    K,
    columns_per_rank,
    slot_rows,
    slot_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TRANSPOSE_B: tl.constexpr,
    SPLIT_STORE: tl.constexpr,
    PULL: tl.constexpr,
    FLATTEN: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    USE_DESCRIPTORS: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Own slot[d] [M, N] = A [M, K] @ B[:, d * columns_per_rank :][:, :N], for every rank d; persistent.

    Rank d pulls its slot. Order: all tiles of rank + 1, then of rank + 2, ..., own ones last, so that at any time every
    rank is pulled from by another one. Before the first store: the start signals of all ranks, which have then read what
    the last op left here. A tile is signalled to rank d one tile later, when its asynchronous stores are complete
    (``bulk_store_wait``), by a release after a block barrier. Waits for nothing but start signals, which every rank sends
    first: all launches make progress.
    """
    epoch = dl.next_epoch(tickets_ptr)
    rank = dl.rank(control_ptr)
    if tl.program_id(0) == 0:
        dl.announce(ready_addresses, signature_ptr, epoch, rank, WORLD_SIZE, TARGET)
    num_tiles_m = tl.cdiv(M, BLOCK_M)
    num_tiles_n = tl.cdiv(N, BLOCK_N)
    num_k_tiles = tl.cdiv(K, BLOCK_K)
    tiles_per_rank = num_tiles_m * num_tiles_n
    pending = tl.cast(0, tl.int64)  # address of the flag of the tile that is still being stored
    for tile_id in tl.range(tl.program_id(0), tiles_per_rank * WORLD_SIZE, tl.num_programs(0), flatten=FLATTEN):
        peer = (rank + 1 + tile_id // tiles_per_rank) % WORLD_SIZE
        tile_m, tile_n = grouped_tile(tile_id % tiles_per_rank, num_tiles_m, num_tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        acc = tile_product(
            a_desc, b_desc, row, peer * columns_per_rank + col, num_k_tiles, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSE_B
        )
        if pending != 0:
            _notify_stored(pending, epoch, TARGET)
        else:
            for step in tl.static_range(1, WORLD_SIZE):
                dl.await_ready(ready_ptr, epoch, control_ptr, (rank + step) % WORLD_SIZE, WORLD_SIZE, TARGET)
            dl.fence_async_proxy(TARGET)
        if PULL:
            store_tile(slots0, acc, peer * slot_rows + row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
        else:
            store_tile_to_peer(
                peer, acc, rank * slot_rows + row, col,
                slots0, slots1, slots2, slots3, slots4, slots5, slots6, slots7,
                slots_addresses, slot_stride, WORLD_SIZE * slot_rows, N,
                BLOCK_M, BLOCK_N, SPLIT_STORE, WORLD_SIZE, USE_DESCRIPTORS,
            )  # fmt: skip
        flags = dl.symm_at(signals_addresses, peer, tl.int32)
        pending = (flags + rank * tiles_per_rank + tile_m * num_tiles_n + tile_n).to(tl.int64)
    if pending != 0:
        _notify_stored(pending, epoch, TARGET)
    if tl.program_id(0) == 0:
        for step in tl.static_range(1, WORLD_SIZE):
            peer = (rank + step) % WORLD_SIZE
            dl.verify_ready(ready_ptr, signature_ptr, epoch, control_ptr, peer, WORLD_SIZE, TARGET)


@triton.jit
def _num_behind(signals_ptr, num_flags, epoch):
    """How many of ``num_flags`` flags are not at ``epoch`` yet, the same number in all threads; orders nothing.

    At least as many lanes as threads: no element is loaded twice, so warps cannot see different values.
    """
    lanes = tl.arange(0, 1024)
    behind = tl.cast(0, tl.int32)
    for first in range(0, num_flags, 1024):
        flags = first + lanes
        seen = tl.load(signals_ptr + flags, mask=flags < num_flags, other=epoch, volatile=True)
        behind += tl.sum(((seen - epoch) < 0).to(tl.int32), axis=0)
    return behind


@triton.jit
def _wait_tile(
    signals_ptr, first, num_granules, epoch, control_ptr,
    FLAGS: tl.constexpr, WORLD_SIZE: tl.constexpr, RANKS_POW2: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Waits (acquire) for granules first ... first + FLAGS - 1 of every source; looks at all of their flags at once."""
    if TARGET == "interpreter":
        behind = tl.cast(1, tl.int32)
    else:
        lanes = tl.arange(0, RANKS_POW2 * FLAGS)
        source = lanes // FLAGS
        granule = first + lanes % FLAGS
        mask = (source < WORLD_SIZE) & (granule < num_granules)
        seen = tl.load(signals_ptr + source * num_granules + granule, mask=mask, other=epoch, volatile=True)
        behind = tl.sum(((seen - epoch) < 0).to(tl.int32), axis=0)
    if behind > 0:  # warps may differ here: no barrier inside
        for peer in range(WORLD_SIZE):
            for one in range(first, tl.minimum(first + FLAGS, num_granules)):
                dl.wait(signals_ptr + peer * num_granules + one, epoch, control_ptr, peer, one, TARGET)
    dl.fence(TARGET)


@triton.jit
def a2a_gemm_kernel(
    a_desc,
    b_desc,
    c_desc,
    signals_ptr,
    tickets_ptr,
    control_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TRANSPOSE_B: tl.constexpr,
    SPLIT_STORE: tl.constexpr,
    GRANULE_ROWS: tl.constexpr,
    FLAGS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    RANKS_POW2: tl.constexpr,
    TARGET: tl.constexpr,
):
    """C [M, N] = ``to_sequence`` buffer A [M, K] @ B, persistent; a row tile starts when all ranks' columns of it arrived.

    Its sums run over K in order, so it needs every source: FLAGS granules of the pushes, or one that is several row tiles. It
    waits (acquire, then a fence for the descriptor loads) for pushes of this epoch; this rank's own push was enqueued before on
    another stream, and the grid leaves it at least one SM. Once a program has seen that everything is there, it goes on
    without waits, in one flattened loop of tiles and K blocks: there the loads of a tile run under the stores of the one before.

    Tried and slower (4 H200, 8192 x 8192 x 8192 and less): the push in the first programs of this kernel, which multiply when it
    is done: a program of 8 warps pushes 13 GB/s, so 16 to 24 of them are late (1.09-1.17x the GEMM alone without, 1.2-1.6x with
    the copy of what arrived). A push on SMs of its own: 1.17x.
    """
    epoch = dl.next_epoch(tickets_ptr + 1)
    num_tiles_m = tl.cdiv(M, BLOCK_M)
    num_tiles_n = tl.cdiv(N, BLOCK_N)
    num_k_tiles = tl.cdiv(K, BLOCK_K)
    num_granules = tl.cdiv(M, GRANULE_ROWS)
    num_tiles = num_tiles_m * num_tiles_n
    tile_id = tl.program_id(0)
    behind = tl.cast(1, tl.int32)
    while (tile_id < num_tiles) & (behind > 0):
        tile_m, tile_n = grouped_tile(tile_id, num_tiles_m, num_tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        _wait_tile(
            signals_ptr, row // GRANULE_ROWS, num_granules, epoch, control_ptr, FLAGS, WORLD_SIZE, RANKS_POW2, TARGET
        )
        dl.fence_async_proxy(TARGET)
        acc = tile_product(a_desc, b_desc, row, col, num_k_tiles, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSE_B)
        store_tile(c_desc, acc, row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
        tile_id += tl.num_programs(0)
        behind = _num_behind(signals_ptr, WORLD_SIZE * num_granules, epoch)
    dl.fence(TARGET)  # the acquire of what _num_behind saw
    dl.fence_async_proxy(TARGET)
    for late_tile in tl.range(tile_id, num_tiles, tl.num_programs(0), flatten=True):
        tile_m, tile_n = grouped_tile(late_tile, num_tiles_m, num_tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        acc = tile_product(a_desc, b_desc, row, col, num_k_tiles, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSE_B)
        store_tile(c_desc, acc, row, col, BLOCK_M, BLOCK_N, SPLIT_STORE)
