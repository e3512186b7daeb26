"""What the workers of the tests of the combined 1F1B schedule run: training steps whose paths the policy alternates,
under a clock that tests advance."""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections import Counter
from unittest import mock

import torch
import torch.distributed as dist
from ep_workers import combined_steps, lines_logged, schedule_models, whole_step

from tests.support.decisions import comparing_on_cpu

MICROBATCHES = 5


class Event:
    """An event on a clock that tests advance."""

    now_us = 0.0

    def record(self):
        self.at_us = Event.now_us

    def query(self):
        return True

    def elapsed_time(self, end):
        return (end.at_us - self.at_us) / 1e3


class _DelayedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, pending):
        ctx.save_for_backward(x, weight)
        ctx.pending = pending
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.pending.append((x, grad))
        return grad @ weight, None, None


def delay_wgrads(model, computed):
    """Weight gradients of the layers' linear layers wait for ``backward_dw``, as Transformer Engine's do; ``computed``
    counts them."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    def forward(linear, x, *_, **__):
        return _DelayedLinear.apply(x, linear.weight, linear.pending), None

    def backward_dw(linear):
        x, grad = linear.pending.pop(0)
        wgrad = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        linear.weight.grad = wgrad if linear.weight.grad is None else linear.weight.grad + wgrad
        computed["wgrads"] += 1

    for linear in model.decoder.modules():
        if isinstance(linear, (ColumnParallelLinear, RowParallelLinear)):
            linear.pending = []
            linear.forward = functools.partial(forward, linear)
            linear.backward_dw = functools.partial(backward_dw, linear)


@contextlib.contextmanager
def clocked_dispatches(us, calls, is_late=False, fails_at=None):
    """Under a clock on which a dispatch takes ``us``: natively, fused. ``calls`` gets whether each was fused.

    Args:
        us: Of this rank.
        calls: A list for the dispatches of the current step.
        is_late: Whether this rank sleeps at random.
        fails_at: The dispatch that raises, counted from 1 over all steps.
    """
    from ditron_train.megatron.ep.dispatcher import DitronMoEAlltoAllTokenDispatcher
    from ditron_train.policy import job_times

    dispatch, draw, number = DitronMoEAlltoAllTokenDispatcher.token_dispatch, random.Random(dist.get_rank()), 0

    def token_dispatch(self, *tokens):
        nonlocal number
        if not self.asks_policy:  # of a probe
            return dispatch(self, *tokens)
        number += 1
        calls.append(self.ep_context is not None)
        Event.now_us += us[calls[-1]] * (1 + 0.01 * draw.random())
        if is_late and dist.get_rank() == number % 2:
            time.sleep(0.1 * draw.random())
        if number == fails_at:
            raise RuntimeError("in the middle")
        return dispatch(self, *tokens)

    with (
        mock.patch.object(DitronMoEAlltoAllTokenDispatcher, "token_dispatch", token_dispatch),
        mock.patch.object(job_times, "_event", Event),
    ):
        yield


def timed_steps(us_of_ranks, num_steps=7, is_late=False, fails_at=None, options=None):
    """Training steps by schedule plans, whose dispatches take so many us on each rank natively and fused.

    Returns:
        Which steps have other losses or gradients than native ones; the path of each step (None: both); whether a
        whole forward and backward afterwards is bitwise identical; how many weight gradients were delayed; what the
        log says of the policy's decisions.
    """
    from ditron_train.policy import gate

    gate.forget("ep")
    options = {"num_layers": 2, "moe_layer_freq": [0, 1], **(options or {})}
    calls, wrong, paths, computed = [], [], [], Counter()
    with schedule_models(**options) as (native, fused), lines_logged() as lines, comparing_on_cpu(repeats=1):
        if options.get("delay_wgrad_compute"):
            for model in (native, fused):
                delay_wgrads(model, computed)
        wanted = combined_steps(native, MICROBATCHES)
        with clocked_dispatches(us_of_ranks[dist.get_rank()], calls, is_late, fails_at):
            for step in range(num_steps):
                try:
                    results = combined_steps(fused, MICROBATCHES)
                    wrong += [step] * (not all(map(torch.equal, wanted, results)))
                except RuntimeError as error:
                    assert str(error) == "in the middle"
                    fused.zero_grad()
                taken = set(calls)
                paths.append(taken.pop() if len(taken) == 1 else None)
                calls.clear()
        whole = not options.get("delay_wgrad_compute")
        is_equal = whole and all(map(torch.equal, whole_step(native), whole_step(fused)))
    return wrong, paths, is_equal, computed["wgrads"], [line for line in lines if "in pieces" in line]
