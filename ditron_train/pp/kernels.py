"""Kernels of the paths that take no copy engine: a bounded wait, a push by a few programs, a flag, a wait with its
header.

Who waits for whom: the consumer waits for *data* (a count of fragments) at its own flag, the producer for *credit* (a
count of messages copied out) at its own; each flag is written by the other side alone and only grows. A push's stores
come before its flag: every program ends with a release at system scope on a counter of its own GPU, the last one to
come has so acquired all of them, and its release of the flag at the peer stands for all. The wait acquires at system
scope; what the stream does next begins behind it.
"""

import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.symm import control as layout

MAX_PROGRAMS = 8  # each fills a multiprocessor; stores of eight reach 337 GB/s, of sixteen no more (H200)
NUM_WARPS = 32
BLOCK_WORDS = 16384  # 64 KiB in flight a program
HEADER_LANES = 16

_KIND_MISMATCH = tl.constexpr(layout.KIND_MISMATCH)
_FIRST_AGREED = tl.constexpr(HEADER_LANES - 2)  # behind ``Header.to_words``: its ``agreed_words``


@triton.jit(do_not_specialize=["signal", "epoch", "peer", "chunk"])
def await_kernel(signal, epoch, control_ptr, peer, chunk, TARGET: tl.constexpr):
    """One program: holds the stream until this rank's flag at address ``signal`` is ``epoch`` or later, at most the
    deadline."""
    dl.wait(
        tl.cast(signal, tl.int64).to(tl.pointer_type(tl.int32)),
        tl.cast(epoch, tl.int32),
        control_ptr,
        peer,
        chunk,
        TARGET,
    )


@triton.jit(do_not_specialize=["signal", "epoch", "sent", "expected", "peer", "message", "lane"])
def await_message_kernel(
    signal,
    epoch,
    sent,
    expected,
    seen_ptr,
    control_ptr,
    peer,
    message,
    lane,
    LANES: tl.constexpr,
    TARGET: tl.constexpr,
):
    """``await_kernel``, then compares the header in front of the message, at address ``sent``, with the one at
    ``expected``: type and number of elements, the last words of both.

    A difference is recorded as a mismatch of ``message``, and both headers are kept in ``seen_ptr`` ``[2, LANES]``;
    after a wait that gave up, its record stands and the comparison says nothing.
    """
    dl.wait(
        tl.cast(signal, tl.int64).to(tl.pointer_type(tl.int32)),
        tl.cast(epoch, tl.int32),
        control_ptr,
        peer,
        message,
        TARGET,
    )
    lanes = tl.arange(0, LANES)
    theirs = tl.load(tl.cast(sent, tl.int64).to(tl.pointer_type(tl.int64)) + lanes, volatile=True)
    mine = tl.load(tl.cast(expected, tl.int64).to(tl.pointer_type(tl.int64)) + lanes)
    different = tl.sum(((theirs != mine) & (lanes >= _FIRST_AGREED)).to(tl.int32), axis=0)
    if different > 0:
        tl.store(seen_ptr + lanes, theirs)
        tl.store(seen_ptr + LANES + lanes, mine)
        dl.record_failure(control_ptr, _KIND_MISMATCH, peer, message, lane, different)


@triton.jit(do_not_specialize=["signal", "epoch"])
def notify_kernel(signal, epoch, TARGET: tl.constexpr):
    """One program: sets the flag at address ``signal``, a peer's, once the stream has got here."""
    dl.notify(tl.cast(signal, tl.int64).to(tl.pointer_type(tl.int32)), tl.cast(epoch, tl.int32), TARGET)


@triton.jit(do_not_specialize=["destination", "source", "num_bytes", "signal", "epoch"])
def push_kernel(
    destination,
    source,
    num_bytes,
    signal,
    epoch,
    arrived_ptr,
    IS_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Copies ``num_bytes`` from address ``source`` to a peer's ``destination``, then sets the flag at ``signal``
    there.

    Programs share the blocks. ``arrived_ptr`` (int64, zero) counts those that are done and is zero again at the end.
    IS_ALIGNED: both addresses are multiples of 16, so 16 bytes move at a time; else one.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    to_bytes = tl.cast(destination, tl.int64).to(tl.pointer_type(tl.uint8))
    from_bytes = tl.cast(source, tl.int64).to(tl.pointer_type(tl.uint8))
    size = tl.cast(num_bytes, tl.int64)
    if IS_ALIGNED:
        words = tl.multiple_of(size // 16 * 4, 4)
        to_words = tl.multiple_of(to_bytes.to(tl.pointer_type(tl.int32)), 16)
        from_words = tl.multiple_of(from_bytes.to(tl.pointer_type(tl.int32)), 16)
        dl.putmem(to_words, from_words, words, program, programs, BLOCK)
        rest = words * 4 + tl.arange(0, 16)
        inside = rest < tl.where(program == 0, size, 0)
        tl.store(to_bytes + rest, tl.load(from_bytes + rest, mask=inside), mask=inside)
    else:
        dl.putmem(to_bytes, from_bytes, size, program, programs, BLOCK)
    tl.debug_barrier()
    before = tl.atomic_add(arrived_ptr, tl.cast(1, tl.int64), sem="acq_rel", scope="sys")
    if before == programs - 1:
        tl.atomic_xchg(arrived_ptr, tl.cast(0, tl.int64), sem="relaxed", scope="gpu")
        dl.notify(tl.cast(signal, tl.int64).to(tl.pointer_type(tl.int32)), tl.cast(epoch, tl.int32), TARGET)
