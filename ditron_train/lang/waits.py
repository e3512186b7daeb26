"""Signals inside kernels: epochs, bounded waits and notifies.

Every wait here ends: when the signal came, when the deadline passed, or when another wait of the channel gave up.
A wait that gives up writes the channel's record (first one wins) and returns; the kernel runs on with wrong data, its
result is discarded, and the host raises (``symm.Channel.check``). No control flow depends on a wait's outcome, so
threads that see different outcomes never diverge at a barrier.

``TARGET`` is ``runtime.device.kernel_target``: it picks between inline asm (NVIDIA), the generic loop (AMD) and a host
loop (interpreter), since ``tl.target_info`` needs a driver.
"""

import ctypes
import os
import time

import triton
import triton.language as tl

from ditron_train.symm import control as layout

ABORT = tl.constexpr(layout.CONTROL_ABORT)
TIMEOUT_NS = tl.constexpr(layout.CONTROL_TIMEOUT_NS)
RECORD_ADDRESS = tl.constexpr(layout.CONTROL_RECORD_ADDRESS)
RECORD_STATE = tl.constexpr(layout.RECORD_STATE)
RECORD_KIND = tl.constexpr(layout.RECORD_KIND)
RECORD_PEER = tl.constexpr(layout.RECORD_PEER)
RECORD_CHUNK = tl.constexpr(layout.RECORD_CHUNK)
RECORD_EXPECTED = tl.constexpr(layout.RECORD_EXPECTED)
RECORD_SEEN = tl.constexpr(layout.RECORD_SEEN)
KIND_TIMEOUT = tl.constexpr(layout.KIND_TIMEOUT)
TICKET_UNIT_LOG2 = tl.constexpr(layout.TICKET_UNIT_LOG2)


@triton.constexpr_function
def is_cuda(target):
    """Whether ``TARGET`` names an NVIDIA GPU, at compile time."""
    return target.startswith("sm_")


@triton.constexpr_function
def power_of_two(count):
    """The least power of two from ``count`` up, at compile time."""
    return triton.next_power_of_2(count)


@triton.jit
def next_epoch(tickets_ptr):
    """Epoch of this launch (int32: 1, 2, ..., cyclic), the same in all its programs; each calls it exactly once.

    A launch draws 2**TICKET_UNIT_LOG2 tickets whatever its grid is: program 0 draws the rest. So
    ``ticket >> TICKET_UNIT_LOG2`` counts launches, without a launch to advance it and right under graph replay.
    Launches of one slot must not overlap. At most 1024 programs.
    """
    unit = tl.cast(1, tl.int64) << TICKET_UNIT_LOG2
    others = (tl.num_programs(0) - 1).to(tl.int64)
    draw = tl.where(tl.program_id(0) == 0, unit - others, 1)
    ticket = tl.atomic_add(tickets_ptr, draw, sem="relaxed", scope="gpu")
    return ((ticket >> TICKET_UNIT_LOG2) + 1).to(tl.int32)


@triton.jit
def last_epoch(tickets_ptr):
    """Epoch of the last launch that drew from this slot, for a kernel after it in the stream (none is drawn)."""
    return (tl.load(tickets_ptr) >> TICKET_UNIT_LOG2).to(tl.int32)


@triton.jit
def record_failure(control_ptr, kind, peer, chunk, expected, seen):
    """Writes the channel's record unless one is there; uniform over the program (it holds barriers)."""
    claimed = tl.atomic_cas(
        control_ptr + ABORT, tl.cast(0, tl.int64), tl.cast(1, tl.int64), sem="relaxed", scope="gpu"
    )
    if claimed == 0:
        record = tl.load(control_ptr + RECORD_ADDRESS).to(tl.pointer_type(tl.int64))
        tl.store(record + RECORD_KIND, tl.cast(kind, tl.int64))
        tl.store(record + RECORD_PEER, tl.cast(peer, tl.int64))
        tl.store(record + RECORD_CHUNK, tl.cast(chunk, tl.int64))
        tl.store(record + RECORD_EXPECTED, tl.cast(expected, tl.int64))
        tl.store(record + RECORD_SEEN, tl.cast(seen, tl.int64))
        tl.debug_barrier()
        tl.atomic_xchg(record + RECORD_STATE, tl.cast(1, tl.int64), sem="release", scope="sys")


def _never_compiled(function):
    """Marks a plain function that jit functions name: the compiler's walk over what they use refuses others."""
    function.__triton_builtin__ = True
    return function


