"""Names of what is chosen: an op at a shape, a machine, and the launch constants of a ``Choice``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ditron_train.gemm.configs import GemmConfig
from ditron_train.gemm.operands import FP8_DTYPES, result_dtype
from ditron_train.runtime.tuning_table import shape_class

Op = Literal["ag_gemm", "gemm_rs", "gemm_ar"]
#: Of a result: so much of it a GEMM-AR can exchange by stores.
PUSH_BYTES = 4 << 20
Layout = Literal["nt", "nn"]
# How partial sums of a GEMM-RS travel: stored by its epilogue, or by copy engines behind a GEMM for the rows of each
# rank.
ScatterMode = Literal["store", "copy"]


@dataclass(frozen=True)
class GatherPlan:
    """One way to move the rows of an AG-GEMM.

    Attributes:
        mode: ``push`` (SMs beside the GEMM) or ``copy`` (copy engines, no SM).
        push_programs: SMs that push; the GEMM leaves them free.
        num_chunks: Chunks of a shard that copy engines signal separately.
    """

    mode: Literal["push", "copy"]
    push_programs: int = 12
    num_chunks: int = 1


@dataclass(frozen=True)
class Problem:
    """An op at a shape: its GEMM C [m, n] = A [m, k] @ B as one rank sees it; m are the rows of all ranks."""

    op: Op
    m: int
    n: int
    k: int
    layout: Layout
    dtype: torch.dtype
    world_size: int

    @property
    def table_op(self) -> str:
        """Its name in a table."""
        return f"{self.op} {self.layout}{' fp8' if self.is_fp8 else ''}"

    @property
    def is_fp8(self) -> bool:
        """Whether its operands are FP8."""
        return self.dtype in FP8_DTYPES

    @property
    def result_bytes(self) -> int:
        """Of an element of C."""
        return result_dtype(self.dtype).itemsize

    @property
    def moved_bytes(self) -> int:
        """Of an element of what travels: A or C."""
        return self.dtype.itemsize if self.op == "ag_gemm" else self.result_bytes

    @property
    def shape_class(self) -> str:
        """Its class in a table."""
        return shape_class(self.m, self.n, self.k)


@dataclass(frozen=True)
class Choice:
    """Launch constants of one op at one shape. They change the time, never the bits.

    Attributes:
        config: Tile sizes.
        gather: Of an AG-GEMM: how rows travel. Of a GEMM-AR: how partial sums do, stored behind cuBLAS's GEMM by
            ``push_programs`` or sent by copy engines in chunks of rows, each behind its own GEMM.
        fold_rows: Of a GEMM-RS that stores: rows of a block that is added up at once; at most ``config.block_m``.
        scatter: Of a GEMM-RS: how partial sums travel.
        rounds: Of a GEMM-AR: in one every rank gets all partial sums; in two a GEMM-RS in chunks, then a gather.
        use_native: Whether native was quicker than every choice where this was measured. The ops themselves do not
            ask.
        source: ``table``, ``model`` or ``default``.
    """

    config: GemmConfig
    gather: GatherPlan = GatherPlan("copy")
    fold_rows: int = 32
    scatter: ScatterMode = "store"
    rounds: int = 1
    use_native: bool = False
    source: str = "default"
