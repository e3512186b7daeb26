"""``to_heads``, ``to_sequence`` and ``gather_sequence``: the exchanges of Ulysses without a GEMM; ``to_all`` and
``sum_to_sequence``: a gather of the whole sequence, and the sum of its gradients.

``to_heads`` is, for each part, an all-to-all and the reorder of chunks; ``to_sequence`` is its inverse:

    arrived = all_to_all_single(torch.stack(part.chunk(world, dim=heads)))
    whole = torch.cat([chunk of position i for i in range(2 * world)])  # rank r sent chunks r and 2 * world - 1 - r

    current stream        | push: flag block 0 to rank + 1, rank + 2, ..., own; flag block 1 ... |
    communication stream  | receive: wait for the flag of each flag block, take the parts apart |

``gather_sequence`` is the exchange before an A2A-GEMM, by itself: the push runs on the communication stream while
the caller's work (a weight gradient) runs on the current one.

``to_all`` gives every rank all heads, in the order of the sequence while more arrives; ``sum_to_sequence`` is its
transpose, whose rows are added once all have arrived:

    all_gather_into_tensor(gathered, part)
    whole[row_table.flatten()] = gathered

    reduce_scatter_tensor(part, whole[row_table.flatten()])

All of them only enqueue; they wait for the device only at the first call of a new shape. Bits are those of the
collective and the reorder: rows and columns are only moved, and ``sum_to_sequence`` then adds in NCCL's ring order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch

from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.sp import transfer_sizes
from ditron_train.sp.choices import exchange_programs
from ditron_train.sp.context import SPContext
from ditron_train.sp.layouts import HeadsLayout
from ditron_train.sp.transfer import (
    GATHER,
    TO_ALL,
    TO_HEADS,
    TO_SEQUENCE,
    Receiver,
    Transfer,
    arrived_kernel,
    check_parts,
    kinds_of,
    push_kernel,
    table_kind,
)
from ditron_train.stream.events import current_handle

_OPERATIONS = {"to_heads": TO_HEADS, "to_all": TO_ALL, "to_sequence": TO_SEQUENCE}


class ExchangePlan(Transfer):
    """``to_heads``, ``to_all`` or ``to_sequence`` of one shape: a push and, concurrently, the kernel that takes apart
    what arrives."""

    def __init__(
        self,
        context: SPContext,
        layout: HeadsLayout,
        m: int,
        dtype: torch.dtype,
        *,
        operation: int,
        packed: bool,
        programs: int,
    ) -> None:
        super().__init__(context, operation, layout, m, dtype, packed=packed)
        self._push = self.copy_kernel(push_kernel, programs)
        self._receive = Receiver(self, programs)

    def run(
        self, parts: Sequence[torch.Tensor], lead: Sequence[int], table: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """``lead``: leading dimensions of the result."""
        context = self.context
        parts = [part.contiguous() for part in parts]
        results = self._receive.empty(lead)
        context.fork()
        with self.aborting:
            # The push first: with one hardware queue the kernel that waits would stand in front of it.
            self.copy(self._push, parts, table)
            self._receive(results, table)
        context.join()
        context.leave(self.channel)
        return results


class SequenceGatherPlan(Transfer):
    """All heads of the local rows, as an A2A-GEMM multiplies them, left in the context's buffer."""

    def __init__(self, context: SPContext, layout: HeadsLayout, m: int, dtype: torch.dtype, *, packed: bool) -> None:
        super().__init__(context, GATHER, layout, m, dtype, packed=packed)
        self._columns = context.world_size * layout.num_columns
        self._push = self.copy_kernel(push_kernel, transfer_sizes.GATHER_PROGRAMS)
        constants = {"WORLD_SIZE": context.world_size, "TARGET": context.target}
        self._arrived = context.launch(arrived_kernel, 1, constants, num_warps=1)

    def run(
        self, parts: Sequence[torch.Tensor], table: torch.Tensor | None, meanwhile: Callable[[], object]
    ) -> torch.Tensor:
        """[m, world * columns], until the next op of the context (a copy if rows are padded).

        ``meanwhile``: enqueued while they arrive.
        """
        context = self.context
        parts = [part.contiguous() for part in parts]
        self.fork(lambda: self.copy(self._push, parts, table, on_side=True))
        with self.aborting:
            try:
                meanwhile()
            finally:  # whatever it raises: launches are counted, and the other stream still reads what is given here
                if not self._arrived.repeat("arrived", current_handle(context.device)):
                    self._arrived(self.channel.pointers(self.signature), self.num_flag_blocks, key="arrived")
        context.join()
        context.leave(self.channel)
        return self.buffer.local[:, : self._columns].contiguous()


def _plan_gather(
    context: SPContext, kinds: tuple[tuple, ...], layout: HeadsLayout, table: tuple | None
) -> SequenceGatherPlan:
    """What ``gather_sequence`` needs for parts of these kinds (collective)."""
    first = check_parts("gather_sequence", context, layout, kinds, table, whole_sequence=True)
    m = first.shape[:-2].numel() // context.world_size
    return SequenceGatherPlan(context, layout, m, first.dtype, packed=table is not None)


