"""The kernel that begins a gather by copy engines."""

import triton
import triton.language as tl

import ditron_train.lang as dl


@triton.jit(do_not_specialize=["num_flags"])
def gather_start_kernel(
    epochs_ptr, num_flags, channel, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, TARGET: tl.constexpr
):
    """One program before a gather by copy engines: exchanges start signals and stores ``epochs_ptr[:num_flags] =
    epoch``.

    After the data the copy engines copy those words onto the peers' flags. Since the epoch is read from device memory,
    every replay of a captured graph gets a new one.
    """
    epoch = dl.next_epoch(channel.tickets)
    rank = dl.rank(channel.control)
    dl.announce(channel.ready_addresses, channel.signature, epoch, rank, WORLD_SIZE, TARGET)
    lanes = tl.arange(0, BLOCK)
    for block in range(0, tl.cdiv(num_flags, BLOCK)):
        offsets = block * BLOCK + lanes
        tl.store(epochs_ptr + offsets, epoch + tl.zeros((BLOCK,), tl.int32), mask=offsets < num_flags)
    dl.verify_peers(channel.ready, channel.signature, epoch, channel.control, rank, WORLD_SIZE, TARGET)
