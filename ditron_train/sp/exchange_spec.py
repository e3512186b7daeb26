"""The exchanges around an attention without a projection, declared for the tools: ``tune`` takes them alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ditron_train.policy import Cost, Function, OpSpec, Place, Shape
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.values import make_values
from ditron_train.sp.choices import exchange_class, exchange_programs
from ditron_train.sp.context import SPContext
from ditron_train.sp.exchange import to_heads, to_sequence
from ditron_train.sp.layouts import output_layout
from ditron_train.sp.native import AllToAlls, exchange_natively
from ditron_train.sp.spec import BEHIND, FRONT, ProjectionCall, ProjectionSpec, Side
from ditron_train.sp.transfer_sizes import EXCHANGE_PROGRAMS


class ExchangeSpec(ProjectionSpec):
    """One exchange without a product."""

    search_rounds = 1

    def __init__(self, op: str, side: Side) -> None:
        super().__init__(op, side)
        self.has_rows, self.table_op = False, op

    def inputs(self, call: ProjectionCall) -> tuple[torch.Tensor]:  # type: ignore[override]
        """See `OpSpec`: no weight."""
        return (call.x,)

    def megatron(self, call: ProjectionCall) -> Function:
        return lambda x: exchange_natively(call.exchange, self.side.towards_heads, x)

    def sample(self, shape: Shape, place: Place, seed: int) -> ProjectionCall:
        """See `OpSpec`: q, k and v as one part, or the attended values."""
        why = self.why_not_shape(shape, place.world_size)
        if why is not None:
            raise SettingError(why)
        world, (seqlen, heads, groups, head_size) = place.world_size, shape.sizes.values()
        rows, num_heads = (
            (seqlen // world, heads + 2 * groups) if self.side.towards_heads else (seqlen, heads // world)
        )
        size = (rows, 1, num_heads, head_size)
        x = make_values(size, place.dtype, place.device, seed=20 * seed + self.side.first_seed, rank=place.rank)
        layout = output_layout(num_heads if self.side.towards_heads else heads, head_size, world)
        return ProjectionCall(x, x, layout, AllToAlls(place.group, place.device), place.group)

    def _sent(self, call: ProjectionCall) -> tuple[int, int]:
        """Rows of one rank, and columns of all heads."""
        world, rows = call.exchange.world_size, call.x.shape[0]
        return rows if self.side.towards_heads else rows // world, world * call.layout.num_columns

    def cost(self, call: ProjectionCall, context: SPContext) -> Cost:
        return Cost(call.x.nbytes * (context.world_size - 1) / context.world_size, 0.0)

    def parts(self, call: ProjectionCall, context: SPContext) -> Mapping[str, Callable[[], object]]:
        """See `OpSpec`: it has none."""
        return {}

    def comm_sms(self, call: ProjectionCall, context: SPContext) -> int:
        """See `OpSpec`: as many as programs move data, as a tuning table says."""
        if context.target == "interpreter":
            return 0
        return exchange_programs(self.row, *self._sent(call), context)

    def shape_class(self, call: ProjectionCall) -> str:
        return exchange_class(*self._sent(call))

    def candidates(self, call: ProjectionCall, context: SPContext, ranked: Sequence[Any]) -> Sequence[Any]:
        """See `OpSpec`; on the CPU one program moves everything."""
        return list(dict.fromkeys([EXCHANGE_PROGRAMS, *((8, 16, 24, 48, 64) if context.is_cuda else ())]))

    def fused_as(self, call: ProjectionCall, context: SPContext, candidate: Any) -> Function:
        exchange = to_heads if self.side.towards_heads else to_sequence
        return lambda x: list(exchange((x,), context=context, layout=call.layout, programs=candidate))

    def entry(self, call: ProjectionCall, candidate: Any, *, is_native: bool) -> dict[str, Any]:
        return {"programs": candidate, "native": is_native}


SPECS: Sequence[OpSpec[Any, Any]] = (ExchangeSpec("to_heads", FRONT), ExchangeSpec("to_sequence", BEHIND))
