"""The choices of the experts' GEMMs that ``tune`` tries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.ep.grouped_gemm import default_group_config, group_class
from ditron_train.gemm.configs import GemmConfig, config_entry, config_variants
from ditron_train.policy import Function
from ditron_train.runtime.device import kernel_target
from ditron_train.tools.cases.ep_gemm import CASES, NAMES, GroupCall, GroupGemmCase
from ditron_train.tools.tune.space import SearchSpace


class GroupGemmSpace(SearchSpace[GroupCall, None]):
    """Tile sizes."""

    case: GroupGemmCase
    is_local = True
    most_shapes = 2  # of one layer

    def shape_class(self, call: GroupCall) -> str:
        """Of the largest number of rows of any rank, so that the ranks tune alike (collective)."""
        num_experts, rows, n, k = self.case.op.sizes(call)
        most = torch.tensor([rows], device=call.x.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=call.group)
        return group_class(num_experts, int(most.item()), n, k)

    def candidates(self, call: GroupCall, context: None, ranked: Sequence[Any]) -> Sequence[GemmConfig]:
        if ranked:
            return []
        target, device = kernel_target(call.x.device), call.x.device
        default = default_group_config(
            NAMES[self.case.op.product], *self.case.op.sizes(call), call.x.dtype, target, device
        )
        return [default, *config_variants(default, target)]

    def run_as(self, call: GroupCall, context: None, candidate: GemmConfig) -> Function:
        return self.case.op.run_as(call, candidate)

    def entry(self, call: GroupCall, candidate: GemmConfig, *, is_native: bool) -> dict[str, Any]:
        return {**config_entry(candidate), "native": is_native}


SPACES: Sequence[SearchSpace[Any, Any]] = tuple(GroupGemmSpace(case, case.row) for case in CASES)
