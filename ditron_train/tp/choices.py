"""How an AG-GEMM or GEMM-RS runs at a shape: the one place where tile sizes and ways of moving data are looked up.

First a table (the user's, ``DITRON_TUNING``, or the one that ships for this GPU), else the cost model. Every rank
reads the same table and computes the same model, so all choose alike without talking.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from ditron_train.gemm.configs import (
    as_count,
    as_power_of_two,
    choose_config,
    config_entry,
    config_of_entry,
    config_variants,
)
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.profiles import Machine
from ditron_train.runtime.rates import MachineRates
from ditron_train.runtime.tuning_table import active_table
from ditron_train.tp.cost_model import predict, rates_of
from ditron_train.tp.problem import PUSH_BYTES, Choice, GatherPlan, Layout, Op, Problem


def default_choice(problem: Problem, machine: Machine) -> Choice:
    """Where every search starts: the tile of fewest waves, copy engines, one chunk a shard."""
    config = choose_config(problem.m, problem.n, problem.k, problem.dtype, machine.target, machine.num_sms)
    gather = GatherPlan("push", push_programs=1) if machine.target == "interpreter" else GatherPlan("copy")
    if problem.op == "gemm_ar":
        gather = _ar_plans(problem)[0]
    # Larger blocks are quicker; with 8 ranks 64 rows spill registers (docs/measurements/tp.md).
    fold_rows = 64 if problem.world_size <= 4 else 32
    return Choice(config, gather, fold_rows=min(fold_rows, config.block_m))


def _ar_plans(problem: Problem) -> list[GatherPlan]:
    """Of a GEMM-AR in one round: stores where there is little to send, copy engines in chunks elsewhere.

    What little is cannot be cut, either: cuBLAS splits the sums of a product with few rows, and another one for each
    chunk."""
    if problem.m * problem.n * problem.dtype.itemsize <= PUSH_BYTES:
        return [GatherPlan("push", push_programs=programs) for programs in (64, 16)]
    return [GatherPlan("copy", num_chunks=chunks) for chunks in (4, 8, 16, 2, 1)]


def transfer_variants(problem: Problem, machine: Machine, base: Choice) -> list[Choice]:
    """Other ways for ``base`` to move its data: copy engines or SMs, how many, chunks, rows of a fold."""
    if problem.op == "gemm_ar":
        variants = [replace(base, gather=plan) for plan in _ar_plans(problem)[1:]]
        if problem.world_size > 2 and base.gather.mode == "copy":
            variants.append(replace(base, gather=GatherPlan("copy"), rounds=2))
        return variants
    if problem.op == "gemm_rs":
        rows = (16, 32, 64) if machine.target != "interpreter" else (16, 32)
        variants = [
            replace(base, fold_rows=count)
            for count in rows
            if count <= base.config.block_m and count != base.fold_rows
        ]
        return [*variants, replace(base, scatter="copy")] if problem.world_size > 1 else variants
    plans = [GatherPlan("copy", num_chunks=chunks) for chunks in (1, 2, 4)]
    plans += [
        GatherPlan("push", push_programs=programs)
        for programs in ((1,) if machine.target == "interpreter" else (8, 12, 16))
    ]
    return [replace(base, gather=plan) for plan in plans if plan != base.gather]


def tile_variants(machine: Machine, base: Choice) -> list[Choice]:
    """``base`` with other tile sizes, stages and groups."""
    configs = config_variants(base.config, machine.target)
    return [replace(base, config=config, fold_rows=min(base.fold_rows, config.block_m)) for config in configs]


def choose(problem: Problem, machine: Machine) -> Choice:
    """The choice of a shape: a table's where its class was measured, else the cost model's.

    Raises:
        SettingError: ``DITRON_TUNING`` names a file that is unreadable, no table, or of another kind of device.
        NotSupportedError: No GEMM for this type or device.
    """
    table = active_table(machine.device)
    entry = None if table is None else table.find(problem.table_op, problem.world_size, problem.shape_class)
    if entry is not None:
        return _choice_of(entry, problem)
    return modelled_choice(problem, machine)


def modelled_choice(problem: Problem, machine: Machine) -> Choice:
    """What the cost model takes for the quickest.

    Raises:
        SettingError, NotSupportedError: As ``choose``.
    """
    return _modelled(problem, machine, rates_of(machine))


@lru_cache(maxsize=4096)
def _modelled(problem: Problem, machine: Machine, rates: MachineRates) -> Choice:
    base = default_choice(problem, machine)
    if machine.target == "interpreter":
        return base
    # Of equals the first, so the default stands where the model sees no difference.
    tried = [base, *transfer_variants(problem, machine, base)]
    tried += [variant for choice in tried for variant in tile_variants(machine, choice)]
    best = min(tried, key=lambda choice: predict(problem, choice, machine, rates).ditron_us)
    return replace(best, source="model")


def prefers_native(
    op: Op, m: int, n: int, k: int, layout: Layout, dtype: torch.dtype, world_size: int, device: str
) -> bool:
    """Whether the table says that native is quicker than every choice that was tried at this shape."""
    table = active_table(device)
    problem = Problem(op, m, n, k, layout, dtype, world_size)
    entry = None if table is None else table.find(problem.table_op, world_size, problem.shape_class)
    return entry is not None and entry.get("native") is True


def entry_of(problem: Problem, choice: Choice) -> dict[str, Any]:
    """``choice`` as it stands in a table."""
    entry = config_entry(choice.config)
    if problem.op == "gemm_ar":
        entry.update(rounds=choice.rounds)
    if problem.op == "gemm_rs" and choice.scatter == "copy":
        entry.update(scatter="copy engine")
    elif problem.op == "gemm_rs":
        entry.update(scatter="SM store", fold_rows=choice.fold_rows)
    elif choice.gather.mode == "copy":
        entry.update(gather="copy engine", chunks=choice.gather.num_chunks)
    else:
        entry.update(gather="SM push", push_sms=choice.gather.push_programs)
    entry["native"] = choice.use_native
    return entry


def _choice_of(entry: dict[str, Any], problem: Problem) -> Choice:
    """Inverse of ``entry_of``."""
    try:
        config = replace(config_of_entry(entry), operand_bytes=1 if problem.is_fp8 else 2)
        choice = Choice(config, use_native=bool(entry.get("native")), source="table")
        if problem.op == "gemm_ar":
            choice = replace(choice, rounds=min(as_count(entry["rounds"]), 2))
        if problem.op == "gemm_rs":
            if entry["scatter"] == "copy engine":
                return replace(choice, scatter="copy")
            if entry["scatter"] == "SM store":
                return replace(choice, fold_rows=min(as_power_of_two(entry["fold_rows"], 16), config.block_m))
            raise ValueError(f"scatter is {entry['scatter']!r}")
        if entry["gather"] == "copy engine":
            return replace(choice, gather=GatherPlan("copy", num_chunks=as_count(entry["chunks"])))
        if entry["gather"] == "SM push":
            return replace(choice, gather=GatherPlan("push", push_programs=as_count(entry["push_sms"])))
        raise ValueError(f"gather is {entry['gather']!r}")
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        where = f"{problem.world_size} ranks, {problem.table_op}, {problem.shape_class}"
        raise SettingError(f"the tuning table's entry of {where} cannot be read: {error!r}") from None
