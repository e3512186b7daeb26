"""The ops of Ulysses, prepared for one shape: everything that does not change between calls is decided once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from ditron_train.gemm.configs import GemmConfig
from ditron_train.gemm.operands import aligned_operand, empty_aligned, make_descriptor, padded_columns
from ditron_train.runtime.launch import KernelLaunch
from ditron_train.runtime.sizes import next_power_of_2
from ditron_train.sp import transfer_sizes as tuning
from ditron_train.sp.context import SPContext
from ditron_train.sp.gemm_kernels import a2a_gemm_kernel, gemm_a2a_kernel
from ditron_train.sp.kernels import arrived_kernel, push_kernel, receive_kernel
from ditron_train.sp.layouts import HeadsLayout

__all__ = ["DTYPES", "PreparedA2AGemm", "PreparedExchange", "PreparedGather", "PreparedGemmA2A", "WeightLayout"]

WeightLayout = Literal["nt", "nn"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_GEMM_A2A, _TO_HEADS, _A2A_GEMM, _TO_SEQUENCE, _GATHER = 1, 2, 3, 4, 5  # first word of a signature


class _Transfer:
    """What all ops have: the channel and the buffer of one direction, agreed for one shape, and the kernels that copy.

    Args:
        context: Whose buffers are used (collective).
        operation: First word of the signature.
        layout: Columns of one rank.
        m: Local rows.
        dtype: Of everything.
        k: What else the ranks must agree on.
        granule_rows: Rows of one source that ``flags_per_granule`` flags stand for.
        block_n: Tile width where each tile has a flag; 0 where a granule has one.
        packed: Whether calls come with a table of rows.
        copy: How its kernels copy.
    """

    def __init__(
        self, context: SPContext, operation: int, layout: HeadsLayout, m: int, dtype: torch.dtype, *,
        k: int, granule_rows: int, block_n: int, packed: bool, copy: tuning.CopyShape = tuning.PUSH,
    ) -> None:  # fmt: skip
        self.copy = copy
        self.context, self.layout, self.m, self.dtype, self.packed = context, layout, m, dtype, packed
        self.towards_heads = operation in (_GEMM_A2A, _TO_HEADS)
        self.channel = context.heads_channel if self.towards_heads else context.sequence_channel
        widths = (*layout.widths, 0, 0)[:3]
        values = (operation, m, layout.num_groups, *widths, k, dtype, granule_rows, block_n, int(packed))
        self.signature = context.agree(self.channel, values)
        self.granule_rows = granule_rows
        self.num_granules = -(-m // granule_rows)
        self.flags_per_granule = -(-layout.num_columns // block_n) if block_n else 1
        world = context.world_size
        self.channel.reserve_signals(world * self.num_granules * self.flags_per_granule)
        self.slot_rows = self.num_granules * granule_rows
        if operation == _GEMM_A2A:
            self.buffer = context.staged_buffer(
                world * self.slot_rows, padded_columns(layout.num_columns, dtype), dtype
            )
        elif self.towards_heads:
            self.buffer = context.heads_buffer(
                world * self.slot_rows, padded_columns(layout.num_columns, dtype), dtype
            )
        else:
            self.buffer = context.sequence_buffer(m, padded_columns(world * layout.num_columns, dtype), dtype)

    def copy_constants(self) -> dict[str, int]:
        """How a kernel that copies parts of this layout cuts them into blocks."""
        layout, copy = self.layout, self.copy
        widths = (*layout.widths, 1, 1)[:3]
        block_widths = [min(next_power_of_2(width), copy.width) for width in widths]
        most_groups = next_power_of_2(layout.num_groups)
        blocks = {f"BLOCK_G{i}": min(copy.width // width, most_groups) for i, width in enumerate(block_widths)}
        blocks |= {f"BLOCK_W{i}": width for i, width in enumerate(block_widths)}
        rows = min(copy.rows, self.granule_rows)
        return {"GRANULE_ROWS": self.granule_rows, "ROWS": rows, "NUM_PARTS": len(layout.widths), **blocks}

    def copy_kernel(self, kernel: Any, num_programs: int, **constants: int | bool) -> KernelLaunch:
        """``push_kernel`` or ``receive_kernel``, with the constants that only it has."""
        return KernelLaunch(
            kernel,
            num_programs if self.context.is_cuda else 1,
            {
                **self.copy_constants(),
                **constants,
                "HAS_TABLE": self.packed,
                "WORLD_SIZE": self.context.world_size,
                "TARGET": self.context.target,
            },
            num_warps=16,
        )

    def shape_arguments(self) -> tuple[int, ...]:
        """M ... width2 of the copying kernels."""
        widths = (*self.layout.widths, 0, 0)[:3]
        return self.m, self.m // 2, self.slot_rows, self.buffer.local.stride(0), self.layout.num_groups, *widths


class _Receiver:
    """``receive_kernel`` of a transfer: beside the kernel that sends, and where that multiplies, once more behind
    it."""

    def __init__(self, transfer: _Transfer, num_programs: int, *, pull: bool = False) -> None:
        self._transfer = transfer
        flags = next_power_of_2(transfer.flags_per_granule)
        constants = dict(FLAGS=flags, TO_HEADS=transfer.towards_heads, PULL=pull)
        self._launch = transfer.copy_kernel(receive_kernel, num_programs, **constants, BEHIND=False)
        self._behind = (
            transfer.copy_kernel(receive_kernel, transfer.context.num_sms, **constants, BEHIND=True) if pull else None
        )

    def empty(self, lead: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """The parts, [*lead, heads, head size] each, not yet filled."""
        transfer, layout = self._transfer, self._transfer.layout
        factor = 1 if transfer.towards_heads else transfer.context.world_size
        return tuple(
            torch.empty(
                *lead, layout.num_heads(part) * factor, head_dim, dtype=transfer.dtype, device=transfer.context.device
            )
            for part, head_dim in enumerate(layout.head_dims)
        )

    def __call__(
        self, parts: Sequence[torch.Tensor], table: torch.Tensor | None, stream: torch.cuda.Stream | None
    ) -> None:
        """Fills ``parts``."""
        self._launch(*self._arguments(parts, table), stream=stream)

    def finish(self, parts: Sequence[torch.Tensor], table: torch.Tensor | None) -> None:
        """Pulls what is left on the current stream, behind the sender."""
        assert self._behind is not None, "only pulls are shared"
        self._behind(*self._arguments(parts, table))

    def _arguments(self, parts: Sequence[torch.Tensor], table: torch.Tensor | None) -> tuple:
        transfer, channel = self._transfer, self._transfer.channel
        return (
            transfer.buffer.addresses, *(*parts, parts[0], parts[0])[:3], channel.signals.local,
            channel.signals.local if table is None else table, channel.tickets, channel.control, *transfer.shape_arguments(),
            transfer.flags_per_granule,
        )  # fmt: skip


class PreparedExchange:
    """``to_heads`` or ``to_sequence`` of one shape: a push, and beside it the kernel that takes apart what arrives."""

    def __init__(
        self, context: SPContext, layout: HeadsLayout, m: int, dtype: torch.dtype, *, towards_heads: bool, packed: bool
    ) -> None:
        operation = _TO_HEADS if towards_heads else _TO_SEQUENCE
        programs = tuning.EXCHANGE_PROGRAMS
        self._transfer = transfer = _Transfer(
            context, operation, layout, m, dtype, k=0, granule_rows=tuning.GRANULE_ROWS, block_n=0, packed=packed
        )
        self._push = transfer.copy_kernel(push_kernel, programs, TO_HEADS=towards_heads)
        self._receive = _Receiver(transfer, programs)

    def __call__(
        self, parts: Sequence[torch.Tensor], lead: Sequence[int], table: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """``lead``: leading dimensions of the result."""
        transfer = self._transfer
        context, channel = transfer.context, transfer.channel
        parts = [part.contiguous() for part in parts]
        results = self._receive.empty(lead)
        side = context.fork()
        # The push first: with one hardware queue the kernel that waits would stand in front of it.
        self._push(
            *(*parts, parts[0], parts[0])[:3], transfer.buffer.addresses, channel.signals.addresses, channel.ready.addresses,
            channel.ready.local, transfer.signature, channel.signals.local if table is None else table, channel.tickets,
            channel.control, *transfer.shape_arguments(),
        )  # fmt: skip
        self._receive(results, table, side)
        context.join()
        context.leave(channel)
        return results


class PreparedGather:
    """All heads of the local rows, as an A2A-GEMM multiplies them, left in the context's buffer."""

    def __init__(self, context: SPContext, layout: HeadsLayout, m: int, dtype: torch.dtype, *, packed: bool) -> None:
        self._transfer = transfer = _Transfer(
            context, _GATHER, layout, m, dtype, k=0, granule_rows=tuning.GRANULE_ROWS, block_n=0, packed=packed
        )
        self._columns = context.world_size * layout.num_columns
        self._push = transfer.copy_kernel(push_kernel, tuning.GATHER_PROGRAMS, TO_HEADS=False)
        constants = {"WORLD_SIZE": context.world_size, "TARGET": context.target}
        self._arrived = KernelLaunch(arrived_kernel, 1, constants, num_warps=1)

    def __call__(
        self, parts: Sequence[torch.Tensor], table: torch.Tensor | None, meanwhile: Callable[[], object]
    ) -> torch.Tensor:
        """[m, world * columns], until the next op of the context (a copy where rows are padded).

        ``meanwhile``: enqueued while they arrive.
        """
        transfer = self._transfer
        context, channel = transfer.context, transfer.channel
        parts = [part.contiguous() for part in parts]
        self._push(
            *(*parts, parts[0], parts[0])[:3], transfer.buffer.addresses, channel.signals.addresses, channel.ready.addresses,
            channel.ready.local, transfer.signature, channel.signals.local if table is None else table, channel.tickets,
            channel.control, *transfer.shape_arguments(), stream=context.fork(),
        )  # fmt: skip
        try:
            meanwhile()
        finally:  # whatever it raises: launches are counted, and what the other stream reads must not be freed under it
            self._arrived(channel.signals.local, channel.tickets, channel.control, transfer.num_granules)
            context.join()
        context.leave(channel)
        return transfer.buffer.local[:, : self._columns].contiguous()


