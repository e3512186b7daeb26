"""How an AG-GEMM, GEMM-RS or GEMM-AR runs at a shape: the one place where tile sizes and ways of moving data are
looked up.

First a table (the user's, ``DITRON_TUNING``, or the one that ships for this GPU), else the cost model. Every rank
reads the same table and computes the same model, so all ranks make the same choice without communication (whether
cuBLAS may multiply rank by rank is agreed on by ``TPContext.choose``).

The cost model estimates an op's time, native and fused, from the rates of a machine:

    native   = GEMM + collective, one after the other
    limit    = max(GEMM, bytes on the wire / link rate)
    AG-GEMM  = each program's tiles one after another, in the order of arrival, none before its rows have arrived; or
               cuBLAS's product of each rank's rows, likewise
    GEMM-RS  = GEMM, longer by what the stores of each wave of tiles hold it up, and not before its bytes have left;
               then the sum. In chunks: their GEMMs, each chunk's bytes behind it and behind one another, the first's
               in halves if the links are last; then the sum, of the last source alone if its bytes come long after
               the others'
    GEMM-AR  = as its choice says: cuBLAS's GEMM and the stores of one kernel; or the GEMMs of its chunks, each chunk's
               bytes to every peer behind it, and the sum of all; or GEMM-RS in chunks, then a gather and a copy

A GEMM is counted in waves of tiles, and a long one is slowed down by its power. ``tests/tools/tune``
compares it with committed rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch

from ditron_train.costs.estimate import Estimate
from ditron_train.costs.exchanges import one_node, ring_us
from ditron_train.costs.products import cublas_us, num_waves, throttled_us, tile_us
from ditron_train.data.device_profiles import Machine, known_rates
from ditron_train.data.rates import MachineRates
from ditron_train.data.tuning_table import active_table, shape_class
from ditron_train.gemm.configs import (
    HOPPER_SQUARE_RATE,
    GemmConfig,
    as_count,
    as_power_of_two,
    choose_config,
    config_entry,
    config_of_entry,
    config_variants,
)
from ditron_train.gemm.operands import FP8_DTYPES, result_dtype
from ditron_train.runtime.errors import SettingError

Op = Literal["ag_gemm", "gemm_rs", "gemm_ar"]
#: The most bytes of a result that a GEMM-AR exchanges by stores.
PUSH_BYTES = 4 << 20
Layout = Literal["nt", "nn"]
# How partial sums of a GEMM-RS are sent: stored by its epilogue, or by copy engines after a GEMM for the rows of each
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
        """The op's name in a table."""
        return f"{self.op} {self.layout}{' fp8' if self.is_fp8 else ''}"

    @property
    def is_fp8(self) -> bool:
        """Whether the operands are FP8."""
        return self.dtype in FP8_DTYPES

    @property
    def result_bytes(self) -> int:
        """Bytes of an element of C."""
        return result_dtype(self.dtype).itemsize

    @property
    def moved_bytes(self) -> int:
        """Bytes of an element of what is sent: A or C."""
        return self.dtype.itemsize if self.op == "ag_gemm" else self.result_bytes

    @property
    def shape_class(self) -> str:
        """The shape's class in a table."""
        return shape_class(self.m, self.n, self.k)


@dataclass(frozen=True)
class Choice:
    """Launch constants of one op at one shape. They change the time, never the bits.

    Attributes:
        config: Tile sizes.
        gather: AG-GEMM: how rows are sent. GEMM-AR: how partial sums are sent, stored after cuBLAS's GEMM by
            ``push_programs``, or by copy engines in chunks of rows, each after its own GEMM.
        reduce_rows: GEMM-RS that stores: rows of a block that is added up at once; at most ``config.block_m``.
        scatter: GEMM-RS: how partial sums are sent.
        rounds: GEMM-AR: 1: every rank gets all partial sums; 2: a GEMM-RS in chunks, then a gather.
        by_library: AG-GEMM, GEMM-RS by copy engines: cuBLAS multiplies the rows of each rank, instead of tiles.
        use_native: Whether native was faster than every choice when this was measured. The ops themselves do not read
            it.
        source: ``table``, ``model`` or ``default``.
    """

    config: GemmConfig
    gather: GatherPlan = GatherPlan("copy")
    reduce_rows: int = 32
    scatter: ScatterMode = "store"
    rounds: int = 1
    by_library: bool = False
    use_native: bool = False
    source: str = "default"


