"""GEMM-RS that stores to peers from its epilogue, prepared for one shape: a call only enqueues."""

from __future__ import annotations

import torch

from ditron_train.gemm.operands import TensorScales, aligned_operand, make_descriptor, padded_columns, result_dtype
from ditron_train.gemm.peers import MAX_DESCRIPTOR_RANKS
from ditron_train.runtime.launch import KernelLaunch
from ditron_train.runtime.sizes import next_power_of_2
from ditron_train.stream.events import current_handle
from ditron_train.tp.context import RowPartition, TPContext
from ditron_train.tp.gemm_rs_kernel import GemmRsConstants, Slots, gemm_rs_kernel
from ditron_train.tp.problem import Choice, Problem


class PreparedGemmRs:
    """[m, k] times a weight, reduce-scattered by rows; collective to make."""

    def __init__(self, context: TPContext, partition: RowPartition, problem: Problem, choice: Choice) -> None:
        n, dtype, transpose_b = problem.n, result_dtype(problem.dtype), problem.layout == "nt"
        self.context = context
        self.m, self.n, self.k = problem.m, n, problem.k
        config, world_size = choice.config, context.world_size
        self._a_block, self._b_block = (config.block_m, config.block_k), config.b_block(transpose_b)
        self.channel = channel = context.scatter_channel
        self._num_own_rows = partition.count(context.rank)
        block = config.block_m
        values = (self.m, partition.fingerprint, n, dtype, block, config.block_n)
        signature = context.agree(channel, values)
        ends = zip(partition.starts, partition.starts[1:])
        num_slot_tiles = max(-(-end // block) - start // block for start, end in ends if end > start)
        self._slot_rows = num_slot_tiles * block
        self._flags_per_rank = num_slot_tiles * -(-n // config.block_n)
        channel.reserve_signals(world_size * self._flags_per_rank)
        self._pointers = channel.pointers(signature)
        slots = context.slots(world_size * self._slot_rows, padded_columns(n, dtype), dtype)
        self._slots = Slots(slots.local, slots.addresses)
        use_descriptors = world_size <= MAX_DESCRIPTOR_RANKS
        peers = range(world_size) if use_descriptors else [context.rank]
        made = [make_descriptor(slots.peer(peer)[:, :n], config.store_block) for peer in peers]
        self._peers = made + made[:1] * (MAX_DESCRIPTOR_RANKS - len(made))
        self._tables = context.row_tables("scatter", partition, block)
        self._launch = KernelLaunch(
            gemm_rs_kernel,
            max(1, min(context.num_sms, config.num_tiles(self.m, n))),
            {
                "OP": GemmRsConstants(
                    config.tile(transpose_b=transpose_b),
                    min(choice.fold_rows, block),
                    world_size,
                    next_power_of_2(world_size),
                    partition.is_even(block),
                    use_descriptors,
                ),
                "TARGET": context.target,
            },
            **config.launch_options,
        )

    @property
    def identity(self) -> tuple:
        """Of two with the same one the GEMM's kernel is compiled once."""
        return self._launch.identity

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, scales: TensorScales | None = None
    ) -> None:
        """``x``: [m, k]; ``out``: this rank's rows, contiguous."""
        addresses = scales.addresses if scales else ()
        key = (x.data_ptr(), x.stride(), weight.data_ptr(), weight.stride(), out.data_ptr(), *addresses)
        if not self._launch.repeat(key, current_handle(self.context.device)):
            operands = aligned_operand(x), aligned_operand(weight)
            is_as_given = operands[0] is x and operands[1] is weight
            self._launch(*self._arguments(*operands, out, scales), key=key if is_as_given else None)
        self.context.leave(self.channel)

    def compile(self, x: torch.Tensor, weight: torch.Tensor, scales: TensorScales | None = None) -> None:
        """Compiles what a call with these would run, without running it."""
        out = x.new_empty(self._num_own_rows, self.n, dtype=self._slots.local.dtype)
        self._launch.compile(*self._arguments(aligned_operand(x), aligned_operand(weight), out, scales))

    def _arguments(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, scales: TensorScales | None
    ) -> tuple:
        return (
            make_descriptor(x, self._a_block),
            make_descriptor(weight, self._b_block),
            *self._peers,
            self._slots,
            self._pointers,
            out,
            self._tables,
            scales,
            self.m,
            self.n,
            self.k,
            self._slot_rows,
            self._slots.local.stride(0),
            self._flags_per_rank,
        )
