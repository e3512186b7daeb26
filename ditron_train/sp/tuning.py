"""Where data is moved beside a GEMM, by how many programs, and in which blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = [
    "EXCHANGE_PROGRAMS",
    "GRANULE_ROWS",
    "NARROW",
    "WIDE",
    "CopyShape",
    "copies_beside_gemm",
    "granule_rows",
    "narrow_granule_rows",
    "push_programs",
    "receive_programs",
]


@dataclass(frozen=True)
class CopyShape:
    """Rows and columns of one block of a copy, and the program that moves it; what it has in flight decides its rate."""

    rows: int
    width: int
    num_warps: int
    max_registers: int | None


WIDE = CopyShape(rows=128, width=256, num_warps=16, max_registers=None)  # on an SM of its own: 64 KB in flight, no spills
# Beside a program of a Hopper GEMM on the same SM: the 8192 registers and 3 KB of shared memory that one leaves free (8 warps
# of up to 224 registers, four stages). 8 KB in flight on each of 132 SMs fill the links; no SM is lost, and no wave gets longer.
NARROW = CopyShape(rows=16, width=256, num_warps=4, max_registers=64)

GRANULE_ROWS = 128  # rows of an exchange that one flag stands for
EXCHANGE_PROGRAMS = 32  # of the push, and of the kernel that takes apart what arrives

PULL = True
FLATTEN = True

_GRANULE_BYTES = 1 << 18  # a notify costs a program some 3 us, as much as sending 128 KB
_MOST_FLAGS = 4096
_GEMM_FLOP_PER_US = 750e6
_COPY_BYTES_PER_US = 27e3  # one program that reads from a peer


def copies_beside_gemm(target: str) -> bool:
    """Whether copies share SMs with the GEMM (``NARROW``); else they take SMs of their own (``WIDE``)."""
    return target == "sm_90"


def _gemm_us(m: int, n: int, k: int) -> float:
    return 2 * m * n * k / _GEMM_FLOP_PER_US


def granule_rows(m: int, block_m: int, row_bytes: int) -> int:
    """Rows that one flag stands for in a push of [m, row_bytes] to each rank: row tiles, few enough to start early."""
    rows = block_m
    while rows * row_bytes < _GRANULE_BYTES and rows < 4 * block_m and 8 * rows < m:
        rows *= 2
    return rows


def narrow_granule_rows(m: int, block_m: int, world_size: int) -> int:
    """The same for ``NARROW`` pushes: few rows, so that all programs share the first row tile; not too many flags to look at."""
    rows = NARROW.rows
    while world_size * m > _MOST_FLAGS * rows and rows < block_m:
        rows *= 2
    return rows


def push_programs(m: int, n: int, k: int) -> int:
    """SMs that push beside a GEMM [m, k] @ [k, n]: 8 fill the links; a short GEMM waits for them more than it shares."""
    return 16 if _gemm_us(m, n, k) < 200 else 8


def receive_programs(m: int, n: int, k: int, element_bytes: int) -> int:
    """SMs that take apart what arrives during a GEMM [m, k] @ [k, n] whose whole output changes places: they keep up with it."""
    rate = m * n * element_bytes / max(_gemm_us(m, n, k), 1.0)
    return min(max(math.ceil(rate / _COPY_BYTES_PER_US) + 1, 2), 16)
