"""Runs one linear layer natively and with our ops on the same data, and compares every bit of every result."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from ditron_train.megatron.tp.spec import route
from ditron_train.policy import gate
from ditron_train.tools.bench.megatron_tp import native_linear
from ditron_train.tools.session import BenchSession
from ditron_train.tools.verify.cases import Case
from ditron_train.tools.verify.outcome import RESULTS, Outcome, Stress
from ditron_train.tp import TPContext, column_linear, row_linear

__all__ = ["compare"]

_BUFFERS = ("tp.gathered", "tp.partials")


def compare(session: BenchSession, case: Case, stress: Stress, *, seed: int, timed: bool) -> Outcome:
    """Compares ``case`` as often as ``stress`` says (collective).

    Raises:
        SettingError: The shape does not divide over the ranks.
        PeerTimeoutError: A peer did not come.
    """
    shapes = case.local_shapes(session.world_size)
    x, weight = (session.values(shape, case.dtype, seed + i) for i, shape in enumerate(shapes))
    group = dist.group.WORLD
    gate.forget("tp")  # thousands of random shapes are more than a job would ever ask for
    context = route(case.kind, x, weight, group=group, sequence_parallel=True)
    if context is None:
        return Outcome(case, False, dict.fromkeys(RESULTS, 0))
    different = torch.zeros(len(RESULTS), dtype=torch.int64, device=session.device)
    late = np.random.default_rng(seed)
    for turn in range(stress.repeat):
        if turn:
            x, weight = (session.values(shape, case.dtype, seed + 2 * turn + i) for i, shape in enumerate(shapes))
        native = _run_native(session, case, x, weight, seed)
        _disturb(session, context, stress, late)
        ours = _run_ours(session, case, x, weight, seed, context)
        different += _differences(ours, native)
    context.synchronize()  # raises what an op recorded
    num_different = dict(zip(RESULTS, different.tolist()))
    if not timed:
        return Outcome(case, True, num_different)
    timings = session.measure(
        {
            "native": lambda index: _run_native(session, case, x, weight, seed),
            "ditron": lambda index: _run_ours(session, case, x, weight, seed, context),
        }
    )
    return Outcome(case, True, num_different, timings["native"].median_us, timings["ditron"].median_us)


def _differences(ours: list[torch.Tensor], native: list[torch.Tensor]) -> torch.Tensor:
    """1 for every result of which a bit differs on any rank."""
    mine = torch.tensor([int(not torch.equal(a, b)) for a, b in zip(ours, native)], device=ours[0].device)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return mine


def _run_native(
    session: BenchSession, case: Case, x: torch.Tensor, weight: torch.Tensor, seed: int
) -> list[torch.Tensor]:
    layer = native_linear("ag_gemm" if case.kind == "column" else "gemm_rs")
    return _forward_backward(session, layer, x, weight, seed)


def _run_ours(
    session: BenchSession, case: Case, x: torch.Tensor, weight: torch.Tensor, seed: int, context: TPContext
) -> list[torch.Tensor]:
    function = column_linear if case.kind == "column" else row_linear
    return _forward_backward(session, lambda a, b: function(a, b, context=context), x, weight, seed)


def _forward_backward(
    session: BenchSession,
    layer: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    seed: int,
) -> list[torch.Tensor]:
    """Output, gradient of the input, gradient of the weight."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = layer(x, weight)
    grad = session.values(tuple(y.shape), y.dtype, seed + 9)
    return [y.detach(), *torch.autograd.grad(y, [x, weight], grad)]


def _disturb(session: BenchSession, context: TPContext, stress: Stress, late: np.random.Generator) -> None:
    if stress.poison:
        context.synchronize()
        dist.barrier()
        for name in _BUFFERS:
            held = context.arena.tensor(name, (1,), torch.uint8).capacity_bytes
            context.arena.tensor(name, (held,), torch.uint8).local.fill_(0xFF)  # NaN in every floating type
        if session.device.type == "cuda":
            torch.cuda.synchronize(session.device)
        dist.barrier()
    stress.delay(session, late)
