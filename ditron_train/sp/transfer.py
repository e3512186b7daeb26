"""How ops of Ulysses move rows: kernels, what they prepare for one shape, and the checks that all ops share.

Rows are (position, batch) pairs. Rank r of a group of W holds two of the 2 W chunks of the sequence (or of each of
several packed ones), r and 2 W - 1 - r: its rows before attention ("local rows"); around attention it holds all
positions, in order ("global rows"), of its heads.
Columns of one rank's heads: ``num_groups`` groups, each with one slice of every part (q, k, v; or one part).

Three single buffers a rank: ``to_heads`` [W * slot_rows, columns] (slot: source rank, its local rows), ``staged`` of
the same shape (slot: destination rank), which the peers read, and ``to_sequence`` [local rows, W * columns] (what the
projection multiplies). A rank writes into a peer's buffer, or over what a peer has read, only after the peer's start
signal of this epoch (``dl.announce``: everything that its stream had before is done). Arrival is told by flags that
hold the epoch, one for each (source rank, flag block of rows) or (source rank, tile).

Ticket roles of a channel: 0 for the kernel that sends, 1 for the kernel that waits; 2 and 3 count work, by epoch
parity.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

import ditron_train.lang as dl
from ditron_train.gemm.operands import Operand, padded_columns
from ditron_train.gemm.ops import check_operands
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.launch import KernelLaunch
from ditron_train.runtime.sizes import next_power_of_2
from ditron_train.sp import transfer_sizes
from ditron_train.sp.context import SPContext
from ditron_train.sp.layouts import HeadsLayout
from ditron_train.stream.agreement import agree, agree_on_nothing
from ditron_train.stream.events import current_handle
from ditron_train.stream.plan import Plan

WeightLayout = Literal["nt", "nn"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CopyPointers(NamedTuple):
    """What a copy reads and writes.

    Attributes:
        parts: q, k and v; if there are fewer, the first is passed for the missing ones.
        buffers: Addresses of the buffer of every rank.
        table: Rows of packed sequences, int32 [W, M]; any pointer if there is none.
    """

    parts: tuple[Any, Any, Any]
    buffers: Any
    table: Any


class CopyShape(NamedTuple):
    """Sizes of a copy between parts and a buffer.

    Attributes:
        M: Local rows.
        half_rows: Rows of one of their two chunks.
        slot_rows: Rows of one slot of a buffer.
        stride: Elements from one row of a buffer to the next.
        num_groups: Groups of one rank.
        widths: Columns of each part in one group, 0 of those that are not there.
    """

    M: int
    half_rows: int
    slot_rows: int
    stride: int
    num_groups: int
    widths: tuple[int, int, int]


class CopyBlocks(NamedTuple):
    """How a kernel cuts a copy into blocks, and what it knows of it when it is compiled.

    Attributes:
        flag_block_rows: Rows that one flag (or ``flags_per_block``) covers.
        rows: Rows of a block, which divide a flag block.
        groups: Groups of each part in a block.
        widths: Columns of each part in a block.
        to_heads: Whether the copy goes to the attention.
        to_all: Whether every rank gets all heads, not its own.
        has_table: Whether a table says where in the whole sequence a row is.
        world_size: Ranks.
    """

    flag_block_rows: int
    rows: int
    groups: tuple[int, ...]
    widths: tuple[int, ...]
    to_heads: bool
    to_all: bool
    has_table: bool
    world_size: int


@triton.jit
def start_epoch(channel, epoch, rank, WORLD_SIZE: tl.constexpr, TARGET: tl.constexpr):
    """The first program sends this rank's start signals and clears the counter on which the next launch counts its
    work."""
    if tl.program_id(0) == 0:
        dl.announce(channel.ready_addresses, channel.signature, epoch, rank, WORLD_SIZE, TARGET)
        tl.store(channel.tickets + 2 + ((epoch + 1) & 1), tl.cast(0, tl.int64))


@triton.jit
def _global_row(row, mask, owner, table_ptr, shape, COPY: tl.constexpr):
    """Global row of rank ``owner``'s local row: its first half is chunk ``owner``, its second 2 W - 1 - ``owner``.

    Packed sequences are each cut so; their rows are in a table, int32 [W, M]. Twins: ``layouts.global_rows`` and
    ``layouts.packed_rows``.
    """
    if COPY.has_table:
        return tl.load(table_ptr + owner * shape.M + row, mask=mask, other=0).to(tl.int64)
    else:
        second = (2 * COPY.world_size - 2 - owner) * shape.half_rows + row
        return tl.where(row < shape.half_rows, owner * shape.half_rows + row, second).to(tl.int64)


@triton.jit
def _group_stride(shape):
    """Columns of one group, all parts."""
    return shape.widths[0] + shape.widths[1] + shape.widths[2]


@triton.jit
def _copy_columns(
    to_ptr, from_ptr, mask, num_groups, width, to_stride, from_stride, BLOCK_G: tl.constexpr, BLOCK_W: tl.constexpr
):
    """For every group: ``width`` columns of a block of rows; the pointers are [ROWS] and point at column 0 of the
    part, the strides go from one group to the next.

    BLOCK_G groups at a time if they are narrow: what one program has in flight decides its rate.
    """
    lanes = tl.arange(0, BLOCK_G * BLOCK_W)
    for first_group in range(0, num_groups, BLOCK_G):
        groups = first_group + lanes // BLOCK_W
        for first in range(0, width, BLOCK_W):
            cols = first + lanes % BLOCK_W
            block = mask[:, None] & ((cols < width) & (groups < num_groups))[None, :]
            values = tl.load(from_ptr[:, None] + (groups * from_stride + cols)[None, :], mask=block)
            tl.store(to_ptr[:, None] + (groups * to_stride + cols)[None, :], values, mask=block)


@triton.jit
def _copy_parts(
    parts,
    buffer_ptr,
    rows,
    mask,
    part_groups,
    first_group,
    group_stride,
    shape,
    COPY: tl.constexpr,
    BACK: tl.constexpr,
):
    """Copies a block of ``rows`` of all parts, each [rows, part_groups * width], from ``first_group`` on, to [ROWS]
    pointers into a buffer, or BACK."""
    NUM_PARTS: tl.constexpr = len(COPY.groups)
    first_col = 0
    for i in tl.static_range(NUM_PARTS):
        width = shape.widths[i]
        part = parts[i] + rows * (part_groups * width) + first_group * width
        place = buffer_ptr + first_col
        if BACK:
            _copy_columns(
                part, place, mask, shape.num_groups, width, width, group_stride, COPY.groups[i], COPY.widths[i]
            )
        else:
            _copy_columns(
                place, part, mask, shape.num_groups, width, group_stride, width, COPY.groups[i], COPY.widths[i]
            )
        first_col += width


@triton.jit
def next_work(counter_ptr):
    """Draws the next piece of work that several programs, or launches, share."""
    return tl.atomic_add(counter_ptr, tl.cast(1, tl.int64), sem="relaxed", scope="gpu").to(tl.int32)


@triton.jit
def _receive_item(
    item,
    pointers,
    channel,
    shape,
    flags_per_block,
    rank,
    epoch,
    COPY: tl.constexpr,
    FLAGS: tl.constexpr,
    PULL: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Waits for a block of rows of one source and takes them apart; ``receive_kernel`` says which."""
    WORLD_SIZE: tl.constexpr = COPY.world_size
    FLAG_BLOCK_ROWS: tl.constexpr = COPY.flag_block_rows
    ROWS: tl.constexpr = COPY.rows
    BLOCKS: tl.constexpr = FLAG_BLOCK_ROWS // ROWS
    num_flag_blocks = tl.cdiv(shape.M, FLAG_BLOCK_ROWS)
    group_stride = _group_stride(shape)
    if COPY.to_heads:
        turn = item // (num_flag_blocks * BLOCKS)
        flag_block = (item // BLOCKS) % num_flag_blocks
    else:
        turn = (item // BLOCKS) % WORLD_SIZE
        flag_block = item // (BLOCKS * WORLD_SIZE)
    source = (rank + 2 * WORLD_SIZE - 1 - turn) % WORLD_SIZE
    flags = channel.signals + (source * num_flag_blocks + flag_block) * flags_per_block
    first_flag = flag_block * flags_per_block
    dl.wait_many(flags, flags_per_block, epoch, channel.control, source, first_flag, FLAGS, TARGET)
    rows = flag_block * FLAG_BLOCK_ROWS + (item % BLOCKS) * ROWS + tl.arange(0, ROWS)
    mask = rows < shape.M
    buffer = dl.symm_at(pointers.buffers, source if PULL else rank, pointers.parts[0].dtype.element_ty)
    if COPY.to_heads:
        slot = rank if PULL else source
        arrived = buffer + (slot * shape.slot_rows + rows).to(tl.int64) * shape.stride
        out_rows = _global_row(rows, mask, source, pointers.table, shape, COPY)
        out_groups = shape.num_groups
        first_group = 0
    else:
        arrived = buffer + rows.to(tl.int64) * shape.stride + source * shape.num_groups * group_stride
        out_rows = rows.to(tl.int64)
        out_groups = shape.num_groups * WORLD_SIZE
        first_group = source * shape.num_groups
    _copy_parts(pointers.parts, arrived, out_rows, mask, out_groups, first_group, group_stride, shape, COPY, True)


@triton.jit
def receive_kernel(
    pointers,
    channel,
    shape,
    flags_per_block,
    COPY: tl.constexpr,
    FLAGS: tl.constexpr,
    PULL: tl.constexpr,
    BEHIND: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Takes the parts apart that arrive in this rank's buffer (``push_kernel``'s inverse), or, with PULL, in the
    peers'.

    It runs concurrently with the kernel that sends, on SMs that the sender leaves free. With PULL the work is drawn
    from a counter (ticket slot 2 or 3 by epoch parity; the sender resets the other one), so that a second launch on
    all SMs BEHIND the sender can join in for what is left.

    To heads: part [W * M, num_groups * width], global rows of own heads, from the slots (with PULL each source's slot
    of this rank, in its own memory). Else: part [M, W * num_groups * width], local rows of all heads, from the columns
    of the sources.

    Waits (acquire), for every block of rows of one source, for the ``flags_per_block <= FLAGS`` flags of its
    flag block. Sources in the order rank - 1, rank - 2, ..., own: those that send to this rank first come first.
    """
    BLOCKS: tl.constexpr = COPY.flag_block_rows // COPY.rows
    epoch = dl.last_epoch(channel.tickets) if BEHIND else dl.next_epoch(channel.tickets + 1)
    rank = dl.rank(channel.control)
    num_items = COPY.world_size * tl.cdiv(shape.M, COPY.flag_block_rows) * BLOCKS
    counter_ptr = channel.tickets + 2 + (epoch & 1)
    item = next_work(counter_ptr) if PULL else tl.program_id(0)
    while item < num_items:
        _receive_item(item, pointers, channel, shape, flags_per_block, rank, epoch, COPY, FLAGS, PULL, TARGET)
        item = next_work(counter_ptr) if PULL else item + tl.num_programs(0)


@triton.jit(do_not_specialize=["num_flag_blocks"])
def arrived_kernel(channel, num_flag_blocks, WORLD_SIZE: tl.constexpr, TARGET: tl.constexpr):
    """One program after a push whose rows are read where they arrive: waits (acquire) for all flag blocks of all
    sources.

    What follows on the stream reads them plainly.
    """
    epoch = dl.next_epoch(channel.tickets + 1)  # slot 1: the role that waits
    for source in range(WORLD_SIZE):
        flags = channel.signals + source * num_flag_blocks
        dl.wait_many(flags, num_flag_blocks, epoch, channel.control, source, 0, 32, TARGET)


@triton.jit
def push_item(item, pointers, channel, shape, rank, epoch, COPY: tl.constexpr, TARGET: tl.constexpr):
    """Stores one flag block of one peer's share into its buffer, then releases its flag; ``push_kernel`` says
    which."""
    WORLD_SIZE: tl.constexpr = COPY.world_size
    FLAG_BLOCK_ROWS: tl.constexpr = COPY.flag_block_rows
    ROWS: tl.constexpr = COPY.rows
    num_flag_blocks = tl.cdiv(shape.M, FLAG_BLOCK_ROWS)
    group_stride = _group_stride(shape)
    flag_block = item // WORLD_SIZE
    peer = (rank + 1 + item % WORLD_SIZE) % WORLD_SIZE
    buffer = dl.symm_at(pointers.buffers, peer, pointers.parts[0].dtype.element_ty)
    for block in range(0, FLAG_BLOCK_ROWS, ROWS):
        rows = flag_block * FLAG_BLOCK_ROWS + block + tl.arange(0, ROWS)
        mask = rows < shape.M
        if COPY.to_heads:
            in_rows = rows.to(tl.int64)
            in_groups = shape.num_groups if COPY.to_all else shape.num_groups * WORLD_SIZE
            first_group = 0 if COPY.to_all else peer * shape.num_groups
            destination = buffer + (rank * shape.slot_rows + rows).to(tl.int64) * shape.stride
        else:
            in_rows = _global_row(rows, mask, peer, pointers.table, shape, COPY)
            in_groups = shape.num_groups
            first_group = 0
            destination = buffer + rows.to(tl.int64) * shape.stride + rank * shape.num_groups * group_stride
        _copy_parts(
            pointers.parts, destination, in_rows, mask, in_groups, first_group, group_stride, shape, COPY, False
        )
    flags = dl.symm_at(channel.signals_addresses, peer, tl.int32)
    dl.notify(flags + rank * num_flag_blocks + flag_block, epoch, TARGET)


@triton.jit
def push_kernel(pointers, channel, shape, COPY: tl.constexpr, TARGET: tl.constexpr):
    """Pushes to every rank its share of the parts, flag block by flag block of M local rows.

    To heads: the parts hold local rows of all heads, [M, W * num_groups * width]; rank d gets its groups of every row,
    in slot ``rank``. To all: [M, num_groups * width], which every rank gets there. Else: they hold global rows of this
    rank's heads, [W * M, num_groups * width]; rank d gets the rows of its two chunks, in its columns
    ``rank * num_groups * sum(widths)``, since it multiplies them.

    All ranks send a flag block to everybody before the next (a consumer needs it from all sources), starting with rank
    + 1, so no two send to the same one. Before the first store: all start signals. A flag block's flag is released
    once its rows are stored.
    """
    WORLD_SIZE: tl.constexpr = COPY.world_size
    epoch = dl.next_epoch(channel.tickets)
    rank = dl.rank(channel.control)
    start_epoch(channel, epoch, rank, WORLD_SIZE, TARGET)
    dl.await_peers(channel.ready, epoch, channel.control, rank, WORLD_SIZE, TARGET)
    num_items = tl.cdiv(shape.M, COPY.flag_block_rows) * WORLD_SIZE
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        push_item(item, pointers, channel, shape, rank, epoch, COPY, TARGET)
    dl.verify_peers(channel.ready, channel.signature, epoch, channel.control, rank, WORLD_SIZE, TARGET)


GEMM_A2A, TO_HEADS, A2A_GEMM, TO_SEQUENCE, GATHER, TO_ALL = range(1, 7)  # first word of a signature


def memory_of(*tensors: torch.Tensor | None) -> tuple[int, ...]:
    """Where these are: for contiguous ones of known shapes the key of a launch."""
    return tuple([0 if tensor is None else tensor.data_ptr() for tensor in tensors])


class TensorKind(NamedTuple):
    """What a plan takes for granted of a tensor that has been checked once: part of its key, as a plain tuple."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    is_contiguous: bool | None = None  # None: any strides


def kind_of(tensor: torch.Tensor) -> tuple:
    """``TensorKind`` of an operand of any strides."""
    return tensor.shape, tensor.dtype, tensor.device


def kinds_of(parts: Sequence[torch.Tensor]) -> tuple[tuple, ...]:
    """``TensorKind`` of each part."""
    return tuple(kind_of(part) for part in parts)


def table_kind(row_table: torch.Tensor | None) -> tuple | None:
    """``TensorKind`` of a table of rows."""
    return None if row_table is None else (*kind_of(row_table), row_table.is_contiguous())


class Transfer(Plan[SPContext]):
    """The channel and the buffer of one direction, agreed for one shape: what the plans of all ops of Ulysses are.

    Args:
        context: Whose buffers are used (collective).
        operation: First word of the signature.
        layout: Columns of one rank.
        m: Local rows.
        dtype: Of everything.
        k: What else the ranks must agree on.
        flag_block_rows: Rows of one source that ``flags_per_block`` flags cover.
        block_n: Tile width if each tile has a flag; 0 if a flag block has one.
        packed: Whether calls come with a table of rows.
        copy: How its kernels copy.
    """

    def __init__(
        self,
        context: SPContext,
        operation: int,
        layout: HeadsLayout,
        m: int,
        dtype: torch.dtype,
        *,
        k: int = 0,
        flag_block_rows: int = transfer_sizes.FLAG_BLOCK_ROWS,
        block_n: int = 0,
        packed: bool,
        copy: transfer_sizes.CopyShape = transfer_sizes.PUSH,
    ) -> None:
        self.towards_heads = operation in (GEMM_A2A, TO_HEADS, TO_ALL)
        super().__init__(context, context.heads_channel if self.towards_heads else context.sequence_channel)
        self.layout, self.m, self.dtype = layout, m, dtype
        widths = self._three(layout.widths, 0)
        values = (operation, m, layout.num_groups, *widths, k, dtype, flag_block_rows, block_n, int(packed))
        self.signature = agree(context, self.channel, values)
        self.num_flag_blocks = -(-m // flag_block_rows)
        self.flags_per_block = -(-layout.num_columns // block_n) if block_n else 1
        world = context.world_size
        self.channel.reserve_signals(world * self.num_flag_blocks * self.flags_per_block)
        self.slot_rows = self.num_flag_blocks * flag_block_rows
        if self.towards_heads:
            make = context.staged_buffer if operation == GEMM_A2A else context.heads_buffer
            self.buffer = make(world * self.slot_rows, padded_columns(layout.num_columns, dtype), dtype)
        else:
            self.buffer = context.sequence_buffer(m, padded_columns(world * layout.num_columns, dtype), dtype)
        stride = self.buffer.local.stride(0)
        self.shape = CopyShape(m, m // 2, self.slot_rows, stride, layout.num_groups, widths)
        block_widths = tuple(min(next_power_of_2(width), copy.width) for width in layout.widths)
        most_groups = next_power_of_2(layout.num_groups)
        self.blocks = CopyBlocks(
            flag_block_rows,
            min(copy.rows, flag_block_rows),
            tuple(min(copy.width // width, most_groups) for width in block_widths),
            block_widths,
            self.towards_heads,
            operation == TO_ALL,
            packed,
            world,
        )

    @staticmethod
    def _three(values: Sequence[Any], missing: Any) -> tuple[Any, Any, Any]:
        first, second, third = (*values, missing, missing)[:3]
        return first, second, third

    def copy_kernel(self, kernel: Any, num_programs: int, **constants: int | bool) -> KernelLaunch:
        """``push_kernel`` or ``receive_kernel``, with the constants that only it has."""
        values = {"COPY": self.blocks, **constants, "TARGET": self.context.target}
        return self.context.launch(kernel, num_programs if self.context.is_cuda else 1, values, num_warps=16)

    def copy(
        self,
        launch: KernelLaunch,
        parts: Sequence[torch.Tensor],
        table: torch.Tensor | None,
        *more: int,
        on_side: bool = False,
    ) -> None:
        """Launches what ``copy_kernel`` made on the current stream or the communication stream; ``more``: what the
        kernel takes behind ``copy_arguments``, always the same."""
        context, key = self.context, memory_of(*parts, table)
        if not launch.repeat(key, context.comm_handle if on_side else current_handle(context.device)):
            stream = context.comm_stream if on_side else None
            launch(*self.copy_arguments(parts, table), *more, stream=stream, key=key)

    def copy_arguments(self, parts: Sequence[torch.Tensor], table: torch.Tensor | None) -> tuple[tuple, tuple, tuple]:
        """What every kernel that copies takes: ``CopyPointers``, the channel's pointers, ``CopyShape``."""
        channel = self.channel.pointers(self.signature)
        pointers = CopyPointers(
            self._three(parts, parts[0]), self.buffer.addresses, channel.signals if table is None else table
        )
        return pointers, channel, self.shape


class Receiver:
    """``receive_kernel`` of a transfer: concurrently with the kernel that sends, and if that multiplies, once more
    after it."""

    def __init__(self, transfer: Transfer, num_programs: int, *, pull: bool = False) -> None:
        self._transfer, layout = transfer, transfer.layout
        factor = 1 if transfer.towards_heads else transfer.context.world_size
        self._heads = [(layout.num_heads(part) * factor, dim) for part, dim in enumerate(layout.head_dims)]
        constants = dict(FLAGS=next_power_of_2(transfer.flags_per_block), PULL=pull)
        self._launch = transfer.copy_kernel(receive_kernel, num_programs, **constants, BEHIND=False)
        self._behind = (
            transfer.copy_kernel(receive_kernel, transfer.context.num_sms, **constants, BEHIND=True) if pull else None
        )

    def empty(self, lead: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """The parts, [*lead, heads, head size] each, not yet filled."""
        options: dict[str, Any] = dict(dtype=self._transfer.dtype, device=self._transfer.context.device)
        return tuple([torch.empty((*lead, *heads), **options) for heads in self._heads])

    def __call__(self, parts: Sequence[torch.Tensor], table: torch.Tensor | None) -> None:
        """Fills ``parts`` on the communication stream."""
        self._transfer.copy(self._launch, parts, table, self._transfer.flags_per_block, on_side=True)

    def finish(self, parts: Sequence[torch.Tensor], table: torch.Tensor | None) -> None:
        """Pulls what is left on the current stream, after the sender."""
        assert self._behind is not None, "only pulls are shared"
        self._transfer.copy(self._behind, parts, table, self._transfer.flags_per_block)


def check_parts(
    name: str,
    context: SPContext,
    layout: HeadsLayout,
    kinds: tuple[tuple, ...],
    table: tuple | None,
    *,
    whole_sequence: bool,
    all_heads: bool = False,
) -> TensorKind:
    """Checks what this rank can see alone of the parts [s, ..., heads, head size]; returns the first one's kind.

    Args:
        name, context, layout: Of the op.
        kinds: ``kinds_of`` the parts.
        table: ``table_kind`` of the table of rows.
        whole_sequence: Whether the parts hold all rows of this rank's heads, or local rows of all heads.
        all_heads: Whether all heads are one rank's.
    """
    parts = [TensorKind(*kind) for kind in kinds]
    if len(parts) != len(layout.widths):
        raise NotSupportedError(f"{name}: {len(parts)} parts, the layout has {len(layout.widths)}")
    first = parts[0]
    world = context.world_size
    for index, part in enumerate(parts):
        heads = layout.num_heads(index) * (1 if whole_sequence or all_heads else world)
        if len(part.shape) < 3 or tuple(part.shape[-2:]) != (heads, layout.head_dims[index]):
            raise NotSupportedError(
                f"{name}: part {index} is {tuple(part.shape)}, needed is [s, ..., {heads}, {layout.head_dims[index]}]"
            )
        if part.shape[:-2] != first.shape[:-2] or part.dtype != first.dtype or part.device != context.device:
            raise NotSupportedError(
                f"{name}: part {index} is {tuple(part.shape)} {part.dtype} on {part.device}, part 0 is "
                f"{tuple(first.shape)} {first.dtype}, the context is on {context.device}"
            )
    if first.dtype not in DTYPES:
        raise NotSupportedError(f"{name}: {first.dtype}; allowed: {', '.join(map(str, DTYPES))}")
    check_rows(name, context, first.shape[:-2], world if whole_sequence else 1, table)
    return first


def check_rows(name: str, context: SPContext, lead: Sequence[int], num_ranks: int, table: tuple | None) -> None:
    """``lead``: leading dimensions, the rows of ``num_ranks`` ranks; ``table``: as for ``check_parts``."""
    row_table = None if table is None else TensorKind(*table)
    length, num_rows = lead[0], torch.Size(lead).numel()
    if num_rows == 0:
        agree_on_nothing(context, (context.heads_channel, context.sequence_channel))
        raise NotSupportedError(f"{name}: an empty sequence")
    if row_table is not None and (
        length % num_ranks
        or tuple(row_table.shape) != (context.world_size, num_rows // num_ranks)
        or row_table.dtype != torch.int32
        or row_table.device != context.device
        or not row_table.is_contiguous
    ):
        raise NotSupportedError(
            f"{name}: the table of rows is {tuple(row_table.shape)} {row_table.dtype} on {row_table.device}, needed "
            f"is a contiguous int32 of ({context.world_size}, {num_rows} / {num_ranks})"
        )
    divisor = 2 * num_ranks
    if row_table is None and length % divisor:
        raise NotSupportedError(
            f"{name}: Sequence length per GPU needs to be divisible by 2! A sequence dimension of {length} does not "
            f"divide by {divisor}"
        )


def check_gemm(
    name: str,
    context: SPContext,
    x: TensorKind,
    k: int,
    num_columns: int,
    weight: TensorKind,
    weight_layout: WeightLayout,
) -> None:
    """Checks that ``x`` and ``weight`` make [.., K=k] times [k, num_columns]; ``num_columns`` of -1 allows any."""
    if weight_layout not in ("nt", "nn"):
        raise NotSupportedError(f"{name}: weight layout {weight_layout!r} is not nt or nn")
    if len(weight.shape) != 2:
        raise NotSupportedError(f"{name}: weight must have 2 dimensions, has {len(weight.shape)}")
    if x.device != context.device:
        raise NotSupportedError(f"{name}: the input is on {x.device}, the context on {context.device}")
    check_operands(name, Operand(x.dtype, x.device), Operand(weight.dtype, weight.device))
    n, weight_k = weight.shape if weight_layout == "nt" else weight.shape[::-1]
    if weight_k != k or (num_columns >= 0 and n != num_columns) or n == 0 or k == 0:
        wanted = num_columns if num_columns >= 0 else "any"
        raise NotSupportedError(
            f"{name}: weight {tuple(weight.shape)} ({weight_layout}) maps {weight_k} columns to {n}, "
            f"needed is {k} to {wanted}"
        )
