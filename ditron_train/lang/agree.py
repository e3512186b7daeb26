"""The kernel by which all ranks of a group agree on the arguments of an op before its buffers may grow."""

import triton
import triton.language as tl

import ditron_train.lang as dl

__all__ = ["agree_kernel"]


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
):
    """One program: all ranks announce the same signature, or the channel records the mismatch.

    Advances the epoch of the channel's first NUM_ROLES ticket slots, so that they stay in step with those of an op.
    """
    epoch = dl.next_epoch(tickets_ptr)
    for role in tl.static_range(1, NUM_ROLES):
        dl.next_epoch(tickets_ptr + role)
    rank = dl.rank(control_ptr)
    dl.announce(ready_addresses, signature_ptr, epoch, rank, WORLD_SIZE, TARGET)
    for step in tl.static_range(1, WORLD_SIZE):
        dl.verify_ready(ready_ptr, signature_ptr, epoch, control_ptr, (rank + step) % WORLD_SIZE, WORLD_SIZE, TARGET)
