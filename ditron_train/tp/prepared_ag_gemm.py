"""AG-GEMM, prepared for one shape: a call allocates the result and enqueues."""

from __future__ import annotations

import torch

from ditron_train.gemm.operands import (
    TensorScales,
    aligned_operand,
    empty_aligned,
    make_descriptor,
    padded_columns,
    result_dtype,
)
from ditron_train.runtime.launch import KernelLaunch
from ditron_train.stream.events import current_handle
from ditron_train.tp.ag_gemm_kernel import AgGemmConstants, ag_gemm_kernel
from ditron_train.tp.context import FLAGS_PER_RANK, RowPartition, TPContext
from ditron_train.tp.cost_model import is_short
from ditron_train.tp.gather import PreparedGather
from ditron_train.tp.problem import Choice, Problem


class PreparedAgGemm:
    """Gathered [m, k] times a weight [n, k] (``nt``) or [k, n] (``nn``); collective to make.

    ``keeps_gathered``: whether ``gathered`` must hold all rows after a call, not only the peers'. ``buffer``: as of
    ``TPContext.gathered``. Where the op is
    short and sends by copy engines, it is recorded as ``PreparedChunkedGemmRs`` is."""

    def __init__(
        self,
        context: TPContext,
        partition: RowPartition,
        problem: Problem,
        choice: Choice,
        keeps_gathered: bool = False,
        buffer: str | None = None,
    ) -> None:
        (n, k), dtype = (problem.n, problem.k), problem.dtype
        self.context, self._out_dtype = context, result_dtype(dtype)
        self.m, self.n, self.k = problem.m, n, k
        self.config = config = choice.config
        self._a_block, transpose_b = (config.block_m, config.block_k), problem.layout == "nt"
        self.gather = gather = PreparedGather(
            context, partition, padded_columns(k, dtype), dtype, choice.gather, config.block_m, buffer=buffer
        )
        even = partition.is_even(config.block_m)
        self._tables = context.row_tables("gather", partition, config.block_m)
        self.gathered = gather.buffer.local[:, :k]
        self._a = make_descriptor(self.gathered, self._a_block)
        num_programs = max(1, min(context.num_sms - gather.reserved_sms, config.num_tiles(self.m, n)))
        self._out_columns = padded_columns(n, self._out_dtype)
        self._reads_own = even
        self._keeps_gathered = keeps_gathered
        self._num_whole_tiles = config.num_whole_tiles(self.m, n, num_programs)
        halve_tail = self._num_whole_tiles < config.num_tiles(self.m, n)
        self._b_block, self._half_b_block = config.b_block(transpose_b), config.b_block(transpose_b, halved=halve_tail)
        self._launch = KernelLaunch(
            ag_gemm_kernel,
            num_programs,
            {
                "OP": AgGemmConstants(
                    config.tile(transpose_b=transpose_b), FLAGS_PER_RANK, context.world_size, even, halve_tail
                ),
                "TARGET": context.target,
            },
            **config.launch_options,
        )
        self._is_recorded = context.is_cuda and not gather.by_push and is_short(problem, choice, context.machine)

    @property
    def identity(self) -> tuple:
        """Of two with the same one the GEMM's kernel is compiled once."""
        return self._launch.identity

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: TensorScales | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``x``: this rank's rows, contiguous, with ``padded_columns``. Returns [m, n], contiguous."""
        context = self.context
        out = x.new_empty(self.m, self._out_columns, dtype=self._out_dtype)
        added = 0 if bias is None else bias.data_ptr()
        scaled_by = scales.addresses if scales else ()
        key = (x.data_ptr(), weight.data_ptr(), weight.stride(), out.data_ptr(), added, *scaled_by)
        given = x, weight, scales, bias, out, key
        if not self._is_recorded:
            self._enqueue(*given)
        elif not context.repeat_op((self, *key), (x.data_ptr(),)) and self._enqueue(*given):
            context.remember_op((self, *key), lambda: self._enqueue(*given), (x.data_ptr(),))
        return out if self._out_columns == self.n else out[:, : self.n].contiguous()

    def _enqueue(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: TensorScales | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        key: tuple,
    ) -> bool:
        """Whether it reads the weight as given: addresses and strides, ``key``, say all that it does."""
        is_as_given = True
        self.gather.start(x, copies_own=not self._reads_own)
        with self.context.aborting(self.gather.channel):
            if not self._launch.repeat(key, current_handle(self.context.device)):
                operand = aligned_operand(weight)
                is_as_given = operand is weight
                arguments = self._arguments(x, operand, scales, bias, out[:, : self.n])
                self._launch(*arguments, key=key if is_as_given else None)
            if self._keeps_gathered and self._reads_own:
                self.gather.copy_own(x)
        self.gather.finish()
        return is_as_given

    def _arguments(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: TensorScales | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> tuple:
        return (
            self._a,
            make_descriptor(x[:, : self.k], self._a_block) if self._reads_own else self._a,
            make_descriptor(weight, self._b_block),
            make_descriptor(weight, self._half_b_block),
            make_descriptor(out, self.config.store_block),
            self.gather.pointers,
            self._tables,
            scales,
            bias,
            self.m,
            self.n,
            self.k,
            self.gather.granule_rows,
            self._num_whole_tiles,
        )

    def compile(self, x: torch.Tensor, weight: torch.Tensor, scales: TensorScales | None = None) -> None:
        """Compiles what a call with these would run, without running it; nothing is sent."""
        out = empty_aligned(self.m, self.n, self._out_dtype, x.device)
        self._launch.compile(*self._arguments(x, aligned_operand(weight), scales, None, out))
        self.gather.compile(x)