_PUSH_PROGRAMS = (4, 6, 8, 12, 16)  # few leave the GEMM whole waves, many keep up with the links
_PUSH_BESIDE_GEMM = 0.72  # of its rate alone is what a multiprocessor pushes while the others multiply
_PUSH_OF_LINK = 0.79  # of a copy engine's rate is the most that multiprocessors push then
_PUSHED_CHUNKS = 4  # of a shard: what a program that pushes has sent before it goes on to the next flag block
_STORE_STALL = 0.45  # of the time that the links take for the stores of one wave, whatever the tile's products take
_SHORT_US = 400.0  # so long an op takes, three times what the host needs to enqueue its parts one by one
_MIN_FOR_PARTS = 4  # ranks: with fewer one source is most of what there is to add
_PASSES_BEHIND_LAST = 4  # over a rank's rows: the sum so far, the last source, own partial sums, the result
_EXCHANGE_US = 10.0  # of an all-reduce by one kernel's stores, beside its bytes


def rates_of(machine: Machine) -> MachineRates:
    """Rates from the table, else from the device's profile, else from that of its kind of device.

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
    """Times of ``problem``: native, GEMM and collective one after the other; and fused, as ``choice`` says, which
    takes at least as long as the GEMM and as the bytes on the wire."""
    gemm, comm = _cublas_us(problem, machine, rates), collective_us(problem, rates)
    limit = max(gemm, wire_bytes(problem) / (rates.link_gbps * 1e3))
    fused = {"ag_gemm": _ag_gemm_us, "gemm_rs": _gemm_rs_us, "gemm_ar": _gemm_ar_us}[problem.op]
    return Estimate(gemm + comm, max(fused(problem, choice, machine, rates), limit))


def is_short(problem: Problem, choice: Choice, machine: Machine) -> bool:
    """Whether the op is so short that a training step of such ops may be CPU-bound."""
    return predict(problem, choice, machine, rates_of(machine)).ditron_us < _SHORT_US


def _send_rate(plan: GatherPlan, rates: MachineRates) -> float:
    """Bytes per us that leave a rank."""
    if plan.mode == "copy":
        return rates.link_gbps * 1e3
    return min(_PUSH_BESIDE_GEMM * plan.push_programs * rates.push_sm_gbps, _PUSH_OF_LINK * rates.link_gbps) * 1e3


def _by_rank_us(problem: Problem, machine: Machine, rates: MachineRates) -> float:
    """An AG-GEMM by cuBLAS: the product of each rank's rows behind the one before, and not before they are there."""
    world_size = problem.world_size
    each_us = _cublas_us(replace(problem, m=problem.m // world_size), machine, rates)
    shard_us = problem.m * problem.k * problem.dtype.itemsize / world_size / (rates.link_gbps * 1e3) + rates.chunk_us
    end_us = each_us
    for sent in range(1, world_size):
        end_us = max(end_us, rates.start_us + sent * shard_us) + each_us
    return end_us


def _ag_gemm_us(problem: Problem, choice: Choice, machine: Machine, rates: MachineRates) -> float:
    if choice.by_library:
        return _by_rank_us(problem, machine, rates)
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
    """When the last tile is done: program p takes tiles p, p + num_programs, ... in the order of arrival, each not
    before its rows have arrived (``arrivals_us`` [ranks * chunks]); then the halves of the remaining tiles, likewise.

    All row tiles of a group are needed at its start.
    """
    tiles_n = -(-problem.n // config.block_n)
    shard_tiles_m = problem.m / config.block_m / problem.world_size
    num_tiles = config.num_tiles(problem.m, problem.n)
    num_whole = config.num_whole_tiles(problem.m, problem.n, num_programs)

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
    # One pass over the rows that a rank owns.
    own_us = problem.m / world_size * problem.n * problem.result_bytes / (rates.memory_gbps * 1e3)
    reduce_us = (world_size + 1) * own_us
    if choice.scatter == "store":
        return _stored_us(problem, choice, machine, rates) + reduce_us
    multiplied_us, sent_us = _chunks_us(problem, choice, machine, rates)
    last_us = _PASSES_BEHIND_LAST * own_us if _in_parts(world_size, multiplied_us, sent_us) else reduce_us
    if sent_us > multiplied_us:
        num_first = first_rows(problem.m // world_size, problem.n, choice.config, machine)
        _, sent_us = _chunks_us(problem, choice, machine, rates, num_first)
    return max(multiplied_us + reduce_us, sent_us + last_us) + rates.launch_us


def chunk_rows_of(num_rows: int, choice: Choice) -> int:
    """Rows of a chunk of a GEMM-AR: whole row tiles, in about as many chunks as the choice says."""
    tiles = -(-num_rows // choice.config.block_m)
    return -(-tiles // choice.gather.num_chunks) * choice.config.block_m


def _gemm_ar_us(problem: Problem, choice: Choice, machine: Machine, rates: MachineRates) -> float:
    world_size, m, n = problem.world_size, problem.m, problem.n
    num_bytes, link_rate = m * n * problem.dtype.itemsize, rates.link_gbps * 1e3
    pass_us = num_bytes / (rates.memory_gbps * 1e3)
    reduce_us = (world_size + 1) * pass_us
    if choice.gather.mode == "push":
        is_small = num_bytes <= PUSH_BYTES
        sent_us = (world_size - 1) * num_bytes / link_rate if is_small else math.inf
        return _cublas_us(problem, machine, rates) + _EXCHANGE_US + sent_us + reduce_us
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
    return rates.launch_us + lost_us + max(done_us + reduce_us, sent_us + reduce_us * sizes[-1] / m)


def links_are_last(problem: Problem, choice: Choice, machine: Machine) -> bool:
    """Whether the transfers of a GEMM-RS in chunks finish after its GEMMs."""
    multiplied_us, sent_us = _chunks_us(problem, choice, machine, rates_of(machine))
    return sent_us > multiplied_us


def sums_in_parts(problem: Problem, choice: Choice, machine: Machine) -> bool:
    """Whether a GEMM-RS in chunks adds up all sources but the last before the rows of the last have arrived."""
    return _in_parts(problem.world_size, *_chunks_us(problem, choice, machine, rates_of(machine)))


def _in_parts(world_size: int, multiplied_us: float, sent_us: float) -> bool:
    return world_size >= _MIN_FOR_PARTS and sent_us > multiplied_us


def first_rows(num_rows: int, n: int, config: GemmConfig, machine: Machine) -> int:
    """How many of a chunk's ``num_rows`` rows are multiplied and sent before the others if transfers finish last: half
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
    """When the last chunk's GEMM is done, and when the last transfer is. ``num_first``: how many rows of the first
    chunk are sent before its others; None: all at once. A single rank transfers nothing."""
    world_size, rank_rows = problem.world_size, problem.m // problem.world_size
    rank_bytes = rank_rows * problem.n * problem.result_bytes
    waves = num_waves(rank_rows, problem.n, choice.config, machine.num_sms)
    busy_us = world_size * waves * tile_us(problem.k, choice.config, machine.num_sms, rates)
    rank_us = rates.launch_us + throttled_us(busy_us, rates) / world_size
    # Chunks done by then, and how much of one it is.
    parts = [(float(position), 1.0) for position in range(1, world_size)]
    if not parts:
        return rank_us, 0.0
    if num_first is not None and num_first < rank_rows:
        share = num_first / rank_rows
        parts[:1] = [(share, share), (1.0, 1.0 - share)]
    sent_us = rates.start_us
    for done, of_chunk in parts:
        sent_us = max(sent_us, done * rank_us) + of_chunk * rank_bytes / (rates.link_gbps * 1e3) + rates.chunk_us
    return world_size * rank_us, sent_us


def default_choice(problem: Problem, machine: Machine) -> Choice:
    """The start of every search: the tile with the fewest waves, copy engines, one chunk for each shard."""
    config = choose_config(problem.m, problem.n, problem.k, problem.dtype, machine.target, machine.num_sms)
    gather = GatherPlan("push", push_programs=1) if machine.target == "interpreter" else GatherPlan("copy")
    if problem.op == "gemm_ar":
        gather = _ar_plans(problem)[0]
    # Larger blocks are quicker; with 8 ranks 64 rows spill registers (docs/measurements/tp.md).
    reduce_rows = 64 if problem.world_size <= 4 else 32
    return Choice(config, gather, reduce_rows=min(reduce_rows, config.block_m))


def _ar_plans(problem: Problem) -> list[GatherPlan]:
    """Plans of a GEMM-AR in one round: stores if there is little to send, else copy engines in chunks.

    A product with little to send cannot be cut into chunks: cuBLAS splits the sums of a product with few rows, and
    differently for each size of a chunk."""
    if problem.m * problem.n * problem.dtype.itemsize <= PUSH_BYTES:
        return [GatherPlan("push", push_programs=programs) for programs in (64, 16)]
    return [GatherPlan("copy", num_chunks=chunks) for chunks in (4, 8, 16, 2, 1)]


def transfer_variants(problem: Problem, machine: Machine, base: Choice) -> list[Choice]:
    """``base`` with other ways to move its data: copy engines or SMs, their number, chunks, rows of a ring-order
    reduction."""
    if problem.op == "gemm_ar":
        variants = [replace(base, gather=plan) for plan in _ar_plans(problem)[1:]]
        if problem.world_size > 2 and base.gather.mode == "copy":
            variants.append(replace(base, gather=GatherPlan("copy"), rounds=2))
        return variants
    if problem.op == "gemm_rs":
        rows = (16, 32, 64) if machine.target != "interpreter" else (16, 32)
        variants = [
            replace(base, reduce_rows=count)
            for count in rows
            if count <= base.config.block_m and count != base.reduce_rows
        ]
        return [*variants, replace(base, scatter="copy")] if problem.world_size > 1 else variants
    plans = [GatherPlan("copy", num_chunks=chunks) for chunks in (1, 2, 4)]
    plans += [
        GatherPlan("push", push_programs=programs)
        for programs in ((1,) if machine.target == "interpreter" else (8, 12, 16))
    ]
    return [replace(base, gather=plan) for plan in plans if plan != base.gather]


def with_library(choice: Choice) -> Choice:
    """``choice`` with cuBLAS's products, whose rows or partial sums copy engines send."""
    return replace(choice, gather=GatherPlan("copy"), scatter="copy", by_library=True)


def tile_variants(machine: Machine, base: Choice) -> list[Choice]:
    """``base`` with other tile sizes, stages and groups."""
    configs = config_variants(base.config, machine.target)
    return [replace(base, config=config, reduce_rows=min(base.reduce_rows, config.block_m)) for config in configs]


def choose(problem: Problem, machine: Machine) -> Choice:
    """The choice for a shape: a table's if the shape's class was measured, else the cost model's.

    Raises:
        SettingError: ``DITRON_TUNING`` names a file that is unreadable, not a table, or for another kind of device.
        NotSupportedError: No GEMM for this type or device.
    """
    table = active_table(machine.device)
    entry = None if table is None else table.find(problem.table_op, problem.world_size, problem.shape_class)
    if entry is not None:
        return _choice_of(entry, problem)
    return modelled_choice(problem, machine)


def choose_without_copies(problem: Problem, machine: Machine) -> Choice:
    """`choose` if copies to peers take multiprocessors: as many programs push as the cost model finds best beside
    the GEMM, and tiles are stored by it. Raises as `choose`."""
    choice, rates = replace(choose(problem, machine), by_library=False), rates_of(machine)
    if problem.op == "gemm_rs":
        return replace(choice, scatter="store")
    pushed = [replace(choice, gather=GatherPlan("push", count)) for count in _PUSH_PROGRAMS]
    return min(pushed, key=lambda one: predict(problem, one, machine, rates).ditron_us)


def modelled_choice(problem: Problem, machine: Machine) -> Choice:
    """The choice that is fastest by the cost model.

    Raises:
        SettingError, NotSupportedError: As ``choose``.
    """
    return _modelled(problem, machine, rates_of(machine))


@lru_cache(maxsize=4096)
def _modelled(problem: Problem, machine: Machine, rates: MachineRates) -> Choice:
    base = default_choice(problem, machine)
    if machine.target == "interpreter":
        return base
    # The first of equals, so the default is kept if the model sees no difference.
    tried = [base, *transfer_variants(problem, machine, base)]
    tried += [variant for choice in tried for variant in tile_variants(machine, choice)]
    best = min(tried, key=lambda choice: predict(problem, choice, machine, rates).ditron_us)
    return replace(best, source="model")


def prefers_native(
    op: Op, m: int, n: int, k: int, layout: Layout, dtype: torch.dtype, world_size: int, device: str
) -> bool:
    """Whether the table says that native is faster than every choice that was tried at this shape."""
    table = active_table(device)
    problem = Problem(op, m, n, k, layout, dtype, world_size)
    entry = None if table is None else table.find(problem.table_op, world_size, problem.shape_class)
    return entry is not None and entry.get("native") is True


def entry_of(problem: Problem, choice: Choice) -> dict[str, Any]:
    """``choice`` as an entry of a table."""
    entry = config_entry(choice.config)
    if problem.op == "gemm_ar":
        entry.update(rounds=choice.rounds)
    if problem.op == "gemm_rs" and choice.scatter == "copy":
        entry.update(scatter="copy engine")
    elif problem.op == "gemm_rs":
        entry.update(scatter="SM store", reduce_rows=choice.reduce_rows)
    elif choice.gather.mode == "copy":
        entry.update(gather="copy engine", chunks=choice.gather.num_chunks)
    else:
        entry.update(gather="SM push", push_sms=choice.gather.push_programs)
    if choice.by_library:
        entry["products"] = "cuBLAS"
    entry["native"] = choice.use_native
    return entry


def _choice_of(entry: dict[str, Any], problem: Problem) -> Choice:
    """Inverse of ``entry_of``."""
    try:
        config = replace(config_of_entry(entry), operand_bytes=1 if problem.is_fp8 else 2)
        is_native, has_tiles = bool(entry.get("native")), entry.get("products", "tiles") == "tiles"
        choice = Choice(config, by_library=not has_tiles, use_native=is_native, source="table")
        if problem.op == "gemm_ar":
            choice = replace(choice, rounds=min(as_count(entry["rounds"]), 2))
        if problem.op == "gemm_rs":
            if entry["scatter"] == "copy engine":
                return replace(choice, scatter="copy")
            if entry["scatter"] == "SM store":
                key = "reduce_rows" if "reduce_rows" in entry else "fold_rows"  # as until 0.1
                return replace(choice, reduce_rows=min(as_power_of_two(entry[key], 16), config.block_m))
            raise ValueError(f"scatter is {entry['scatter']!r}")
        if entry["gather"] == "copy engine":
            return replace(choice, gather=GatherPlan("copy", num_chunks=as_count(entry["chunks"])))
        if entry["gather"] == "SM push":
            return replace(choice, gather=GatherPlan("push", push_programs=as_count(entry["push_sms"])))
        raise ValueError(f"gather is {entry['gather']!r}")
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        where = f"{problem.world_size} ranks, {problem.table_op}, {problem.shape_class}"
        raise SettingError(f"the tuning table's entry of {where} cannot be read: {error!r}") from None
