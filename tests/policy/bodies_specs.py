"""What the workers of the specs' tests run, and an op that is declared for them alone."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ditron_train.policy import Op, fused_results, gate, native_results
from ditron_train.policy.gate import reason_all_failed
from ditron_train.runtime.errors import DitronError
from ditron_train.runtime.logs import forget_decisions
from ditron_train.runtime.values import have_same_bits, make_values
from ditron_train.symm.exchange import exchange
from ditron_train.tools.bench.megatron_ep import expert_parallel_world
from ditron_train.tools.cases import BenchCase, RunEnvironment, Shape
from ditron_train.tools.catalog import PACKAGES, add_case, cases_of, remove_case
from ditron_train.tools.postmortem.files import read_folder
from ditron_train.tools.tune.space import SearchSpace
from ditron_train.tp import all_gather, get_tp_context
from tests.support import tool_arguments
from tests.support.fused_adam import FusedAdam
from tests.support.model_parallel import model_parallel


class GatherCall(NamedTuple):
    x: torch.Tensor
    group: dist.ProcessGroup


class DoubledGather(Op):
    """Rows of all ranks, doubled."""

    name = "tp doubled_gather"
    wrong = 0.0

    def make_context(self, call):
        return get_tp_context(call.group, call.x.device)

    def inputs(self, call):
        return (call.x,)

    def native(self, call):
        def function(x):
            gathered = x.new_empty(x.shape[0] * dist.get_world_size(call.group), *x.shape[1:])
            dist.all_gather_into_tensor(gathered, x, group=call.group)
            return [2 * gathered]

        return function

    def fused(self, call, context):
        return lambda x: [2 * all_gather(x, context=context) - self.wrong]


class DoubledGatherCase(BenchCase):
    row = "doubled_gather"

    def shapes(self, world_size, on_gpu):
        return [Shape("test", {"m": 32, "n": 16, "k": 16})]

    def shapes_of_model(self, model, world_size):
        return [Shape("hidden", {"m": 32, "n": 16, "k": model.hidden})]

    def sample(self, shape, environment, seed):
        size = (shape.sizes["m"] // environment.world_size, shape.sizes["k"])
        values = make_values(size, environment.dtype, environment.device, seed=seed, rank=environment.rank)
        return GatherCall(values, environment.group)


class DoubledGatherSpace(SearchSpace):
    def candidates(self, call, context, ranked):
        return ["twice", "plus"]

    def run_as(self, call, context, candidate):
        gathered = self.case.op.fused(call, context)
        return gathered if candidate == "twice" else lambda x: [one / 2 + one / 2 for one in gathered(x)]


def run_tool_of_room(room: str, *words: str) -> int:
    """``bench`` of another room, to which the op is said to belong."""
    return run_tool(f"bench.{room}", *words, room=room)


def doctor_names_the_op() -> bool:
    """Whether the doctor has the op among those of its feature."""
    from ditron_train.tools.doctor.examination import examine

    case = DoubledGatherCase(DoubledGather())
    add_case(case)
    try:
        return any("doubled_gather" in feature.ops for feature in examine().features if feature.name == "tp")
    finally:
        remove_case(case)


def run_tool(module: str, *words: str, wrong: float = 0.0, room: str = "tp") -> int:
    """A tool's command line with the test's op among the others."""
    import importlib

    case = DoubledGatherCase(DoubledGather())
    case.op.wrong, case.op.name = wrong * dist.get_rank(), f"{room} doubled_gather"
    add_case(case, DoubledGatherSpace(case, "doubled_gather"))
    try:
        tool = importlib.import_module(f"ditron_train.tools.{module}")
        parser = argparse.ArgumentParser()
        tool.add_arguments(parser)
        return tool.run(tool_arguments.parse(parser, words))
    finally:
        remove_case(case)


def ask_gate() -> list[bool]:
    """Whether the op runs by the fused path at two shapes, one of them asked for twice, and how many were decided."""
    op, place = DoubledGather(), RunEnvironment(dist.group.WORLD, torch.device("cpu"), torch.float32)
    gate.forget()
    calls = [DoubledGatherCase(op).sample(Shape("test", {"m": m, "k": 16}), place, 0) for m in (8, 16, 8)]
    found = [gate.context_for(op, call) is not None for call in calls]
    decided = len(gate.answers("tp doubled_gather"))
    gate.forget()
    return [*found, decided == 2]


class _OfAnotherVersion(DoubledGather):
    """Its fused path calls a library whose interface is another one."""

    name = "tp other_version"

    def fused(self, call, context):
        return lambda x: [all_gather(x, a_new_name=context)]


class _Failing(DoubledGather):
    """What its probe holds does not fit beside the job, or a kernel does not fit the GPU."""

    name = "tp failing"

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def fused(self, call, context):
        raise self.error


def ask_failing_gate(error: Exception) -> str | None:
    """Why the op is native, where trying it raises ``error`` on every rank."""
    op, place = _Failing(error), RunEnvironment(dist.group.WORLD, torch.device("cpu"), torch.float32)
    gate.forget()
    return gate.answer_for(op, DoubledGatherCase(op).sample(Shape("test", {"m": 8, "k": 16}), place, 0)).reason


def ask_gate_of_another_version(on_ranks: tuple[int, ...]) -> str | None:
    """Why the op is native, where its fused path fails on these ranks."""
    op = _OfAnotherVersion() if dist.get_rank() in on_ranks else DoubledGather()
    place = RunEnvironment(dist.group.WORLD, torch.device("cpu"), torch.float32)
    gate.forget()
    return gate.answer_for(op, DoubledGatherCase(op).sample(Shape("test", {"m": 8, "k": 16}), place, 0)).reason


def warnings_of_another_version() -> list[str]:
    """What this rank warns of, where the gate is asked twice."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("ditron_train")
    forget_decisions()
    logger.addHandler(handler)
    try:
        for _ in range(2):
            assert ask_gate_of_another_version((0, 1))
    finally:
        logger.removeHandler(handler)
    return lines


