"""What the workers of the tuning tests run: every function is called on each rank."""

from __future__ import annotations

import argparse
import os
from collections.abc import Hashable, Mapping
from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.distributed as dist

from ditron_train.data.tuning_table import forget_tables
from ditron_train.ep import get_ep_context
from ditron_train.ep.grouped_gemm import choose_group_config
from ditron_train.policy import fused_results, native_results
from ditron_train.runtime.errors import SettingError
from ditron_train.sp import choices as sp_choices
from ditron_train.tools.cases import RunEnvironment
from ditron_train.tools.cases.tp_gemm import GemmCall
from ditron_train.tools.catalog import spaces_of
from ditron_train.tools.timing import Contender, Timing
from ditron_train.tools.tune import search
from ditron_train.tools.tune import tuner as tune
from ditron_train.tools.tune.ep_space import GroupGemmSpace
from ditron_train.tools.tune.space import SearchSpace
from ditron_train.tools.tune.tp_space import GemmSpace
from ditron_train.tp import ag_gemm, get_tp_context
from ditron_train.tp.ag_gemm import AgGemmPlan
from ditron_train.tp.choices import Choice, Problem, choose
from ditron_train.tp.context import TPContext
from tests.support import tool_arguments


def tune_once(path: str, *words: str) -> int | str:
    """The exit status of a run, or what it refused."""
    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    try:
        return tune.run(tool_arguments.parse(parser, ["--output", path, *words]))
    except SettingError as error:
        return str(error)


def tune_with_wrong_bits(path: str, *words: str) -> int | str:
    """The same, where copy engines are made to give other bits."""
    right = GemmSpace.run_as

    def wrong(self: GemmSpace, call: GemmCall, context: TPContext, candidate: Choice):
        run = right(self, call, context, candidate)
        is_wrong = candidate.gather.mode == "copy" and self.case.op.kind == "ag_gemm"
        return lambda *given: [one + is_wrong for one in run(*given)]

    GemmSpace.run_as = wrong
    try:
        return tune_once(path, *words)
    finally:
        GemmSpace.run_as = right


def use_table(path: str, m: int, n: int, k: int) -> tuple[Choice, bool]:
    """What ``ag_gemm`` chooses by the table at a layer's global sizes, and whether it then has native's bits."""
    world_size = dist.get_world_size()
    context = get_tp_context(None, torch.device("cpu"))
    problem = Problem("ag_gemm", m, n // world_size, k, "nt", torch.float32, world_size)
    os.environ["DITRON_TUNING"] = path
    forget_tables()
    context.prepared.clear()
    try:
        choice = choose(problem, context.machine)
        generator = torch.Generator().manual_seed(dist.get_rank())
        x = torch.randint(-3, 4, (m // world_size, k), generator=generator).float()
        weight = torch.randint(-3, 4, (n // world_size, k), generator=generator).float()
        y = ag_gemm(x, weight, context=context)
        gathered = torch.empty(m, k)
        dist.all_gather_into_tensor(gathered, x)
        prepared = next(value for value in context.prepared.values() if isinstance(value, AgGemmPlan))
        assert prepared.config == choice.config
        return choice, torch.equal(y, gathered @ weight.t())
    finally:
        del os.environ["DITRON_TUNING"]
        forget_tables()
        context.prepared.clear()


def tune_with_simulated_times(path: str, *words: str) -> int | str:
    """Narrow tiles are quickest, and stock Megatron takes longest."""

    def simulated(contenders: Mapping[Hashable, Contender], **options: object) -> dict[Hashable, Timing]:
        return {name: Timing(float(getattr(_config_of(name), "block_n", 1e4)), 0.0) for name in contenders}

    right, search.measure = search.measure, simulated
    try:
        return tune_once(path, *words)
    finally:
        search.measure = right


def _config_of(candidate: Hashable) -> object:
    return getattr(candidate, "config", candidate)


def use_choices(path: str) -> dict[str, tuple[int, int, bool]]:
    """By op: columns of the tile without a table and with it, and whether the op then has Megatron's bits."""
    place, found = RunEnvironment(dist.group.WORLD, torch.device("cpu"), torch.float32), {}
    for room, row in (("sp", "gemm_a2a"), ("sp", "a2a_gemm"), ("ep", "group_gemm"), ("ep", "group_wgrad")):
        (space,) = (one for one in spaces_of(room) if one.case.row == row and one.case.has_rows)
        call = space.case.sample(space.shapes(place.world_size, False)[0], place, 0)
        op, context = space.case.op, space.case.op.make_context(call)
        columns = []
        for table in ("off", path):
            os.environ["DITRON_TUNING"] = table
            forget_tables()
            columns.append(_config_of(chosen_for(space, call, context)).block_n)
        if room == "sp":
            context.prepared.clear()
        pairs = zip(fused_results(op, call, context), native_results(op, call), strict=True)
        found[row] = (*columns, all(torch.equal(fused, native) for fused, native in pairs))
        del os.environ["DITRON_TUNING"]
        forget_tables()
    return found


def use_counts(path: str) -> list[tuple[int, int]]:
    """Programs of an exchange, and senders of a dispatch and a combine, without a table and with it."""
    simulated = SimpleNamespace(device=torch.device("cpu"), world_size=dist.get_world_size(), num_sms=132)
    context = get_ep_context(dist.group.WORLD, simulated.device, 8, 2)
    context.move = replace(context.move, num_senders=16, num_programs=simulated.num_sms)
    found = []
    for table in ("off", path):
        os.environ["DITRON_TUNING"] = table
        forget_tables()
        counts = [sp_choices.exchange_programs(op, 32, 256, simulated) for op in ("to_heads", "to_sequence")]
        found.append([*counts, *(context.senders(op, 32) for op in ("dispatch", "combine"))])
    del os.environ["DITRON_TUNING"]
    forget_tables()
    return list(zip(*found, strict=True))


def chosen_for(space: SearchSpace, call: object, context: object) -> object:
    """What the op itself would choose."""
    if isinstance(space, GroupGemmSpace):
        sizes = (len(call.weights), call.x.shape[0], *call.weights[0].shape)
        return choose_group_config(space.table_op, *sizes, call.x.dtype, "interpreter", call.x.device)
    op, layout = space.table_op.split()
    rows = call.x.shape[0] // (1 if op == "gemm_a2a" else context.world_size)
    return sp_choices.choose(sp_choices.Product(op, layout, rows, *call.weight.shape, call.x.dtype), context)
