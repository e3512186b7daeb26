"""Keys and values of the whole sequence on every rank of a context parallel group, and their gradients back, by copy
engines. Equivalent PyTorch code, in the layout of Transformer Engine's ``all_gather`` attention (rank r owns chunks r
and 2 W - 1 - r of the sequence):

    gathered = torch.empty(world_size, *k.shape)
    dist.all_gather_into_tensor(gathered, k)
    whole = gathered.view(2 * world_size, len(k) // 2, ...).index_select(0, order).flatten(0, 1)      # of k and of v

    dk = torch.zeros_like(whole)
    dk[range of step 0].add_(dk of step 0)
    dk[range of step 1].add_(dk of step 1)
    dist.reduce_scatter_tensor(out, chunks of dk in the order of the ranks)                          # of dk and of dv

Timeline of ``all_gather_attention`` in forward. "second" is a second stream for attention kernels:

    native   NCCL      | all-gather of k and v |
    native   compute   |                       | reorder | attention of step 0                   |
    native   second    |                                 | attention of step 1                   |
    fused    copies    | rows for step 0 | rows for step 1 |
    fused    compute   | local shard |   | attention of step 0           |
    fused    waits     |                 | ^ flags of step 0 |
    fused    second    |                                   | attention of step 1           |
    fused    waits     |                                   | ^ flags of step 1 |

In backward, gradients go back by copy engines, too; the owner of the rows adds them up:

    communication   start signals | partial sums of rank - 1's rows to it, flag | rank - 2 ... | wait for all, add up
    current         sums over both steps |

Only rows that a step attends to are sent (``schedule.keys``), at once to their place in the sequence; rows that nobody
sends keep what the buffer held, and no step reads them. Of gradients, only rows that a rank attended to are sent: its
partial sum of the others would be +0, which changes nothing, since no partial sum is -0.

Who waits for whom: nothing is written to a peer before its start signal of this epoch, which says that its stream is
done with what the buffer held. Gathered rows and received partial sums share one buffer.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.runtime.versions import pip_command
from ditron_train.schedule.keys import Range, chunks_of, hull_of_steps, rows_by_step
from ditron_train.schedule.orders import chunk_order
from ditron_train.stream.agreement import agree
from ditron_train.stream.copies import copy_in_sequence
from ditron_train.stream.driver import has_driver
from ditron_train.stream.events import current_handle, current_stream
from ditron_train.stream.op_context import OpContext, context_of
from ditron_train.stream.plan import REDUCE_BLOCK, SUM_DTYPES, CopyExchange, SumExchange
from ditron_train.symm.channel import ChannelPointers
from ditron_train.symm.control import cyclic_difference

_BUFFER = "sp.keys_values"
_MOST_ELEMENTS = 1 << 31  # of k or v on a rank: kernels count them in 32 bits


@triton.jit
def keys_wait_kernel(
    channel, senders_ptr, STEP: tl.constexpr, LAST: tl.constexpr, WORLD_SIZE: tl.constexpr, TARGET: tl.constexpr
):
    """One program before a step: waits for the flags of the ranks that send rows for it, those with a nonzero word in
    ``senders_ptr`` [2, world]. The LAST step's draws the epoch, and follows the others' on the streams."""
    if LAST:
        epoch = dl.next_epoch(channel.tickets + 1)  # slot 1: the role that waits
    else:
        epoch = dl.last_epoch(channel.tickets + 1) + 1
    rank = dl.rank(channel.control)
    for distance in tl.static_range(1, WORLD_SIZE):
        peer = (rank + distance) % WORLD_SIZE
        if tl.load(senders_ptr + STEP * WORLD_SIZE + peer) != 0:
            dl.wait(channel.signals + 2 * peer + STEP, epoch, channel.control, peer, STEP, TARGET)


@triton.jit(do_not_specialize=["first_row", "first_end", "second_row", "second_end"])
def add_steps_kernel(
    first_ptr, second_ptr, out_ptr, first_row, first_end, second_row, second_end, row_elements, BLOCK: tl.constexpr
):
    """out = (0 + first) + second, rounded after each addition, from the least to the largest row of the two ranges of
    rows of a sequence; what is in neither is 0."""
    first_start, first_stop = tl.cast(first_row, tl.int64) * row_elements, tl.cast(first_end, tl.int64) * row_elements
    second_start = tl.cast(second_row, tl.int64) * row_elements
    second_stop = tl.cast(second_end, tl.int64) * row_elements
    low, high = tl.minimum(first_start, second_start), tl.maximum(first_stop, second_stop)
    lanes = tl.arange(0, BLOCK)
    for block in range(tl.program_id(0), tl.cdiv(high - low, BLOCK), tl.num_programs(0)):
        offsets = low + tl.cast(block, tl.int64) * BLOCK + lanes
        in_first = (offsets >= first_start) & (offsets < first_stop)
        in_second = (offsets >= second_start) & (offsets < second_stop)
        first = tl.load(first_ptr + (offsets - first_start), mask=in_first, other=0).to(tl.float32)
        second = tl.load(second_ptr + (offsets - second_start), mask=in_second, other=0).to(tl.float32)
        total = tl.where(first == 0, 0.0, first) + second  # -0 becomes +0
        tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=offsets < high)


@triton.jit
def sum_keys_kernel(
    partial_ptr, slots_ptr, channel, out_ptr, bounds_ptr, chunk_elements, row_elements,
    BLOCK: tl.constexpr, WORLD_SIZE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """out = ((x[rank + 1] + x[rank + 2]) + ...) + x[rank] for this rank's chunks, each + in fp32, rounded at every
    hop.

    A part is one chunk of one tensor: out [2 tensors, 2 chunks, chunk]. ``x[rank]`` is read from ``partial_ptr``
    [2 tensors, 2 * world chunks, chunk], the others from slots [world, 2, 2, chunk] in own memory, once the flag of
    their source holds this epoch (acquire). ``bounds_ptr`` [2 chunks, world, 2]: the rows of a chunk, first and end,
    that a rank adds to; it adds 0 to the others. A chunk has less than 2**31
    elements.
    """
    epoch = dl.next_epoch(channel.tickets + 1)  # slot 1: the role that waits
    rank = dl.rank(channel.control)
    for step in tl.static_range(1, WORLD_SIZE):
        peer = (rank + step) % WORLD_SIZE
        ends = tl.load(bounds_ptr + 2 * peer + 1) + tl.load(bounds_ptr + 2 * (WORLD_SIZE + peer) + 1)
        if ends != 0:
            dl.wait(channel.signals + peer, epoch, channel.control, peer, 0, TARGET)
    lanes = tl.arange(0, BLOCK)
    num_blocks = tl.cdiv(chunk_elements, BLOCK)
    for item in range(tl.program_id(0), 4 * num_blocks, tl.num_programs(0)):
        part = item // num_blocks
        slot = part % 2
        offsets = (item % num_blocks) * BLOCK + lanes
        own_chunk = tl.where(slot == 0, rank, 2 * WORLD_SIZE - 1 - rank)
        total = tl.zeros([BLOCK], tl.float32)
        for step in tl.static_range(1, WORLD_SIZE + 1):
            source = (rank + step) % WORLD_SIZE
            bounds = bounds_ptr + 2 * (slot * WORLD_SIZE + source)
            first = tl.load(bounds) * row_elements
            end = tl.load(bounds + 1) * row_elements
            if step == WORLD_SIZE:
                place = (part // 2) * 2 * WORLD_SIZE + own_chunk
                values_ptr = partial_ptr + tl.cast(place, tl.int64) * chunk_elements
            else:
                values_ptr = slots_ptr + tl.cast(source * 4 + part, tl.int64) * chunk_elements
            values = tl.load(values_ptr + offsets, mask=(offsets >= first) & (offsets < end), other=0)
            total = (total + values.to(tl.float32)).to(slots_ptr.dtype.element_ty).to(tl.float32)
        part_ptr = out_ptr + tl.cast(part, tl.int64) * chunk_elements
        tl.store(part_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=offsets < chunk_elements)


class KeyValueContext(OpContext):
    """Buffer and channels of the keys and values of one context parallel group (constructed collectively)."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, *, first_epoch: int = 0) -> None:
        super().__init__(group, device, first_epoch=first_epoch)
        fields = ("rows", "columns", "dtype", "ranges")
        self.gather_channel = self.add_channel("sp.gather_keys", 2 * self.world_size, fields)
        self.scatter_channel = self.add_channel("sp.scatter_keys", self.world_size, fields)
        self.gather_epochs, self.scatter_epochs = torch.zeros(2, 1, dtype=torch.int32, device=self.device)


