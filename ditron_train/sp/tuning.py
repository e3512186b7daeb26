"""How many SMs move data beside a GEMM, and in which blocks."""

from __future__ import annotations

import math

__all__ = ["EXCHANGE_PROGRAMS", "GRANULE_ROWS", "COPY_ROWS", "COPY_WIDTH", "granule_rows", "push_programs", "receive_programs"]

GRANULE_ROWS = 128  # rows of an exchange that one flag stands for
COPY_ROWS = 128  # rows and columns of one block of a copy: with 32 warps 64 KB in flight a program, and no spills
COPY_WIDTH = 256
EXCHANGE_PROGRAMS = 32  # of the push, and of the kernel that takes apart what arrives

_GRANULE_BYTES = 1 << 18  # a notify costs a program some 3 us, as much as sending 128 KB
_GEMM_FLOP_PER_US = 750e6
_COPY_BYTES_PER_US = 45e3  # one program of 32 warps


def _gemm_us(m: int, n: int, k: int) -> float:
    return 2 * m * n * k / _GEMM_FLOP_PER_US


def granule_rows(m: int, block_m: int, row_bytes: int) -> int:
    """Rows that one flag stands for in a push of [m, row_bytes] to each rank: row tiles, few enough to start early."""
    rows = block_m
    while rows * row_bytes < _GRANULE_BYTES and rows < 4 * block_m and 8 * rows < m:
        rows *= 2
    return rows


def push_programs(m: int, n: int, k: int) -> int:
    """SMs that push beside a GEMM [m, k] @ [k, n]: 8 fill the links; a short GEMM waits for them more than it shares."""
    return 16 if _gemm_us(m, n, k) < 200 else 8


def receive_programs(m: int, n: int, k: int, element_bytes: int) -> int:
    """SMs that take apart what arrives during a GEMM [m, k] @ [k, n] whose whole output changes places: they keep up with it."""
    rate = m * n * element_bytes / max(_gemm_us(m, n, k), 1.0)
    return min(max(math.ceil(rate / _COPY_BYTES_PER_US) + 1, 2), 16)
