"""How many SMs move data during a GEMM, and in which blocks; the times that led to it: ``docs/measurements/sp.md``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from ditron_train.gemm.configs import GemmConfig


@dataclass(frozen=True)
class CopyShape:
    """Rows and columns of one block of a copy; what a program has in flight decides its rate."""

    rows: int
    width: int


PUSH = CopyShape(rows=128, width=256)  # 64 KB in flight
PULL = CopyShape(rows=128, width=512)  # reads from a peer take longer: it spills a little, and is faster

FLAG_BLOCK_ROWS = 128  # rows of an exchange that one flag stands for
EXCHANGE_PROGRAMS = 32  # of the push, and of the kernel that takes apart what arrives, if no table says how many
GATHER_PROGRAMS = 16  # of a push under a weight gradient
PULL_GROUP_M = 4  # row tiles that a GEMM-A2A walks together: its rows are whole sooner

_FLAG_BLOCK_BYTES = 1 << 18  # a notify costs a program as much as sending half of it
_GEMM_FLOP_PER_US = 750e6
NUM_PUSH = 16  # programs of an A2A-GEMM that push: the best of 8, 16, 24 and 32 at three of four shapes
_PULL_BYTES_PER_US = 24e3
_GATHER_BYTES_PER_US = GATHER_PROGRAMS * 12.7e3


class Pace(NamedTuple):
    """What a deal is weighed with: of the whole GPU's GEMM, of one program that pushes (of a GEMM, with 8 warps), of
    all of them on the links, and the start signals with the first flag blocks' way."""

    flop_per_us: float
    push_bytes_per_us: float
    link_bytes_per_us: float
    start_us: float


# Kernels deal by these on every machine, so that all ranks deal alike.
_KERNELS_PACE = Pace(_GEMM_FLOP_PER_US, 14e3, 340e3, 20.0)


def _gemm_us(m: int, n: int, k: int) -> float:
    return 2 * m * n * k / _GEMM_FLOP_PER_US


def flag_block_rows(m: int, block_m: int, row_bytes: int) -> int:
    """Rows that one flag covers in a push of [m, row_bytes] to each rank: row tiles, few enough to start early."""
    rows = block_m
    while rows * row_bytes < _FLAG_BLOCK_BYTES and rows < 4 * block_m and 8 * rows < m:
        rows *= 2
    return rows


def deal_of(
    m: int,
    n: int,
    k: int,
    world_size: int,
    config: GemmConfig,
    num_programs: int,
    element_bytes: int,
    num_push: int = NUM_PUSH,
) -> tuple[int, int]:
    """(programs that push first, tiles dealt to the others alone) of an A2A-GEMM [m, k] @ [k, n]."""
    return weighed_deal(m, n, k, world_size, config, num_programs, element_bytes, num_push, _KERNELS_PACE)[:2]


def weighed_deal(
    m: int,
    n: int,
    k: int,
    world_size: int,
    config: GemmConfig,
    num_programs: int,
    element_bytes: int,
    num_push: int,
    pace: Pace,
) -> tuple[int, int, float]:
    """As `deal_of`, at another pace, and when the last tile is done, in us.

    The programs that push come to the GEMM when the push is done. All numbers of whole waves without them are weighed:
    the last tile should be done early.
    """
    num_tiles = config.num_tiles(m, n)
    row_bytes = m * k * element_bytes
    wave_us = 2 * config.block_m * config.block_n * k / (pace.flop_per_us / num_programs)
    group_share = min(config.group_m * config.block_m / m, 1.0)  # of the rows: a group of row tiles is walked together
    link_us = row_bytes * (world_size - 1) / world_size / pace.link_bytes_per_us
    push_us = pace.start_us + max(row_bytes / (num_push * pace.push_bytes_per_us), link_us)
    num_early = num_programs - num_push
    best = None
    early_us, early_tiles = 0.0, 0
    while True:
        shared_us = -(-(num_tiles - early_tiles) // num_programs) * wave_us
        end_us = max(early_us, push_us) + shared_us
        if best is None or end_us < best[0]:
            best = end_us, early_tiles
        if early_tiles == num_tiles or num_early <= 0:  # nobody is left to work early
            return num_push, best[1], best[0]
        early_tiles = min(early_tiles + num_early, num_tiles)
        needed_share = min(early_tiles / num_tiles + group_share, 1.0)
        early_us = max(early_us, needed_share * push_us) + wave_us


def receive_programs(m: int, n: int, k: int, element_bytes: int) -> int:
    """SMs that pull what a GEMM [m, k] @ [k, n] computes, whose whole output changes places: they keep up with it."""
    rate = m * n * element_bytes / max(_gemm_us(m, n, k), 1.0)
    return min(max(math.ceil(rate / _PULL_BYTES_PER_US), 2), 16)


def hides_gather(n: int, k: int, num_columns: int, element_bytes: int) -> bool:
    """Whether a weight gradient [n, k] takes longer than the push of as many rows of ``num_columns`` by
    GATHER_PROGRAMS."""
    return _gemm_us(1, n, k) >= num_columns * element_bytes / _GATHER_BYTES_PER_US