def fail_during_an_exchange(on_ranks: tuple[int, ...]) -> str:
    """What becomes of an unforeseen error on these ranks if the others exchange something else."""
    if dist.get_rank() not in on_ranks:
        exchange(dist.group.WORLD, "of something else")
        return ""
    try:
        return reason_all_failed("tp test", TypeError("of one rank"), dist.group.WORLD)
    except TypeError as error:
        return f"raised: {error}"


def asked_and_recorded(on_ranks: tuple[int, ...]) -> tuple[str, object]:
    """What this rank's record says behind a failure of all ranks, behind which the job goes on."""
    assert ask_gate_of_another_version(on_ranks)
    (file,) = (one for one in read_folder(Path(os.environ["DITRON_POSTMORTEM"])) if one.rank == dist.get_rank())
    return file.state, file.error


def names_of_cases() -> list[str]:
    """Those that make up calls of their own."""
    return [case.op.name for room in PACKAGES for case in cases_of(room) if case.shapes(2, False)]


def _case(name: str) -> BenchCase:
    known = [DoubledGatherCase(DoubledGather()), *cases_of(name.split()[0])]
    return next(case for case in known if case.op.name == name)


def same_bits(name: str) -> bool:
    """Whether both paths agree on every small shape and seed."""
    with _groups_of(_case(name)):
        return _same_bits(name)


@contextlib.contextmanager
def _groups_of(case: BenchCase):
    """Megatron's groups that the op is run in; as if a FusedAdam were installed."""
    from megatron.core import optimizer

    is_expert = case.groups == "expert"
    groups = expert_parallel_world() if is_expert else model_parallel(tensor_model_parallel_size=dist.get_world_size())
    with groups, mock.patch.object(optimizer, "Adam", FusedAdam):
        yield


def _same_bits(name: str) -> bool:
    case, place = _case(name), RunEnvironment(dist.group.WORLD, torch.device("cpu"), torch.float32)
    equal = True
    for shape in case.shapes(place.world_size, False):
        for seed in range(2):
            with case.surroundings(shape):
                call = case.sample(shape, place, seed)
                if seed:
                    _negate_zeros(case.op.inputs(call))
                pairs = zip(
                    fused_results(case.op, call, case.op.make_context(call)),
                    native_results(case.op, call),
                    strict=True,
                )
                equal &= all(have_same_bits(fused, native) for fused, native in pairs)
    return equal


@torch.no_grad()
def _negate_zeros(tensors: Iterable[torch.Tensor]) -> None:
    """Of the values that are whole numbers on a CPU; what is added up to zero shows where a sum begins."""
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.masked_fill_(tensor == 0, -0.0)


def bad_calls_are_refused(name: str) -> bool:
    """Operands of other dimensions raise on every rank; a good call behind them has the right bits."""
    with _groups_of(_case(name)):
        case, place = _case(name), RunEnvironment(dist.group.WORLD, torch.device("cpu"), torch.float32)
        call = case.sample(case.shapes(place.world_size, False)[0], place, 0)
        context = case.op.make_context(call)
        with pytest.raises(DitronError):
            case.op.fused(call, context)(*(tensor.flatten() for tensor in case.op.inputs(call)))
        return _same_bits(name)
