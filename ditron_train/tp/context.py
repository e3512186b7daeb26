"""``TPContext``, which owns the symmetric memory of tensor parallelism on one group, and the checks that every op
makes before anything is signalled.

All layers of a group share the memory: one gathered activation and one set of partials, of the largest layer's size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from ditron_train.data.device_profiles import Machine
from ditron_train.gemm.fp8 import check_fp8_operands
from ditron_train.gemm.operands import FP8_DTYPES, Operand
from ditron_train.gemm.ops import check_operands
from ditron_train.runtime.device import device_name
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.sizes import top_of_range
from ditron_train.runtime.values import to_device
from ditron_train.runtime.versions import pip_command
from ditron_train.schedule.orders import gather_row_tile_order, scatter_row_tile_order
from ditron_train.stream.driver import has_driver
from ditron_train.stream.op_context import OpContext, context_of
from ditron_train.symm.arena import SymmetricTensor
from ditron_train.tp.choices import PUSH_BYTES, Choice, Layout, Problem, choose, choose_without_copies, with_library
from ditron_train.tp.split_products import have_bits_of_whole

_Found = TypeVar("_Found")

MOST_CHUNKS = 64  # of one source in an all-reduce by copy engines
MOST_PUSH_PROGRAMS = 128  # in one of stores
FLAGS_PER_RANK = 1024  # arrival flags of one source rank in a gather
#: Names of the buffer that gathers share, and of the one that partial sums are stored in.
GATHERED, SLOTS = "tp.gathered", "tp.partials"


@dataclass(frozen=True)
class RowPartition:
    """How the rows of a matrix are spread over the ranks of a group.

    Attributes:
        starts: ``world_size + 1`` row indices; rank ``r`` owns rows ``starts[r]`` up to ``starts[r + 1]``.
    """

    starts: tuple[int, ...]

    @classmethod
    def of(cls, counts: Sequence[int]) -> RowPartition:
        """From the number of rows of each rank."""
        return cls((0, *accumulate(map(int, counts))))

    @property
    def num_rows(self) -> int:
        """Rows of all ranks."""
        return self.starts[-1]

    def count(self, rank: int) -> int:
        """Rows of one rank."""
        return self.starts[rank + 1] - self.starts[rank]

    @property
    def max_count(self) -> int:
        """Rows of the rank that has most."""
        return max(end - start for start, end in zip(self.starts, self.starts[1:]))

    def owners_key(self, block_m: int) -> tuple[tuple[int, int, bool], ...]:
        """What the owners of tiles of ``block_m`` rows depend on, and so their order: in which tile each share begins,
        whether at its first row, and whether the share is empty."""
        ends = (*self.starts[1:], self.starts[-1])
        return tuple((start // block_m, -(-start // block_m), start == end) for start, end in zip(self.starts, ends))

    def is_even(self, block_m: int) -> bool:
        """Whether every rank owns the same whole number of tiles of ``block_m`` rows."""
        rows = self.count(0)
        return rows > 0 and rows % block_m == 0 and all(self.count(r) == rows for r in range(len(self.starts) - 1))

    @property
    def fingerprint(self) -> int:
        """31 bits by which ranks detect that they were called with different partitions."""
        return hash(self.starts) & 0x7FFFFFFF


class RowTables(NamedTuple):
    """Tables of the rows of all ranks, int32.

    Attributes:
        order: [row tiles], the row tiles in the order of their computation; read if shares are uneven.
        starts: [world_size + 1], the first row of each rank, and the end of the last.
    """

    order: torch.Tensor
    starts: torch.Tensor


class TPContext(OpContext):
    """Buffers, channels and the communication stream of one tensor-parallel group (constructed collectively).

    Args:
        group: The tensor-parallel process group (``None``: WORLD).
        device: The device of the activations.
        first_epoch: For tests of the epoch's wrap.

    Attributes:
        by_library: What cuBLAS multiplies rank by rank, whatever ``choices`` says.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, *, first_epoch: int = 0) -> None:
        super().__init__(group, device, first_epoch=first_epoch)
        fields = ("total_rows", "row_partition", "columns", "dtype")
        self.gather_channel = self.add_channel(
            "tp.gather", self.world_size * FLAGS_PER_RANK, (*fields, "flag_block_rows")
        )
        self.scatter_channel = self.add_channel("tp.gemm_rs", self.world_size * 4096, (*fields, "block_m", "block_n"))
        self.reduce_channel = self.add_channel("tp.reduce_scatter", self.world_size, fields)
        sizes = ("num_rows", "columns", "dtype", "chunk_rows")
        self.all_reduce_channel = self.add_channel("tp.all_reduce", self.world_size * MOST_CHUNKS, sizes)
        self.push_channel = self.add_channel("tp.all_reduce_push", self.world_size * MOST_PUSH_PROGRAMS, sizes)
        self.all_reduce_epochs = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.reduce_epochs = torch.zeros(self.world_size, dtype=torch.int32, device=self.device)
        self.gather_epochs = torch.zeros(FLAGS_PER_RANK, dtype=torch.int32, device=self.device)
        self.machine = Machine(device_name(self.device), self.target, self.num_sms)
        self._tables: dict[object, torch.Tensor] = {}
        self._choices: dict[tuple[Any, ...], Any] = {}
        self.by_library: set[Problem] = set()
        self._tried: set[Problem] | None = None

    def table(self, key: object, values: Sequence[int] | np.ndarray) -> torch.Tensor:
        """A small int32 table on the device, made once for ``key``."""
        tensor = self._tables.get(key)
        if tensor is None:
            host = torch.from_numpy(np.array(values, dtype=np.int32))
            tensor = self._tables[key] = to_device(host, self.device)
        return tensor

    def row_tables(self, kind: Literal["gather", "scatter"], partition: RowPartition, block_m: int) -> RowTables:
        """The first rows of the ranks, and the row tiles in gather or scatter order; if shares are even, no kernel
        reads the order, and it is any table."""
        starts = self.table(partition, partition.starts)
        if partition.is_even(block_m):
            return RowTables(starts, starts)
        key = (kind, *partition.owners_key(block_m))  # most new lengths share a table with one before
        if key not in self._tables:
            function = gather_row_tile_order if kind == "gather" else scatter_row_tile_order
            self.table(key, function(partition.starts, block_m, self.rank, self.world_size))
        return RowTables(self._tables[key], starts)

    def modelled(self, function: Callable[..., _Found], problem: Problem, *arguments: Hashable) -> _Found:
        """The result of a function of ``choices`` for a problem; if lengths vary, computed once for each range of
        lengths, for its most rows."""
        if not self.varies:
            return function(problem, *arguments, self.machine)
        key = (function, replace(problem, m=top_of_range(problem.m)), *arguments)
        if key not in self._choices:
            self._choices[key] = function(*key[1:], self.machine)
        found: _Found = self._choices[key]
        return found

    def choose(self, problem: Problem) -> Choice:
        """``choices.choose``, ``modelled``; if copies would take multiprocessors, without copies. By cuBLAS only if
        the library's bits do not depend on how many rows it multiplies at once (collective if that is new)."""
        choice = self.modelled(choose if self.arena.transport.copies_by_engine else choose_without_copies, problem)
        if not choice.by_library and self._tried is None and problem not in self.by_library:
            return choice
        if problem.op == "gemm_ar" or not self._splits_by_rank(problem):
            return replace(choice, by_library=False)
        if self._tried is not None:
            self._tried.add(problem)
        return with_library(choice)

    @contextmanager
    def trying_library(self) -> Iterator[set[Problem]]:
        """Inside, cuBLAS multiplies whatever it can, and the set gets what that is. All ranks enter and leave it
        between two ops, with no graph captured."""
        self.synchronize()
        self._forget_prepared()
        self._tried = set()
        try:
            yield self._tried
        finally:
            self._tried = None
            self.synchronize()
            self._forget_prepared()

    @property
    def way(self) -> str:
        """What tells ``trying_library`` in a decision's key."""
        return "" if self._tried is None else ", by cuBLAS"

    def _splits_by_rank(self, problem: Problem) -> bool:
        if self.varies or not (self.arena.transport.copies_by_engine and can_copy(self)):
            return False  # what is proven of ever new lengths is proven of the tiles
        if problem.is_fp8:  # bits of these do not depend on the number of rows
            return problem.n % 16 == problem.k % 16 == 0
        key = (have_bits_of_whole, problem)
        if key not in self._choices:
            self._choices[key] = have_bits_of_whole(problem, self.group, self.device)
        found: bool = self._choices[key]
        return found

    def forget_shapes(self) -> None:
        """As ``OpContext.forget_shapes``; also drops the tables of row tiles."""
        super().forget_shapes()
        self._tables.clear()
        self._choices.clear()

    def gathered(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> SymmetricTensor:
        """The gathered activation, as ``[num_rows, num_columns]``; valid until the next gather of this context."""
        return self.roomy(GATHERED, num_rows, num_columns, dtype)

    def pushed(self, dtype: torch.dtype) -> SymmetricTensor:
        """Where peers store the partial sums of small all-reduces, [2, world_size, elements]: by the epoch's
        parity."""
        return self.arena.tensor("tp.pushed", (2, self.world_size, PUSH_BYTES // dtype.itemsize), dtype)

    def slots(self, num_rows: int, num_columns: int, dtype: torch.dtype, room_rows: int = 0) -> SymmetricTensor:
        """The partials that peers store here; ``room_rows``: rows of the longest call of the range, if known."""
        return self.roomy(SLOTS, num_rows, num_columns, dtype, room_rows)


def get_tp_context(
    group: dist.ProcessGroup | None = None, device: torch.device | None = None, *, first_epoch: int = 0
) -> TPContext:
    """The context of ``group`` (``None``: WORLD), made at the first call, which is collective over the group."""
    return context_of(TPContext, group, device, first_epoch=first_epoch)


class Operands(NamedTuple):
    """Shapes, types and devices of an op's x and weight."""

    x_shape: torch.Size
    weight_shape: torch.Size
    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    weight_device: torch.device

    def sizes(self, name: str, context: TPContext, layout: Layout) -> tuple[int, int]:
        """(N, K), after this rank's checks.

        Raises:
            NotSupportedError: Device, types or shapes do not fit op ``name``.
        """
        x_shape, weight_shape = self.x_shape, self.weight_shape
        if layout not in ("nt", "nn"):
            raise NotSupportedError(f"{name}: layout {layout!r} is not nt or nn")
        if self.device != context.device:
            raise NotSupportedError(f"{name}: x is on {self.device}, the context on {context.device}")
        if len(weight_shape) != 2 or len(x_shape) < 2:
            raise NotSupportedError(
                f"{name}: x must have at least 2 dimensions and weight 2, got {len(x_shape)} and {len(weight_shape)}"
            )
        operands = Operand(self.dtype, self.device), Operand(self.weight_dtype, self.weight_device)
        if self.dtype in FP8_DTYPES:
            check_fp8_operands(name, *operands)
            if layout != "nt" or self.dtype != self.weight_dtype:
                raise NotSupportedError(
                    f"{name}: FP8 operands of {self.dtype} and {self.weight_dtype}, {layout}: only nt of one type"
                )
        else:
            check_operands(name, *operands)
        n, k = weight_shape if layout == "nt" else weight_shape[::-1]
        if x_shape[-1] != k:
            raise NotSupportedError(
                f"{name}: x {tuple(x_shape)} and weight {tuple(weight_shape)} ({layout}) do not fit"
            )
        if n == 0 or k == 0:
            raise NotSupportedError(f"{name}: weight {tuple(weight_shape)} has an empty dimension")
        return n, k


def row_partition(
    name: str, context: TPContext, shape: torch.Size, row_counts: Sequence[int] | None, *, total: bool
) -> RowPartition:
    """Rows of all ranks: as given, or the same number on each. ``total``: whether x holds the rows of all ranks."""
    world = context.world_size
    rows = shape[:-1].numel()
    if row_counts is None:
        if total and shape[0] % world:
            raise NotSupportedError(
                f"{name}: dimension 0 of {tuple(shape)} does not divide by {world} ranks; pass row_counts"
            )
        row_counts = [rows // world if total else rows] * world
    if len(row_counts) != world or min(row_counts) < 0:
        raise NotSupportedError(f"{name}: row_counts {list(row_counts)} for a group of {world}")
    partition = RowPartition.of(row_counts)
    if rows != (partition.num_rows if total else partition.count(context.rank)):
        raise NotSupportedError(f"{name}: x has {rows} rows, row_counts {list(row_counts)} say otherwise")
    return partition


def can_copy(context: TPContext) -> bool:
    """Whether copy engines can be driven here: on a GPU that needs ``cuda-bindings``."""
    return has_driver() or not context.is_cuda


def check_can_copy(name: str, context: TPContext) -> None:
    """Raises NotSupportedError if op ``name`` needs copy engines that cannot be driven here."""
    if not can_copy(context):
        raise NotSupportedError(f"{name} by copy engines needs cuda-bindings: {pip_command('cuda-bindings')}")
