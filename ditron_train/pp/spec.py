"""A pipeline message declared for the policy: one send and one receive around the ring of stages."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ditron_train.policy import Decision, Function, Op
from ditron_train.pp.context import PipelineContext
from ditron_train.pp.messages import Header
from ditron_train.pp.ops import exchange
from ditron_train.runtime.settings import get_settings


class MessageCall(NamedTuple):
    """Messages of one size on this stage.

    Attributes:
        context: Of the pipeline group, with slots for the size.
        num_bytes: Size of a message.
        is_alike: Whether all stages know the same size; else nothing can be compared.
        sends: Whether this stage sends to the next one.
        receives: Whether it receives from the previous one.
        data: What is sent; None: values of its own.
        received: Where NCCL puts what arrives; None: memory of its own.
    """

    context: PipelineContext
    num_bytes: int
    is_alike: bool = True
    sends: bool = True
    receives: bool = True
    data: torch.Tensor | None = None
    received: torch.Tensor | None = None


def start_natively(
    call: MessageCall, data: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup
) -> list[dist.Work]:
    """``batch_isend_irecv`` of ``data``, as megatron-core calls it; nothing if this stage has no part."""
    context, operations = call.context, []
    if call.sends:
        target = dist.get_global_rank(context.group, context.next_rank)
        operations.append(dist.P2POp(dist.isend, data, target, group))
    if call.receives:
        source = dist.get_global_rank(context.group, context.previous_rank)
        operations.append(dist.P2POp(dist.irecv, received, source, group))
    return dist.batch_isend_irecv(operations) if operations else []


def by_nccl(call: MessageCall, group: dist.ProcessGroup) -> Function:
    """A message by NCCL in ``group``: a function of what is sent."""

    def function(data: torch.Tensor) -> list[torch.Tensor]:
        received = torch.empty_like(data) if call.received is None else call.received
        for work in start_natively(call, data, received, group):
            work.wait()
        return [received if call.receives else data]

    return function


def start_fused(call: MessageCall, data: torch.Tensor) -> dict[str, Any]:
    """Our send and our posted receive of ``data``: handles by direction."""
    header = Header(tuple(data.shape), data.dtype)
    return exchange(call.context, send_next=data if call.sends else None, recv_prev=header if call.receives else None)


class MessageOp(Op[MessageCall, PipelineContext]):
    """To the next stage and from the previous one, by copy engines against NCCL's send and receive."""

    name, log_name = "pp send_recv", "pp"

    def group(self, call: MessageCall) -> dist.ProcessGroup:
        return call.context.group

    def device(self, call: MessageCall) -> torch.device:
        return call.context.device

    def key(self, call: MessageCall) -> tuple[Hashable, ...]:
        return call.num_bytes, get_settings().policy

    def make_context(self, call: MessageCall) -> PipelineContext:
        return call.context

    def decide(self, call: MessageCall, context: PipelineContext) -> Decision:
        if not call.is_alike:
            return Decision(True, "stages know different sizes", None, None, None)
        if context.device.type == "cuda":
            # All ranks make NCCL's communicator: a message alone may be its first use later.
            dist.barrier(context.group)
        decision = super().decide(call, context)
        if decision.use_ditron and context.first_of_crossings and call.sends and call.receives:
            # One block of NCCL's keeps up with more of them if both directions share a link, not in one alone.
            firsts, rank = context.first_of_crossings, context.rank
            decision = super().decide(call._replace(sends=rank in firsts, receives=rank - 1 in firsts), context)
        return decision

    def describe_shape(self, call: MessageCall) -> str:
        return f"messages of {call.num_bytes} bytes: "

    def describe(self, call: MessageCall, context: PipelineContext) -> str:
        return f"{self.name} {call.num_bytes} bytes" + ("" if call.sends and call.receives else " one way")

    def inputs(self, call: MessageCall) -> Sequence[torch.Tensor]:
        """Values of their own, so that the user's random state does not move."""
        if call.data is not None:
            return (call.data,)
        context = call.context
        words = torch.arange(call.num_bytes // 4 + 1, dtype=torch.int32, device=context.device)
        return (words.mul_(2 * context.rank + 37).view(torch.uint8)[: call.num_bytes],)

    def native(self, call: MessageCall) -> Function:
        return by_nccl(call, call.context.group)

    def fused(self, call: MessageCall, context: PipelineContext) -> Function:
        """The sender's copy is complete, too."""

        def function(data: torch.Tensor) -> list[torch.Tensor]:
            handles = start_fused(call, data)
            for handle in handles.values():
                handle.wait()
            return [handles["recv_prev"].tensor if call.receives else data]

        return function


MESSAGE = MessageOp()
OPS: Sequence[Op[Any, Any]] = (MESSAGE,)
