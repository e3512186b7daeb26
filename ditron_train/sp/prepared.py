"""The ops of Ulysses, prepared for one shape: everything that does not change between calls is decided once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from ditron_train.gemm.operands import aligned_operand, empty_aligned, make_descriptor, padded_columns
from ditron_train.runtime.launch import KernelLaunch
from ditron_train.runtime.sizes import next_power_of_2
from ditron_train.sp import transfer_sizes
from ditron_train.sp.choices import ProjectionChoice
from ditron_train.sp.context import SPContext
from ditron_train.sp.gemm_kernels import a2a_gemm_kernel, gemm_a2a_kernel
from ditron_train.sp.kernels import arrived_kernel, push_kernel
from ditron_train.sp.layouts import HeadsLayout
from ditron_train.sp.transfer import A2A_GEMM, GATHER, GEMM_A2A, TO_HEADS, TO_SEQUENCE, Receiver, Transfer, memory_of
from ditron_train.stream.events import current_handle

WeightLayout = Literal["nt", "nn"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class PreparedExchange:
    """``to_heads`` or ``to_sequence`` of one shape: a push, and beside it the kernel that takes apart what arrives."""

    def __init__(
        self,
        context: SPContext,
        layout: HeadsLayout,
        m: int,
        dtype: torch.dtype,
        *,
        towards_heads: bool,
        packed: bool,
        programs: int,
    ) -> None:
        operation = TO_HEADS if towards_heads else TO_SEQUENCE
        self._transfer = transfer = Transfer(context, operation, layout, m, dtype, packed=packed)
        self._push = transfer.copy_kernel(push_kernel, programs)
        self._receive = Receiver(transfer, programs)

    def __call__(
        self, parts: Sequence[torch.Tensor], lead: Sequence[int], table: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """``lead``: leading dimensions of the result."""
        transfer = self._transfer
        context = transfer.context
        parts = [part.contiguous() for part in parts]
        results = self._receive.empty(lead)
        context.fork()
        with context.aborting(transfer.channel):
            # The push first: with one hardware queue the kernel that waits would stand in front of it.
            transfer.copy(self._push, parts, table)
            self._receive(results, table)
        context.join()
        context.leave(transfer.channel)
        return results


class PreparedGather:
    """All heads of the local rows, as an A2A-GEMM multiplies them, left in the context's buffer."""

    def __init__(self, context: SPContext, layout: HeadsLayout, m: int, dtype: torch.dtype, *, packed: bool) -> None:
        self._transfer = transfer = Transfer(context, GATHER, layout, m, dtype, packed=packed)
        self._columns = context.world_size * layout.num_columns
        self._push = transfer.copy_kernel(push_kernel, transfer_sizes.GATHER_PROGRAMS)
        constants = {"WORLD_SIZE": context.world_size, "TARGET": context.target}
        self._arrived = KernelLaunch(arrived_kernel, 1, constants, num_warps=1)

    def __call__(
        self, parts: Sequence[torch.Tensor], table: torch.Tensor | None, meanwhile: Callable[[], object]
    ) -> torch.Tensor:
        """[m, world * columns], until the next op of the context (a copy where rows are padded).

        ``meanwhile``: enqueued while they arrive.
        """
        transfer = self._transfer
        context = transfer.context
        parts = [part.contiguous() for part in parts]
        context.start(transfer.channel, lambda: transfer.copy(self._push, parts, table, on_side=True))
        with context.aborting(transfer.channel):
            try:
                meanwhile()
            finally:  # whatever it raises: launches are counted, and the other stream still reads what is given here
                if not self._arrived.repeat("arrived", current_handle(context.device)):
                    given = transfer.channel.pointers(transfer.signature), transfer.num_granules
                    self._arrived(*given, key="arrived")
        context.join()
        context.leave(transfer.channel)
        return transfer.buffer.local[:, : self._columns].contiguous()


