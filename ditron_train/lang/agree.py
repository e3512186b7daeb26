"""The kernel by which all ranks of a group agree on the arguments of an op before its buffers may grow."""

import triton
import triton.language as tl

import ditron_train.lang as dl


@triton.jit
def agree_kernel(
    ready_addresses,
    ready_ptr,
    signature_ptr,
    tickets_ptr,
    control_ptr,
    NUM_ROLES: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TARGET: tl.constexpr,
    VERIFY: tl.constexpr = True,
):
    """One program: all ranks announce the same signature, or the channel records the mismatch; without VERIFY the
    host compares.

    It stands for a launch of the op: it advances the epoch of the channel's first NUM_ROLES ticket slots, so that they
    stay in step, and leaves the op's own counters (slots 2 and 3, where NUM_ROLES leaves them) as the next launch
    wants them.
    """
    epoch = dl.next_epoch(tickets_ptr)
    for role in tl.static_range(1, NUM_ROLES):
        dl.next_epoch(tickets_ptr + role)
    if NUM_ROLES <= 2:
        tl.store(tickets_ptr + 2 + tl.arange(0, 2), tl.zeros((2,), tl.int64))
    rank = dl.rank(control_ptr)
    dl.announce(ready_addresses, signature_ptr, epoch, rank, WORLD_SIZE, TARGET)
    if VERIFY:
        dl.verify_peers(ready_ptr, signature_ptr, epoch, control_ptr, rank, WORLD_SIZE, TARGET)
