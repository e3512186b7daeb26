"""Start signals inside kernels: a rank says that its buffers of an op may be written, and with which signature."""

import triton
import triton.language as tl

from ditron_train.lang.waits import is_cuda, power_of_two, record_failure, wait, wait_peers
from ditron_train.symm import control as layout

KIND_MISMATCH = tl.constexpr(layout.KIND_MISMATCH)
READY_WORDS = tl.constexpr(layout.READY_WORDS)


@triton.jit
def announce(ready_addresses, signature_ptr, epoch, rank, WORLD_SIZE: tl.constexpr, TARGET: tl.constexpr):
    """Start signal of ``rank`` to every rank (its own signal buffer too): the signature, then ``epoch`` released, to
    all at once.

    It says: everything this rank's stream had before this op is done, so its symmetric buffers of the op may be
    overwritten. One program of a launch calls it. Signal buffers alternate by epoch parity: a slot is rewritten two
    epochs later, which needs this rank's start signal in between. The block barrier is what makes the words part of
    each release.
    """
    PEERS: tl.constexpr = power_of_two(WORLD_SIZE)
    lanes = tl.arange(0, READY_WORDS)
    peers = tl.arange(0, PEERS)
    is_there = peers < WORLD_SIZE
    signal_buffers = tl.load(ready_addresses + peers, mask=is_there, other=0).to(tl.pointer_type(tl.int32))
    slots = signal_buffers + ((epoch & 1) * WORLD_SIZE + rank) * READY_WORDS
    words = tl.load(signature_ptr + lanes)[None, :] + tl.zeros((PEERS, READY_WORDS), tl.int32)
    tl.store(slots[:, None] + lanes[None, :], words, mask=is_there[:, None] & (lanes[None, :] > 0))
    tl.debug_barrier()
    tl.atomic_xchg(slots, epoch + tl.zeros((PEERS,), tl.int32), mask=is_there, sem="release", scope="sys")


@triton.jit
def await_ready(ready_ptr, epoch, control_ptr, peer, WORLD_SIZE: tl.constexpr, TARGET: tl.constexpr):
    """Waits for ``peer``'s start signal of ``epoch``: after it, its buffers of this op may be written."""
    wait(ready_ptr + ((epoch & 1) * WORLD_SIZE + peer) * READY_WORDS, epoch, control_ptr, peer, -1, TARGET)


@triton.jit
def await_peers(
    ready_ptr,
    epoch,
    control_ptr,
    rank,
    WORLD_SIZE: tl.constexpr,
    TARGET: tl.constexpr,
    HOLDS_BARRIER: tl.constexpr = True,
):
    """``await_ready`` for all peers, from ``rank`` + 1 on: at once, or one by one without a barrier, which a pipelined
    loop needs."""
    if HOLDS_BARRIER and WORLD_SIZE > 1:
        signal_buffer_ptr = ready_ptr + (epoch & 1) * WORLD_SIZE * READY_WORDS
        wait_peers(signal_buffer_ptr, READY_WORDS, epoch, control_ptr, rank, -1, 1, WORLD_SIZE - 1, WORLD_SIZE, TARGET)
    else:
        for step in tl.static_range(1, WORLD_SIZE):
            await_ready(ready_ptr, epoch, control_ptr, (rank + step) % WORLD_SIZE, WORLD_SIZE, TARGET)


@triton.jit
def verify_ready(ready_ptr, signature_ptr, epoch, control_ptr, peer, WORLD_SIZE: tl.constexpr, TARGET: tl.constexpr):
    """``await_ready``, then compares ``peer``'s signature with this rank's; a difference aborts the channel.

    Called by one program of a launch, for every peer.
    """
    await_ready(ready_ptr, epoch, control_ptr, peer, WORLD_SIZE, TARGET)
    lanes = tl.arange(0, READY_WORDS)
    slot = ready_ptr + ((epoch & 1) * WORLD_SIZE + peer) * READY_WORDS
    theirs = tl.load(slot + lanes, volatile=True)
    mine = tl.load(signature_ptr + lanes)
    arrived = tl.sum(tl.where(lanes == 0, (theirs - epoch >= 0).to(tl.int32), 0), axis=0)
    different = tl.sum(((theirs != mine) & (lanes > 0)).to(tl.int32), axis=0)
    if arrived * different > 0:
        record_failure(control_ptr, KIND_MISMATCH, peer, -1, epoch, different)


@triton.jit
def verify_peers(ready_ptr, signature_ptr, epoch, control_ptr, rank, WORLD_SIZE: tl.constexpr, TARGET: tl.constexpr):
    """``verify_ready`` for all peers, from ``rank`` + 1 on, in the first program of a launch; the others do
    nothing."""
    if tl.program_id(0) == 0:
        if is_cuda(TARGET) and WORLD_SIZE > 2:
            _verify_at_once(ready_ptr, signature_ptr, epoch, control_ptr, rank, WORLD_SIZE, TARGET)
        else:
            for step in tl.static_range(1, WORLD_SIZE):
                verify_ready(
                    ready_ptr, signature_ptr, epoch, control_ptr, (rank + step) % WORLD_SIZE, WORLD_SIZE, TARGET
                )


@triton.jit
def _verify_at_once(
    ready_ptr, signature_ptr, epoch, control_ptr, rank, WORLD_SIZE: tl.constexpr, TARGET: tl.constexpr
):
    """Peer by peer a look at a flag and one at a signature take more than a microsecond: here all peers have them
    looked at together."""
    PEERS: tl.constexpr = power_of_two(WORLD_SIZE)
    lanes = tl.arange(0, READY_WORDS)
    steps = tl.arange(0, PEERS)
    peers = (rank + tl.maximum(steps, 1)) % WORLD_SIZE  # of one that comes again the first counts
    await_peers(ready_ptr, epoch, control_ptr, rank, WORLD_SIZE, TARGET)
    slots = ready_ptr + ((epoch & 1) * WORLD_SIZE + peers) * READY_WORDS
    theirs = tl.load(slots[:, None] + lanes[None, :], volatile=True)
    mine = tl.load(signature_ptr + lanes)[None, :]
    arrived = tl.sum(tl.where(lanes[None, :] == 0, (theirs - epoch >= 0).to(tl.int32), 0), axis=1)
    different = arrived * tl.sum(((theirs != mine) & (lanes[None, :] > 0)).to(tl.int32), axis=1)
    first = tl.min(tl.where(different > 0, steps, PEERS), axis=0)
    if first < PEERS:
        count = tl.sum(tl.where(steps == first, different, 0), axis=0)
        record_failure(control_ptr, KIND_MISMATCH, (rank + tl.maximum(first, 1)) % WORLD_SIZE, -1, epoch, count)
