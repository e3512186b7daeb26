"""Reduce-scatters along dimension 0 by copy engines, concurrent with GEMMs, which keep all multiprocessors. Equivalent
PyTorch code:

    out = partial.new_empty(len(partial) // world_size, partial.shape[1])
    work = dist.reduce_scatter_tensor(out, partial, group=group, async_op=True)
    ...
    work.wait()

Streams of one rank:

    communication   start signals (one program) | rows of rank - 1 to it, flag | rows of rank - 2 to it, flag | ...
    current         ... | a kernel that waits for the flags of all sources and adds up

Who waits for whom: nothing is written into a peer's receive buffers (slots) before its start signal of this epoch. The
sum waits for flags that hold the epoch.

If the product to be scattered can be complete before something else long enough to hide the transfer runs (column
linear's backward: dgrad first, wgrad after it), this beats GEMM-RS: the product is cuBLAS's own, the transfer is
hidden by the next GEMM, and only the addition at the end is left.

A copy engine takes 2 to 3 us for each command in addition to its bytes: flags of several peers are one command if
peers' memory can be mapped side by side (``stream.window``). Times: ``docs/measurements/tp.md``.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.schedule.orders import chunk_order, order_in_block, rank_blocks
from ditron_train.stream.agreement import agree, agree_on_nothing
from ditron_train.stream.copies import StridedCopy, copy_bytes, copy_in_sequence, copy_with_flags
from ditron_train.stream.plan import SUM_DTYPES, Pending, SumExchange
from ditron_train.stream.window import flags_of_peers, send_strided
from ditron_train.tp.context import SLOTS, RowPartition, TPContext, check_can_copy, row_partition


class _Sources(NamedTuple):
    """Partial sums of the rows that this rank owns: its own, the slots of all ranks, and a slot's size."""

    own: Any
    slots: Any
    slot_elements: Any
    num_elements: Any
    rank: Any


@triton.jit
def _add_up(
    sources,
    out_ptr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    GOES_ON: tl.constexpr,
    BLOCK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):
    """Adds the sources ``rank + FIRST`` to ``rank + LAST``, in this order; ``rank + WORLD_SIZE`` is this rank. If it
    GOES_ON, the sum so far is read from ``out_ptr``: storing it has rounded it as adding here would, and each thread
    reads what it wrote."""
    lanes = tl.arange(0, BLOCK)
    for block in range(tl.program_id(0), tl.cdiv(sources.num_elements, BLOCK), tl.num_programs(0)):
        offsets = tl.cast(block, tl.int64) * BLOCK + lanes
        mask = offsets < sources.num_elements
        if GOES_ON:
            total = tl.load(out_ptr + offsets, mask=mask).to(tl.float32)
        for step in tl.static_range(FIRST, LAST + 1):
            if step == WORLD_SIZE:
                values = tl.load(sources.own + offsets, mask=mask).to(tl.float32)
            else:
                source = (sources.rank + step) % WORLD_SIZE
                values = tl.load(sources.slots + source * sources.slot_elements + offsets, mask=mask).to(tl.float32)
            if step == FIRST and not GOES_ON:
                total = values
            else:
                total = (total + values).to(sources.slots.dtype.element_ty).to(tl.float32)
        tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["slot_rows"])
