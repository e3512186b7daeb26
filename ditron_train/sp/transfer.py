"""What all ops of Ulysses prepare for one shape: channel and buffer of one direction, and the kernels that copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ditron_train.gemm.operands import padded_columns
from ditron_train.runtime.launch import KernelLaunch
from ditron_train.runtime.sizes import next_power_of_2
from ditron_train.sp import transfer_sizes
from ditron_train.sp.context import SPContext
from ditron_train.sp.kernels import CopyBlocks, CopyPointers, CopyShape, receive_kernel
from ditron_train.sp.layouts import HeadsLayout
from ditron_train.stream.events import current_handle

__all__ = ["A2A_GEMM", "GATHER", "GEMM_A2A", "TO_HEADS", "TO_SEQUENCE", "Receiver", "Transfer", "memory_of"]

GEMM_A2A, TO_HEADS, A2A_GEMM, TO_SEQUENCE, GATHER = 1, 2, 3, 4, 5  # first word of a signature


def memory_of(*tensors: torch.Tensor | None) -> tuple[int, ...]:
    """Where these lie: for contiguous ones of known shapes the key of a launch."""
    return tuple([0 if tensor is None else tensor.data_ptr() for tensor in tensors])


class Transfer:
    """The channel and the buffer of one direction, agreed for one shape.

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
        self,
        context: SPContext,
        operation: int,
        layout: HeadsLayout,
        m: int,
        dtype: torch.dtype,
        *,
        k: int = 0,
        granule_rows: int = transfer_sizes.GRANULE_ROWS,
        block_n: int = 0,
        packed: bool,
        copy: transfer_sizes.CopyShape = transfer_sizes.PUSH,
    ) -> None:
        self.context, self.layout, self.m, self.dtype = context, layout, m, dtype
        self.towards_heads = operation in (GEMM_A2A, TO_HEADS)
        self.channel = context.heads_channel if self.towards_heads else context.sequence_channel
        widths = self._three(layout.widths, 0)
        values = (operation, m, layout.num_groups, *widths, k, dtype, granule_rows, block_n, int(packed))
        self.signature = context.agree(self.channel, values)
        self.num_granules = -(-m // granule_rows)
        self.flags_per_granule = -(-layout.num_columns // block_n) if block_n else 1
        world = context.world_size
        self.channel.reserve_signals(world * self.num_granules * self.flags_per_granule)
        self.slot_rows = self.num_granules * granule_rows
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
            granule_rows,
            min(copy.rows, granule_rows),
            tuple(min(copy.width // width, most_groups) for width in block_widths),
            block_widths,
            self.towards_heads,
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
        return KernelLaunch(kernel, num_programs if self.context.is_cuda else 1, values, num_warps=16)

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
    """``receive_kernel`` of a transfer: beside the kernel that sends, and where that multiplies, once more behind
    it."""

    def __init__(self, transfer: Transfer, num_programs: int, *, pull: bool = False) -> None:
        self._transfer, layout = transfer, transfer.layout
        factor = 1 if transfer.towards_heads else transfer.context.world_size
        self._heads = [(layout.num_heads(part) * factor, dim) for part, dim in enumerate(layout.head_dims)]
        constants = dict(FLAGS=next_power_of_2(transfer.flags_per_granule), PULL=pull)
        self._launch = transfer.copy_kernel(receive_kernel, num_programs, **constants, BEHIND=False)
        self._behind = (
            transfer.copy_kernel(receive_kernel, transfer.context.num_sms, **constants, BEHIND=True) if pull else None
        )

    def empty(self, lead: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """The parts, [*lead, heads, head size] each, not yet filled."""
        transfer = self._transfer
        return tuple(
            [
                torch.empty((*lead, *heads), dtype=transfer.dtype, device=transfer.context.device)
                for heads in self._heads
            ]
        )

    def __call__(self, parts: Sequence[torch.Tensor], table: torch.Tensor | None) -> None:
        """Fills ``parts`` on the communication stream."""
        self._transfer.copy(self._launch, parts, table, self._transfer.flags_per_granule, on_side=True)

    def finish(self, parts: Sequence[torch.Tensor], table: torch.Tensor | None) -> None:
        """Pulls what is left on the current stream, behind the sender."""
        assert self._behind is not None, "only pulls are shared"
        self._transfer.copy(self._behind, parts, table, self._transfer.flags_per_granule)
