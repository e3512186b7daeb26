"""Kernels that show, beside libraries that nobody has tried, whether launches, rendezvous and memory order work.

`policy.self_check` runs them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import ditron_train.lang as dl


class Terms(NamedTuple):
    """What ``scale_kernel`` multiplies with and adds, by column: two tensors of one argument."""

    factor: Any
    offset: Any


@triton.jit
def scale_kernel(x, terms, out, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``out = x * factor + offset`` in fp32, ``ROWS`` rows a program.

    Its arguments are one of each kind that the ops launch with: a descriptor (``x``, ``[rows, COLUMNS]``), a tuple of
    pointers, a pointer and an integer.
    """
    first = tl.program_id(0) * ROWS
    columns = tl.arange(0, COLUMNS)
    rows = first + tl.arange(0, ROWS)
    factor = tl.load(terms.factor + columns)
    offset = tl.load(terms.offset + columns)
    scaled = x.load([first, 0]).to(tl.float32) * factor[None, :] + offset[None, :]
    tl.store(out + rows[:, None] * num_columns + columns[None, :], scaled)


@triton.jit
def handover_kernel(
    channel, values, slot_addresses, slots, out, ROUNDS: tl.constexpr, BLOCK: tl.constexpr, TARGET: tl.constexpr
):
    """Program 0 puts ``values[round]`` into every rank's slot ``[rank, round]`` and announces each by a flag.

    Program 1 waits for each flag and copies what it then reads: ``out[peer, round]``.

    The flag is released at system scope behind the stores of all threads, and acquired before the loads. What is read
    too early is what the slot held before, so values are others in each launch. A rank's own slots are written like a
    peer's: there one program hands over to another of its device. Ranks must have read everything before the next
    launch. In the interpreter program 0 is done before program 1 begins, so nothing is awaited in the other direction.
    """
    epoch = dl.next_epoch(channel.tickets)
    rank = dl.rank(channel.control)
    num_ranks = dl.num_ranks(channel.control)
    for step in range(num_ranks):
        peer = (rank + step) % num_ranks
        if tl.program_id(0) == 0:
            slot = dl.symm_at(slot_addresses, peer, tl.int32) + rank * ROUNDS * BLOCK
            flags = dl.symm_at(channel.signals_addresses, peer, tl.int32) + rank * ROUNDS
            for round in range(ROUNDS):
                source = values + round * BLOCK
                dl.putmem_signal(slot + round * BLOCK, source, BLOCK, flags + round, epoch, BLOCK, TARGET)
        else:
            lanes = tl.arange(0, BLOCK)
            for round in range(ROUNDS):
                place = peer * ROUNDS + round
                dl.wait(channel.signals + place, epoch, channel.control, peer, round, TARGET)
                tl.store(out + place * BLOCK + lanes, tl.load(slots + place * BLOCK + lanes))