def _plan_exchange(
    context: SPContext,
    name: str,
    kinds: tuple[tuple, ...],
    layout: HeadsLayout,
    table: tuple | None,
    programs: int | None,
) -> ExchangePlan:
    """What ``to_heads``, ``to_all`` or ``to_sequence`` needs for parts of these kinds (collective)."""
    world, operation = context.world_size, _OPERATIONS[name]
    is_whole, all_heads = operation == TO_SEQUENCE, operation == TO_ALL
    first = check_parts(name, context, layout, kinds, table, whole_sequence=is_whole, all_heads=all_heads)
    m = first.shape[:-2].numel() // (world if is_whole else 1)
    programs = programs or exchange_programs(name, m, world * layout.num_columns, context)
    packed = table is not None
    return ExchangePlan(context, layout, m, first.dtype, operation=operation, packed=packed, programs=programs)


@outside_compile
def gather_sequence(
    parts: Sequence[torch.Tensor],
    *,
    context: SPContext,
    layout: HeadsLayout,
    row_table: torch.Tensor | None = None,
    meanwhile: Callable[[], object],
) -> torch.Tensor:
    """Gives every rank all heads of its chunks, in the layout of ``a2a_gemm``, concurrently with other work.

    Args:
        parts: As ``a2a_gemm``.
        context: As ``a2a_gemm``.
        layout: As ``a2a_gemm``.
        row_table: As ``a2a_gemm``.
        meanwhile: Enqueues what runs while they arrive, on the current stream.

    Returns:
        [local rows, world * layout.num_columns], in the context's buffer: until its next op.

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``a2a_gemm``.
    """
    context.enter("gather_sequence", parts[0].shape, parts[0].dtype)
    return context.plan(_plan_gather, kinds_of(parts), layout, table_kind(row_table)).run(parts, row_table, meanwhile)


def _exchange(
    name: str,
    context: SPContext,
    layout: HeadsLayout,
    parts: Sequence[torch.Tensor],
    row_table: torch.Tensor | None,
    programs: int | None,
) -> tuple[torch.Tensor, ...]:
    context.enter(name, parts[0].shape, parts[0].dtype)
    plan = context.plan(_plan_exchange, name, kinds_of(parts), layout, table_kind(row_table), programs)
    lead, world = parts[0].shape[:-2], context.world_size
    length = lead[0] * world if plan.towards_heads else lead[0] // world
    return plan.run(parts, (length, *lead[1:]), row_table)


@outside_compile
def to_heads(
    parts: Sequence[torch.Tensor],
    *,
    context: SPContext,
    layout: HeadsLayout,
    row_table: torch.Tensor | None = None,
    programs: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """The exchange before attention: all heads of this rank's chunks become this rank's heads of the whole sequence.

    Args:
        parts: One tensor a part, [s / world, ..., world * heads of a rank, head size]; fp32, bf16 or fp16, any
            strides.
        context: The group's context.
        layout: Columns of one rank.
        row_table: As ``gemm_a2a``.
        programs: That move data; by the shape if None. They do not change bits.

    Returns:
        One tensor a part, [s, ..., heads of this rank, head size], in the order of the sequence.

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``gemm_a2a``.
    """
    return _exchange("to_heads", context, layout, parts, row_table, programs)


@outside_compile
def to_sequence(
    parts: Sequence[torch.Tensor],
    *,
    context: SPContext,
    layout: HeadsLayout,
    row_table: torch.Tensor | None = None,
    programs: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """The inverse of ``to_heads``, the exchange after attention.

    Args:
        parts: One tensor a part, [s, ..., heads of this rank, head size].
        context: The group's context.
        layout: Columns of one rank.
        row_table: As ``gemm_a2a``.
        programs: As ``to_heads``.

    Returns:
        One tensor a part, [s / world, ..., world * heads of a rank, head size].

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``gemm_a2a``.
    """
    return _exchange("to_sequence", context, layout, parts, row_table, programs)


@outside_compile
def to_all(
    parts: Sequence[torch.Tensor], *, context: SPContext, layout: HeadsLayout, row_table: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """All heads of this rank's chunks become all heads of the whole sequence, on every rank.

    Args:
        parts: One tensor a part, [s / world, ..., heads, head size]; fp32, bf16 or fp16, any strides.
        context: The group's context.
        layout: Columns of all heads.
        row_table: As ``gemm_a2a``.

    Returns:
        One tensor a part, [s, ..., heads, head size], in the order of the sequence.

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``gemm_a2a``.
    """
    return _exchange("to_all", context, layout, parts, row_table, None)


@outside_compile
def sum_to_sequence(
    parts: Sequence[torch.Tensor], *, context: SPContext, layout: HeadsLayout, row_table: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """The transpose of ``to_all``: this rank's rows of the sums over ranks, in NCCL's ring order.

    Args:
        parts: One tensor a part, [s, ..., heads, head size], contiguous: this rank's part of the sums.
        context: As ``to_all``.
        layout: As ``to_all``, of one group.
        row_table: As ``to_all``.

    Returns:
        One tensor a part, [s / world, ..., heads, head size], rounded after each addition.

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``gemm_a2a``.
    """
    if layout.num_groups != 1:
        raise NotSupportedError(f"sum_to_sequence: columns of a part are together, not in {layout.num_groups} groups")
    world = context.world_size
    rows = gather_sequence(parts, context=context, layout=layout, row_table=row_table, meanwhile=lambda: None)
    sums = []
    for part, of_ranks in zip(parts, rows.unflatten(1, (world, -1)).split(list(layout.widths), dim=2)):
        in_ring_order = [of_ranks[:, (context.rank + 1 + step) % world] for step in range(world)]
        total = reduce(torch.add, in_ring_order) if world > 1 else in_ring_order[0].clone()  # not of the buffer
        sums.append(total.view(-1, *part.shape[1:]))
    return tuple(sums)
