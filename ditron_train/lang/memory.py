"""Memory inside kernels: addressing peers, copies to and from them, fences, thread-level helpers.

The OpenSHMEM names (``putmem``, ``getmem``, ``putmem_signal``, ``signal_op``, ``fence``, ``quiet``, ``barrier_all``)
work on addresses that the arena mapped, so they need no library inside a kernel and are the same for every transport
that maps peers. SM-driven pulls are slow (a half of the push rate): kernels push.
"""

import triton
import triton.language as tl

from ditron_train.lang.start_signals import READY_WORDS, await_ready
from ditron_train.lang.waits import is_cuda, notify, wait, wait_cuda
from ditron_train.symm import control as layout

_RANK = tl.constexpr(layout.CONTROL_RANK)
_WORLD_SIZE = tl.constexpr(layout.CONTROL_WORLD_SIZE)


@triton.constexpr_function
def _has_async_proxy(target):
    return target.startswith("sm_") and int(target[3:]) >= 90


@triton.jit
def rank(control_ptr):
    """This rank in the channel's group (int32)."""
    return tl.load(control_ptr + _RANK).to(tl.int32)


@triton.jit
def num_ranks(control_ptr):
    """Size of the channel's group (int32)."""
    return tl.load(control_ptr + _WORLD_SIZE).to(tl.int32)


@triton.jit
def symm_at(addresses_ptr, rank, DTYPE: tl.constexpr):
    """Pointer to group rank ``rank``'s copy of a ``SymmetricTensor`` (``addresses_ptr``: its ``addresses``)."""
    return tl.multiple_of(tl.load(addresses_ptr + rank).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def consume_token(value, token):
    """Ties ``value`` to ``token``: returns ``value``. Waits here have side effects and order later loads by
    themselves; the call documents which wait a value depends on, and keeps kernels written for token-based compilers
    readable."""
    return value


@triton.jit
def fence_async_proxy(TARGET: tl.constexpr):
    """Orders later descriptor (TMA) loads after what this thread has acquired; needed after every acquire that
    guards memory which is then read through a descriptor. Nothing if there is no async proxy."""
    if _has_async_proxy(TARGET):
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def wait_token(signal_ptr, epoch, control_ptr, peer, chunk, TARGET: tl.constexpr):
    """``wait``, then what ``fence_async_proxy`` does, for a loop whose descriptor loads the compiler pipelines:
    returns an int32 zero. Add it to a coordinate of the loads that the wait guards.

    The loads depend on the sum, so the compiler keeps the wait in front of the first of them, where it issues them:
    some steps of the K loop ahead, while the products of the tile before still run. It holds no barrier (one inside
    such a loop turns the pipelining off): every thread acquires for itself, the one that issues the loads among them.
    """
    if is_cuda(TARGET):
        seen = wait_cuda(signal_ptr, epoch, control_ptr, tl.cast(peer, tl.int32), tl.cast(chunk, tl.int32))
        if _has_async_proxy(TARGET):
            return tl.inline_asm_elementwise(
                "fence.proxy.async.global; mov.u32 $0, 0;", "=r,r", [seen], dtype=tl.int32, is_pure=False, pack=1
            )
        else:
            return tl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [seen], dtype=tl.int32, is_pure=False, pack=1)
    else:
        wait(signal_ptr, epoch, control_ptr, peer, chunk, TARGET)
        return tl.cast(0, tl.int32)


@triton.jit
def bulk_store_wait(TARGET: tl.constexpr):
    """Waits until this thread's descriptor (TMA) stores are complete and visible, not only read out of shared memory.
    Goes between a descriptor store and the ``notify`` that announces it. Elsewhere stores are plain: nothing."""
    if _has_async_proxy(TARGET):
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def notify_stored(signal_address, epoch, PIPELINED: tl.constexpr, TARGET: tl.constexpr):
    """``bulk_store_wait``, then ``notify`` of the flag at ``signal_address`` (int64, so that loops can carry it): the
    flag of a tile that leaves through a descriptor.

    PIPELINED: in one asm block. The compiler does not pipeline a loop in which it sees a barrier, so there it sees
        none.
    """
    if PIPELINED and _has_async_proxy(TARGET):
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
        bulk_store_wait(TARGET)
        notify(signal_address.to(tl.pointer_type(tl.int32)), epoch, TARGET)


