"""All-gathers along dimension 0, concurrent with what the current stream does next. Equivalent PyTorch code:

    gathered = x.new_empty(world_size * len(x), x.shape[1])
    work = dist.all_gather_into_tensor(gathered, x, group=group, async_op=True)
    ...
    work.wait()

Streams of one rank, by copy engines:

    communication   start signals (one program) | rows to rank - 1, flag | rows to rank - 2, flag | ...
    current         ... | a program that waits for the flags of all peers, or of one after the other (``consume``)

By pushes, multiprocessors replace the copy engines: one kernel on the communication stream signals, stores the rows
and sets a flag for each block of rows.

Who waits for whom: nothing is written to a peer before its start signal of this epoch, which says that its stream is
done with what the buffer held. The consumer waits for flags that hold the epoch. The current stream joins the
communication stream at the end, so that what was sent may be reused.

A quantized operand consists of several tensors, its bytes and its scales, which are gathered by one call
(``start_gather_of_parts``). Each tensor is contiguous in the buffer, in the order of the ranks. All peers get the
first tensors, each rank's with a flag of their own, before any gets the others: a consumer that computes with one rank
after the other begins early, and the others arrive meanwhile.

Sizes that change no code are not specialised on (``do_not_specialize``): a new shape needs no compilation.
"""

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.gemm.operands import padded_columns
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.schedule.orders import arrival_order, chunk_order, order_in_block, rank_blocks
from ditron_train.stream.agreement import agree, agree_on_nothing
from ditron_train.stream.copies import StridedCopy, copy_in_sequence, copy_with_flags
from ditron_train.stream.driver import has_driver, memcpys_async
from ditron_train.stream.events import current_handle
from ditron_train.stream.plan import CopyExchange, Pending
from ditron_train.stream.window import flags_of_peers, send_strided
from ditron_train.symm.arena import SymmetricTensor
from ditron_train.symm.control import DTYPES
from ditron_train.tp.choices import GatherPlan
from ditron_train.tp.context import FLAGS_PER_RANK, GATHERED, RowPartition, TPContext, check_can_copy, row_partition


@triton.jit
def _in_vectors(num_elements, ptr):
    """Returns ``num_elements``, a multiple of 16 bytes, in a form from which the compiler can tell that it is one, so
    that it moves 16 bytes at a time (``tl.multiple_of`` has no effect on an argument)."""
    NUM_BITS: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    VECTOR: tl.constexpr = 128 // (8 if NUM_BITS < 8 else NUM_BITS)  # booleans have 1, and take a byte
    return num_elements // VECTOR * VECTOR