@_never_compiled
def _wait_on_host(signal_ptr, epoch, control_ptr, peer, chunk):
    """The interpreter's wait: polls the flag, yielding the core between polls, and ends with the interpreter's own
    acquire, which takes as long as a hundred polls: ranks that wait would keep the cores from those that work."""
    control = _int64_words(control_ptr, layout.CONTROL_WORDS)
    flag = ctypes.c_int32.from_address(_scalar(signal_ptr))
    deadline_ns = time.monotonic_ns() + control[layout.CONTROL_TIMEOUT_NS]
    expected = _scalar(epoch)
    polls = 0
    while True:
        seen = flag.value
        if (seen - expected + 2**31) % 2**32 - 2**31 >= 0 or control[layout.CONTROL_ABORT]:
            tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
            return
        if time.monotonic_ns() > deadline_ns:
            break
        polls += 1
        if polls < 20:  # with more ranks than cores a poll takes time from the one that is waited for
            os.sched_yield()
        else:
            time.sleep(0.0002)
    control[layout.CONTROL_ABORT] = 1
    record = (ctypes.c_int64 * layout.RECORD_WORDS).from_address(control[layout.CONTROL_RECORD_ADDRESS])
    record[layout.RECORD_KIND] = layout.KIND_TIMEOUT
    record[layout.RECORD_PEER] = _scalar(peer)
    record[layout.RECORD_CHUNK] = _scalar(chunk)
    record[layout.RECORD_EXPECTED] = expected
    record[layout.RECORD_SEEN] = seen
    record[layout.RECORD_STATE] = 1


def _scalar(value) -> int:
    handle = getattr(value, "handle", None)
    return int(handle.data.reshape(-1)[0]) if handle is not None else int(getattr(value, "value", value))


def _int64_words(pointer, count: int):
    return (ctypes.c_int64 * count).from_address(_scalar(pointer))


