"""``all_gather``, ``start_reduce_scatter`` and what else moves rows without a GEMM of ours:
plain functions on tensors, not differentiable by themselves. They enqueue as ``tp.ops`` do."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from ditron_train.gemm.operands import padded_columns
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.runtime.versions import pip_command
from ditron_train.schedule.orders import order_in_block, rank_blocks
from ditron_train.tp.all_reduce import PreparedLargest
from ditron_train.tp.context import TPContext
from ditron_train.tp.gather import PreparedGather
from ditron_train.tp.prepared import AllGatherCall, ReduceScatterCall, can_copy
from ditron_train.tp.scatter import PreparedScatter


def sendable_rows(x: torch.Tensor) -> torch.Tensor:
    """[rows, K] with rows of whole 16 bytes, contiguous: symmetric memory must be describable as it is."""
    columns = x.shape[-1]
    if x.requires_grad:  # a copy into symmetric memory would make autograd's history of all calls part of it
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
class StartedGather:
    """A gather on its way; ``wait()``, once and before the next one starts, gives the rows: starts and waits are
    counted. ``rows``: where they will be.

    Args:
        started_on: What ``enter`` gave; ``wait`` may come on another stream.
        copies_own: Else ``rows`` lack this rank's own, which ``consume`` gives where they are: they are read on its
            stream, as late as that.
    """

    def __init__(
        self,
        prepared: PreparedGather,
        rows: torch.Tensor,
        num_columns: int,
        started_on: torch.cuda.Stream | None,
        copies_own: bool,
    ) -> None:
        self._prepared = prepared
        self._own_rows = None if copies_own else rows[:, :num_columns]
        self._sent = rows  # kept until the stream is behind the sends
        self.rows = prepared.buffer.local[:, :num_columns]
        self._started_on = started_on
        prepared.start(rows, copies_own=copies_own)

    def wait(self) -> torch.Tensor:
        """Holds the current stream until all rows are there: [total rows, K], a view of the context's buffer that the
        next gather overwrites."""
        assert self._own_rows is None, "own rows are not there"
        self._prepared.context.resume(self._started_on, self._sent)
        self._prepared.wait()
        return self.rows

    def consume(self, each: Callable[[slice, torch.Tensor], None], key: Hashable | None = None) -> None:
        """Instead of ``wait``: ``each`` rank's place among all and its rows, this rank's own first, then the others'
        in the order of arrival, the current stream held until they are there. When it ends all are there and counted,
        as after ``wait``. ``key``: as of ``CopiedGather.consume``."""
        assert key is None or self._own_rows is None, "own rows lie elsewhere in each call"
        prepared = self._prepared
        starts = prepared.partition.starts
        prepared.context.resume(self._started_on, self._sent)

        def consume_rank(ranks: Sequence[int]) -> None:
            share = slice(starts[ranks[0]], starts[ranks[0] + 1])
            is_own = ranks[0] == prepared.context.rank
            each(share, self.rows[share] if self._own_rows is None or not is_own else self._own_rows)

        prepared.consume([(source,) for source in prepared.arrival_order], consume_rank, key)

    def give_up(self) -> None:
        """Instead of ``wait`` or ``consume``, where what comes before it failed: the next gather's rows come behind
        these, which are for nobody."""
        self._prepared.context.resume(self._started_on, self._sent)
        self._prepared.give_up()


@outside_compile
def start_all_gather(
    x: torch.Tensor,
    *,
    context: TPContext,
    row_counts: Sequence[int] | None = None,
    in_turn: bool = False,
    copies_own: bool = True,
) -> StartedGather:
    """Starts a gather of ``x`` [rows, ..., K] by copy engines, beside what the current stream does next. ``in_turn``:
    each peer is told of its rows as soon as they are there, for ``StartedGather.consume``, which gives this rank's own
    rows where ``x`` is without ``copies_own``: the gathered rows lack them then.

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``ag_gemm``.
    """
    counts = None if row_counts is None else tuple(row_counts)
    stream = context.enter("all_gather", x.shape if counts is None else counts, x.dtype)
    prepared = context.prepare(AllGatherCall, x.shape, x.dtype, x.device, counts, in_turn)
    return StartedGather(prepared, sendable_rows(x), x.shape[-1], stream, copies_own)


@outside_compile
def all_gather(x: torch.Tensor, *, context: TPContext, row_counts: Sequence[int] | None = None) -> torch.Tensor:
    """Rows of all ranks, [total rows, K], as a tensor of its own."""
    return start_all_gather(x, context=context, row_counts=row_counts).wait().clone()


@outside_compile
class StartedSum:
    """A reduce-scatter on its way; ``wait()``, once and before the next one starts, gives this rank's rows. ``out``:
    where they will be.

    Args:
        started_on: As of ``StartedGather``.
    """

    def __init__(
        self,
        prepared: PreparedScatter,
        partial: torch.Tensor,
        shape: tuple[int, ...],
        started_on: torch.cuda.Stream | None,
    ) -> None:
        self._prepared = prepared
        self._partial = partial
        self._started_on = started_on
        # Allocated before the communication stream forks off: memory that the current stream frees later is not free
        # there.
        self.out = partial.new_empty(shape)
        prepared.start(partial)

    def wait(self) -> torch.Tensor:
        """The sum over ranks, in NCCL's order."""
        self._prepared.context.resume(self._started_on, self._partial, self.out)
        self._prepared.finish(self._partial, self.out, beside=True)
        return self.out


