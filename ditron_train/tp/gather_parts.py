"""Gathers of several tensors at once by copy engines: what a quantized operand consists of, its bytes and its scales.

The tensors of all ranks lie tensor by tensor, each in the order of the ranks, so that each is whole. Peers get the
first ones in turn, then the others: who computes with those of one rank after the other begins early, and the others
arrive meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.runtime.versions import pip_command
from ditron_train.schedule.orders import chunk_order, order_in_block, rank_blocks
from ditron_train.stream.copies import copy_in_turn
from ditron_train.stream.driver import memcpys_async
from ditron_train.stream.events import current_handle
from ditron_train.tp.context import FLAGS_PER_RANK, TPContext
from ditron_train.tp.gather import CopiedGather
from ditron_train.tp.prepared import can_copy

_ALIGNMENT = 16  # bytes


class PreparedParts(CopiedGather):
    """Gathers of tensors of ``sizes`` bytes a rank, the same on all ranks (collective to make).

    The first ``num_in_turn`` of a rank have a flag, the others have one: ``wait_for`` waits for the former.

    ``totals``: the bytes of each tensor of all ranks, views of the buffer. ``blocks``: ranks whose parts are consumed
    together, as they arrive; this rank's comes first.
    """

    def __init__(self, context: TPContext, sizes: tuple[int, ...], num_in_turn: int, num_blocks: int) -> None:
        world, num_bytes = context.world_size, sum(sizes)
        units = world * num_bytes // _ALIGNMENT
        turns = num_blocks << 8 | num_in_turn
        super().__init__(context, (units, hash(sizes) & 0x7FFFFFFF, _ALIGNMENT, torch.uint8, turns))
        self.blocks = rank_blocks(self.arrival_order, num_blocks)
        order = [context.rank, *chunk_order(context.rank, world, "gather_push").tolist()]
        in_turn = [one for block in rank_blocks(order, num_blocks) for one in order_in_block(context.rank, block)]
        self._peers = [one for one in in_turn if one != context.rank]
        self.buffer = context.gathered(units, _ALIGNMENT, torch.uint8)
        starts = [world * before for before in accumulate(sizes, initial=0)]
        flat = self.buffer.local.view(-1)
        self.totals = [flat[first:last] for first, last in zip(starts, starts[1:])]
        parts = list(zip(range(len(sizes)), starts, sizes))
        self._stages = [stage for stage in (parts[:num_in_turn], parts[num_in_turn:]) if stage]
        self._own = [(total.data_ptr() + context.rank * size, size) for total, size in zip(self.totals, sizes)]
        self.granule_rows, count = 1, len(self._stages)
        self._first_starts = context.table(("flags", 1), range(world + 1))
        self.row_starts = context.table(("flags", count), range(0, count * world + 1, count))

    def start(self, parts: Sequence[torch.Tensor]) -> None:
        """Sends contiguous ``parts``, which must stay unchanged until the stream is behind ``finish``."""
        context = self.context
        addresses = tuple(part.data_ptr() for part in parts)
        context.start(self.channel, lambda: self._send(addresses), (self, addresses), addresses)
        own = [(to, address, size) for (to, size), address in zip(self._own, addresses)]
        if context.is_cuda:
            memcpys_async(own, current_handle(context.device))
        else:
            copy_in_turn(own, None)

    def _send(self, addresses: tuple[int, ...]) -> None:
        context, rank, moves = self.context, self.context.rank, []
        epoch = context.gather_epochs.data_ptr()
        for index, stage in enumerate(self._stages):
            for peer in self._peers:
                buffer, flags = self.buffer.host_addresses[peer], self.channel.signals.host_addresses[peer]
                moves += [(buffer + start + rank * size, addresses[i], size) for i, start, size in stage]
                moves.append((flags + 4 * (rank * FLAGS_PER_RANK + index), epoch, 4))
        self._signal_start(1, context.comm_stream)
        copy_in_turn(moves, context.comm_stream)

    def wait_for(self, source: int) -> None:
        """Holds the current stream until the first tensors of rank ``source`` are there; ``wait`` has to come."""
        self._wait_for_flags(source, self._first_starts)


class _Call(NamedTuple):
    """Of ``start_gather_of_parts``; see ``tp.prepared``."""

    sizes: tuple[int, ...]
    devices: frozenset[torch.device]
    num_in_turn: int
    num_blocks: int

    def prepare(self, context: TPContext) -> PreparedParts:
        sizes, name = self.sizes, "gather_of_parts"
        if not can_copy(context):
            raise NotSupportedError(f"{name} by copy engines needs cuda-bindings: {pip_command('cuda-bindings')}")
        if self.devices != {context.device}:
            raise NotSupportedError(f"{name}: parts on {set(self.devices)}, the context is on {context.device}")
        if not sizes or min(sizes) == 0 or any(size % _ALIGNMENT for size in sizes):
            raise NotSupportedError(f"{name}: parts of {list(sizes)} bytes; each has to be whole {_ALIGNMENT} bytes")
        if not 0 <= self.num_in_turn <= len(sizes):
            raise NotSupportedError(f"{name}: {self.num_in_turn} of {len(sizes)} parts in turn")
        return PreparedParts(context, sizes, self.num_in_turn, self.num_blocks)


class StartedParts:
    """A gather of parts on its way; ``wait()`` or ``consume()``, once and before the next gather starts.

    Attributes:
        totals: Where the parts of all ranks will be, along dimension 0: views of the context's buffer that its next
            gather overwrites.
    """

    def __init__(
        self,
        prepared: PreparedParts,
        parts: Sequence[torch.Tensor],
        num_in_turn: int,
        started_on: torch.cuda.Stream | None,
    ) -> None:
        self._prepared = prepared
        self._sent = parts  # kept until the stream is behind the sends
        self._num_in_turn = num_in_turn
        self._started_on = started_on
        world = prepared.context.world_size
        self.totals = [  # of this call alone: who takes them may empty them
            total.view(part.dtype).view(world * part.shape[0], *part.shape[1:])
            for total, part in zip(prepared.totals, parts)
        ]
        prepared.start(parts)

    def wait(self) -> list[torch.Tensor]:
        """Holds the current stream until all parts of all ranks are there."""
        self._prepared.context.resume(self._started_on, *self._sent)
        self._prepared.wait()
        return self.totals

    def consume(self, each: Callable[[int, list[torch.Tensor]], None], key: Hashable | None = None) -> None:
        """Instead of ``wait``: ``each`` of the blocks of ranks, by its number, and its parts that come in turn, along
        dimension 0; that of this rank first, then the others in the order of arrival, the current stream held until
        they are there. When it ends everything is there and counted, as after ``wait``. ``key``: as of
        ``CopiedGather.consume``."""
        prepared = self._prepared
        num_blocks = len(prepared.blocks)
        prepared.context.resume(self._started_on, *self._sent)

        def consume_block(ranks: Sequence[int]) -> None:
            block = ranks[0] // len(ranks)
            each(block, [total.chunk(num_blocks)[block] for total in self.totals[: self._num_in_turn]])

        prepared.consume(prepared.blocks, consume_block, key)


@outside_compile
def start_gather_of_parts(
    parts: Sequence[torch.Tensor], *, context: TPContext, num_in_turn: int = 0, num_blocks: int | None = None
) -> StartedParts:
    """Starts a gather of each of ``parts`` along dimension 0 by copy engines, beside what the current stream does
    next. Equivalent: ``dist.all_gather_into_tensor`` of each.

    Args:
        parts: [rows, ...] each, of any types, the same sizes on all ranks.
        context: The group's context.
        num_in_turn: So many of ``parts`` peers get in turn and before the others, for ``StartedParts.consume``.
        num_blocks: Of ranks whose parts are consumed together: a divisor of the group's size. Default: each rank's
            by themselves.

    Raises:
        NotSupportedError: Devices, sizes that are not whole 16 bytes, no ``cuda-bindings`` on a GPU.
        MismatchError: The ranks' calls differ (at the first call of sizes here, else at the next ``check``).
        PeerTimeoutError: A peer did not come (CPU: here, GPU: at a later call or ``context.synchronize()``).
    """
    parts = [part.detach().contiguous() for part in parts]
    sizes = tuple(part.nbytes for part in parts)
    stream = context.enter("gather_of_parts", sizes)
    devices = frozenset(part.device for part in parts)
    prepared = context.prepare(_Call, sizes, devices, num_in_turn, num_blocks or context.world_size)
    return StartedParts(prepared, parts, num_in_turn, stream)
