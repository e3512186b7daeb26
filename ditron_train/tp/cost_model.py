"""Estimates of an op's time, natively and ours, from the rates of a machine: what chooses where nothing was measured.

    native   = GEMM + collective, one after the other
    limit    = max(GEMM, bytes on the wire / link rate)
    AG-GEMM  = each program's tiles one after another, in the order of arrival, none before its rows have arrived
    GEMM-RS  = GEMM, longer by what the stores of each wave of tiles hold it up, and not before its bytes have left;
               then the fold. In chunks: their GEMMs, each chunk's bytes behind it and behind one another, the first's
               in halves where the links are last; then the fold, of the last source alone where its bytes come long
               after the others'
    GEMM-AR  = as its choice says: cuBLAS's GEMM and the stores of one kernel; or the GEMMs of its chunks, each chunk's
               bytes to every peer behind it, and the sum of all; or GEMM-RS in chunks, then a gather and a copy

A GEMM is counted in waves of tiles, and a long one is slowed down by its power. ``bench tp --model`` shows the error
at every shape (``docs/measurements/tp.md``).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ditron_train.costs import Estimate, cublas_us, num_waves, one_node, ring_us, throttled_us, tile_us
from ditron_train.gemm.configs import HOPPER_SQUARE_RATE, GemmConfig
from ditron_train.runtime.profiles import Machine, known_rates
from ditron_train.runtime.rates import MachineRates
from ditron_train.runtime.tuning_table import active_table
from ditron_train.tp.problem import PUSH_BYTES, Choice, GatherPlan, Problem

_PUSH_BESIDE_GEMM = 0.72  # of its rate alone is what a multiprocessor pushes while the others multiply
_PUSH_OF_LINK = 0.79  # of a copy engine's rate is the most that multiprocessors push then
_PUSHED_CHUNKS = 4  # of a shard: what a program that pushes has sent before it goes on to the next granule
_STORE_STALL = 0.45  # of the time that the links take for the stores of one wave, whatever the tile's products take
_SHORT_US = 400.0  # so long an op takes, three times what the host needs to enqueue its parts one by one
_FEWEST_FOR_PARTS = 4  # ranks: with fewer one source is most of what there is to add
_PASSES_BEHIND_LAST = 4  # over own rows: the sum so far, the last source, own partial sums, the result
_EXCHANGE_US = 10.0  # of an all-reduce by one kernel's stores, beside its bytes


def rates_of(machine: Machine) -> MachineRates:
    """Rates that the table measured, else those of the device's profile, else of its kind of device's.

    Raises:
        SettingError: As ``choices.choose``.
    """
    table = active_table(machine.device)
    if table is not None and table.rates is not None:
        return table.rates
    return known_rates(machine)


def wire_bytes(problem: Problem) -> float:
    """Bytes that each rank receives over the links."""
    columns = problem.k if problem.op == "ag_gemm" else problem.n
    columns *= 2 if problem.op == "gemm_ar" else 1  # scattered, then gathered
    return problem.m * columns * problem.moved_bytes * (problem.world_size - 1) / problem.world_size


def collective_us(problem: Problem, rates: MachineRates) -> float:
    """NCCL's all-gather, reduce-scatter, or all-reduce, which is both; nothing on one rank."""
    columns = problem.k if problem.op == "ag_gemm" else problem.n
    passes = 2 if problem.op == "gemm_ar" else 1
    num_bytes = passes * problem.m * columns * problem.moved_bytes
    return ring_us(num_bytes, one_node(problem.world_size), rates)


def _cublas_us(problem: Problem, machine: Machine, rates: MachineRates) -> float:
    return cublas_us(problem.m, problem.n, problem.k, machine, rates, problem.dtype)


def predict(problem: Problem, choice: Choice, machine: Machine, rates: MachineRates) -> Estimate:
    """``problem`` natively, GEMM and collective one after the other, and run as ``choice`` says: at best as long as
    the GEMM, or as the bytes on the wire."""
    gemm, comm = _cublas_us(problem, machine, rates), collective_us(problem, rates)
    limit = max(gemm, wire_bytes(problem) / (rates.link_gbps * 1e3))
    ours = {"ag_gemm": _ag_gemm_us, "gemm_rs": _gemm_rs_us, "gemm_ar": _gemm_ar_us}[problem.op]
    return Estimate(gemm + comm, max(ours(problem, choice, machine, rates), limit), gemm, comm)


def is_short(problem: Problem, choice: Choice, machine: Machine) -> bool:
    """Whether a training step of such ops may wait for its host."""
    return predict(problem, choice, machine, rates_of(machine)).ditron_us < _SHORT_US


def _send_rate(plan: GatherPlan, rates: MachineRates) -> float:
    """Bytes per us that leave a rank."""
    if plan.mode == "copy":
        return rates.link_gbps * 1e3
    return min(_PUSH_BESIDE_GEMM * plan.push_programs * rates.push_sm_gbps, _PUSH_OF_LINK * rates.link_gbps) * 1e3


