"""Kernels of a gather: SMs that push, the program in front of copy engines, the program that waits for all rows.
``channel`` is ``ChannelPointers``.

Sizes that change no code are not specialised on (``do_not_specialize``): a new shape needs no compilation.
"""

import triton
import triton.language as tl

import ditron_train.lang as dl


@triton.jit
def _in_vectors(num_elements, ptr):
    """``num_elements``, which are whole 16 bytes, as a number of which the compiler sees that, and moves 16 bytes at a
    time (``tl.multiple_of`` says nothing of an argument)."""
    NUM_BITS: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    VECTOR: tl.constexpr = 128 // (8 if NUM_BITS < 8 else NUM_BITS)  # truth values have 1, and take a byte
    return num_elements // VECTOR * VECTOR


@triton.jit(do_not_specialize=["K", "granule_rows"])
def push_shard_kernel(
    x_ptr,
    gathered_addresses,
    channel,
    row_starts_ptr,
    K,
    granule_rows,
    FLAGS_PER_RANK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Copies this rank's rows x [rows, K] (contiguous) to their place in every peer's gathered buffer.

    First to rank - 1, then rank - 2, ...: so every rank receives from rank + 1 first, the order in which the GEMM
    consumes, and no two ranks push to the same one. Programs share the granules (``granule_rows`` rows each); a
    granule's flag is released once its rows are stored. Before the first store to a peer: its start signal, acquired.
    """
    K = _in_vectors(K, x_ptr)
    epoch = dl.next_epoch(channel.tickets)
    rank = dl.rank(channel.control)
    program = tl.program_id(0)
    if program == 0:
        dl.announce(channel.ready_addresses, channel.signature, epoch, rank, WORLD_SIZE, TARGET)
    first_row = tl.load(row_starts_ptr + rank)
    num_rows = tl.load(row_starts_ptr + rank + 1) - first_row
    num_granules = tl.cdiv(num_rows, granule_rows)
    for step in tl.static_range(1, WORLD_SIZE):
        peer = (rank + WORLD_SIZE - step) % WORLD_SIZE
        if program == 0:
            dl.verify_ready(channel.ready, channel.signature, epoch, channel.control, peer, WORLD_SIZE, TARGET)
        else:
            dl.await_ready(channel.ready, epoch, channel.control, peer, WORLD_SIZE, TARGET)
        destination = dl.symm_at(gathered_addresses, peer, x_ptr.dtype.element_ty) + first_row.to(tl.int64) * K
        flags = dl.symm_at(channel.signals_addresses, peer, tl.int32) + rank * FLAGS_PER_RANK
        for granule in range(program, num_granules, tl.num_programs(0)):
            row = tl.cast(granule, tl.int64) * granule_rows
            count = tl.minimum(num_rows - row, granule_rows) * K
            dl.putmem(destination + row * K, x_ptr + row * K, count, 0, 1, BLOCK)
            dl.notify(flags + granule, epoch, TARGET)


@triton.jit(do_not_specialize=["num_flags"])
def gather_start_kernel(
    epochs_ptr, num_flags, channel, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, TARGET: tl.constexpr
):
    """One program in front of a gather by copy engines: start signals both ways, then ``epochs_ptr[:num_flags] =
    epoch``.

    The copy engines copy those words behind the data onto the peers' flags: the epoch stays in device memory, so a
    captured graph replays with fresh ones.
    """
    epoch = dl.next_epoch(channel.tickets)
    rank = dl.rank(channel.control)
    dl.announce(channel.ready_addresses, channel.signature, epoch, rank, WORLD_SIZE, TARGET)
    lanes = tl.arange(0, BLOCK)
    for block in range(0, tl.cdiv(num_flags, BLOCK)):
        offsets = block * BLOCK + lanes
        tl.store(epochs_ptr + offsets, epoch + tl.zeros((BLOCK,), tl.int32), mask=offsets < num_flags)
    dl.verify_peers(channel.ready, channel.signature, epoch, channel.control, rank, WORLD_SIZE, TARGET)


@triton.jit
def _await_rows(
    peer, epoch, channel, row_starts_ptr, granule_rows, FLAGS_PER_RANK: tl.constexpr, TARGET: tl.constexpr
):
    num_rows = tl.load(row_starts_ptr + peer + 1) - tl.load(row_starts_ptr + peer)
    for flag in range(0, tl.cdiv(num_rows, granule_rows)):
        dl.wait(channel.signals + peer * FLAGS_PER_RANK + flag, epoch, channel.control, peer, flag, TARGET)


@triton.jit(do_not_specialize=["granule_rows"])
def gather_wait_kernel(
    channel, row_starts_ptr, granule_rows, FLAGS_PER_RANK: tl.constexpr, WORLD_SIZE: tl.constexpr, TARGET: tl.constexpr
):
    """One program behind a gather: every peer's rows have arrived. What follows on the stream reads them plainly."""
    epoch = dl.next_epoch(channel.tickets + 1)
    rank = dl.rank(channel.control)
    for step in tl.static_range(1, WORLD_SIZE):
        _await_rows((rank + step) % WORLD_SIZE, epoch, channel, row_starts_ptr, granule_rows, FLAGS_PER_RANK, TARGET)


@triton.jit(do_not_specialize=["peer", "granule_rows"])
def gather_wait_one_kernel(
    channel, row_starts_ptr, peer, granule_rows, FLAGS_PER_RANK: tl.constexpr, TARGET: tl.constexpr
):
    """One program in front of what reads the rows of ``peer`` alone: they have arrived. The epoch is the one that
    ``gather_wait_kernel``, which follows on the stream, will draw."""
    epoch = dl.last_epoch(channel.tickets + 1) + 1
    _await_rows(peer, epoch, channel, row_starts_ptr, granule_rows, FLAGS_PER_RANK, TARGET)


@triton.jit
def copy_rows_kernel(source_ptr, destination_ptr, num_elements, BLOCK: tl.constexpr):
    """Copies ``num_elements`` inside own memory, both contiguous and whole 16 bytes. Few warps, few registers and no
    shared memory: it runs on multiprocessors that a GEMM holds."""
    dl.putmem(
        destination_ptr, source_ptr, _in_vectors(num_elements, source_ptr), tl.program_id(0), tl.num_programs(0), BLOCK
    )
