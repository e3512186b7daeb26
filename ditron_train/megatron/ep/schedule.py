"""Schedule plans (``overlap_moe_expert_parallel_comm``): when their nodes and runs are under way.

A plan runs a layer in pieces, one microbatch's forward during another one's backward, on two streams:

    communication  combine backward      | dispatch forward, dispatch backward | combine forward
    computation    attention, counts     | experts backward, experts forward   | attention backward

**Which path.** The other microbatch's attention and experts cannot run on a probe's tensors: they accumulate into
``main_grad``, delay weight gradients, and draw random numbers. So the policy compares bits on tensors of its own, and
times whole runs of a plan (forward and backward) in the job's first steps, which alternate between the paths
(``policy.job_times.StepTimes``). Bits are equal either way.

**No deadlock.** Number the ops that wait for peers in the order in which the host launches them. Ranks run the same
plan and the same layers on the same kinds of streams, so an op has the same number on all of its ranks; messages
between pipeline stages are NCCL's, in the native order. Whatever op n waits for (its stream, an event, the host's wait
for counts, the same op on its peers) has a number of at most n. So the first op that would never end has all before it
ended on all ranks, and can lack nothing but multiprocessors.

- ``CUDA_DEVICE_MAX_CONNECTIONS=1``: kernels start in the order of launches, whatever their streams. Multiprocessors
  are held by earlier kernels alone, which end; streams of another priority are as with more connections.
- More connections: a later kernel may hold multiprocessors and wait for its peers. Such kernels are one that moves
  rows and one that exchanges counts, since both kinds are ordered each among themselves (``EPContext``), and NCCL's,
  of at most 32 blocks each. Those that move rows take no more than ``MoveConfig.num_concurrent`` multiprocessors here
  (``EPContext.run_concurrently``), so all of them and three of NCCL's collectives fit into 132. All other kernels wait
  for nothing inside, and end.

Fused tensor and context parallel layers, and experts split over tensor parallel ranks, are kernels that wait for peers
on all multiprocessors, so the argument does not hold for them: ``coverage`` keeps the dispatcher native there.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
from megatron.core.pipeline_parallel.utils import ScheduleNode

from ditron_train.policy.job_times import run_of_schedule

_running = threading.local()
_run_native = ScheduleNode._forward
_run_plans_native = TransformerModelChunkSchedulePlan.run


@functools.wraps(_run_native)
def _run(self: Any, *inputs: Any) -> Any:
    outer = in_schedule_node()
    _running.node = True
    try:
        return _run_native(self, *inputs)
    finally:
        _running.node = outer


@functools.wraps(_run_plans_native)
def _run_plans(f_schedule_plan: Any, b_schedule_plan: Any, *arguments: Any, **options: Any) -> Any:
    with run_of_schedule(f_schedule_plan is not None, b_schedule_plan is not None):
        return _run_plans_native(f_schedule_plan, b_schedule_plan, *arguments, **options)


def watch_schedule_nodes() -> None:
    """From now on nodes and runs of plans say when they run; for good, since layers that exist outlive `restore`."""
    ScheduleNode._forward = _run
    TransformerModelChunkSchedulePlan.run = staticmethod(_run_plans)


def in_schedule_node() -> bool:
    """Whether the forward of a node of a schedule plan is running in this thread."""
    return getattr(_running, "node", False)
