"""A pipeline message declared for the policy and the tools: one send and one receive around the ring of stages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ditron_train.policy import Cost, Decision, Function, ModelSizes, OpSpec, Place, Shape
from ditron_train.pp.context import PipelineContext, get_pipeline_context
from ditron_train.pp.messages import Header
from ditron_train.pp.ops import exchange
from ditron_train.runtime.groups import GroupCache
from ditron_train.runtime.settings import get_settings
from ditron_train.runtime.values import make_values

_ENGINE_GBPS = 390.0  # one copy engine's pushes over NVLink on an H200
_CTAS = (1, 2, 4, 8)
_UNIT_BYTES = 512
_limited: GroupCache[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = GroupCache()


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


def message_shapes(num_bytes: float) -> list[Shape]:
    """Messages of about so many bytes round the ring, and between pairs of stages one way."""
    sizes = {"num_bytes": max(int(num_bytes) // _UNIT_BYTES, 1) * _UNIT_BYTES}
    return [Shape("ring", sizes), Shape("pairs", sizes)]


@lru_cache(maxsize=1)
def _landing(num_elements: int, device: torch.device) -> torch.Tensor:
    """Where messages of one size arrive, all in the same place."""
    return torch.empty(num_elements, dtype=torch.bfloat16, device=device)


def limited_groups(group: dist.ProcessGroup, device: torch.device) -> dict[str, dist.ProcessGroup]:
    """The same ranks in groups of which NCCL may use a few blocks alone, by name (collective once)."""
    if group not in _limited:
        groups = {}
        for ctas in _CTAS:
            options = dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = ctas
            options.config.min_ctas = 1
            one = dist.new_group(dist.get_process_group_ranks(group), pg_options=options)
            dist.all_reduce(torch.zeros(1, device=device), group=one)
            groups[f"NCCL, {ctas} blocks" if ctas > 1 else "NCCL, 1 block"] = one
        _limited[group] = groups
    return _limited[group]


def start_natively(
    call: MessageCall, data: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup
) -> list[dist.Work]:
    """``batch_isend_irecv`` of ``data``, as megatron-core calls it; nothing where this stage has no part."""
    context, operations = call.context, []
    if call.sends:
        target = dist.get_global_rank(context.group, context.next_rank)
        operations.append(dist.P2POp(dist.isend, data, target, group))
    if call.receives:
        source = dist.get_global_rank(context.group, context.previous_rank)
        operations.append(dist.P2POp(dist.irecv, received, source, group))
    return dist.batch_isend_irecv(operations) if operations else []


def start_fused(call: MessageCall, data: torch.Tensor) -> dict[str, Any]:
    """Our send and our posted receive of ``data``: handles by direction."""
    header = Header(tuple(data.shape), data.dtype)
    return exchange(call.context, send_next=data if call.sends else None, recv_prev=header if call.receives else None)


class MessageSpec(OpSpec[MessageCall, PipelineContext]):
    """To the next stage and from the previous one, by copy engines against NCCL's send and receive."""

    name, log_name, row = "pp send_recv", "pp", "send_recv"

    def group(self, call: MessageCall) -> dist.ProcessGroup:
        return call.context.group

    def device(self, call: MessageCall) -> torch.device:
        return call.context.device

    def key(self, call: MessageCall) -> tuple[Hashable, ...]:
        return call.num_bytes, get_settings().policy

    def context(self, call: MessageCall) -> PipelineContext:
        return call.context

    def decide(self, call: MessageCall, context: PipelineContext) -> Decision:
        if not call.is_alike:
            return Decision(True, "stages know different sizes", None, None, None)
        if context.device.type == "cuda":
            # All ranks make NCCL's communicator: a message alone may be its first use later.
            dist.barrier(context.group)
        decision = super().decide(call, context)
        if decision.use_ditron and context.first_of_crossings and call.sends and call.receives:
            # One block of NCCL's keeps up with more of them where both directions share a link, not in one alone.
            firsts, rank = context.first_of_crossings, context.rank
            decision = super().decide(call._replace(sends=rank in firsts, receives=rank - 1 in firsts), context)
        return decision

    def where(self, call: MessageCall) -> str:
        return f"messages of {call.num_bytes} bytes: "

    def words(self, call: MessageCall, context: PipelineContext) -> str:
        return f"{self.name} {call.num_bytes} bytes" + ("" if call.sends and call.receives else " one way")

    def inputs(self, call: MessageCall) -> Sequence[torch.Tensor]:
        """See `OpSpec`: values of their own, so that the user's random state does not move."""
        if call.data is not None:
            return (call.data,)
        context = call.context
        words = torch.arange(call.num_bytes // 4 + 1, dtype=torch.int32, device=context.device)
        return (words.mul_(2 * context.rank + 37).view(torch.uint8)[: call.num_bytes],)

    def megatron(self, call: MessageCall) -> Function:
        return self._by_nccl(call, call.context.group)

    def _by_nccl(self, call: MessageCall, group: dist.ProcessGroup) -> Function:
        def function(data: torch.Tensor) -> list[torch.Tensor]:
            received = torch.empty_like(data) if call.received is None else call.received
            for work in start_natively(call, data, received, group):
                work.wait()
            return [received if call.receives else data]

        return function

    def fused(self, call: MessageCall, context: PipelineContext) -> Function:
        """See `OpSpec`: the sender's copy is complete, too."""

        def function(data: torch.Tensor) -> list[torch.Tensor]:
            handles = start_fused(call, data)
            for handle in handles.values():
                handle.wait()
            return [handles["recv_prev"].tensor if call.receives else data]

        return function

    def shapes(self, world_size: int, on_gpu: bool) -> list[Shape]:
        """See `OpSpec`; the first shows the latency."""
        return [
            shapes[index]
            for index in range(2)
            for megabytes in ((0.008192, 1, 8, 16, 32, 64, 128, 256) if on_gpu else (0.1, 1))
            for shapes in [message_shapes(megabytes * 1e6)]
        ]

    def traced_shape(self, world_size: int, on_gpu: bool) -> Shape:
        return message_shapes(64e6 if on_gpu else 4096)[0]

    def shapes_of_model(self, model: ModelSizes, world_size: int) -> list[Shape]:
        """See `OpSpec`: activations in 16 bits."""
        return message_shapes(2 * model.tokens * model.hidden)

    def why_not_shape(self, shape: Shape, world_size: int) -> str | None:
        if world_size % 2:
            return f"messages in pairs take an even number of ranks, not {world_size}"
        return None

    def sample(self, shape: Shape, place: Place, seed: int) -> MessageCall:
        """See `OpSpec`; in bfloat16 (collective)."""
        num_bytes, is_first = shape.sizes["num_bytes"], place.rank % 2 == 0
        context = get_pipeline_context(place.group, place.device)
        if num_bytes > context.slot_bytes:
            context.reserve(num_bytes)
        data = make_values((num_bytes // 2,), torch.bfloat16, place.device, seed=seed, rank=place.rank)
        call = MessageCall(context, num_bytes, data=data, received=_landing(data.numel(), place.device))
        return call if shape.model == "ring" else call._replace(sends=is_first, receives=not is_first)

    def cost(self, call: MessageCall, context: PipelineContext) -> Cost:
        return Cost(call.num_bytes, 0.0)

    def columns(self, call: MessageCall, context: PipelineContext, times_us: Mapping[str, float]) -> dict[str, Any]:
        """See `OpSpec`: the limit is a copy engine's."""
        is_cuda = context.device.type == "cuda"
        return {"dtype": torch.bfloat16, "limit_us": call.num_bytes / _ENGINE_GBPS / 1e3 if is_cuda else None}

    def peers(self, call: MessageCall, context: PipelineContext) -> Mapping[str, Callable[[], object]]:
        """See `OpSpec`: NCCL limited to a few blocks."""
        if context.device.type != "cuda":
            return {}
        assert call.data is not None
        groups = limited_groups(context.group, context.device)
        return {name: partial(self._by_nccl(call, group), call.data) for name, group in groups.items()}


MESSAGE = MessageSpec()
SPECS: Sequence[OpSpec[Any, Any]] = (MESSAGE,)
