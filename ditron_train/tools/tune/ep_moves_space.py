"""The choices of dispatch and combine that ``tune`` tries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ditron_train.ep import EPContext
from ditron_train.ep.context import move_class, usual_senders
from ditron_train.policy import Function
from ditron_train.tools.cases.ep_moves import COMBINE, DISPATCH, TokensCall
from ditron_train.tools.tune.space import SearchSpace


class MoveSpace(SearchSpace[TokensCall, EPContext]):
    """Programs that push tokens."""

    most_shapes = 1

    def shape_class(self, call: TokensCall) -> str:
        config = call.pair.fused.config
        return move_class(config.num_moe_experts, config.moe_router_topk, call.tokens.shape[1])

    def candidates(self, call: TokensCall, context: EPContext, ranked: Sequence[Any]) -> Sequence[int]:
        """How many programs push; in the interpreter there is one."""
        if ranked:
            return []
        counts = () if context.target == "interpreter" else (4, 8, 12, 16, 24, 32)
        usual = usual_senders(self.case.row, context.move.num_senders, context.world_size)
        return list(dict.fromkeys([usual, *counts]))

    def run_as(self, call: TokensCall, context: EPContext, candidate: int) -> Function:

        def function(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
            context.tried_senders = candidate
            try:
                return self.case.op.fused(call, context)(*inputs)
            finally:
                context.tried_senders = None

        return function

    def entry(self, call: TokensCall, candidate: int, *, is_native: bool) -> dict[str, Any]:
        return {"senders": candidate, "native": is_native}


SPACES: Sequence[SearchSpace[Any, Any]] = (MoveSpace(DISPATCH, DISPATCH.row), MoveSpace(COMBINE, COMBINE.row))
