"""Tile sizes of the GEMM kernels. They change the time, never the bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ditron_train.gemm.operands import FP8_DTYPES
from ditron_train.runtime.device import HOPPER_AND_NEWER
from ditron_train.runtime.errors import NotSupportedError


class Tile(NamedTuple):
    """A ``GemmConfig`` as one constexpr of a kernel; ``transpose_b``: B is given as it is stored in a Linear's
    weight."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    transpose_b: bool
    split_store: bool


@dataclass(frozen=True)
class GemmConfig:
    """Launch constants of one GEMM.

    Attributes:
        block_m: Rows of an output tile.
        block_n: Columns of an output tile.
        block_k: Depth of one step of the K loop.
        num_warps: Warps of a program.
        num_stages: Steps of the K loop in flight.
        group_m: Row tiles that are walked together, for reuse in L2.
        operand_bytes: Of an element of A and B: 1 of FP8. Results have 2.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    operand_bytes: int = 2

    @property
    def split_store(self) -> bool:
        """Whether an output tile is stored in two halves: wide tiles need the shared memory for a stage more."""
        return self.block_n >= 256

    @property
    def store_block(self) -> tuple[int, int]:
        """Block of the output's descriptor."""
        return self.block_m, self.block_n // 2 if self.split_store else self.block_n

    def b_block(self, transpose_b: bool, *, halved: bool = False) -> tuple[int, int]:
        """Block of B's descriptor, for whole tiles or for halves of them."""
        columns = self.block_n // 2 if halved else self.block_n
        return (columns, self.block_k) if transpose_b else (self.block_k, columns)

    def tile(self, *, transpose_b: bool) -> Tile:
        """What a kernel is compiled for."""
        return Tile(self.block_m, self.block_n, self.block_k, self.group_m, transpose_b, self.split_store)

    @property
    def launch_options(self) -> dict[str, int]:
        """Keywords of a ``KernelLaunch``."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}

    def tile_constants(self, *, transpose_b: bool) -> dict[str, int | bool]:
        """``tile`` as a constant each."""
        return {name.upper(): value for name, value in self.tile(transpose_b=transpose_b)._asdict().items()}

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program: the steps in flight and one block to be stored."""
        step = (self.block_m + self.block_n) * self.block_k
        return self.operand_bytes * self.num_stages * step + 2 * self.store_block[0] * self.store_block[1]

    def num_tiles(self, m: int, n: int) -> int:
        """Output tiles of an [m, n] result."""
        return -(-m // self.block_m) * -(-n // self.block_n)

    def num_whole_tiles(self, m: int, n: int, num_programs: int) -> int:
        """How many of them are computed whole: all but a last wave that is at most half full, if tiles can be
        halved."""
        num_tiles = self.num_tiles(m, n)
        tail = num_tiles % num_programs
        return num_tiles - tail if self.split_store and 2 * tail <= num_programs else num_tiles


# Hopper: the first, with its tail halved, runs at cuBLAS's speed; the second at 0.87 of its rate but with half the
# tile, which gives small shapes more programs (docs/measurements/tp.md).
_HOPPER_WIDE = GemmConfig(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=4)
_HOPPER_SQUARE = GemmConfig(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=4)
# Of FP8 operands: as many bytes a step, twice the depth, which is what a split accumulator sums at a time.
_HOPPER_WIDE_FP8 = replace(_HOPPER_WIDE, block_k=128, num_stages=3, operand_bytes=1)
_HOPPER_SQUARE_FP8 = replace(_HOPPER_SQUARE, block_k=128, operand_bytes=1)
_HOPPER = {2: (_HOPPER_WIDE, _HOPPER_SQUARE), 1: (_HOPPER_WIDE_FP8, _HOPPER_SQUARE_FP8)}  # by operand_bytes
#: What square tiles reach of the rate of wide ones, measured on Hopper.
HOPPER_SQUARE_RATE = 0.87
_AMPERE = GemmConfig(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=3)
_CDNA = GemmConfig(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=2)


def _interpreter_config(m: int, n: int, k: int) -> GemmConfig:
    """The interpreter pays by the launch of a NumPy call: the largest tiles that are not mostly padding."""

    def fit(size: int, largest: int) -> int:
        block = 16
        while block < min(size, largest):
            block *= 2
        return block

    return GemmConfig(fit(m, 128), fit(n, 128), fit(k, 64), num_warps=4, num_stages=1)


def _hopper_config(m: int, n: int, num_sms: int, operand_bytes: int) -> GemmConfig:
    """The tile whose waves take less time; the unit is the time of one wide tile."""
    wide, square = _HOPPER[operand_bytes]
    num_tiles = wide.num_tiles(m, n)
    num_whole = wide.num_whole_tiles(m, n, num_sms)
    half_time = 0.5 / HOPPER_SQUARE_RATE
    wide_time = -(-num_whole // num_sms) + (half_time if num_whole < num_tiles else 0.0)
    square_time = -(-square.num_tiles(m, n) // num_sms) * half_time
    return wide if num_whole > 0 and wide_time <= square_time else square


@lru_cache(maxsize=4096)
def choose_config(m: int, n: int, k: int, dtype: torch.dtype, target: str, num_sms: int = 132) -> GemmConfig:
    """Picks tile sizes for C [m, n] = A [m, k] @ B [k, n].

    Args:
        m: Rows of the result.
        n: Columns of the result.
        k: Length of the sums.
        dtype: Type of both operands.
        target: As ``runtime.device.kernel_target``.
        num_sms: Programs that run at a time.

    Raises:
        NotSupportedError: fp32 and other types on a GPU: only bf16 and fp16, and FP8 on Hopper, are known to equal
            cuBLAS there.
    """
    if target == "interpreter":
        return _interpreter_config(m, n, k)
    if dtype in FP8_DTYPES:
        if target != "sm_90":
            raise NotSupportedError(f"GEMM of {dtype} on {target}: only on Hopper")
        return _hopper_config(m, n, num_sms, 1)
    if dtype not in (torch.bfloat16, torch.float16):
        raise NotSupportedError(f"GEMM of {dtype} on {target}: only bfloat16 and float16")
    if target in HOPPER_AND_NEWER:
        return _hopper_config(m, n, num_sms, 2)
    if target == "sm_80":
        return _AMPERE
    if target == "hip":
        return _CDNA
    raise NotSupportedError(f"no GEMM configuration for target {target!r}")


# What a block may have at most, of the smallest device of each kind.
_SHARED_KIB = {"sm_80": 99, "sm_90": 227, "sm_100": 227}


def config_variants(base: GemmConfig, target: str) -> list[GemmConfig]:
    """Configurations worth trying instead of ``base`` on this kind of device, nearest first, without ``base``; all fit
    into its shared memory, or take no more than ``base``."""
    if target == "interpreter":
        narrow = replace(base, block_n=base.block_n // 2)
        return [narrow] if narrow.block_n >= 16 else []
    variants = [replace(base, group_m=group_m) for group_m in (4, 16) if group_m != base.group_m]
    variants += [replace(base, num_stages=stages) for stages in (base.num_stages - 1,) if stages >= 2]
    if target in HOPPER_AND_NEWER:
        wide, square = _HOPPER[base.operand_bytes]
        variants.append(square if base.block_n == wide.block_n else wide)
    elif target == "sm_80":
        variants += [replace(base, num_stages=4), replace(base, block_n=256, num_stages=2)]
    if target not in _SHARED_KIB:
        return [config for config in variants if config.shared_bytes <= base.shared_bytes]
    return [config for config in variants if config.shared_bytes <= _SHARED_KIB[target] << 10]


def config_entry(config: GemmConfig) -> dict[str, Any]:
    """``config`` as it is written in a tuning table."""
    return {
        "tile": f"{config.block_m}x{config.block_n}x{config.block_k}",
        "warps": config.num_warps,
        "stages": config.num_stages,
        "group_m": config.group_m,
    }


def config_of_entry(entry: dict[str, Any]) -> GemmConfig:
    """Inverse of ``config_entry``; raises KeyError, ValueError, AttributeError or TypeError for what is none."""
    block_m, block_n, block_k = (as_power_of_two(int(size), 16) for size in entry["tile"].split("x"))
    warps, stages, group_m = as_power_of_two(entry["warps"], 1), as_count(entry["stages"]), as_count(entry["group_m"])
    return GemmConfig(block_m, block_n, block_k, warps, stages, group_m)


def as_power_of_two(value: object, least: int) -> int:
    """``value`` of a table's entry; raises ValueError for what is no power of two from ``least`` up."""
    if not isinstance(value, int) or value < least or value & (value - 1):
        raise ValueError(f"{value} is no power of two from {least} up")
    return value


def as_count(value: object) -> int:
    """Likewise a number from 1 up."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{value} is no count")
    return value