def get_key_value_context(group: dist.ProcessGroup | None, device: torch.device) -> KeyValueContext:
    """The context of ``group`` (``None``: WORLD), made at the first call, which is collective over the group."""
    return context_of(KeyValueContext, group, device)


#: Destination, number of the tensor that is copied from, byte in it, bytes; of tensor 2 the byte is an address.
_Move = tuple[int, int, int, int]


def _with_flag(moves: list[_Move], flag: int, epochs: torch.Tensor) -> list[_Move]:
    """Moves to one peer, and its flag after them, if there are any."""
    return [*moves, (flag, 2, epochs.data_ptr(), 4)] if moves else []


def _at(moves: Sequence[_Move], addresses: tuple[int, int]) -> list[tuple[int, int, int]]:
    """Moves as copies of tensors at these addresses."""
    first = (*addresses, 0)
    return [(to, first[tensor] + offset, num_bytes) for to, tensor, offset, num_bytes in moves]


class _Sizes:
    """Sizes of one call signature, in rows and bytes, and the buffer that both directions use (collective)."""

    def __init__(
        self, context: KeyValueContext, channel: Any, shape: torch.Size, dtype: torch.dtype, ranges: tuple[Range, ...]
    ) -> None:
        self.world, self.rank, self.ranges = context.world_size, context.rank, ranges
        self.rows, self.columns = shape[0] // 2, shape[1:].numel()
        self.row_bytes = self.columns * dtype.itemsize
        self.total_rows = 2 * self.world * self.rows
        num_bytes = 2 * self.total_rows * self.row_bytes
        values = (self.rows, self.columns, dtype, cyclic_difference(zlib.crc32(repr(ranges).encode()), 0))
        signature = agree(context, channel, values, buffer=(_BUFFER, num_bytes))
        self.pointers: ChannelPointers = channel.pointers(signature)
        self.buffer = context.roomy(_BUFFER, 2 * self.total_rows, self.columns, dtype)

    def place(self, tensor: int, chunk: int, row: int) -> int:
        """Byte of a row of a chunk in [2 tensors, all rows, columns]."""
        return (tensor * self.total_rows + chunk * self.rows + row) * self.row_bytes