class PreparedGemmA2A:
    """[m, k] times a weight of all heads, each rank's columns to that rank; what arrives is taken apart meanwhile."""

    def __init__(
        self, context: SPContext, layout: HeadsLayout, m: int, k: int, dtype: torch.dtype, weight_layout: WeightLayout,
        config: GemmConfig, packed: bool,
    ) -> None:  # fmt: skip
        self.config, self.k, self.weight_layout = config, k, weight_layout
        self._transfer = transfer = _Transfer(
            context, _GEMM_A2A, layout, m, dtype, k=k, granule_rows=config.block_m, block_n=config.block_n,
            packed=packed, copy=tuning.PULL,
        )  # fmt: skip
        world, n = context.world_size, layout.num_columns
        programs = tuning.receive_programs(m, world * n, k, dtype.itemsize)
        self._receive = _Receiver(transfer, programs, pull=True)
        self._slots = make_descriptor(transfer.buffer.local[:, :n], config.store_block)
        self._columns_per_rank = n if weight_layout == "nt" else padded_columns(n, dtype)
        self._launch = KernelLaunch(
            gemm_a2a_kernel,
            max(1, min(context.num_sms - programs, world * config.num_tiles(m, n))),
            {
                **config.tile_constants(transpose_b=weight_layout == "nt"),
                "WORLD_SIZE": world,
                "TARGET": context.target,
            },
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )

    def _weight(self, weight: torch.Tensor) -> Any:
        """Descriptor of the weight; where a rank's columns are no whole 16 bytes, of a copy in which they are."""
        config, n = self.config, self._transfer.layout.num_columns
        if self._columns_per_rank != n:
            columns = weight.reshape(self.k, -1, n)
            weight = torch.nn.functional.pad(columns, (0, self._columns_per_rank - n)).flatten(1)
        nt = self.weight_layout == "nt"
        return make_descriptor(
            aligned_operand(weight), (config.block_n, config.block_k) if nt else (config.block_k, config.block_n)
        )

    def __call__(
        self, rows: torch.Tensor, weight: torch.Tensor, lead: Sequence[int], table: torch.Tensor | None,
        meanwhile: Callable[[], object] | None,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """``rows`` [m, k]; ``lead``: leading dimensions of the parts; ``meanwhile``: enqueued while the last ones
        arrive."""
        transfer, config = self._transfer, self.config
        context, channel = transfer.context, transfer.channel
        parts = self._receive.empty(lead)
        side = context.fork()
        self._launch(
            make_descriptor(aligned_operand(rows), (config.block_m, config.block_k)),
            self._weight(weight),
            self._slots,
            channel.signals.addresses,
            channel.ready.addresses,
            channel.ready.local,
            transfer.signature,
            channel.tickets,
            channel.control,
            transfer.m,
            transfer.layout.num_columns,
            self.k,
            self._columns_per_rank,
            transfer.slot_rows,
        )
        self._receive(parts, table, side)
        try:
            if meanwhile is not None:
                meanwhile()
            else:
                self._receive.finish(parts, table)
        finally:  # whatever it raises: what the other stream writes to must not be freed under it
            context.join()
        context.leave(channel)
        return parts


class PreparedA2AGemm:
    """All heads of the local rows times a weight, the push of this rank's share in the same kernel."""

    def __init__(
        self, context: SPContext, layout: HeadsLayout, m: int, n: int, dtype: torch.dtype, weight_layout: WeightLayout,
        config: GemmConfig, packed: bool,
    ) -> None:  # fmt: skip
        self.config, self.n = config, n
        self.k = k = context.world_size * layout.num_columns
        granule_rows = tuning.granule_rows(m, config.block_m, layout.num_columns * dtype.itemsize)
        self._transfer = transfer = _Transfer(
            context, _A2A_GEMM, layout, m, dtype, k=n, granule_rows=granule_rows, block_n=0, packed=packed
        )
        self._a = make_descriptor(transfer.buffer.local[:, :k], (config.block_m, config.block_k))
        self._b_block = (config.block_n, config.block_k) if weight_layout == "nt" else (config.block_k, config.block_n)
        num_tiles, world = config.num_tiles(m, n), context.world_size
        if context.is_cuda:
            num_programs = context.num_sms
            self._deal = tuning.deal_of(m, n, k, world, config, num_programs, dtype.itemsize)
        else:
            num_programs, self._deal = 2, (1, num_tiles // 3)
        self._launch = KernelLaunch(
            a2a_gemm_kernel,
            num_programs,
            {
                **config.tile_constants(transpose_b=weight_layout == "nt"),
                **transfer.copy_constants(),
                "HAS_TABLE": packed,
                "WORLD_SIZE": world,
                "RANKS_POW2": next_power_of_2(world),
                "TARGET": context.target,
            },
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )

    def borrowed(self) -> torch.Tensor:
        """What the last call multiplied [m, k]; where rows are not padded, where it lies: until the next op of the
        context."""
        return self._transfer.buffer.local[:, : self.k].contiguous()

    def __call__(
        self, parts: Sequence[torch.Tensor], weight: torch.Tensor, keep: bool, table: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """([m, n], what was multiplied [m, k] or None)."""
        transfer = self._transfer
        context, channel, m = transfer.context, transfer.channel, transfer.m
        parts = [part.contiguous() for part in parts]
        out = empty_aligned(m, self.n, transfer.dtype, context.device)
        _, half_rows, _, buffer_stride, *columns = transfer.shape_arguments()
        self._launch(
            self._a,
            make_descriptor(aligned_operand(weight), self._b_block),
            make_descriptor(out, self.config.store_block),
            *(*parts, parts[0], parts[0])[:3],
            transfer.buffer.addresses,
            channel.signals.addresses,
            channel.signals.local,
            channel.ready.addresses,
            channel.ready.local,
            transfer.signature,
            channel.signals.local if table is None else table,
            channel.tickets,
            channel.control,
            m,
            self.n,
            self.k,
            half_rows,
            buffer_stride,
            *columns,
            *self._deal,
        )
        context.leave(channel)
        return out.contiguous(), self._transfer.buffer.local[:, : self.k].clone() if keep else None
