"""Times of GEMMs, grouped GEMMs, attention and passes over memory on one GPU, in us.

A GEMM is counted in waves of tiles, and a long one is slowed down by its power.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from ditron_train.data.device_profiles import Machine
from ditron_train.data.rates import MachineRates
from ditron_train.gemm.configs import HOPPER_SQUARE_RATE, GemmConfig, choose_config

FP8_TARGETS = ("sm_90", "interpreter")  # where the fused path multiplies operands of FP8
_SHORT_RATE = 0.97  # with a stage less
_WIDE_COLUMNS = 256
_DEEP_STAGES = 4
_BACKWARD_FLOPS = 2.5  # of the attention's forward: it is computed anew, and four products stand behind two


def gemm_us(m: int, n: int, k: int, config: GemmConfig, num_programs: int, num_sms: int, rates: MachineRates) -> float:
    """A tile GEMM on ``num_programs`` of ``num_sms`` multiprocessors: waves of tiles, at the rate of such tiles."""
    return throttled_us(num_waves(m, n, config, num_programs) * tile_us(k, config, num_sms, rates), rates)


def throttled_us(busy_us: float, rates: MachineRates) -> float:
    """How long it takes what would take ``busy_us`` at the clock of a short GEMM."""
    return busy_us * (1 + rates.gemm_throttle * math.log2(max(busy_us / rates.gemm_throttled_from_us, 1.0)))


def num_waves(m: int, n: int, config: GemmConfig, num_programs: int) -> float:
    """In units of a whole tile; a last wave that is computed in halves takes half a tile, at the rate of square
    ones."""
    num_whole = config.num_whole_tiles(m, n, num_programs)
    return -(-num_whole // num_programs) + (0.5 / HOPPER_SQUARE_RATE if num_whole < config.num_tiles(m, n) else 0.0)


def tile_us(k: int, config: GemmConfig, num_sms: int, rates: MachineRates) -> float:
    """One tile on one multiprocessor, all others at work, too."""
    rate = rates.gemm_flop_per_us / num_sms * (rates.fp8_speed if config.operand_bytes == 1 else 1.0)
    if config.block_n < _WIDE_COLUMNS:
        rate *= HOPPER_SQUARE_RATE
    if config.num_stages < _DEEP_STAGES:
        rate *= _SHORT_RATE
    return 2 * config.block_m * config.block_n * k / rate


def _config(m: int, n: int, k: int, dtype: torch.dtype, machine: Machine) -> GemmConfig:
    """Tiles as of the fused path; those of FP8 if the fused path has none: of 16 bits."""
    is_known = dtype.itemsize > 1 or machine.target in FP8_TARGETS
    config = choose_config(m, n, k, dtype if is_known else torch.bfloat16, machine.target, machine.num_sms)
    return config if dtype.itemsize > 1 else replace(config, operand_bytes=1)


def cublas_us(
    m: int, n: int, k: int, machine: Machine, rates: MachineRates, dtype: torch.dtype = torch.bfloat16
) -> float:
    """C [m, n] = A [m, k] @ B [k, n] by cuBLAS, which is as quick as the tiles that `choose_config` takes."""
    config = _config(m, n, k, dtype, machine)
    return rates.launch_us + gemm_us(m, n, k, config, machine.num_sms, machine.num_sms, rates)


def grouped_us(
    groups: Sequence[tuple[int, int, int]], machine: Machine, rates: MachineRates, dtype: torch.dtype = torch.bfloat16
) -> float:
    """GEMMs (m, n, k) of a rank's experts one behind another, whose last waves overlap; empty ones take nothing.

    Each reads weights of its own: little is multiplied for a byte, and memory holds the tiles up."""
    tiles, elements = 0.0, 0.0
    for m, n, k in groups:
        if min(m, n, k) > 0:
            elements += m * k + k * n + m * n
            config = _config(m, n, k, dtype, machine)
            tiles += config.num_tiles(m, n) * tile_us(k, config, machine.num_sms, rates)
    if not tiles:
        return 0.0
    memory_us = elements * dtype.itemsize / (rates.memory_gbps * 1e3)
    return rates.launch_us + throttled_us(tiles / machine.num_sms, rates) + rates.memory_share * memory_us


def attention_us(
    num_tokens: int, num_heads: float, channels: int, rates: MachineRates, *, keys: int | None = None, batch: int = 1,
    backward: bool = False,
) -> float:  # fmt: skip
    """Causal attention over sequences of ``num_tokens``, to the last ``keys`` (default: all) before each, without
    scores in memory."""
    keys = num_tokens if keys is None else min(keys, num_tokens)
    flops = 4.0 * (num_tokens - keys / 2) * keys * num_heads * channels * batch
    if backward:
        return rates.launch_us + _BACKWARD_FLOPS * flops / (rates.attention_backward_tflops * 1e6)
    return rates.launch_us + flops / (rates.attention_tflops * 1e6)


def pass_us(num_bytes: float, rates: MachineRates, *, reorders: bool = False) -> float:
    """One kernel that reads and writes ``num_bytes`` together, in order or not."""
    gbps = rates.reorder_gbps if reorders else rates.memory_gbps
    return rates.launch_us / 2 + num_bytes / (gbps * 1e3)
