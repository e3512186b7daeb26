"""Audits: one in a number of a job's fused calls is computed by both paths, on the call's own data, and compared.

This checks jobs whose shapes are not known beforehand. An audited call runs as any other; at its backward, or after
its forward if it has none, both paths compute results and gradients again, and all ranks learn whether the bits are
equal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.policy.op import Op, fused_results, native_results
from ditron_train.policy.probe import same_bits
from ditron_train.runtime.errors import DitronError
from ditron_train.runtime.logs import get_logger
from ditron_train.runtime.settings import get_settings


class AuditedCall:
    """An ``Observer`` that computes one call by both paths (collective at the end of the call or of its backward).

    Args:
        op, call, context: The op, the call and its context.
        distrust: Makes such calls native from now on.
    """

    def __init__(self, op: Op[Any, Any], call: Any, context: Any, distrust: Callable[[str], None]) -> None:
        self._op, self._call, self._context, self._distrust = op, call, context, distrust

    def run(self, x: torch.Tensor, run: Callable[[], Any], multiplied: Callable[[], torch.Tensor]) -> Any:
        """See ``Observer``."""
        result: Any = run()
        y = result[0] if isinstance(result, tuple) else result
        with torch.no_grad():
            rows = multiplied().detach()
        if y.requires_grad:
            y.register_hook(lambda grad: self._compare(rows, grad))
        else:
            self._compare(rows, None)
        return result

    def _compare(self, x: torch.Tensor, grad: torch.Tensor | None) -> None:
        op, group = self._op, self._op.group(self._call)
        assert group is not None, "a context belongs to a group"
        call = op.with_values(self._call, x, grad)
        expected, found = native_results(op, call), fused_results(op, call, self._context)
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        differs = torch.tensor(0 if same_bits(expected, found) else world_size - rank, device=x.device)
        dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=group)
        if not differs:
            return
        what = f"an audit found other bits than the native path's on rank {world_size - int(differs)}"
        line = f"{op.log_name or op.name} {op.describe_shape(call)}: {what}"
        self._distrust(what)
        if get_settings().policy == "bits":
            raise DitronError(line)
        if rank == 0:
            get_logger("policy").log(logging.ERROR, "%s; such layers are native from now on", line)
