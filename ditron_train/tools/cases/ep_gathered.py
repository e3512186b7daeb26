"""Gathered experts as tools measure them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.extensions.transformer_engine import HAVE_TE

from ditron_train.ep.combine import SumOrder, index_add_order
from ditron_train.megatron.ep.gathered_spec import GATHERED_EXPERTS, ExpertsCall, GatheredExpertsOp
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.tools.cases.case import BenchCase, Cost, RunEnvironment, Shape
from ditron_train.tools.cases.ep_layers import MoeCase, routing_of
from ditron_train.tools.cases.ep_moves import repeating
from ditron_train.tp.context import TPContext


class GatheredExpertsCase(MoeCase[ExpertsCall, TPContext]):
    """Against the allgather dispatcher's steps."""

    op: GatheredExpertsOp
    row = "gathered_experts"
    measured = "forward_backward"
    groups = "expert"

    def surroundings(self, shape: Shape) -> Any:
        return repeating(shape)

    def no_row_reason(self, call: ExpertsCall) -> str | None:
        return self.op.min_rows_reason(call)

    def sample(self, shape: Shape, environment: RunEnvironment, seed: int) -> ExpertsCall:
        """Collective."""
        routed, _ = routing_of(shape, environment, seed)
        world, device = environment.world_size, environment.device
        maps = routed.new_empty(world * len(routed), routed.shape[1])
        dist.all_gather_into_tensor(maps.view(torch.uint8), routed.view(torch.uint8), group=environment.group)
        local = maps.view(len(maps), world, -1)[:, environment.rank].contiguous()
        hidden, ffn, num = shape.sizes["hidden"], shape.sizes["ffn_hidden"], local.shape[1]
        generator = torch.Generator(device).manual_seed(1000 * seed + environment.rank)

        def values(*size: int) -> torch.Tensor:
            if device.type == "cpu":  # small integers: exact in every order of a sum
                return torch.randint(-2, 3, size, device=device, generator=generator).to(environment.dtype)
            return torch.empty(size, dtype=environment.dtype, device=device).normal_(generator=generator)

        is_fused = HAVE_TE and not shape.options["deterministic"]
        order: SumOrder | None = "descending" if is_fused else index_add_order(environment.dtype, device)
        if order is None:
            raise NotSupportedError(f"index_add_ of {environment.dtype} adds in an order of its own here")
        x, grad = values(len(routed), hidden), values(len(routed), hidden)
        firsts, seconds = [values(2 * ffn, hidden) for _ in range(num)], [values(hidden, ffn) for _ in range(num)]
        return ExpertsCall(x, firsts, seconds, local, environment.group, order, torch.float32, is_fused, grad)

    def cost(self, call: ExpertsCall, context: TPContext) -> Cost:
        """Tokens go out and sums come back, forward and backward; sums of results in their own type."""
        elements = call.x.numel() * (context.world_size - 1)
        size = call.x.element_size()
        rows = int(call.local_map.sum())
        features = call.firsts[0].numel() + call.seconds[0].numel()
        return Cost(elements * (3.0 * size + call.sum_dtype.itemsize), 6.0 * rows * features)


CASES: Sequence[BenchCase[Any, Any]] = (GatheredExpertsCase(GATHERED_EXPERTS),)
