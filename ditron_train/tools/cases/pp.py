"""Pipeline messages as tools measure them: one send and one receive around the ring of stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.pp.context import PipelineContext, get_pipeline_context
from ditron_train.pp.spec import MESSAGE, MessageCall, by_nccl
from ditron_train.runtime.groups import GroupCache
from ditron_train.tools.cases.case import BenchCase, Cost, ModelSizes, RunEnvironment, Shape
from ditron_train.tools.timing import Timing

_ENGINE_GBPS = 390.0  # one copy engine's pushes over NVLink on an H200
_CTAS = (1, 2, 4, 8)
_UNIT_BYTES = 512
_limited: GroupCache[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = GroupCache()


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


class MessageCase(BenchCase[MessageCall, PipelineContext]):
    """Against NCCL's send and receive."""

    row = "send_recv"

    def shapes(self, world_size: int, on_gpu: bool) -> list[Shape]:
        """The first shows the latency."""
        return [
            shapes[index]
            for index in range(2)
            for megabytes in ((0.008192, 1, 8, 16, 32, 64, 128, 256) if on_gpu else (0.1, 1))
            for shapes in [message_shapes(megabytes * 1e6)]
        ]

    def traced_shape(self, world_size: int, on_gpu: bool) -> Shape:
        return message_shapes(64e6 if on_gpu else 4096)[0]

    def shapes_of_model(self, model: ModelSizes, world_size: int) -> list[Shape]:
        """Activations in 16 bits."""
        return message_shapes(2 * model.tokens * model.hidden)

    def unsupported_shape(self, shape: Shape, world_size: int) -> str | None:
        if world_size % 2:
            return f"messages in pairs take an even number of ranks, not {world_size}"
        return None

    def sample(self, shape: Shape, environment: RunEnvironment, seed: int) -> MessageCall:
        """In bfloat16 (collective)."""
        num_bytes, is_first = shape.sizes["num_bytes"], environment.rank % 2 == 0
        context = get_pipeline_context(environment.group, environment.device)
        if num_bytes > context.slot_bytes:
            context.reserve(num_bytes)
        (data,) = environment.values([(num_bytes // 2,)], seed, torch.bfloat16)
        call = MessageCall(context, num_bytes, data=data, received=_landing(data.numel(), environment.device))
        return call if shape.model == "ring" else call._replace(sends=is_first, receives=not is_first)

    def cost(self, call: MessageCall, context: PipelineContext) -> Cost:
        return Cost(call.num_bytes, 0.0)

    def columns(self, call: MessageCall, context: PipelineContext, timings: Mapping[str, Timing]) -> dict[str, Any]:
        """The limit is a copy engine's."""
        is_cuda = context.device.type == "cuda"
        return {"dtype": torch.bfloat16, "limit_us": call.num_bytes / _ENGINE_GBPS / 1e3 if is_cuda else None}

    def peers(self, call: MessageCall, context: PipelineContext) -> Mapping[str, Callable[[], object]]:
        """NCCL limited to a few blocks."""
        if context.device.type != "cuda":
            return {}
        assert call.data is not None
        groups = limited_groups(context.group, context.device)
        return {name: partial(by_nccl(call, group), call.data) for name, group in groups.items()}


MESSAGES = MessageCase(MESSAGE)
CASES: Sequence[BenchCase[Any, Any]] = (MESSAGES,)