@triton.jit(do_not_specialize=["K", "flag_block_rows"])
def push_shard_kernel(
    x_ptr,
    gathered_addresses,
    channel,
    row_starts_ptr,
    K,
    flag_block_rows,
    FLAGS_PER_RANK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Copies this rank's rows x [rows, K] (contiguous) to their place in every peer's gathered buffer.

    First to rank - 1, then rank - 2, ...: so every rank receives from rank + 1 first, the order in which the GEMM
    consumes, and no two ranks push to the same one. Programs share the flag blocks (``flag_block_rows`` rows each); a
    flag block's flag is set (release) once its rows are stored. Before the first store to a peer, a program waits for
    its start signal (acquire).
    """
    K = _in_vectors(K, x_ptr)
    epoch = dl.next_epoch(channel.tickets)
    rank = dl.rank(channel.control)
    program = tl.program_id(0)
    if program == 0:
        dl.announce(channel.ready_addresses, channel.signature, epoch, rank, WORLD_SIZE, TARGET)
    first_row = tl.load(row_starts_ptr + rank)
    num_rows = tl.load(row_starts_ptr + rank + 1) - first_row
    num_flag_blocks = tl.cdiv(num_rows, flag_block_rows)
    for step in tl.static_range(1, WORLD_SIZE):
        peer = (rank + WORLD_SIZE - step) % WORLD_SIZE
        if program == 0:
            dl.verify_ready(channel.ready, channel.signature, epoch, channel.control, peer, WORLD_SIZE, TARGET)
        else:
            dl.await_ready(channel.ready, epoch, channel.control, peer, WORLD_SIZE, TARGET)
        destination = dl.symm_at(gathered_addresses, peer, x_ptr.dtype.element_ty) + first_row.to(tl.int64) * K
        flags = dl.symm_at(channel.signals_addresses, peer, tl.int32) + rank * FLAGS_PER_RANK
        for flag_block in range(program, num_flag_blocks, tl.num_programs(0)):
            row = tl.cast(flag_block, tl.int64) * flag_block_rows
            count = tl.minimum(num_rows - row, flag_block_rows) * K
            dl.putmem(destination + row * K, x_ptr + row * K, count, 0, 1, BLOCK)
            dl.notify(flags + flag_block, epoch, TARGET)


@triton.jit
def _await_rows(
    peer, epoch, channel, row_starts_ptr, flag_block_rows, FLAGS_PER_RANK: tl.constexpr, TARGET: tl.constexpr
):
    num_rows = tl.load(row_starts_ptr + peer + 1) - tl.load(row_starts_ptr + peer)
    for flag in range(0, tl.cdiv(num_rows, flag_block_rows)):
        dl.wait(channel.signals + peer * FLAGS_PER_RANK + flag, epoch, channel.control, peer, flag, TARGET)


@triton.jit(do_not_specialize=["flag_block_rows"])
def gather_wait_kernel(
    channel,
    row_starts_ptr,
    flag_block_rows,
    FLAGS_PER_RANK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """One program after a gather: waits until every peer's rows have arrived. Later work on the stream can read them
    by ordinary loads."""
    epoch = dl.next_epoch(channel.tickets + 1)  # slot 1: the role that waits
    rank = dl.rank(channel.control)
    for step in tl.static_range(1, WORLD_SIZE):
        _await_rows(
            (rank + step) % WORLD_SIZE, epoch, channel, row_starts_ptr, flag_block_rows, FLAGS_PER_RANK, TARGET
        )


@triton.jit(do_not_specialize=["peer", "flag_block_rows"])
def gather_wait_one_kernel(
    channel, row_starts_ptr, peer, flag_block_rows, FLAGS_PER_RANK: tl.constexpr, TARGET: tl.constexpr
):
    """One program before what reads the rows of ``peer`` alone: waits until they have arrived. The epoch is the one
    that ``gather_wait_kernel``, which follows on the stream, will draw."""
    epoch = dl.last_epoch(channel.tickets + 1) + 1  # slot 1: the role that waits
    _await_rows(peer, epoch, channel, row_starts_ptr, flag_block_rows, FLAGS_PER_RANK, TARGET)


@triton.jit
def copy_rows_kernel(source_ptr, destination_ptr, num_elements, BLOCK: tl.constexpr):
    """Copies ``num_elements``, contiguous and a multiple of 16 bytes, within this rank's memory. With few warps, few
    registers and no shared memory it fits on multiprocessors that a GEMM occupies."""
    dl.putmem(
        destination_ptr, source_ptr, _in_vectors(num_elements, source_ptr), tl.program_id(0), tl.num_programs(0), BLOCK
    )


_PUSH_WARPS = 32  # docs/measurements/tp.md
_PUSH_BLOCK = 16384
_COPY_BLOCK = 4096
_FLAG_BLOCK_BYTES = 1 << 18  # a notify costs a program some 3 us


def _push_flag_block_rows(partition: RowPartition, row_bytes: int, block_m: int) -> int:
    """Rows of one flag block of a push: enough that a notify costs little, and that there is a flag for each block."""
    rows = 8
    while rows < block_m and 2 * rows * row_bytes <= _FLAG_BLOCK_BYTES:
        rows *= 2
    while -(-partition.max_count // rows) > FLAGS_PER_RANK:
        rows *= 2
    return rows


def _num_chunks(partition: RowPartition, wanted: int, block_m: int) -> int:
    """Chunks of a copy-engine gather: as wanted, or the next fewer that are whole row tiles."""
    tiles = -(-partition.max_count // block_m)
    chunks = max(1, min(wanted, tiles, FLAGS_PER_RANK))
    while tiles % chunks:
        chunks -= 1
    return chunks


class BaseGather(CopyExchange[TPContext]):
    """What gathers share: start signals before the copy engines' work, and programs that wait for arrivals after it.

    Args:
        context: Whose buffers and streams are used.
        values: Of the signature: what must be equal on all ranks (collective).
        num_bytes: Bytes that are gathered, if a call that fits into the buffer needs no agreement of its own.

    Attributes:
        arrival_order: Ranks in the order in which their data arrives.
    """

    buffer: SymmetricTensor
    row_starts: torch.Tensor  #: First row of each rank, and the end of the last; of parts, a row stands for a flag.
    flag_block_rows: int  #: Rows that one flag stands for.

    def __init__(self, context: TPContext, values: tuple[int | torch.dtype, ...], num_bytes: int = 0) -> None:
        channel = context.gather_channel
        pointers = channel.pointers(agree(context, channel, values, buffer=(GATHERED, num_bytes)))
        super().__init__(context, channel, pointers, context.gather_epochs)
        self.arrival_order: list[int] = arrival_order(context.rank, context.world_size).tolist()
        flags, target = {"FLAGS_PER_RANK": FLAGS_PER_RANK}, {"TARGET": context.target}
        self._flags_of_world = {**flags, "WORLD_SIZE": context.world_size}
        self._wait = context.launch(gather_wait_kernel, 1, {**self._flags_of_world, **target}, num_warps=1)
        self._wait_one = context.launch(gather_wait_one_kernel, 1, {**flags, **target}, num_warps=1)

    def _wait_for_flags(self, source: int, row_starts: torch.Tensor) -> None:
        if source == self.context.rank:
            return
        if not self._wait_one.repeat(source, current_handle(self.context.device)):
            self._wait_one(self.pointers, row_starts, source, self.flag_block_rows, key=source)

    def wait(self) -> torch.Tensor:
        """Makes the current stream wait until all rows have arrived; returns them, a view of the buffer."""
        with self.aborting:
            if not self._wait.repeat("wait", current_handle(self.context.device)):
                self._wait(self.pointers, self.row_starts, self.flag_block_rows, key="wait")
        self.finish()
        return self.buffer.local

    def consume(
        self, blocks: Sequence[Sequence[int]], each: Callable[[Sequence[int]], None], key: Hashable | None = None
    ) -> None:
        """Instead of ``wait``: calls ``each`` for one block of ranks after the other, and makes the current stream
        wait for the block's data before it. When it ends, or fails, all data has arrived, as after ``wait``.

        ``key``: determines everything that ``each`` does, which must not allocate then; frequent calls are recorded.
        """

        def enqueue() -> None:
            for ranks in blocks:
                for source in ranks:
                    self.wait_for(source)
                each(ranks)

        try:
            self.replay(None if key is None else (self, key), enqueue, forks=False, allocates=True)
        finally:
            self.wait()

    def wait_for(self, source: int) -> None:
        """Makes the current stream wait for what is consumed of rank ``source``; ``wait`` must be called later."""
        raise NotImplementedError

    def finish(self) -> None:
        """Makes the current stream wait for the sends, so that what was sent may be reused."""
        self.context.join()
        self.context.leave(self.channel)


class Gather(BaseGather):
    """Gathers of rows [rows, K] over the context's group, for one partition, K and dtype (constructed collectively).

    ``start`` enqueues the sends, concurrent with what the current stream does next; the GEMM of an AG-GEMM, or
    ``wait``, consumes; ``finish`` makes the current stream wait for the sends.

    One arrival flag stands for ``flag_block_rows`` rows; with copy engines these are one of the plan's chunks.
    ``local_shard`` is this rank's part of the buffer.

    Args:
        context: Whose buffers and streams are used.
        partition: The rows of all ranks.
        num_columns: K, with rows of whole 16 bytes.
        dtype: Of the rows.
        plan: SM pushes or copy engines (pushes if ``cuda-bindings`` is missing).
        block_m: Row tile of the consumer: chunks of copy engines are whole tiles.
        is_awaited: Whether rows are consumed only when all have arrived (``wait``). Flags are then one command after
            all rows, if peers' memory can be mapped contiguously.
    """

    def __init__(
        self,
        context: TPContext,
        partition: RowPartition,
        num_columns: int,
        dtype: torch.dtype,
        plan: GatherPlan,
        block_m: int,
        *,
        is_awaited: bool = False,
    ) -> None:
        self.partition = partition
        self.num_columns = num_columns
        self.by_push = plan.mode == "push" or (context.is_cuda and not has_driver())
        if self.by_push:
            self.flag_block_rows = _push_flag_block_rows(partition, num_columns * dtype.itemsize, block_m)
        else:
            num_chunks = _num_chunks(partition, plan.num_chunks, block_m)
            self.flag_block_rows = -(-partition.max_count // (block_m * num_chunks)) * block_m
        values = (partition.num_rows, partition.fingerprint, num_columns, dtype, self.flag_block_rows)
        super().__init__(context, values, partition.num_rows * num_columns * dtype.itemsize)
        self.buffer = context.gathered(partition.num_rows, num_columns, dtype)
        self.row_starts = context.table(partition, partition.starts)
        self.row_bytes = num_columns * dtype.itemsize
        self.reserved_sms = plan.push_programs if self.by_push else 1
        self._push = context.launch(
            push_shard_kernel,
            plan.push_programs if context.is_cuda else 1,
            {**self._flags_of_world, "BLOCK": _PUSH_BLOCK, "TARGET": context.target},
            num_warps=_PUSH_WARPS,
        )
        self._copy = None
        if context.is_cuda:
            self._copy = context.launch(copy_rows_kernel, context.num_sms, {"BLOCK": _COPY_BLOCK}, num_warps=4)
        start = partition.starts[context.rank]
        self.local_shard = self.buffer.local[start : start + partition.count(context.rank)]
        self._copies = [] if self.by_push else self._list_copies()
        self._flags = self._strided_copy_of_flags() if is_awaited else None

    def _list_copies(self) -> list[tuple[int, int, int, int, int]]:
        """Every chunk in order: (destination, offset in x, bytes, its flag, the word that holds the flag's epoch)."""
        context, partition, rows = self.context, self.partition, self.flag_block_rows
        rank = context.rank
        start, count = partition.starts[rank], partition.count(rank)
        epochs = context.gather_epochs.data_ptr()
        copies = []
        for peer in chunk_order(rank, context.world_size, "gather_push").tolist():
            target = self.buffer.host_addresses[peer] + start * self.row_bytes
            flags = self.channel.signals.host_addresses[peer] + 4 * rank * FLAGS_PER_RANK
            for index, first in enumerate(range(0, count, rows)):
                num_rows = min(rows, count - first)
                offset = first * self.row_bytes
                copies.append(
                    (target + offset, offset, num_rows * self.row_bytes, flags + 4 * index, epochs + 4 * index)
                )
        return copies

    def _strided_copy_of_flags(self) -> StridedCopy | None:
        """The flags of all peers as one command; None if each peer's flag is sent after its rows."""
        if len(self._copies) != self.context.world_size - 1:  # one chunk for each peer has one flag
            return None
        rank, words = self.context.rank, self.context.gather_epochs.data_ptr()
        return flags_of_peers(self.channel.signals, rank, 4 * rank * FLAGS_PER_RANK, words)

    def _push_arguments(self, x: torch.Tensor) -> tuple:
        return x, self.buffer.addresses, self.pointers, self.row_starts, self.num_columns, self.flag_block_rows

    def compile(self, x: torch.Tensor) -> None:
        """Compiles the kernel of a push without running it; the one before copy engines compiles in no time."""
        if self.by_push:
            self._push.compile(*self._push_arguments(x))

    def start(self, x: torch.Tensor, *, copies_own: bool = True) -> None:
        """Sends ``x``, this rank's rows, contiguous; it must stay unchanged until the stream has passed ``finish``.

        ``copies_own``: whether ``x`` is also copied to this rank's part of the buffer, unless it already is that part.
        """
        address = x.data_ptr()
        if self.by_push:
            self.fork(lambda: self._send_by_push(x))
        else:
            self.fork(lambda: self._send_by_copies(x), (self, address), (address,))
        if copies_own and x.data_ptr() != self.local_shard.data_ptr():
            # On the current stream: a copy within one device needs SMs, which a GEMM would take first.
            try:
                self.local_shard.copy_(x)
            except BaseException:
                self.abort()
                raise

    def _send_by_push(self, x: torch.Tensor) -> None:
        context, key = self.context, x.data_ptr()
        if not self._push.repeat(key, context.comm_handle):
            self._push(*self._push_arguments(x), stream=context.comm_stream, key=key)

    def copy_own(self, x: torch.Tensor) -> None:
        """Copies ``x`` to its place in the buffer on the communication stream, after the sends: for a consumer that
        has been launched, reads this rank's own rows from ``x``, and leaves room on its multiprocessors.

        Enqueued before the consumer, the copy would keep it waiting for the sends if the device has one connection
        (``CUDA_DEVICE_MAX_CONNECTIONS=1``), and the driver's copy kernel finds no room next to a GEMM
        (``docs/measurements/tp.md``).
        """
        if self._copy is None:
            self.local_shard.copy_(x)
            return
        context, key = self.context, x.data_ptr()
        if not self._copy.repeat(key, context.comm_handle):
            self._copy(x, self.local_shard, x.numel(), stream=context.comm_stream, key=key)

    def _send_by_copies(self, x: torch.Tensor) -> None:
        """Each chunk, then its flag, or all flags at the end, peer after peer on one stream: nothing else was quicker
        (``docs/measurements/tp.md``)."""
        context, stream = self.context, self.context.comm_stream
        num_flags = max(-(-self.partition.max_count // self.flag_block_rows), context.world_size)
        self._signal_start(num_flags)
        address = x.data_ptr()
        if self._flags is None:
            copy_with_flags(self._copies, address, stream)
            return
        copy_in_sequence(((to, address + offset, num_bytes) for to, offset, num_bytes, _, _ in self._copies), stream)
        if not send_strided((self._flags,), stream):
            self._flags = None  # from now on each after its rows
            copy_in_sequence(((flag, word, 4) for _, _, _, flag, word in self._copies), stream)

    def wait_for(self, source: int) -> None:
        """Makes the current stream wait for the rows of rank ``source``; ``wait`` must still be called."""
        self._wait_for_flags(source, self.row_starts)


def plan_all_gather(
    context: TPContext,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    counts: tuple[int, ...] | None,
    flags_each_rank: bool,
) -> Gather:
    """The gather that ``start_all_gather`` uses for x of this shape (collective).

    Raises:
        NotSupportedError: As ``start_all_gather``; also if there are no rows.
    """
    if device != context.device or len(shape) < 2:
        raise NotSupportedError(f"all_gather: x {tuple(shape)} on {device}, the context is on {context.device}")
    if dtype not in DTYPES:
        raise NotSupportedError(f"all_gather: {dtype} is not supported")
    partition = row_partition("all_gather", context, shape, counts, total=False)
    if partition.num_rows == 0 or shape[-1] == 0:
        agree_on_nothing(context, (context.gather_channel,), dtype=dtype)
        raise NotSupportedError(f"all_gather: nothing to gather in {tuple(shape)}")
    columns = padded_columns(shape[-1], dtype)
    return Gather(context, partition, columns, dtype, GatherPlan("copy"), block_m=1, is_awaited=not flags_each_rank)


def sendable_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` as contiguous [rows, K], padded to rows of whole 16 bytes, as descriptors of the gathered rows need it."""
    columns = x.shape[-1]
    if x.requires_grad:  # else a copy into symmetric memory would attach the autograd history of all calls to it
        x = x.detach()
    if x.is_contiguous() and x.data_ptr() % 16 == 0 and columns * x.dtype.itemsize % 16 == 0:
        return x if x.dim() == 2 else x.view(-1, columns)
    rows = x if x.dim() == 2 else x.reshape(-1, columns)
    missing = padded_columns(columns, x.dtype) - columns
    if missing:
        rows = torch.nn.functional.pad(rows, (0, missing))
    rows = rows.contiguous()
    return rows if rows.data_ptr() % 16 == 0 else rows.clone()


@outside_compile
class PendingGather(Pending[Gather]):
    """A gather that has been started. ``wait()`` returns the rows; call it once, before the next gather starts, since
    starts and waits are counted. ``rows``: where the rows will be.

    Args:
        gather: The collective that moves the rows.
        rows: This rank's rows; columns from ``num_columns`` on are padding.
        num_columns: K.
        started_on: The stream that ``enter`` returned; ``wait`` may be called on another one.
        copies_own: As of ``start_all_gather``. If not, ``consume`` reads ``rows`` on its stream, so they must stay
            unchanged until then.
    """

    def __init__(
        self,
        gather: Gather,
        rows: torch.Tensor,
        num_columns: int,
        started_on: torch.cuda.Stream | None,
        copies_own: bool,
    ) -> None:
        super().__init__(gather, started_on, rows)
        self._own_rows = None if copies_own else rows[:, :num_columns]
        self.rows = gather.buffer.local[:, :num_columns]
        gather.start(rows, copies_own=copies_own)

    def wait(self) -> torch.Tensor:
        """Makes the current stream wait until all rows have arrived. Returns [total rows, K], a view of the context's
        buffer that the next gather overwrites."""
        assert self._own_rows is None, "this rank's own rows were not copied into the buffer"
        self._resume()
        self._exchange.wait()
        return self.rows

    def consume(self, each: Callable[[slice, torch.Tensor], None], key: Hashable | None = None) -> None:
        """Instead of ``wait``: calls ``each`` with every rank's slice of the gathered rows and its rows, this rank's
        own first, then the others' in the order of arrival; the current stream waits for the rows before each call.
        When it ends all rows have arrived, as after ``wait``. ``key``: as of ``BaseGather.consume``."""
        assert key is None or self._own_rows is None, "this rank's own rows are stored elsewhere in each call"
        gather, starts = self._exchange, self._exchange.partition.starts
        self._resume()

        def consume_rank(ranks: Sequence[int]) -> None:
            share = slice(starts[ranks[0]], starts[ranks[0] + 1])
            is_own = ranks[0] == gather.context.rank
            each(share, self.rows[share] if self._own_rows is None or not is_own else self._own_rows)

        gather.consume([(source,) for source in gather.arrival_order], consume_rank, key)


@outside_compile
def start_all_gather(
    x: torch.Tensor,
    *,
    context: TPContext,
    row_counts: Sequence[int] | None = None,
    flags_each_rank: bool = False,
    copies_own: bool = True,
) -> PendingGather:
    """Starts a gather of ``x`` [rows, ..., K] by copy engines, concurrent with what the current stream does next.

    Args:
        x: This rank's rows.
        context: The group's context.
        row_counts: Rows of each rank if they differ.
        flags_each_rank: Whether a flag follows the rows of each rank, so that ``PendingGather.consume`` can consume
            them one rank after the other; else the flags of all ranks come last.
        copies_own: Whether ``x`` is copied into the gathered rows. If not, the gathered rows lack this rank's own, and
            ``PendingGather.consume`` reads them from ``x``.

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``ag_gemm``.
    """
    counts = None if row_counts is None else tuple(row_counts)
    stream = context.enter("all_gather", x.shape if counts is None else counts, x.dtype)
    gather = context.plan(plan_all_gather, x.shape, x.dtype, x.device, counts, flags_each_rank)
    return PendingGather(gather, sendable_rows(x), x.shape[-1], stream, copies_own)


@outside_compile
def all_gather(x: torch.Tensor, *, context: TPContext, row_counts: Sequence[int] | None = None) -> torch.Tensor:
    """Rows of all ranks, [total rows, K], as a tensor of its own."""
    return start_all_gather(x, context=context, row_counts=row_counts).wait().clone()


_ALIGNMENT = 16  # bytes


class PartsGather(BaseGather):
    """Gathers of several tensors of ``sizes`` bytes a rank, the same on all ranks (constructed collectively).

    The first ``num_flagged_first`` tensors of a rank share a flag, for which ``wait_for`` waits; the others share
    another.

    ``totals``: the bytes of each tensor of all ranks, views of the buffer. ``blocks``: ranks whose parts are consumed
    together, in the order of arrival; this rank's block comes first.
    """

    def __init__(self, context: TPContext, sizes: tuple[int, ...], num_flagged_first: int, num_blocks: int) -> None:
        world, num_bytes = context.world_size, sum(sizes)
        units = world * num_bytes // _ALIGNMENT
        blocks_and_flags = num_blocks << 8 | num_flagged_first
        super().__init__(context, (units, hash(sizes) & 0x7FFFFFFF, _ALIGNMENT, torch.uint8, blocks_and_flags))
        self.blocks = rank_blocks(self.arrival_order, num_blocks)
        order = [context.rank, *chunk_order(context.rank, world, "gather_push").tolist()]
        sent_to = [peer for block in rank_blocks(order, num_blocks) for peer in order_in_block(context.rank, block)]
        self._peers = [peer for peer in sent_to if peer != context.rank]
        self.buffer = context.gathered(units, _ALIGNMENT, torch.uint8)
        starts = [world * before for before in accumulate(sizes, initial=0)]
        flat = self.buffer.local.view(-1)
        self.totals = [flat[first:last] for first, last in zip(starts, starts[1:])]
        parts = list(zip(range(len(sizes)), starts, sizes))
        self._stages = [stage for stage in (parts[:num_flagged_first], parts[num_flagged_first:]) if stage]
        self._own = [(total.data_ptr() + context.rank * size, size) for total, size in zip(self.totals, sizes)]
        self.flag_block_rows, count = 1, len(self._stages)
        self._first_starts = context.table(("flags", 1), range(world + 1))
        self.row_starts = context.table(("flags", count), range(0, count * world + 1, count))

    def start(self, parts: Sequence[torch.Tensor]) -> None:
        """Sends contiguous ``parts``, which must stay unchanged until the stream has passed ``finish``."""
        context = self.context
        addresses = tuple(part.data_ptr() for part in parts)
        self.fork(lambda: self._send(addresses), (self, addresses), addresses)
        try:
            own = [(to, address, size) for (to, size), address in zip(self._own, addresses)]
            if context.is_cuda:
                memcpys_async(own, current_handle(context.device))
            else:
                copy_in_sequence(own, None)
        except BaseException:
            self.abort()
            raise

    def _send(self, addresses: tuple[int, ...]) -> None:
        context, rank, moves = self.context, self.context.rank, []
        epoch = context.gather_epochs.data_ptr()
        for index, stage in enumerate(self._stages):
            for peer in self._peers:
                buffer, flags = self.buffer.host_addresses[peer], self.channel.signals.host_addresses[peer]
                moves += [(buffer + start + rank * size, addresses[i], size) for i, start, size in stage]
                moves.append((flags + 4 * (rank * FLAGS_PER_RANK + index), epoch, 4))
        self._signal_start(1)
        copy_in_sequence(moves, context.comm_stream)

    def wait_for(self, source: int) -> None:
        """Makes the current stream wait for the first tensors of rank ``source``; ``wait`` must be called later."""
        self._wait_for_flags(source, self._first_starts)


def plan_gather_of_parts(
    context: TPContext,
    sizes: tuple[int, ...],
    devices: frozenset[torch.device],
    num_flagged_first: int,
    num_blocks: int,
) -> PartsGather:
    """The gather that ``start_gather_of_parts`` uses for parts of ``sizes`` bytes (collective).

    Raises:
        NotSupportedError: As ``start_gather_of_parts``.
    """
    name = "gather_of_parts"
    check_can_copy(name, context)
    if devices != {context.device}:
        raise NotSupportedError(f"{name}: parts on {set(devices)}, the context is on {context.device}")
    if not sizes or min(sizes) == 0 or any(size % _ALIGNMENT for size in sizes):
        raise NotSupportedError(f"{name}: parts of {list(sizes)} bytes; each has to be whole {_ALIGNMENT} bytes")
    if not 0 <= num_flagged_first <= len(sizes):
        raise NotSupportedError(f"{name}: num_flagged_first={num_flagged_first} for {len(sizes)} parts")
    return PartsGather(context, sizes, num_flagged_first, num_blocks)


@outside_compile
class PendingParts(Pending[PartsGather]):
    """A gather of parts that has been started; call ``wait()`` or ``consume()`` once, before the next gather starts.

    Attributes:
        totals: Where the parts of all ranks will be, along dimension 0: views of the context's buffer that its next
            gather overwrites.
    """

    def __init__(
        self,
        gather: PartsGather,
        parts: Sequence[torch.Tensor],
        num_flagged_first: int,
        started_on: torch.cuda.Stream | None,
    ) -> None:
        super().__init__(gather, started_on, *parts)
        self._num_flagged_first = num_flagged_first
        world = gather.context.world_size
        self.totals = [  # views made for this call: Transformer Engine may empty them
            total.view(part.dtype).view(world * part.shape[0], *part.shape[1:])
            for total, part in zip(gather.totals, parts)
        ]
        gather.start(parts)

    def wait(self) -> list[torch.Tensor]:
        """Makes the current stream wait until all parts of all ranks have arrived."""
        self._resume()
        self._exchange.wait()
        return self.totals

    def consume(self, each: Callable[[int, list[torch.Tensor]], None], key: Hashable | None = None) -> None:
        """Instead of ``wait``: calls ``each`` with the number of every block of ranks and the block's first
        ``num_flagged_first`` parts, along dimension 0: this rank's block first, then the others in the order of
        arrival; the current stream waits for the parts before each call. When it ends all parts have arrived, as after
        ``wait``. ``key``: as of ``BaseGather.consume``."""
        gather, num_blocks = self._exchange, len(self._exchange.blocks)
        self._resume()

        def consume_block(ranks: Sequence[int]) -> None:
            block = ranks[0] // len(ranks)
            each(block, [total.chunk(num_blocks)[block] for total in self.totals[: self._num_flagged_first]])

        gather.consume(gather.blocks, consume_block, key)


@outside_compile
def start_gather_of_parts(
    parts: Sequence[torch.Tensor], *, context: TPContext, num_flagged_first: int = 0, num_blocks: int | None = None
) -> PendingParts:
    """Starts a gather of each of ``parts`` along dimension 0 by copy engines, concurrent with what the current stream
    does next. Equivalent: ``dist.all_gather_into_tensor`` of each.

    Args:
        parts: [rows, ...] each, of any types, the same sizes on all ranks.
        context: The group's context.
        num_flagged_first: How many of ``parts`` are sent first, with a flag after those of each rank, so that
            ``PendingParts.consume`` can consume them one block of ranks after the other.
        num_blocks: Number of blocks of ranks whose parts are consumed together: a divisor of the group's size.
            Default: one for each rank.

    Raises:
        NotSupportedError: Devices, sizes that are not whole 16 bytes, no ``cuda-bindings`` on a GPU.
        MismatchError: The ranks' calls differ (at the first call of sizes here, else at the next ``check``).
        PeerTimeoutError: A peer did not arrive (CPU: here, GPU: at a later call or ``context.synchronize()``).
    """
    parts = [part.detach().contiguous() for part in parts]
    sizes = tuple(part.nbytes for part in parts)
    stream = context.enter("gather_of_parts", sizes)
    devices = frozenset(part.device for part in parts)
    gather = context.plan(plan_gather_of_parts, sizes, devices, num_flagged_first, num_blocks or context.world_size)
    return PendingParts(gather, parts, num_flagged_first, stream)