class KeyValueGather(CopyExchange[KeyValueContext]):
    """Gathers of keys and values of one shape, with the rows that ``ranges`` need (constructed collectively).

    Attributes:
        keys, values: [all rows, columns], views of the buffer: valid until the context's next exchange.
    """

    def __init__(
        self, context: KeyValueContext, shape: torch.Size, dtype: torch.dtype, ranges: tuple[Range, ...]
    ) -> None:
        channel, epochs = context.gather_channel, context.gather_epochs
        sizes = self._sizes = _Sizes(context, channel, shape, dtype, ranges)
        super().__init__(context, channel, sizes.pointers, epochs)
        self.keys, self.values = sizes.buffer.local.view(2, sizes.total_rows, sizes.columns)
        senders = [
            [any(rows_by_step(ranges, sizes.rows, chunk, sizes.rank)[step] for chunk in chunks_of(peer, sizes.world))
             for peer in range(sizes.world)]
            for step in range(2)
        ]  # fmt: skip
        self._senders = torch.tensor(senders, dtype=torch.int32, device=context.device)
        world, target = {"WORLD_SIZE": sizes.world}, {"TARGET": context.target}
        self._waits = [
            context.launch(keys_wait_kernel, 1, {"STEP": step, "LAST": step == 1, **world, **target}, num_warps=1)
            for step in range(2)
        ]
        self._own = self._moves(sizes.rank, 0) + self._moves(sizes.rank, 1)
        self._sends: list[_Move] = []
        for step in range(2):
            for peer in ((sizes.rank + distance) % sizes.world for distance in range(1, sizes.world)):
                flag = channel.signals.host_addresses[peer] + 4 * (2 * sizes.rank + step)
                self._sends += _with_flag(self._moves(peer, step), flag, epochs)

    def _moves(self, peer: int, step: int) -> list[_Move]:
        """What ``peer`` needs of this rank's rows for its ``step``; tensor 0 is k, 1 is v."""
        sizes = self._sizes
        return [
            (
                sizes.buffer.host_addresses[peer] + sizes.place(tensor, chunk, first),
                tensor,
                (slot * sizes.rows + first) * sizes.row_bytes,
                (end - first) * sizes.row_bytes,
            )
            for slot, chunk in enumerate(chunks_of(sizes.rank, sizes.world))
            for first, end in rows_by_step(sizes.ranges, sizes.rows, chunk, peer)[step]
            for tensor in range(2)
        ]

    def start(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Sends this rank's rows [2 chunks, ...], contiguous; they must stay unchanged until ``finish``."""
        context, addresses = self.context, (keys.data_ptr(), values.data_ptr())
        self.fork(lambda: self._send(addresses), (self, addresses), addresses)
        with self.aborting:  # on the current stream: a copy within one device needs SMs
            copy_in_sequence(_at(self._own, addresses), current_stream(context.device) if context.is_cuda else None)

    def _send(self, addresses: tuple[int, int]) -> None:
        self._signal_start()
        copy_in_sequence(_at(self._sends, addresses), self.context.comm_stream)

    def wait(self, step: int) -> None:
        """Makes the current stream wait for the rows of ``step``; for the second after the first, on any stream that
        has waited for the first one's."""
        with self.aborting:
            if not self._waits[step].repeat(step, current_handle(self.context.device)):
                self._waits[step](self.pointers, self._senders, key=step)

    def finish(self) -> None:
        """Makes the current stream wait for the sends."""
        self.context.join()
        self.context.leave(self.channel)


class KeyValueScatter(SumExchange[KeyValueContext]):
    """Sums over the ranks of the gradients of gathered keys and values (constructed collectively)."""

    def __init__(
        self, context: KeyValueContext, shape: torch.Size, dtype: torch.dtype, ranges: tuple[Range, ...]
    ) -> None:
        channel, epochs = context.scatter_channel, context.scatter_epochs
        sizes = self._sizes = _Sizes(context, channel, shape, dtype, ranges)
        super().__init__(context, channel, sizes.pointers, epochs)
        world, rank = sizes.world, sizes.rank
        bounds = [
            [hull_of_steps(ranges, sizes.rows, chunk, source) for source in range(world)]
            for chunk in chunks_of(rank, world)
        ]
        self._bounds = torch.tensor(bounds, dtype=torch.int32, device=context.device)
        self._ring_reduce = self._launch_of_sum(sum_keys_kernel, {})
        num_programs = 2 * context.num_sms if context.is_cuda else 1
        self._add_steps = context.launch(add_steps_kernel, num_programs, {"BLOCK": REDUCE_BLOCK}, num_warps=8)
        self._sends: list[_Move] = []
        for peer in chunk_order(rank, world, "sum_push").tolist():
            self._sends += _with_flag(self._moves(peer), channel.signals.host_addresses[peer] + 4 * rank, epochs)

    def _moves(self, peer: int) -> list[_Move]:
        sizes, moves = self._sizes, list[_Move]()
        for slot, chunk in enumerate(chunks_of(peer, sizes.world)):
            first, end = hull_of_steps(sizes.ranges, sizes.rows, chunk, sizes.rank)
            for tensor in range(2 if first < end else 0):
                row = ((sizes.rank * 2 + tensor) * 2 + slot) * sizes.rows + first
                destination = sizes.buffer.host_addresses[peer] + row * sizes.row_bytes
                moves.append((destination, 0, sizes.place(tensor, chunk, first), (end - first) * sizes.row_bytes))
        return moves

    def run(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """From the gradients of both steps' keys and values, [rows of the step's range, ...] each, to the sums over
        steps and ranks of this rank's rows [2 chunks, ...]."""
        sizes, like = self._sizes, keys[0]
        partial = like.new_empty(2, sizes.total_rows, sizes.columns)
        out = like.new_empty(2, 2 * sizes.rows, *like.shape[1:])
        bounds = [row for chunk in chunks_of(sizes.rank, sizes.world) for row in sizes.ranges[chunk]]
        for total, steps in zip(partial, (keys, values)):
            self._add_steps(*steps, total, *bounds, sizes.columns)
        address = partial.data_ptr()
        self.fork(lambda: self._send(address), (self, address), (address,))
        self.finish(partial, out, beside=True)
        return out[0], out[1]

    def _send(self, address: int) -> None:
        self._signal_start()
        copy_in_sequence(_at(self._sends, (address, address)), self.context.comm_stream)

    def _reduce_arguments(self, partial: torch.Tensor, out: torch.Tensor) -> tuple[Any, ...]:
        sizes = self._sizes
        slots, chunk_elements = sizes.buffer.local, sizes.rows * sizes.columns
        return partial, slots, self.pointers, out, self._bounds, chunk_elements, sizes.columns


@outside_compile
class FusedMoves:
    """The exchanges of keys and values by copy engines; the ops of this module.

    Args:
        context: The group's context.
        ranges: Of each of the 2 W chunks, the rows of the sequence that its queries see.
    """

    def __init__(self, context: KeyValueContext, ranges: tuple[Range, ...]) -> None:
        self.rank, self.ranges, self._context = context.rank, ranges, context

    def gather(self, k: torch.Tensor, v: torch.Tensor) -> KeyValueGather:
        """Starts the gather of this rank's k and v [2 chunks, ..., head size], contiguous, concurrent with what the
        current stream does next: ``wait(0)``, ``wait(1)`` and ``finish()`` follow, before the context's next exchange.

        Raises:
            NotSupportedError: Shapes, types or devices do not fit, or no ``cuda-bindings`` on a GPU.
            MismatchError: The ranks' calls differ (at the first call of sizes here, else at the next ``check``).
            PeerTimeoutError: A peer did not arrive (CPU: here, GPU: at a later call or ``context.synchronize()``).
        """
        gather: KeyValueGather = self._plan("gather_keys", KeyValueGather, (k, v), len(k))
        gather.start(k, v)
        return gather

    def scatter(
        self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums of the gradients of gathered keys and values over both steps, then over the ranks in NCCL's ring order.

        Args:
            keys, values: Of each step, [rows of its range, ..., head size], contiguous.
            num_rows: Rows of this rank's two chunks.

        Returns:
            For keys and values, this rank's rows [2 chunks, ..., head size].

        Raises:
            NotSupportedError, MismatchError, PeerTimeoutError: As ``gather``.
        """
        scatter: KeyValueScatter = self._plan("scatter_keys", KeyValueScatter, (*keys, *values), num_rows)
        return scatter.run(keys, values)

    def _plan(self, name: str, kind: Any, tensors: Sequence[torch.Tensor], num_rows: int) -> Any:
        context, like = self._context, tensors[0]
        context.enter(name, num_rows, like.shape[1:], like.dtype)
        if context.is_cuda and not has_driver():
            raise NotSupportedError(f"{name} by copy engines needs cuda-bindings: {pip_command('cuda-bindings')}")
        found = {(one.shape[1:], one.dtype, one.device) for one in tensors}
        fits = found == {(like.shape[1:], like.dtype, context.device)} and like.dtype in SUM_DTYPES
        columns = like.shape[1:].numel()
        fits &= 0 < num_rows * columns < _MOST_ELEMENTS and columns * like.dtype.itemsize % 16 == 0
        if not fits or num_rows % 2 or len(self.ranges) != 2 * context.world_size:
            raise NotSupportedError(f"{name}: {num_rows} rows of {sorted(map(str, found))}, {len(self.ranges)} ranges")
        return context.plan(kind, torch.Size((num_rows, *like.shape[1:])), like.dtype, self.ranges)
