"""How many SMs move data beside a GEMM, and in which blocks."""

from __future__ import annotations

import math

import torch

from ditron_train.gemm.configs import GemmConfig, choose_config
from ditron_train.stream.op_context import OpContext

__all__ = [
    "COPY_ROWS",
    "COPY_WIDTH",
    "EXCHANGE_PROGRAMS",
    "GRANULE_ROWS",
    "PUSH_COUNTS",
    "deal_of",
    "granule_rows",
    "num_push_programs",
    "receive_programs",
    "tiles_of_program",
]

GRANULE_ROWS = 128  # rows of an exchange that one flag stands for
COPY_ROWS = 128  # rows and columns of one block of a copy: with 32 warps 64 KB in flight a program, and no spills
COPY_WIDTH = 256
EXCHANGE_PROGRAMS = 32  # of the push, and of the kernel that takes apart what arrives

_GRANULE_BYTES = 1 << 18  # a notify costs a program some 3 us, as much as sending 128 KB
_GEMM_FLOP_PER_US = 750e6
_COPY_BYTES_PER_US = 45e3  # one program
_LINK_BYTES_PER_US = 340e3
_START_US = 20.0  # start signals, and the first granules' way
PUSH_COUNTS = (4, 8, 12, 16, 24, 32)
PULL = True
FLATTEN = True


def _gemm_us(m: int, n: int, k: int) -> float:
    return 2 * m * n * k / _GEMM_FLOP_PER_US


def granule_rows(m: int, block_m: int, row_bytes: int) -> int:
    """Rows that one flag stands for in a push of [m, row_bytes] to each rank: row tiles, few enough to start early."""
    rows = block_m
    while rows * row_bytes < _GRANULE_BYTES and rows < 4 * block_m and 8 * rows < m:
        rows *= 2
    return rows


def tiles_of_program(program: int, num_programs: int, num_push: int, num_early_tiles: int, num_tiles: int) -> list[int]:
    """Twin of the deal in ``a2a_gemm_kernel``: the tiles of one program, in order."""
    num_early = num_programs - num_push
    first = program - num_push
    early = range(first, num_early_tiles, num_early) if first >= 0 else range(0)
    return [*early, *range(num_early_tiles + program, num_tiles, num_programs)]


def deal_of(
    m: int, n: int, k: int, world_size: int, config: GemmConfig, num_programs: int, element_bytes: int, keep: bool
) -> tuple[int, int]:
    """(programs that push first, tiles dealt to the others alone) of an A2A-GEMM [m, k] @ [k, n].

    The pushing programs come to the GEMM when the push (and with ``keep`` a copy of what arrived) is done. All numbers of
    them and of whole waves without them are weighed: the last tile should be done early.
    """
    num_tiles = config.num_tiles(m, n)
    most = num_programs - 1
    if num_programs < 2:
        return 1, 0
    row_bytes = m * k * element_bytes
    wave_us = 2 * config.block_m * config.block_n * k / (_GEMM_FLOP_PER_US / 132)
    group_share = min(config.group_m * config.block_m / m, 1.0)  # of the rows: a group of row tiles is walked together
    best = None
    for num_push in sorted({min(count, most) for count in PUSH_COUNTS}):
        copy_us = row_bytes / (num_push * _COPY_BYTES_PER_US)
        push_us = max(copy_us, row_bytes * (world_size - 1) / world_size / _LINK_BYTES_PER_US)
        join_us = _START_US + push_us + (copy_us if keep else 0)
        num_early = num_programs - num_push
        early_us, early_tiles = 0.0, 0
        while True:
            shared_us = -(-(num_tiles - early_tiles) // num_programs) * wave_us
            end_us = max(early_us, join_us) + shared_us
            if best is None or end_us < best[0]:
                best = end_us, num_push, early_tiles
            if early_tiles == num_tiles:
                break
            early_tiles = min(early_tiles + num_early, num_tiles)
            needed_share = min(early_tiles / num_tiles + group_share, 1.0)
            early_us = max(early_us, _START_US + needed_share * push_us) + wave_us
    return best[1:]


def num_push_programs(m: int, n: int, k: int, world_size: int, dtype: torch.dtype, context: OpContext) -> int:
    """SMs that push first in an A2A-GEMM [m, k] @ [k, n] with the configuration of its shape."""
    config = choose_config(m, n, k, dtype, context.target, context.num_sms)
    return deal_of(m, n, k, world_size, config, context.num_sms, dtype.itemsize, False)[0]


def receive_programs(m: int, n: int, k: int, element_bytes: int) -> int:
    """SMs that take apart what arrives during a GEMM [m, k] @ [k, n] whose whole output changes places: they keep up with it."""
    rate = m * n * element_bytes / max(_gemm_us(m, n, k), 1.0)
    return min(max(math.ceil(rate / _COPY_BYTES_PER_US) + 1, 2), 16)