@outside_compile
def start_reduce_scatter(partial: torch.Tensor, *, context: TPContext) -> StartedSum:
    """Starts the reduce-scatter of ``partial`` [s, ..., N] along dimension 0 by copy engines, beside what the current
    stream does next. One at a time: ``wait()`` before the next op of this context.

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``gemm_rs``; also without ``cuda-bindings`` on a GPU.
    """
    stream = context.enter("reduce_scatter", partial.shape, partial.dtype)
    _check_can_copy("reduce_scatter", context)
    prepared = context.prepare(ReduceScatterCall, partial.shape, partial.dtype, partial.device)
    shape = (partial.shape[0] // context.world_size, *partial.shape[1:])
    return StartedSum(prepared, partial.contiguous(), shape, stream)


def reserve_reduce_scatter(shape: torch.Size, dtype: torch.dtype, *, context: TPContext) -> None:
    """Makes what ``reduce_scatter_rows`` of this shape and type needs, before anything depends on it.

    Raises:
        ArenaError, NotSupportedError, MismatchError: It cannot be had; on every rank alike.
    """
    _check_can_copy("reduce_scatter", context)
    context.prepare(ReduceScatterCall, shape, dtype, context.device)


@outside_compile
def reduce_scatter_rows(
    like: torch.Tensor,
    produce: Callable[[torch.Tensor, int], None],
    *,
    context: TPContext,
    behind: Callable[[], None] | None = None,
) -> torch.Tensor:
    """The reduce-scatter of partial sums that are made rank by rank: copy engines send the rows of one while those of
    the next are made.

    Args:
        like: [s, ..., N] of the partial sums' shape, type and device, contiguous; it is overwritten by them.
        produce: ``(rows, owner)``: enqueues what writes the rows of ``owner`` [s / world, ..., N] on the current
            stream; called once for each rank, this one last.
        context: The group's context.
        behind: Enqueues what is to run under the last transfer.

    Returns:
        [s / world, ..., N]: the sum over ranks, in NCCL's ring order.

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``start_reduce_scatter``.
    """
    context.enter("reduce_scatter", like.shape, like.dtype)
    _check_can_copy("reduce_scatter", context)
    prepared: PreparedScatter = context.prepare(ReduceScatterCall, like.shape, like.dtype, like.device)
    out = like.new_empty(like.shape[0] // context.world_size, *like.shape[1:])
    partial, starts = like.view(like.shape[0], -1), prepared.partition.starts
    prepared.begin()
    with context.aborting(prepared.channel):
        for position, owner in enumerate([*prepared.peers, context.rank]):
            rows = slice(starts[owner], starts[owner + 1])
            produce(partial[rows], owner)
            if owner != context.rank:
                context.fork()
                prepared.send(partial, position, rows, signals=True)
        if behind is not None:
            behind()
        prepared.finish(partial, out)
    return out


@outside_compile
def largest_of_ranks(value: torch.Tensor, *, context: TPContext) -> None:
    """``value``, fp32 of one element, becomes the largest of all ranks': an all-reduce with ``ReduceOp.MAX``, as NCCL
    treats what is not a number.

    Raises:
        NotSupportedError: It is of another type or size, or elsewhere.
        MismatchError, PeerTimeoutError: As ``gemm_ar``.
    """
    context.enter("largest_of_ranks", value.shape, value.dtype)
    if value.numel() != 1 or value.dtype != torch.float32 or value.device != context.device:
        raise NotSupportedError(
            f"largest_of_ranks: {tuple(value.shape)} {value.dtype} on {value.device}, needed is one fp32 on "
            f"{context.device}"
        )
    prepared = context.prepared.get(("largest",))
    if prepared is None:
        prepared = context.prepared[("largest",)] = PreparedLargest(context)
    prepared(value)


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
    """The reduce-scatter along dimension 0 of a product [s, ..., N] that ``compute`` writes share by share: each is
    sent by copy engines while the next is computed, that with this rank's own last. Sums are those of ``gemm_rs``.

    Args:
        compute: Called with rows of [s * ..., N] and where they go, contiguous; enqueues on the current stream.
        shape: Of the product.
        dtype: Of the product.
        context: The group's context.
        num_products: In how many shares, of as many ranks each: a divisor of the group's size. Default: a share a
            rank. Fewer take the host less, and leave more to be sent behind the last.
        key: Says all that ``compute`` does, and that it allocates nothing: what comes often is recorded.
        before: Enqueues what comes first and is not recorded, behind all that the last op of the context does.

    Returns:
        [s / world, ..., N].

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``start_reduce_scatter``.
    """
    context.enter("scatter_as_computed", tuple(shape), dtype)
    _check_can_copy("scatter_as_computed", context)
    call = (ReduceScatterCall, torch.Size(shape), dtype, context.device)
    starts, rank = context.prepare(*call).partition.starts, context.rank
    partial = context.scratch("products", (starts[-1], shape[-1]), dtype)
    prepared: PreparedScatter = context.prepare(*call)  # anew where other memory has moved for these
    out = partial.new_empty(shape[0] // context.world_size, *shape[1:])

    def enqueue() -> None:
        prepared.begin()
        own_block, *others = rank_blocks([rank, *prepared.peers], num_products or context.world_size)
        for owners in (*others, own_block):
            rows = slice(starts[owners.start], starts[owners.stop])
            compute(rows, partial[rows])
            receivers = [owner for owner in order_in_block(rank, owners) if owner != rank]
            if receivers:
                context.fork()
            for owner in receivers:
                place = slice(starts[owner], starts[owner + 1])
                prepared.send(partial, prepared.peers.index(owner), place, signals=True)
        context.join()  # by ``finish``, too, behind the sum: but what is recorded has to join what it forks

    if before is not None:
        before()
    address = partial.data_ptr()
    with context.aborting(prepared.channel):
        context.run_op_again(None if key is None else (prepared, num_products, address, key), enqueue, (address,))
        prepared.finish(partial, out)
    return out


def _check_can_copy(name: str, context: TPContext) -> None:
    if not can_copy(context):
        raise NotSupportedError(f"{name} by copy engines needs cuda-bindings: {pip_command('cuda-bindings')}")
