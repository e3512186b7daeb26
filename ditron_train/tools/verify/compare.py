"""Runs one linear layer natively and by the fused path on the same data, and compares every bit of every
result."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from ditron_train.megatron.tp.linear_call import LinearCall
from ditron_train.megatron.tp.routing import op_of, unsupported_reason_kind
from ditron_train.policy import fused_results, gate, native_results
from ditron_train.policy.uninitialized import FillNewTensors
from ditron_train.tools.cases import RunEnvironment, Shape
from ditron_train.tools.cases.tp_linear import LinearCase
from ditron_train.tools.session import BenchSession, same_result
from ditron_train.tools.verify.cases import Case
from ditron_train.tools.verify.outcome import RESULTS, Outcome, Stress
from ditron_train.tp import TPContext

_BUFFERS = ("tp.gathered", "tp.partials")


def compare(session: BenchSession, case: Case, stress: Stress, *, seed: int, timed: bool) -> Outcome:
    """Compares ``case`` as often as ``stress`` says, and if ``timed`` twice with new tensors filled, with NaN and with
    finite values (collective).

    Raises:
        SettingError: The shape does not divide over the ranks.
        PeerTimeoutError: A peer did not arrive.
    """
    if unsupported_reason_kind(case.kind, case.sequence_parallel) is not None:
        return Outcome(case, False, dict.fromkeys(RESULTS, 0))
    op = op_of(case.kind, case.sequence_parallel)
    call = _sample(session, LinearCase(op), case, seed)
    gate.forget("tp")  # thousands of random shapes are more than a job would ever ask for
    context = gate.context_for(op, call)
    if context is None:
        return Outcome(case, False, dict.fromkeys(RESULTS, 0))
    different = torch.zeros(len(RESULTS), dtype=torch.int64, device=session.device)
    late = np.random.default_rng(seed)
    for turn in range(stress.repeat):
        if turn:
            call = _sample(session, LinearCase(op), case, seed + turn)
        native = native_results(op, call)
        _disturb(session, context, stress, late)
        different += _differences(fused_results(op, call, context), native)
        for is_finite in (False, True) if timed and turn == 0 else ():
            with FillNewTensors(is_finite=is_finite):  # what it does not write is not read either
                filled = fused_results(op, call, context)
            different += _differences(filled, native)
    context.synchronize()  # raises what an op recorded
    num_different = dict(zip(RESULTS, different.tolist()))
    if not timed:
        return Outcome(case, True, num_different)
    contenders = {
        "native": lambda index: native_results(op, call),
        "fused": lambda index: fused_results(op, call, context),
    }
    return Outcome(case, True, num_different, session.measure(contenders))


def _sample(session: BenchSession, linear: LinearCase, case: Case, seed: int) -> LinearCall:
    world = dist.group.WORLD
    assert world is not None
    shape = Shape(case.name, {"m": case.m, "n": case.n, "k": case.k})
    return linear.sample(shape, RunEnvironment(world, session.device, case.dtype), seed)


def _differences(fused: list[torch.Tensor], native: list[torch.Tensor]) -> torch.Tensor:
    """1 for every result of which a bit differs on any rank."""
    mine = torch.tensor(
        [int(not same_result(a, b)) for a, b in zip(fused, native, strict=True)], device=fused[0].device
    )
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return mine


def _disturb(session: BenchSession, context: TPContext, stress: Stress, late: np.random.Generator) -> None:
    if stress.poison:
        context.synchronize()
        dist.barrier()
        for name in _BUFFERS:
            held = max(context.arena.capacity_bytes(name), 1)
            context.arena.tensor(name, (held,), torch.uint8).local.fill_(0xFF)  # NaN in every floating type
        if session.device.type == "cuda":
            torch.cuda.synchronize(session.device)
        dist.barrier()
    stress.delay(session, late)
