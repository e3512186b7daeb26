"""``gemm_a2a``, ``a2a_gemm`` and the exchanges without a GEMM: plain functions on tensors.

They enqueue on the current stream (``a2a_gemm`` on the context's communication stream too), never wait for the device but
at the first call of a new shape, and give the bits of GEMM, all-to-all and reorder wherever the tile GEMM gives cuBLAS's
(``gemm.known_bits``): rows and columns are only moved, and every sum runs over all of K in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ditron_train.gemm.configs import GemmConfig, choose_config
from ditron_train.gemm.operands import aligned_operand, empty_aligned, make_descriptor
from ditron_train.gemm.ops import check_operands
from ditron_train.gemm.peers import MAX_DESCRIPTOR_RANKS
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.sp.context import SPContext
from ditron_train.sp.kernels import a2a_gemm_kernel, gemm_a2a_kernel, push_kernel, receive_kernel
from ditron_train.sp.layouts import HeadsLayout
from ditron_train.stream.op_context import SideStream
from ditron_train.symm.arena import SymmetricTensor
from ditron_train.symm.channel import Channel

__all__ = ["WeightLayout", "a2a_gemm", "gemm_a2a", "to_heads", "to_sequence"]

WeightLayout = Literal["nt", "nn"]
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_GEMM_A2A, _TO_HEADS, _TO_SEQUENCE = 1, 2, 3  # first word of a signature
_GRANULE_ROWS = 128  # rows of an exchange that one flag stands for
_PUSH_ROWS = 128  # with 32 warps: 64 KB of a program in flight, and no spills
_COPY_WIDTH = 256  # columns that a block of a copy covers at most


def _next_power_of_2(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def _padded_columns(num_columns: int, dtype: torch.dtype) -> int:
    per_line = 16 // dtype.itemsize
    return -(-num_columns // per_line) * per_line


def _check_parts(
    name: str, context: SPContext, layout: HeadsLayout, parts: Sequence[torch.Tensor], *, whole_sequence: bool
) -> None:
    """Checks what this rank can see alone of the parts [s, ..., heads, head size]."""
    if len(parts) != len(layout.widths):
        raise NotSupportedError(f"{name}: {len(parts)} parts, the layout has {len(layout.widths)}")
    first = parts[0]
    world = context.world_size
    for index, part in enumerate(parts):
        heads = layout.num_heads(index) * (1 if whole_sequence else world)
        if part.dim() < 3 or tuple(part.shape[-2:]) != (heads, layout.head_dims[index]):
            raise NotSupportedError(
                f"{name}: part {index} is {tuple(part.shape)}, needed is [s, ..., {heads}, {layout.head_dims[index]}]"
            )
        if part.shape[:-2] != first.shape[:-2] or part.dtype != first.dtype or part.device != context.device:
            raise NotSupportedError(
                f"{name}: part {index} is {tuple(part.shape)} {part.dtype} on {part.device}, part 0 is "
                f"{tuple(first.shape)} {first.dtype}, the context is on {context.device}"
            )
    if first.dtype not in _DTYPES:
        raise NotSupportedError(f"{name}: {first.dtype}; allowed: {', '.join(map(str, _DTYPES))}")
    _check_sequence(name, first.shape[0], first.shape[1:-2].numel(), 2 * world if whole_sequence else 2)


def _check_sequence(name: str, length: int, batch: int, divisor: int) -> None:
    if length == 0 or batch == 0:
        raise NotSupportedError(f"{name}: an empty sequence")
    if length % divisor:
        raise NotSupportedError(
            f"{name}: Sequence length per GPU needs to be divisible by 2! A sequence dimension of {length} does not divide "
            f"by {divisor}"
        )


def _check_gemm(
    name: str, context: SPContext, x: torch.Tensor, k: int, num_columns: int, weight: torch.Tensor, weight_layout: WeightLayout
) -> None:
    """Checks that ``x`` and ``weight`` make [.., K=k] times [k, num_columns]; ``num_columns`` of -1 allows any."""
    if weight_layout not in ("nt", "nn"):
        raise NotSupportedError(f"{name}: weight layout {weight_layout!r} is not nt or nn")
    if weight.dim() != 2:
        raise NotSupportedError(f"{name}: weight must have 2 dimensions, has {weight.dim()}")
    if x.device != context.device:
        raise NotSupportedError(f"{name}: the input is on {x.device}, the context on {context.device}")
    check_operands(name, x, weight)
    n, weight_k = weight.shape if weight_layout == "nt" else weight.shape[::-1]
    if weight_k != k or (num_columns >= 0 and n != num_columns) or n == 0 or k == 0:
        wanted = num_columns if num_columns >= 0 else "any"
        raise NotSupportedError(
            f"{name}: weight {tuple(weight.shape)} ({weight_layout}) maps {weight_k} columns to {n}, needed is {k} to {wanted}"
        )


def _descriptor_of_weight(weight: torch.Tensor, config: GemmConfig, weight_layout: WeightLayout):
    block = (config.block_n, config.block_k) if weight_layout == "nt" else (config.block_k, config.block_n)
    return make_descriptor(aligned_operand(weight), block)


@dataclass(frozen=True)
class _Transfer:
    """One exchange: its channel, buffer and the shape that all ranks have agreed on.

    Attributes:
        m: Local rows.
        granule_rows: Rows of one source that ``flags_per_granule`` flags stand for.
        slot_rows: Rows of one source's slot in the ``to_heads`` buffer.
    """

    context: SPContext
    channel: Channel
    layout: HeadsLayout
    buffer: SymmetricTensor
    signature: torch.Tensor
    m: int
    granule_rows: int
    slot_rows: int
    flags_per_granule: int

    @property
    def towards_heads(self) -> bool:
        return self.channel is self.context.heads_channel

    def shape_arguments(self) -> tuple[int, ...]:
        """M ... width2 of ``push_kernel`` and ``receive_kernel``."""
        widths = (*self.layout.widths, 0, 0)[:3]
        return self.m, self.m // 2, self.slot_rows, self.buffer.local.stride(0), self.layout.num_groups, *widths

    def copy_options(self, rows: int) -> dict[str, int]:
        """Constants of a kernel that copies blocks of at most ``rows`` rows."""
        widths = (*self.layout.widths, 1, 1)[:3]
        blocks = {f"BLOCK_W{part}": min(_next_power_of_2(width), _COPY_WIDTH) for part, width in enumerate(widths)}
        return dict(
            GRANULE_ROWS=self.granule_rows,
            ROWS=min(rows, self.granule_rows),
            NUM_PARTS=len(self.layout.widths),
            TO_HEADS=self.towards_heads,
            WORLD_SIZE=self.context.world_size,
            TARGET=self.context.target,
            **blocks,
        )

    def push(self, parts: Sequence[torch.Tensor], num_programs: int) -> None:
        """Enqueues ``push_kernel`` on the current stream."""
        parts = [part.contiguous() for part in parts]
        interpreted = self.context.target == "interpreter"
        push_kernel[(1 if interpreted else num_programs,)](
            *(parts + parts[:1] * 2)[:3],
            self.buffer.addresses,
            self.channel.signals.addresses,
            self.channel.ready.addresses,
            self.channel.ready.local,
            self.signature,
            self.channel.tickets,
            self.channel.control,
            *self.shape_arguments(),
            num_warps=16 if self.context.target == "hip" else 32,
            **self.copy_options(_PUSH_ROWS),
        )

    def receive(self, shape: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Enqueues ``receive_kernel`` behind the sender; returns the parts, [*shape, heads, head size] each."""
        context, layout = self.context, self.layout
        factor = 1 if self.towards_heads else context.world_size
        parts = [
            torch.empty(*shape, layout.num_heads(part) * factor, head_dim, dtype=self.buffer.local.dtype, device=context.device)
            for part, head_dim in enumerate(layout.head_dims)
        ]
        options = self.copy_options(32)
        items = context.world_size * -(-self.m // self.granule_rows) * (self.granule_rows // options["ROWS"])
        receive_kernel[(1 if context.target == "interpreter" else min(items, 6 * context.num_sms),)](
            self.buffer.local,
            *(parts + parts[:1] * 2)[:3],
            self.channel.signals.local,
            self.channel.tickets,
            self.channel.control,
            *self.shape_arguments(),
            self.flags_per_granule,
            FLAGS=_next_power_of_2(self.flags_per_granule),
            num_warps=8,
            **options,
        )
        context.leave(self.channel)
        return tuple(parts)


def _begin(
    context: SPContext,
    operation: int,
    layout: HeadsLayout,
    m: int,
    dtype: torch.dtype,
    *,
    k: int = 0,
    block_m: int = _GRANULE_ROWS,
    block_n: int = 0,
) -> _Transfer:
    """Agrees with all ranks on the call and makes room for it. ``block_n`` above 0: one flag a tile, else one a granule."""
    context.enter()
    towards_heads = operation != _TO_SEQUENCE
    channel = context.heads_channel if towards_heads else context.sequence_channel
    widths = (*layout.widths, 0, 0)[:3]
    values = (operation, m, layout.num_groups, *widths, k, _DTYPES[dtype], block_m, block_n)
    signature = context.agree(channel, values)
    world = context.world_size
    granules = -(-m // block_m)
    flags_per_granule = -(-layout.num_columns // block_n) if block_n else 1
    channel.reserve_signals(world * granules * flags_per_granule)
    slot_rows = granules * block_m
    if towards_heads:
        buffer = context.heads_buffer(world * slot_rows, _padded_columns(layout.num_columns, dtype), dtype)
    else:
        buffer = context.sequence_buffer(m, _padded_columns(world * layout.num_columns, dtype), dtype)
    return _Transfer(context, channel, layout, buffer, signature, m, block_m, slot_rows, flags_per_granule)


def gemm_a2a(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    context: SPContext,
    layout: HeadsLayout,
    weight_layout: WeightLayout = "nt",
    config: GemmConfig | None = None,
) -> tuple[torch.Tensor, ...]:
    """Projects ``x`` and gives every rank its heads of the whole sequence: QKV's forward, the output projection's dgrad.

    The bits are those of ``x @ weight.T``, split into parts, then for each part an all-to-all and the reorder of chunks.

    Args:
        x: [s / world, ..., K], this rank's two chunks of the sequence; bf16 or fp16 (on CPU fp32 too), any strides.
        weight: [world * layout.num_columns, K] (``nt``) or its transpose (``nn``).
        context: The group's context.
        layout: Columns of one rank.
        weight_layout: How ``weight`` lies.
        config: Tile sizes; chosen by the shape where None. They do not change bits.

    Returns:
        One tensor a part, [s, ..., heads of this rank, head size], in the order of the sequence.

    Raises:
        NotSupportedError: What this rank sees alone does not fit.
        MismatchError: The ranks' calls differ (at the first call of a shape here, else at the next ``check``).
        PeerTimeoutError: A peer did not come (CPU: here, GPU: at a later call or ``context.synchronize()``).
    """
    name, world = "gemm_a2a", context.world_size
    if x.dim() < 2:
        raise NotSupportedError(f"{name}: x has {x.dim()} dimensions, needed are 2 or more")
    _check_gemm(name, context, x, x.shape[-1], world * layout.num_columns, weight, weight_layout)
    _check_sequence(name, x.shape[0], x.shape[1:-1].numel(), 2)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    (m, k), n = rows.shape, layout.num_columns
    config = config or choose_config(m, world * n, k, x.dtype, context.target, context.num_sms)
    transfer = _begin(context, _GEMM_A2A, layout, m, x.dtype, k=k, block_m=config.block_m, block_n=config.block_n)
    _launch_gemm_a2a(transfer, rows, weight, weight_layout, config)
    return transfer.receive((x.shape[0] * world, *x.shape[1:-1]))


def _launch_gemm_a2a(
    transfer: _Transfer, rows: torch.Tensor, weight: torch.Tensor, weight_layout: WeightLayout, config: GemmConfig
) -> None:
    context, channel, buffer = transfer.context, transfer.channel, transfer.buffer
    n, world = transfer.layout.num_columns, context.world_size
    use_descriptors = world <= MAX_DESCRIPTOR_RANKS
    peers = range(world) if use_descriptors else [context.rank]
    columns_per_rank = n
    if weight_layout == "nn" and n != _padded_columns(n, weight.dtype):  # descriptors load whole 16 bytes
        columns_per_rank = _padded_columns(n, weight.dtype)
        weight = torch.nn.functional.pad(weight.reshape(-1, world, n), (0, columns_per_rank - n)).flatten(1)
    slots = [make_descriptor(buffer.peer(peer)[:, :n], config.store_block) for peer in peers]
    slots += slots[:1] * (MAX_DESCRIPTOR_RANKS - len(slots))
    gemm_a2a_kernel[(min(context.num_sms, world * config.num_tiles(transfer.m, n)),)](
        make_descriptor(aligned_operand(rows), (config.block_m, config.block_k)),
        _descriptor_of_weight(weight, config, weight_layout),
        *slots,
        buffer.addresses,
        channel.signals.addresses,
        channel.ready.addresses,
        channel.ready.local,
        transfer.signature,
        channel.tickets,
        channel.control,
        transfer.m,
        n,
        rows.shape[1],
        columns_per_rank,
        transfer.slot_rows,
        buffer.local.stride(0),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        TRANSPOSE_B=weight_layout == "nt",
        SPLIT_STORE=config.split_store,
        WORLD_SIZE=world,
        USE_DESCRIPTORS=use_descriptors,
        TARGET=context.target,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _push_programs(m: int, n: int, k: int) -> int:
    """SMs that push beside a GEMM [m, k] @ [k, n]: 8 fill the links; a short GEMM waits for them more than it shares."""
    return 16 if 2 * m * n * k / 750e6 < 200 else 8  # estimated us of the GEMM


def a2a_gemm(
    parts: Sequence[torch.Tensor],
    weight: torch.Tensor,
    *,
    context: SPContext,
    layout: HeadsLayout,
    weight_layout: WeightLayout = "nt",
    return_gathered: bool = False,
    config: GemmConfig | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Gives every rank all heads of its chunks and projects them: the output projection's forward, QKV's dgrad.

    The bits are those of the reorder and all-to-all of each part, then the GEMM over all heads.

    Args:
        parts: One tensor a part, [s, ..., heads of this rank, head size], in the order of the sequence.
        weight: [N, world * layout.num_columns] (``nt``) or its transpose (``nn``).
        context: The group's context.
        layout: Columns of one rank.
        weight_layout: How ``weight`` lies.
        return_gathered: Also return what was multiplied, [local rows, world * layout.num_columns], as a tensor of its own.
        config: Tile sizes; chosen by the shape where None. They do not change bits.

    Returns:
        [s / world, ..., N], and the gathered rows if asked for.

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``gemm_a2a``.
    """
    name, world = "a2a_gemm", context.world_size
    _check_parts(name, context, layout, parts, whole_sequence=True)
    k = world * layout.num_columns
    _check_gemm(name, context, parts[0], k, -1, weight, weight_layout)
    shape = (parts[0].shape[0] // world, *parts[0].shape[1:-2])
    m, n = torch.Size(shape).numel(), weight.shape[0 if weight_layout == "nt" else 1]
    dtype = parts[0].dtype
    config = config or choose_config(m, n, k, dtype, context.target, context.num_sms)
    transfer = _begin(context, _TO_SEQUENCE, layout, m, dtype, k=n, block_m=config.block_m)
    push_programs = _push_programs(m, n, k)
    parts = [part.contiguous() for part in parts]
    side = SideStream(context)
    with side:
        transfer.push(parts, push_programs)
    out = empty_aligned(m, n, dtype, context.device)
    gathered = transfer.buffer.local[:, :k]
    channel = transfer.channel
    a2a_gemm_kernel[(max(1, min(context.num_sms - push_programs, config.num_tiles(m, n))),)](
        make_descriptor(gathered, (config.block_m, config.block_k)),
        _descriptor_of_weight(weight, config, weight_layout),
        make_descriptor(out, config.store_block),
        channel.signals.local,
        channel.tickets,
        channel.control,
        m,
        n,
        k,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        TRANSPOSE_B=weight_layout == "nt",
        SPLIT_STORE=config.split_store,
        WORLD_SIZE=world,
        RANKS_POW2=_next_power_of_2(world),
        TARGET=context.target,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    side.join()
    context.leave(channel)
    y = out.contiguous().view(*shape, n)
    return (y, gathered.clone(memory_format=torch.contiguous_format)) if return_gathered else y


_EXCHANGE_PROGRAMS = 16


def to_heads(parts: Sequence[torch.Tensor], *, context: SPContext, layout: HeadsLayout) -> tuple[torch.Tensor, ...]:
    """The exchange before attention: all heads of this rank's chunks become this rank's heads of the whole sequence.

    Args:
        parts: One tensor a part, [s / world, ..., world * heads of a rank, head size]; fp32, bf16 or fp16, any strides.
        context: The group's context.
        layout: Columns of one rank.

    Returns:
        One tensor a part, [s, ..., heads of this rank, head size], in the order of the sequence.

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``gemm_a2a``.
    """
    _check_parts("to_heads", context, layout, parts, whole_sequence=False)
    lead = parts[0].shape[:-2]
    transfer = _begin(context, _TO_HEADS, layout, lead.numel(), parts[0].dtype)
    transfer.push(parts, _EXCHANGE_PROGRAMS)
    return transfer.receive((lead[0] * context.world_size, *lead[1:]))


def to_sequence(parts: Sequence[torch.Tensor], *, context: SPContext, layout: HeadsLayout) -> tuple[torch.Tensor, ...]:
    """The inverse of ``to_heads``, the exchange after attention.

    Args:
        parts: One tensor a part, [s, ..., heads of this rank, head size].
        context: The group's context.
        layout: Columns of one rank.

    Returns:
        One tensor a part, [s / world, ..., world * heads of a rank, head size].

    Raises:
        NotSupportedError, MismatchError, PeerTimeoutError: As ``gemm_a2a``.
    """
    _check_parts("to_sequence", context, layout, parts, whole_sequence=True)
    lead = parts[0].shape[:-2]
    shape = (lead[0] // context.world_size, *lead[1:])
    transfer = _begin(context, _TO_SEQUENCE, layout, torch.Size(shape).numel(), parts[0].dtype)
    transfer.push(parts, _EXCHANGE_PROGRAMS)
    return transfer.receive(shape)