@triton.jit
def thread_id(TARGET: tl.constexpr):
    """Index of this thread in its block; 0 in the interpreter. Differs between threads: never branch on it around
    anything that holds a barrier."""
    if is_cuda(TARGET):
        return tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return tl.cast(0, tl.int32)


@triton.jit
def lane_id(TARGET: tl.constexpr):
    """Index of this thread in its warp; 0 in the interpreter."""
    if is_cuda(TARGET):
        return tl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return tl.cast(0, tl.int32)


@triton.jit
def sync_threads():
    """Barrier over the program's threads."""
    tl.debug_barrier()


@triton.jit
def fence(TARGET: tl.constexpr):
    """Orders this thread's earlier writes before its later ones, at system scope (OpenSHMEM ``fence``)."""
    if is_cuda(TARGET):
        tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def quiet(TARGET: tl.constexpr):
    """Waits until this program's puts are visible: descriptor stores complete, plain stores ordered (``quiet``)."""
    bulk_store_wait(TARGET)
    fence(TARGET)


@triton.jit
def putmem(destination_ptr, source_ptr, num_elements, first_block, block_step, BLOCK: tl.constexpr):
    """Copies ``num_elements`` of ``source_ptr`` to ``destination_ptr`` (a peer's memory), blocks ``first_block``,
    ``first_block + block_step``, ... of ``BLOCK`` elements: several programs share one copy. Plain stores:
    non-blocking until the next ``notify`` or ``quiet``."""
    lanes = tl.arange(0, BLOCK)
    for block in range(first_block, tl.cdiv(num_elements, BLOCK), block_step):
        offsets = tl.cast(block, tl.int64) * BLOCK + lanes
        values = tl.load(source_ptr + offsets, mask=offsets < num_elements)
        tl.store(destination_ptr + offsets, values, mask=offsets < num_elements)


@triton.jit
def getmem(destination_ptr, source_ptr, num_elements, first_block, block_step, BLOCK: tl.constexpr):
    """Copies from a peer's ``source_ptr``; blocking, since its loads are."""
    putmem(destination_ptr, source_ptr, num_elements, first_block, block_step, BLOCK)


@triton.jit
def putmem_signal(
    destination_ptr, source_ptr, num_elements, signal_ptr, epoch, BLOCK: tl.constexpr, TARGET: tl.constexpr
):
    """One program's whole ``putmem``, then ``notify``."""
    putmem(destination_ptr, source_ptr, num_elements, tl.cast(0, tl.int32), 1, BLOCK)
    notify(signal_ptr, epoch, TARGET)


@triton.jit
def signal_op(signal_ptr, value, ADD: tl.constexpr, TARGET: tl.constexpr):
    """Sets the flag to ``value`` or adds ``value`` to it, released at system scope (``signal_op``)."""
    if ADD:
        tl.debug_barrier()
        tl.atomic_add(signal_ptr, value, sem="release", scope="sys")
    else:
        notify(signal_ptr, value, TARGET)


@triton.jit
def signal_wait_until(signal_ptr, value, control_ptr, peer, TARGET: tl.constexpr):
    """Waits until the flag is ``value`` or later (``signal_wait_until`` with GE, the only comparison that is safe with
    monotonic epochs)."""
    wait(signal_ptr, value, control_ptr, peer, -1, TARGET)


@triton.jit
def barrier_all(ready_addresses, ready_ptr, epoch, control_ptr, rank, WORLD_SIZE: tl.constexpr, TARGET: tl.constexpr):
    """All ranks of the group have called it for ``epoch`` (one program a launch; bounded like every wait)."""
    for step in tl.static_range(WORLD_SIZE):
        peer = (rank + WORLD_SIZE - step) % WORLD_SIZE
        base = tl.load(ready_addresses + peer).to(tl.pointer_type(tl.int32))
        notify(base + ((epoch & 1) * WORLD_SIZE + rank) * READY_WORDS, epoch, TARGET)
    for step in tl.static_range(WORLD_SIZE):
        await_ready(ready_ptr, epoch, control_ptr, (rank + step) % WORLD_SIZE, WORLD_SIZE, TARGET)
