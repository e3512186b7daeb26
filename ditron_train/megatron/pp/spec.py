"""A pipeline message declared for the policy: one send and one receive around the ring of stages."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ditron_train.policy import Decision, Function, OpSpec
from ditron_train.pp import PipelineContext, exchange
from ditron_train.pp.messages import Header
from ditron_train.runtime.settings import get_settings

__all__ = ["SPECS", "MESSAGE", "MessageCall"]


class MessageCall(NamedTuple):
    """Messages of one size on this stage.

    Attributes:
        context: Of the pipeline group, with slots for the size.
        num_bytes: Size of a message.
        is_alike: Whether all stages know the same size; else nothing can be compared.
    """

    context: PipelineContext
    num_bytes: int
    is_alike: bool = True


class MessageSpec(OpSpec[MessageCall, PipelineContext]):
    """To the next stage and from the previous one, by copy engines against NCCL's send and receive."""

    name, log_name, row = "pp send_recv", "pp", "send_recv"

    def group(self, call: MessageCall) -> dist.ProcessGroup:
        """See `OpSpec`."""
        return call.context.group

    def device(self, call: MessageCall) -> torch.device:
        """See `OpSpec`."""
        return call.context.device

    def key(self, call: MessageCall) -> tuple[Hashable, ...]:
        """See `OpSpec`."""
        return call.num_bytes, get_settings().policy

    def context(self, call: MessageCall) -> PipelineContext:
        """See `OpSpec`."""
        return call.context

    def decide(self, call: MessageCall, context: PipelineContext) -> Decision:
        """See `OpSpec`."""
        if not call.is_alike:
            return Decision(True, "stages know different sizes", None, None, None)
        if context.device.type == "cuda":
            dist.barrier(
                context.group
            )  # all ranks make NCCL's communicator: a message alone may be its first use later
        return super().decide(call, context)

    def where(self, call: MessageCall) -> str:
        """See `OpSpec`."""
        return f"messages of {call.num_bytes} bytes: "

    def words(self, call: MessageCall, context: PipelineContext) -> str:
        """See `OpSpec`."""
        return f"{self.name} {call.num_bytes} bytes"

    def inputs(self, call: MessageCall) -> Sequence[torch.Tensor]:
        """See `OpSpec`: values of their own, so that the user's random state does not move."""
        context = call.context
        words = torch.arange(call.num_bytes // 4 + 1, dtype=torch.int32, device=context.device)
        return (words.mul_(2 * context.rank + 37).view(torch.uint8)[: call.num_bytes],)

    def megatron(self, call: MessageCall) -> Function:
        """See `OpSpec`."""
        context = call.context
        peers = [dist.get_global_rank(context.group, rank) for rank in (context.next_rank, context.previous_rank)]

        def function(data: torch.Tensor) -> list[torch.Tensor]:
            received = torch.empty_like(data)
            send = dist.P2POp(dist.isend, data, peers[0], context.group)
            receive = dist.P2POp(dist.irecv, received, peers[1], context.group)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
            return [received]

        return function

    def fused(self, call: MessageCall, context: PipelineContext) -> Function:
        """See `OpSpec`."""

        def function(data: torch.Tensor) -> list[torch.Tensor]:
            handles = exchange(context, send_next=data, recv_prev=Header(tuple(data.shape), data.dtype))
            for handle in handles.values():
                handle.wait()
            received = handles["recv_prev"].tensor
            assert received is not None
            return [received]

        return function


MESSAGE = MessageSpec()
SPECS: Sequence[OpSpec[Any, Any]] = (MESSAGE,)