class PreparedGemmA2A:
    """[m, k] times a weight of all heads, each rank's columns to that rank; what arrives is taken apart meanwhile."""

    def __init__(
        self,
        context: SPContext,
        layout: HeadsLayout,
        m: int,
        k: int,
        dtype: torch.dtype,
        weight_layout: WeightLayout,
        choice: ProjectionChoice,
        packed: bool,
    ) -> None:
        config, programs = choice.config, choice.programs
        self.config, self.k, self.weight_layout = config, k, weight_layout
        sizes: dict[str, Any] = dict(granule_rows=config.block_m, block_n=config.block_n, copy=transfer_sizes.PULL)
        self._transfer = transfer = Transfer(context, GEMM_A2A, layout, m, dtype, k=k, packed=packed, **sizes)
        world, n = context.world_size, layout.num_columns
        self._receive = Receiver(transfer, programs, pull=True)
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

    def _weight(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight; where a rank's columns are no whole 16 bytes, a copy in which they are."""
        n = self._transfer.layout.num_columns
        if self._columns_per_rank != n:
            columns = weight.reshape(self.k, -1, n)
            weight = torch.nn.functional.pad(columns, (0, self._columns_per_rank - n)).flatten(1)
        return aligned_operand(weight)

    def _multiply(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """The GEMM; launched again where it comes with the same memory."""
        transfer, config = self._transfer, self.config
        key = (rows.data_ptr(), rows.stride(), weight.data_ptr(), weight.stride(), memory_of(bias))
        if self._launch.repeat(key, current_handle(transfer.context.device)):
            return
        a, b = aligned_operand(rows), self._weight(weight)
        self._launch(
            make_descriptor(a, (config.block_m, config.block_k)),
            make_descriptor(b, config.b_block(self.weight_layout == "nt")),
            self._slots,
            transfer.channel.pointers(transfer.signature),
            bias,
            transfer.m,
            transfer.layout.num_columns,
            self.k,
            self._columns_per_rank,
            transfer.slot_rows,
            key=key if a is rows and b is weight else None,
        )

    def mixed(self) -> torch.Tensor:
        """A copy of the last call's product [m, columns of all ranks], from the slots that peers have read."""
        transfer, world = self._transfer, self._transfer.context.world_size
        slots = transfer.buffer.local.unflatten(0, (world, transfer.slot_rows))
        own = slots[:, : transfer.m, : transfer.layout.num_columns]
        return own.transpose(0, 1).contiguous().flatten(1)

    def __call__(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        lead: Sequence[int],
        table: torch.Tensor | None,
        meanwhile: Callable[[], object] | None,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """``rows`` [m, k]; ``lead``: leading dimensions of the parts; ``meanwhile``: enqueued while the last ones
        arrive."""
        context = self._transfer.context
        parts = self._receive.empty(lead)
        context.fork()
        with context.aborting(self._transfer.channel):  # what the other stream writes to must not be freed under it
            self._multiply(rows, weight, bias)
            self._receive(parts, table)
            if meanwhile is not None:
                meanwhile()
            else:
                self._receive.finish(parts, table)
        context.join()
        context.leave(self._transfer.channel)
        return parts


class PreparedA2AGemm:
    """All heads of the local rows times a weight, the push of this rank's share in the same kernel."""

    def __init__(
        self,
        context: SPContext,
        layout: HeadsLayout,
        m: int,
        n: int,
        dtype: torch.dtype,
        weight_layout: WeightLayout,
        choice: ProjectionChoice,
        packed: bool,
    ) -> None:
        config = choice.config
        self.config, self.n = config, n
        self.k = k = context.world_size * layout.num_columns
        granule_rows = transfer_sizes.granule_rows(m, config.block_m, layout.num_columns * dtype.itemsize)
        self._transfer = transfer = Transfer(
            context, A2A_GEMM, layout, m, dtype, k=n, granule_rows=granule_rows, packed=packed
        )
        self._a = make_descriptor(transfer.buffer.local[:, :k], (config.block_m, config.block_k))
        self._b_block = config.b_block(weight_layout == "nt")
        num_tiles, world = config.num_tiles(m, n), context.world_size
        if context.is_cuda:
            num_programs = context.num_sms
            self._deal = transfer_sizes.deal_of(m, n, k, world, config, num_programs, dtype.itemsize, choice.programs)
        else:
            num_programs, self._deal = 2, (1, num_tiles // 3)
        self._launch = KernelLaunch(
            a2a_gemm_kernel,
            num_programs,
            {
                **config.tile_constants(transpose_b=weight_layout == "nt"),
                "COPY": transfer.blocks,
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
        context = transfer.context
        parts = [part.contiguous() for part in parts]
        out = empty_aligned(transfer.m, self.n, transfer.dtype, context.device)
        key = (weight.stride(), *memory_of(weight, out, *parts, table))
        if not self._launch.repeat(key, current_handle(context.device)):
            operand = aligned_operand(weight)
            self._launch(
                self._a,
                make_descriptor(operand, self._b_block),
                make_descriptor(out, self.config.store_block),
                *transfer.copy_arguments(parts, table),
                self.n,
                self.k,
                *self._deal,
                key=key if operand is weight else None,
            )
        context.leave(transfer.channel)
        return out.contiguous(), transfer.buffer.local[:, : self.k].clone() if keep else None
