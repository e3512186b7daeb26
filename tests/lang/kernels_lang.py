"""Kernels of the primitives' tests: an all-gather and a barrier made of them."""

import triton
import triton.language as tl

import ditron_train.lang as dl


@triton.jit
def push_all(
    source, gathered_addresses, signals_addresses, ready_addresses, ready, signature, tickets, control, num_elements,
    WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Each rank announces itself, checks everybody's signature, then pushes its elements to every rank's row."""
    epoch = dl.next_epoch(tickets)
    rank = dl.rank(control)
    dl.announce(ready_addresses, signature, epoch, rank, WORLD_SIZE, TARGET)
    for step in tl.static_range(WORLD_SIZE):
        peer = (rank + step) % WORLD_SIZE
        dl.verify_ready(ready, signature, epoch, control, peer, WORLD_SIZE, TARGET)
    for step in tl.static_range(WORLD_SIZE):
        peer = (rank + step) % WORLD_SIZE
        destination = dl.symm_at(gathered_addresses, peer, source.dtype.element_ty) + rank * num_elements
        signal = dl.symm_at(signals_addresses, peer, tl.int32) + rank
        dl.putmem_signal(destination, source, num_elements, signal, epoch, BLOCK, TARGET)


@triton.jit
def wait_all(signals, tickets, control, WORLD_SIZE: tl.constexpr, COUNT: tl.constexpr, TARGET: tl.constexpr):
    """Waits for every rank's row."""
    epoch = dl.next_epoch(tickets + 1)
    dl.wait_many(signals, WORLD_SIZE, epoch, control, -1, 0, COUNT, TARGET)


@triton.jit
def wait_each(signals, tickets, control, WORLD_SIZE: tl.constexpr, TARGET: tl.constexpr):
    """The same flag by flag."""
    epoch = dl.next_epoch(tickets + 1)
    for peer in tl.static_range(WORLD_SIZE):
        dl.wait(signals + peer, epoch, control, peer, 7, TARGET)


@triton.jit
def put_get(
    source, back, buffer_addresses, signals_addresses, signals, ready_addresses, ready, tickets, control, num_elements,
    WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Puts to the next rank with both kinds of signal, waits for the previous one's, and gets its own put back."""
    epoch = dl.next_epoch(tickets)
    rank = dl.rank(control)
    target = (rank + 1) % dl.num_ranks(control)
    buffer = dl.symm_at(buffer_addresses, target, tl.float32)
    flags = dl.symm_at(signals_addresses, target, tl.int32)
    dl.putmem(buffer, source, num_elements, tl.cast(0, tl.int32), 1, BLOCK)
    dl.quiet(TARGET)
    dl.signal_op(flags + 1, 7, True, TARGET)
    dl.signal_op(flags, epoch, False, TARGET)
    dl.signal_wait_until(signals, epoch, control, (rank + WORLD_SIZE - 1) % WORLD_SIZE, TARGET)
    dl.getmem(back, buffer, num_elements, tl.cast(0, tl.int32), 1, BLOCK)
    dl.barrier_all(ready_addresses, ready, epoch, control, rank, WORLD_SIZE, TARGET)


@triton.jit
def threads(out, token, TARGET: tl.constexpr):
    """What the storing thread is called in its block and in its warp."""
    names = dl.consume_token(dl.thread_id(TARGET) * 64 + dl.lane_id(TARGET), tl.load(token))
    dl.sync_threads()
    tl.store(out, names)
