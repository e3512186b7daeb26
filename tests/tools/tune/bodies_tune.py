"""What the workers of the tuning tests run: every function is called on each rank."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist

from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.tuning_table import forget_tables
from ditron_train.tools.tune import tuner as tune
from ditron_train.tp import ag_gemm, get_tp_context
from ditron_train.tp.choices import Choice, Problem, choose
from ditron_train.tp.context import TPContext
from ditron_train.tp.prepared import PreparedAgGemm
from ditron_train.tp.spec import GemmCall, GemmSpec


def tune_once(path: str, *words: str) -> int | str:
    """The exit status of a run, or what it refused."""
    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    try:
        return tune.run(parser.parse_args(["--output", path, *words]))
    except SettingError as error:
        return str(error)


def tune_with_wrong_bits(path: str, *words: str) -> int | str:
    """The same, where copy engines are made to give other bits."""
    right = GemmSpec.fused_as

    def wrong(self: GemmSpec, call: GemmCall, context: TPContext, candidate: Choice):
        run = right(self, call, context, candidate)
        is_wrong = candidate.gather.mode == "copy" and self.op == "ag_gemm"
        return lambda *given: [one + is_wrong for one in run(*given)]

    GemmSpec.fused_as = wrong
    try:
        return tune_once(path, *words)
    finally:
        GemmSpec.fused_as = right


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
        prepared = next(value for value in context.prepared.values() if isinstance(value, PreparedAgGemm))
        assert prepared.config == choice.config
        return choice, torch.equal(y, gathered @ weight.t())
    finally:
        del os.environ["DITRON_TUNING"]
        forget_tables()
        context.prepared.clear()