def reduce_rows_kernel(
    partial_ptr,
    slots_ptr,
    channel,
    out_ptr,
    row_starts_ptr,
    N,
    slot_rows,
    FIRST_PART: tl.constexpr,
    BLOCK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """out = ((x[rank + 1] + x[rank + 2]) + ...) + x[rank] for this rank's rows, each + in fp32, rounded at every hop.

    ``x[rank]`` is read from ``partial_ptr`` [total rows, N], the others from slots [world, slot_rows, N] in own
    memory, once the flag of their source holds this epoch (acquire). Elementwise over one contiguous range, since rows
    of a slot follow each other.

    FIRST_PART: how many sources are added up, into ``out_ptr``, before the others have arrived (0: all are added up
    when all have arrived).
    """
    epoch = dl.next_epoch(channel.tickets + 1)  # slot 1: the role that waits
    rank = dl.rank(channel.control)
    first_row = tl.load(row_starts_ptr + rank)
    num_elements = (tl.load(row_starts_ptr + rank + 1) - first_row).to(tl.int64) * N
    own_ptr = partial_ptr + first_row.to(tl.int64) * N
    slot_elements = tl.cast(slot_rows, tl.int64) * N
    sources = _Sources(own_ptr, slots_ptr, slot_elements, num_elements, rank)
    if FIRST_PART > 0:
        dl.wait_peers(channel.signals, 1, epoch, channel.control, rank, 0, 1, FIRST_PART, WORLD_SIZE, TARGET)
        _add_up(sources, out_ptr, 1, FIRST_PART, False, BLOCK, WORLD_SIZE)
    if WORLD_SIZE > 1:
        LAST: tl.constexpr = WORLD_SIZE - 1
        dl.wait_peers(channel.signals, 1, epoch, channel.control, rank, 0, FIRST_PART + 1, LAST, WORLD_SIZE, TARGET)
    _add_up(sources, out_ptr, FIRST_PART + 1, WORLD_SIZE, FIRST_PART > 0, BLOCK, WORLD_SIZE)


@triton.jit(do_not_specialize=["slot_rows", "first", "count"])
def reduce_onto_kernel(
    partial_ptr,
    slots_ptr,
    channel,
    total_ptr,
    out_ptr,
    row_starts_ptr,
    N,
    slot_rows,
    first,
    count,
    STEP: tl.constexpr,
    GOES_ON: tl.constexpr,
    BLOCK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """out = ((total + x[first]) + x[first + STEP]) + ... of ``count`` ranks, for this rank's rows, each + in fp32,
    rounded at every hop: a node's part of a sum that goes from node to node. If ``count`` is 0, nothing is written.

    ``x[rank]`` is read from ``partial_ptr`` [total rows, N], the others from slots [world, slot_rows, N] in own
    memory, once the flags of all peers hold this epoch (acquire); ranks that are not added up have sent nothing.

    GOES_ON: ``total_ptr`` holds the sum so far; else it begins with ``x[first]``.
    """
    epoch = dl.next_epoch(channel.tickets + 1)  # slot 1: the role that waits
    rank = dl.rank(channel.control)
    dl.wait_peers(channel.signals, 1, epoch, channel.control, rank, 0, 1, WORLD_SIZE - 1, WORLD_SIZE, TARGET)
    first_row = tl.load(row_starts_ptr + rank)
    num_elements = (tl.load(row_starts_ptr + rank + 1) - first_row).to(tl.int64) * N
    own_ptr = partial_ptr + first_row.to(tl.int64) * N
    slot_elements = tl.cast(slot_rows, tl.int64) * N
    dtype = slots_ptr.dtype.element_ty
    lanes = tl.arange(0, BLOCK)
    num_blocks = tl.where(count > 0, tl.cdiv(num_elements, BLOCK), 0)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        offsets = tl.cast(block, tl.int64) * BLOCK + lanes
        mask = offsets < num_elements
        if GOES_ON:
            total = tl.load(total_ptr + offsets, mask=mask).to(tl.float32)
        else:
            total = tl.zeros([BLOCK], tl.float32)
        for index in range(0, count):
            source = first + index * STEP
            if source == rank:
                values = tl.load(own_ptr + offsets, mask=mask).to(tl.float32)
            else:
                values = tl.load(slots_ptr + source * slot_elements + offsets, mask=mask).to(tl.float32)
            if GOES_ON:
                total = (total + values).to(dtype).to(tl.float32)
            else:
                total = tl.where(index == 0, values, (total + values).to(dtype).to(tl.float32))
        tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)


class SumOrder(NamedTuple):
    """An order of sums other than the ring's.

    Attributes:
        kernel: The kernel that adds in this order.
        tables: Tables of the order, an argument of the kernel.
        constants: Constants of the kernel.
    """

    kernel: Any
    tables: Any
    constants: dict[str, Any]


class ReduceScatter(SumExchange[TPContext]):
    """Reduce-scatters of partial sums [total rows, N] by rows, for one partition, N and dtype (constructed
    collectively).

    ``start`` enqueues all sends after what the current stream has; or ``begin``, then ``send`` for rows as they are
    computed. ``finish`` adds up on the current stream. ``peers``: in the order of delivery, so that rows arrive in the
    order of the sum.

    Args:
        context: The context whose buffers and streams are used.
        partition: The rows of all ranks.
        num_columns: N, with rows of whole 16 bytes.
        dtype: Type of the partial sums.
        in_parts: Whether ``finish`` is called long before the last rows arrive, and adds up the others meanwhile.
        order: Order of the sums if it is not the ring's: an all-reduce's.
    """

    def __init__(
        self,
        context: TPContext,
        partition: RowPartition,
        num_columns: int,
        dtype: torch.dtype,
        *,
        in_parts: bool = False,
        order: SumOrder | None = None,
    ) -> None:
        channel = context.reduce_channel
        self.partition = partition
        values = (partition.num_rows, partition.fingerprint, num_columns, dtype)
        num_bytes = context.world_size * partition.max_count * num_columns * dtype.itemsize
        pointers = channel.pointers(agree(context, channel, values, buffer=(SLOTS, num_bytes)))
        super().__init__(context, channel, pointers, context.reduce_epochs)
        self._slots = context.slots(context.world_size * partition.max_count, num_columns, dtype)
        self._row_starts = context.table(partition, partition.starts)
        self._num_columns = num_columns
        self._order = order
        if order is None:
            first_part = {"FIRST_PART": context.world_size - 2 if in_parts else 0}
            self._ring_reduce = self._launch_of_sum(reduce_rows_kernel, first_part)
        else:
            self._ring_reduce = self._launch_of_sum(order.kernel, order.constants)
        self.peers = chunk_order(context.rank, context.world_size, "sum_push").tolist()
        self._row_bytes = num_columns * dtype.itemsize
        self._copies = self._list_copies(self._row_bytes)
        self._all_flags: StridedCopy | None = None  # of what is sent as a whole, from the first time on
        self._has_all_flags = False
        self._first_flags = self._strided_copy_of_flags(num_skipped=1) if in_parts else None

    def _list_copies(self, row_bytes: int) -> list[tuple[int, int, int, int, int]]:
        """Arguments of ``copy_with_flags`` for each of ``peers``: copies its rows of the partial to its slot."""
        context, partition, rank = self.context, self.partition, self.context.rank
        slot = rank * partition.max_count * row_bytes
        return [
            (
                self._slots.host_addresses[peer] + slot,
                partition.starts[peer] * row_bytes,
                partition.count(peer) * row_bytes,
                self.channel.signals.host_addresses[peer] + 4 * rank,
                context.reduce_epochs.data_ptr(),
            )
            for peer in self.peers
        ]

    def _strided_copy_of_flags(self, num_skipped: int) -> StridedCopy | None:
        """The flags of all ``peers`` but the last ``num_skipped``, as one command; None if they are sent one by
        one."""
        rank, words = self.context.rank, self.context.reduce_epochs.data_ptr()
        return flags_of_peers(self.channel.signals, rank, 4 * rank, words, num_skipped=num_skipped)

    def start(self, partial: torch.Tensor) -> None:
        """Sends ``partial`` [total rows, N], contiguous; it must stay unchanged until ``finish``."""
        if not self._has_all_flags:
            self._all_flags, self._has_all_flags = self._strided_copy_of_flags(num_skipped=0), True
        address = partial.data_ptr()
        self.fork(lambda: self._send_all(partial), (self, address), (address,))

    def _send_all(self, partial: torch.Tensor) -> None:
        """Sends rows peer by peer: one command for several GPUs would take four times as long
        (``docs/measurements/tp.md``). No rank adds up before all rows have arrived, so flags come last."""
        self._signal_start()
        address, stream = partial.data_ptr(), self.context.comm_stream
        if self._all_flags is None:
            copy_with_flags(self._copies, address, stream)
            return
        rows = ((to, address + offset, num_bytes) for to, offset, num_bytes, _, _ in self._copies if num_bytes)
        copy_in_sequence(rows, stream)
        if not send_strided((self._all_flags,), stream):
            self._all_flags = None
            copy_in_sequence(((flag, word, 4) for _, _, _, flag, word in self._copies), stream)

    def send(self, partial: torch.Tensor, position: int, rows: slice, *, signals: bool) -> None:
        """Sends ``rows``, a part of those of ``peers[position]``, after what the communication stream has;
        ``signals``: they are the last of them, so that a flag follows. Peers that add up in parts wait for all sources
        but one at first, so those flags can be sent together as one command."""
        stream = self.context.comm_stream
        destination, offset, _, flag, word = self._copies[position]
        skipped = rows.start * self._row_bytes - offset
        source, num_bytes = rows.start * self._row_bytes, (rows.stop - rows.start) * self._row_bytes
        num_behind = len(self.peers) - 1 - position
        if signals and (self._first_flags is None or num_behind == 0):
            chunk = (destination + skipped, source, num_bytes, flag, word)
            copy_with_flags((chunk,), partial.data_ptr(), stream)
            return
        if num_bytes:
            copy_bytes(destination + skipped, partial.data_ptr() + source, num_bytes, stream)
        first_flags = self._first_flags
        if signals and num_behind == 1 and first_flags is not None and not send_strided((first_flags,), stream):
            self._first_flags = None
            copy_in_sequence(((flag, word, 4) for _, _, _, flag, word in self._copies[:-1]), stream)

    def _reduce_arguments(self, partial: torch.Tensor, out: torch.Tensor) -> tuple[Any, ...]:
        order = () if self._order is None else (self._order.tables,)
        operands = (partial, self._slots.local, self.pointers, out, self._row_starts, *order)
        return (*operands, self._num_columns, self.partition.max_count)


def plan_reduce_scatter(
    context: TPContext, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> ReduceScatter:
    """The reduce-scatter of partial sums of this shape (collective).

    Raises:
        NotSupportedError: Shape, type or device do not fit, or there are no rows.
    """
    is_fitting = device == context.device and len(shape) >= 2
    if is_fitting and shape.numel() == 0:
        agree_on_nothing(context, (context.reduce_channel,))
    if not is_fitting or shape.numel() == 0:
        raise NotSupportedError(f"reduce_scatter: {tuple(shape)} on {device}, context on {context.device}")
    if dtype not in SUM_DTYPES:
        raise NotSupportedError(f"reduce_scatter: {dtype}; allowed: {', '.join(map(str, SUM_DTYPES))}")
    partition = row_partition("reduce_scatter", context, shape, None, total=True)
    return ReduceScatter(context, partition, shape[-1], dtype)


@outside_compile
class PendingReduceScatter(Pending[ReduceScatter]):
    """A reduce-scatter that has been started. ``wait()`` returns this rank's rows; call it once, before the next one
    starts. ``out``: where the rows will be.

    Args:
        exchange: The collective that moves and adds up the partial sums.
        partial: The partial sums.
        shape: Shape of the result.
        started_on: As of ``PendingGather``.
    """

    def __init__(
        self,
        exchange: ReduceScatter,
        partial: torch.Tensor,
        shape: tuple[int, ...],
        started_on: torch.cuda.Stream | None,
    ) -> None:
        # Allocated before the communication stream forks off: memory that the current stream frees later is not free
        # there.
        self.out = partial.new_empty(shape)
        super().__init__(exchange, started_on, partial, self.out)
        self._partial = partial
        exchange.start(partial)

    def wait(self) -> torch.Tensor:
        """The sum over ranks, in NCCL's order."""
        self._resume()
        self._exchange.finish(self._partial, self.out, beside=True)
        return self.out


@outside_compile
def start_reduce_scatter(partial: torch.Tensor, *, context: TPContext) -> PendingReduceScatter:
    """Starts the reduce-scatter of ``partial`` [s, ..., N] along dimension 0 by copy engines, concurrent with what the
    current stream does next. One at a time: call ``wait()`` before the next op of this context.

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``gemm_rs``; also without ``cuda-bindings`` on a GPU.
    """
    stream = context.enter("reduce_scatter", partial.shape, partial.dtype)
    check_can_copy("reduce_scatter", context)
    exchange = context.plan(plan_reduce_scatter, partial.shape, partial.dtype, partial.device)
    shape = (partial.shape[0] // context.world_size, *partial.shape[1:])
    return PendingReduceScatter(exchange, partial.contiguous(), shape, stream)


def reserve_reduce_scatter(shape: torch.Size, dtype: torch.dtype, *, context: TPContext) -> None:
    """Allocates and agrees on what ``reduce_scatter_rows`` of this shape and type needs, before anything depends on
    it.

    Raises:
        ArenaError, NotSupportedError, MismatchError: It cannot be had; on every rank alike.
    """
    check_can_copy("reduce_scatter", context)
    context.plan(plan_reduce_scatter, shape, dtype, context.device)


@outside_compile
def reduce_scatter_rows(
    like: torch.Tensor,
    produce: Callable[[torch.Tensor, int], None],
    *,
    context: TPContext,
    behind: Callable[[], None] | None = None,
) -> torch.Tensor:
    """The reduce-scatter of partial sums that are computed rank by rank: copy engines send the rows of one rank while
    those of the next are computed.

    Args:
        like: [s, ..., N], contiguous, of the partial sums' shape, type and device; overwritten by them.
        produce: ``(rows, owner)``: enqueues what writes the rows of ``owner`` [s / world, ..., N] on the current
            stream; called once for each rank, for this one last.
        context: The group's context.
        behind: Enqueues what is to run during the last transfer.

    Returns:
        [s / world, ..., N]: the sum over ranks, in NCCL's ring order.

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``start_reduce_scatter``.
    """
    context.enter("reduce_scatter", like.shape, like.dtype)
    check_can_copy("reduce_scatter", context)
    exchange = context.plan(plan_reduce_scatter, like.shape, like.dtype, like.device)
    out = like.new_empty(like.shape[0] // context.world_size, *like.shape[1:])
    partial, starts = like.view(like.shape[0], -1), exchange.partition.starts
    exchange.begin()
    with exchange.aborting:
        for position, owner in enumerate([*exchange.peers, context.rank]):
            rows = slice(starts[owner], starts[owner + 1])
            produce(partial[rows], owner)
            if owner != context.rank:
                context.fork()
                exchange.send(partial, position, rows, signals=True)
        if behind is not None:
            behind()
        exchange.finish(partial, out)
    return out


@outside_compile
def scatter_as_computed(
    compute: Callable[[slice, torch.Tensor], None],
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    context: TPContext,
    num_products: int | None = None,
    key: Hashable | None = None,
    before: Callable[[], None] | None = None,
) -> torch.Tensor:
    """The reduce-scatter along dimension 0 of a product [s, ..., N] that ``compute`` writes share by share: copy
    engines send each share while the next one is computed. The share with the rows that this rank owns is last. Sums
    are those of ``gemm_rs``.

    Args:
        compute: ``(rows, out)``: enqueues what computes these rows of [s * ..., N] into ``out``, contiguous, on the
            current stream.
        shape: Shape of the product.
        dtype: Type of the product.
        context: The group's context.
        num_products: Number of shares, each for equally many ranks: a divisor of the group's size. Default: a share
            for each rank. Fewer shares cost less host time, and leave more to be sent after the last product.
        key: Determines everything that ``compute`` does, which must not allocate then; frequent calls are recorded.
        before: Enqueues what comes first and is not recorded, after the last op of the context.

    Returns:
        [s / world, ..., N].

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``start_reduce_scatter``.
    """
    context.enter("scatter_as_computed", tuple(shape), dtype)
    check_can_copy("scatter_as_computed", context)
    call = (torch.Size(shape), dtype, context.device)
    starts, rank = context.plan(plan_reduce_scatter, *call).partition.starts, context.rank
    partial = context.scratch("products", (starts[-1], shape[-1]), dtype)
    exchange = context.plan(plan_reduce_scatter, *call)  # again, since allocating ``partial`` may have moved buffers
    out = partial.new_empty(shape[0] // context.world_size, *shape[1:])

    def enqueue() -> None:
        exchange.begin()
        own_block, *others = rank_blocks([rank, *exchange.peers], num_products or context.world_size)
        for owners in (*others, own_block):
            rows = slice(starts[owners.start], starts[owners.stop])
            compute(rows, partial[rows])
            receivers = [owner for owner in order_in_block(rank, owners) if owner != rank]
            if receivers:
                context.fork()
            for owner in receivers:
                place = slice(starts[owner], starts[owner + 1])
                exchange.send(partial, exchange.peers.index(owner), place, signals=True)
        context.join()  # ``finish`` also joins, after the sum, but a recording has to join what it forks

    if before is not None:
        before()
    address = partial.data_ptr()
    recorded_as = None if key is None else (exchange, num_products, address, key)
    with exchange.aborting:
        exchange.replay(recorded_as, enqueue, (address,), allocates=True)
        exchange.finish(partial, out)
    return out