@triton.jit
def wait_cuda(signal_ptr, epoch, control_ptr, peer, chunk):
    """One asm block a wait: every thread polls with ``ld.acquire.sys`` and so orders its own later loads.

    The loop also leaves when the channel's abort word is set. The thread that wins the abort word writes the record;
    a scalar atomic in Triton would cost two block barriers a poll. The words' offsets are ``symm.control``'s. Returns
    what it saw last.
    """
    return tl.inline_asm_elementwise(
        """
        {
            .reg .pred done, flag;
            .reg .b32 seen, ahead;
            .reg .b64 start, now, limit, abort, record, wide;
            ld.acquire.sys.global.b32 seen, [$1];
            sub.s32 ahead, seen, $2;
            setp.ge.s32 done, ahead, 0;
            @done bra WAIT_END;
            mov.u64 start, %globaltimer;
            ld.global.b64 limit, [$3+8];
        WAIT_POLL:
            nanosleep.u32 32;
            ld.acquire.sys.global.b32 seen, [$1];
            sub.s32 ahead, seen, $2;
            setp.ge.s32 done, ahead, 0;
            @done bra WAIT_END;
            ld.volatile.global.b64 abort, [$3];
            setp.ne.s64 flag, abort, 0;
            @flag bra WAIT_END;
            mov.u64 now, %globaltimer;
            sub.s64 now, now, start;
            setp.lt.s64 flag, now, limit;
            @flag bra WAIT_POLL;
            atom.relaxed.gpu.global.cas.b64 abort, [$3], 0, 1;
            setp.ne.s64 flag, abort, 0;
            @flag bra WAIT_END;
            ld.global.b64 record, [$3+16];
            mov.u64 wide, 1;
            st.volatile.global.b64 [record+8], wide;
            cvt.s64.s32 wide, $4;
            st.volatile.global.b64 [record+16], wide;
            cvt.s64.s32 wide, $5;
            st.volatile.global.b64 [record+24], wide;
            cvt.s64.s32 wide, $2;
            st.volatile.global.b64 [record+32], wide;
            cvt.s64.s32 wide, seen;
            st.volatile.global.b64 [record+40], wide;
            fence.acq_rel.sys;
            mov.u64 wide, 1;
            st.volatile.global.b64 [record], wide;
        WAIT_END:
            mov.b32 $0, seen;
        }
        """,
        "=r,l,r,l,r,r",
        [signal_ptr.to(tl.int64), epoch, control_ptr.to(tl.int64), peer, chunk],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _clock_hip():
    """Ticks of 10 ns."""
    return tl.inline_asm_elementwise(
        "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _wait_generic(signal_ptr, epoch, control_ptr, peer, chunk):
    """Uniform over the program: the atomic's result is broadcast, the abort word is read by one atomic as well."""
    seen = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
    limit = tl.load(control_ptr + TIMEOUT_NS) // 10
    start = _clock_hip()
    waited = start - start
    abort = tl.cast(0, tl.int64)
    while ((seen - epoch) < 0) & (abort == 0) & (waited < limit):
        seen = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
        abort = tl.atomic_add(control_ptr + ABORT, tl.cast(0, tl.int64), sem="relaxed", scope="gpu")
        waited = _clock_hip() - start
    if ((seen - epoch) < 0) & (abort == 0):
        record_failure(control_ptr, KIND_TIMEOUT, peer, chunk, epoch, seen)


@triton.jit
def wait(signal_ptr, epoch, control_ptr, peer, chunk, TARGET: tl.constexpr):
    """Waits until ``*signal_ptr - epoch >= 0`` (cyclic int32); acquire at system scope.

    After it, plain loads of what the notifier wrote are ordered; before descriptor (TMA) loads call
    ``fence_async_proxy``. ``peer`` (group rank) and ``chunk`` only name what is missing in the record.
    """
    if TARGET == "interpreter":
        _wait_on_host(signal_ptr, epoch, control_ptr, peer, chunk)
    elif is_cuda(TARGET):
        wait_cuda(signal_ptr, epoch, control_ptr, tl.cast(peer, tl.int32), tl.cast(chunk, tl.int32))
    else:
        _wait_generic(signal_ptr, epoch, control_ptr, peer, chunk)


@triton.jit
def wait_many(signal_ptr, count, epoch, control_ptr, peer, first_chunk, COUNT: tl.constexpr, TARGET: tl.constexpr):
    """``wait`` for ``count`` consecutive flags, ``signal_ptr + i``, looked at ``COUNT`` (a power of two up to 32) at a
    time.

    A vector of volatile loads finds the usual case (all there) in one round trip; only then, or for those that are
    behind, ``wait`` runs flag by flag. The acquire is a system-scope fence by every thread after its own loads.
    """
    if is_cuda(TARGET):
        lanes = tl.arange(0, COUNT)
        for first in range(0, count, COUNT):
            block = tl.minimum(count - first, COUNT)
            seen = tl.load(signal_ptr + first + lanes, mask=lanes < block, other=epoch, volatile=True)
            behind = tl.sum(((seen - epoch) < 0).to(tl.int32), axis=0)
            if behind > 0:  # warps may differ here: no barrier inside
                for i in range(first, first + block):
                    wait(signal_ptr + i, epoch, control_ptr, peer, first_chunk + i, TARGET)
        _acquire_fence(TARGET)
    else:
        for i in range(count):
            wait(signal_ptr + i, epoch, control_ptr, peer, first_chunk + i, TARGET)


@triton.jit
def wait_ranks(
    signal_ptr, stride, epoch, control_ptr, chunk, WORLD_SIZE: tl.constexpr, COUNT: tl.constexpr, TARGET: tl.constexpr
):
    """``wait`` for one flag of every rank, ``signal_ptr + rank * stride``; ``COUNT`` is the power of two from
    WORLD_SIZE."""
    if is_cuda(TARGET):
        lanes = tl.arange(0, COUNT)
        seen = tl.load(signal_ptr + lanes * stride, mask=lanes < WORLD_SIZE, other=epoch, volatile=True)
        behind = tl.sum(((seen - epoch) < 0).to(tl.int32), axis=0)
        if behind > 0:  # warps may differ here: no barrier inside
            for peer in range(WORLD_SIZE):
                wait(signal_ptr + peer * stride, epoch, control_ptr, peer, chunk, TARGET)
        _acquire_fence(TARGET)
    else:
        for peer in range(WORLD_SIZE):
            wait(signal_ptr + peer * stride, epoch, control_ptr, peer, chunk, TARGET)


@triton.jit
def wait_peers(
    signal_ptr, stride, epoch, control_ptr, rank, chunk,
    FIRST: tl.constexpr, LAST: tl.constexpr, WORLD_SIZE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """``wait`` for one flag each, ``signal_ptr + peer * stride``, of the ranks ``rank + FIRST`` to ``rank + LAST``, if
    there are any.

    A look at a flag takes some 0.7 us, so each lane waits for a peer of its own; the barrier hands what it has
    acquired to the threads that read what was written.
    """
    if is_cuda(TARGET) and LAST >= FIRST:
        steps = FIRST + tl.minimum(tl.arange(0, power_of_two(LAST - FIRST + 1)), LAST - FIRST)
        peers = (rank + steps) % WORLD_SIZE
        wait_cuda(signal_ptr + peers * stride, epoch, control_ptr, peers, tl.cast(chunk, tl.int32))
        tl.debug_barrier()
    else:
        for step in tl.static_range(FIRST, LAST + 1):
            peer = (rank + step) % WORLD_SIZE
            wait(signal_ptr + peer * stride, epoch, control_ptr, peer, chunk, TARGET)


@triton.jit
def _acquire_fence(TARGET: tl.constexpr):
    if is_cuda(TARGET):
        tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def notify(signal_ptr, epoch, TARGET: tl.constexpr):
    """Sets ``*signal_ptr = epoch``, released at system scope.

    The block barrier in front is what makes all threads' stores part of the release: Triton emits none before an
    atomic. Descriptor (TMA) stores need ``bulk_store_wait`` before.
    """
    tl.debug_barrier()
    tl.atomic_xchg(signal_ptr, epoch, sem="release", scope="sys")