def _ag_gemm_us(problem: Problem, choice: Choice, machine: Machine, rates: MachineRates) -> float:
    world_size, plan, config = problem.world_size, choice.gather, choice.config
    by_push = plan.mode == "push"
    num_chunks = _PUSHED_CHUNKS if by_push else plan.num_chunks
    num_programs = max(
        1, min(machine.num_sms - (plan.push_programs if by_push else 1), config.num_tiles(problem.m, problem.n))
    )
    waves = num_waves(problem.m, problem.n, config, num_programs)
    each_us = throttled_us(waves * tile_us(problem.k, config, machine.num_sms, rates), rates) / waves
    shard_us = problem.m * problem.k * problem.dtype.itemsize / world_size / _send_rate(plan, rates)
    arrivals_us = np.zeros(world_size * num_chunks)
    sent = np.arange(1, (world_size - 1) * num_chunks + 1)
    arrivals_us[num_chunks:] = rates.start_us + sent * (shard_us / num_chunks + (0.0 if by_push else rates.chunk_us))
    end_us = _last_tile_us(problem, config, num_programs, each_us, arrivals_us, num_chunks)
    return rates.launch_us + end_us + rates.copy_share * min(waves * each_us, (world_size - 1) * shard_us)


def _last_tile_us(
    problem: Problem, config: GemmConfig, num_programs: int, whole_us: float, arrivals_us: np.ndarray, num_chunks: int
) -> float:
    """When the last tile is done: program p takes tiles p, p + num_programs, ... of the order of arrival, each not
    before its rows are there (``arrivals_us`` [ranks * chunks]); then the halves of tiles that are left, likewise.

    All row tiles of a group are wanted at its start.
    """
    tiles_n = -(-problem.n // config.block_n)
    shard_tiles_m = problem.m / config.block_m / problem.world_size
    num_tiles, num_whole = (
        config.num_tiles(problem.m, problem.n),
        config.num_whole_tiles(problem.m, problem.n, num_programs),
    )

    def there_us(tile: np.ndarray) -> np.ndarray:
        step = np.minimum(tile // (shard_tiles_m * tiles_n), problem.world_size - 1)
        group = (tile - step * shard_tiles_m * tiles_n) // (config.group_m * tiles_n)
        last_row = np.minimum((group + 1) * config.group_m, shard_tiles_m) - 1
        part = np.clip(last_row * num_chunks // shard_tiles_m, 0, num_chunks - 1)
        return arrivals_us[(step * num_chunks + part).astype(np.int64)]

    free_us = np.zeros(num_programs)
    halves = num_whole + np.arange(2 * (num_tiles - num_whole)) // 2
    for tiles, each_us in ((np.arange(num_whole), whole_us), (halves, 0.5 * whole_us / HOPPER_SQUARE_RATE)):
        for first in range(0, len(tiles), num_programs):
            wave = tiles[first : first + num_programs]
            free_us[: len(wave)] = np.maximum(free_us[: len(wave)], there_us(wave)) + each_us
    return float(free_us.max())


def _gemm_rs_us(problem: Problem, choice: Choice, machine: Machine, rates: MachineRates) -> float:
    world_size = problem.world_size
    own_us = (
        problem.m / world_size * problem.n * problem.result_bytes / (rates.memory_gbps * 1e3)
    )  # one pass over own rows
    fold_us = (world_size + 1) * own_us
    if choice.scatter == "store":
        return _stored_us(problem, choice, machine, rates) + fold_us
    multiplied_us, sent_us = _chunks_us(problem, choice, machine, rates)
    last_us = _PASSES_BEHIND_LAST * own_us if _in_parts(world_size, multiplied_us, sent_us) else fold_us
    if sent_us > multiplied_us:
        num_first = first_rows(problem.m // world_size, problem.n, choice.config, machine)
        _, sent_us = _chunks_us(problem, choice, machine, rates, num_first)
    return max(multiplied_us + fold_us, sent_us + last_us) + rates.launch_us


def chunk_rows_of(num_rows: int, choice: Choice) -> int:
    """Rows of a chunk of a GEMM-AR: whole row tiles, in about as many chunks as the choice says."""
    tiles = -(-num_rows // choice.config.block_m)
    return -(-tiles // choice.gather.num_chunks) * choice.config.block_m


def _gemm_ar_us(problem: Problem, choice: Choice, machine: Machine, rates: MachineRates) -> float:
    world_size, m, n = problem.world_size, problem.m, problem.n
    num_bytes, link_rate = m * n * problem.dtype.itemsize, rates.link_gbps * 1e3
    pass_us = num_bytes / (rates.memory_gbps * 1e3)
    fold_us = (world_size + 1) * pass_us
    if choice.gather.mode == "push":
        is_small = num_bytes <= PUSH_BYTES
        sent_us = (world_size - 1) * num_bytes / link_rate if is_small else math.inf
        return _cublas_us(problem, machine, rates) + _EXCHANGE_US + sent_us + fold_us
    if choice.rounds == 2:
        scattered = replace(choice, scatter="copy")
        first_us = _gemm_rs_us(replace(problem, op="gemm_rs"), scattered, machine, rates)
        gathered_us = (world_size - 1) * (num_bytes / world_size / link_rate + rates.chunk_us)
        return first_us + rates.start_us + gathered_us + 2 * pass_us
    rows = chunk_rows_of(m, choice)
    sizes = [min(rows, m - first) for first in range(0, m, rows)]
    waves = [num_waves(size, n, choice.config, machine.num_sms) for size in sizes]
    busy_us = sum(waves) * tile_us(problem.k, choice.config, machine.num_sms, rates)
    chunk_us = throttled_us(busy_us, rates) / sum(waves)
    done_us, sent_us = 0.0, rates.start_us
    for size, of_chunk in zip(sizes, waves):
        done_us += of_chunk * chunk_us + rates.launch_us
        sent_us = max(sent_us, done_us) + (world_size - 1) * (size / m * num_bytes / link_rate + rates.chunk_us)
    lost_us = rates.copy_share * min(done_us, (world_size - 1) * num_bytes / link_rate)
    return rates.launch_us + lost_us + max(done_us + fold_us, sent_us + fold_us * sizes[-1] / m)


def links_are_last(problem: Problem, choice: Choice, machine: Machine) -> bool:
    """Whether the links of a GEMM-RS in chunks are busy for longer than its GEMMs take."""
    multiplied_us, sent_us = _chunks_us(problem, choice, machine, rates_of(machine))
    return sent_us > multiplied_us


def sums_in_parts(problem: Problem, choice: Choice, machine: Machine) -> bool:
    """Whether a GEMM-RS in chunks adds up all sources but the last while that one's rows are still on their way."""
    return _in_parts(problem.world_size, *_chunks_us(problem, choice, machine, rates_of(machine)))


def _in_parts(world_size: int, multiplied_us: float, sent_us: float) -> bool:
    return world_size >= _FEWEST_FOR_PARTS and sent_us > multiplied_us


def first_rows(num_rows: int, n: int, config: GemmConfig, machine: Machine) -> int:
    """Of a chunk of ``num_rows`` rows, those that are multiplied and sent before the others where links are last: half
    of its row tiles, if that takes fewer waves, else all."""
    half = -(-num_rows // config.block_m) // 2 * config.block_m
    waves, of_half = (math.ceil(num_waves(rows, n, config, machine.num_sms)) for rows in (num_rows, half))
    return half if 0 < of_half < waves else num_rows


def _stored_us(problem: Problem, choice: Choice, machine: Machine, rates: MachineRates) -> float:
    config, world_size = choice.config, problem.world_size
    waves = -(-config.num_tiles(problem.m, problem.n) // machine.num_sms)  # all of whole tiles
    each_us = throttled_us(waves * tile_us(problem.k, config, machine.num_sms, rates), rates) / waves
    wave_bytes = (
        machine.num_sms * config.block_m * config.block_n * problem.result_bytes * (world_size - 1) / world_size
    )
    stall_us = _STORE_STALL * wave_bytes / (rates.link_gbps * 1e3)
    return rates.start_us + max(waves * (each_us + stall_us), wire_bytes(problem) / (rates.link_gbps * 1e3))


def _chunks_us(
    problem: Problem, choice: Choice, machine: Machine, rates: MachineRates, num_first: int | None = None
) -> tuple[float, float]:
    """When the last chunk's GEMM is done, and when the last transfer is. ``num_first``: rows of the first chunk that
    are sent before its others; None: all at once. One rank transfers nothing."""
    world_size, own_rows = problem.world_size, problem.m // problem.world_size
    rank_bytes = own_rows * problem.n * problem.result_bytes
    waves = num_waves(own_rows, problem.n, choice.config, machine.num_sms)
    busy_us = world_size * waves * tile_us(problem.k, choice.config, machine.num_sms, rates)
    rank_us = rates.launch_us + throttled_us(busy_us, rates) / world_size
    parts = [
        (float(position), 1.0) for position in range(1, world_size)
    ]  # chunks done by then, and how much of one it is
    if not parts:
        return rank_us, 0.0
    if num_first is not None and num_first < own_rows:
        share = num_first / own_rows
        parts[:1] = [(share, share), (1.0, 1.0 - share)]
    sent_us = rates.start_us
    for done, of_chunk in parts:
        sent_us = max(sent_us, done * rank_us) + of_chunk * rank_bytes / (rates.link_gbps * 1e3) + rates.chunk_us
    return world_size * rank_us, sent_us
